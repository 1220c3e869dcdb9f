"""The modules of kln_jax, with the first line of what each says of itself.

The reference on the site lists them by this module.
"""

import ast
import pathlib

import kln_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A room imports only from rooms before it. The first is the folder of the package.
ROOMS = (
    "",
    "discrepancies",
    "networks",
    "storage",
    "datasets",
    "training",
    "inference",
    "analysis",
)


def modules(room: str) -> dict[str, str]:
    """Returns the public modules of a room, itself first, each with its first line."""
    folder = ROOT / "kln_jax" / room
    paths = {folder: folder / "__init__.py"}
    paths |= {path.with_suffix(""): path for path in sorted(folder.glob("[!_]*.py"))}
    return {
        ".".join(name.relative_to(ROOT).parts): str(
            ast.get_docstring(ast.parse(path.read_text()))
        ).partition("\n")[0]
        for name, path in paths.items()
    }


def write_reference(folder: pathlib.Path) -> None:
    """Writes the pages of the reference: one of what kln_jax exports, one a room."""
    folder.mkdir(exist_ok=True)
    # But `linear`, a value, whose description stays with its module.
    exported = [n for n in kln_jax.__all__ if hasattr(getattr(kln_jax, n), "__name__")]
    for room in ROOMS:
        title, *_ = found = list(modules(room))
        lines = [title, "=" * len(title), "", ".. autosummary::", ""]
        lines += [f"   {name}" for name in found]
        for name in found:
            lines += ["", name, "-" * len(name), "", f".. automodule:: {name}"]
            if room:
                lines.append(f"   :exclude-members: {', '.join(exported)}")
        (folder / f"{title}.rst").write_text("\n".join(lines))
