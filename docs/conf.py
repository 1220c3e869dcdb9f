"""How Sphinx makes the site from this folder.

The reference comes from docstrings, the keys from the configurations, the figures from
the notebooks, which are run. No page asks another host for anything.
"""

import ast
import itertools
import os

from sphinx.application import Sphinx

import kln_jax
from docs.modules import ROOT, write_reference
from kln_jax.training import variants
from kln_jax.training.configuration import FIELDS

# Of the processes of the notebooks, where tqdm would ask for ipywidgets.
os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:IProgress not found"}
write_reference(ROOT / "docs" / "api")

project = html_title = "kln_jax"
version = release = kln_jax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
extensions += ["sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
exclude_patterns = ["_build"]
smartquotes = False  # What is typed is what is shown: "test", --workdir.
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sourcelink = False
myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove-warn"  # What a notebook warns of fails the build.
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # The docstrings say more: shapes, units, bounds.
autosummary_generate = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
# A name in single backticks is a link where it can be. In full it must be one.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!kln_jax\.).*")]


def keys() -> str:
    """Returns a table of the keys of each group, each key with an anchor."""
    lines: list[str] = []
    for group, members in itertools.groupby(FIELDS.values(), lambda key: key.group):
        lines += ["", f"## {group}", "", "| key | default | allowed | meaning |"]
        lines += ["|:---|:---|:---|:---|"]
        lines += [
            f"| `{key.name}`{{#key-{key.name}}} | `{key.default!r}` | {key.allowed} | "
            f"{key.doc} |"
            for key in members
        ]
    return "\n".join(lines)


def configurations() -> dict[str, str]:
    """Returns the names of the files in configs/ and what each says of itself."""
    return {
        name: str(ast.get_docstring(ast.parse(path.read_text())))
        for name, path in variants.files().items()
    }


def changes() -> str:
    """Returns a table of what each configuration sets to other than the default."""
    default = variants.default_config()
    lines = ["| configuration | keys |", "|:---|:---|"]
    for name, variant in itertools.product(configurations(), ("supervised", "semi")):
        try:
            config = variants.named_config(name, variant)
        except ValueError:
            continue  # It has no such variant.
        suffix = "" if variant == "supervised" else f":{variant}"
        sets = " ".join(
            f"`{key}={value:g}`" if isinstance(value, float) else f"`{key}={value}`"
            for key, value in sorted(config.items())
            if value != default[key] and key != "variant"
        )
        lines += [f"| `configs/{name}.py{suffix}` | {sets} |"]
    return "\n".join(lines)


def headers() -> str:
    """Returns what each configuration says of itself, below a heading."""
    return "\n".join(
        f"### {name}\n\n```text\n{text}\n```\n"
        for name, text in configurations().items()
    )


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts into a page what its marks, such as ``<!-- keys -->``, name."""
    generators = {
        "configuration": {"keys": keys, "changes": changes},
        "reproduce": {"configurations": headers},
    }
    for mark, generate in generators.get(page, {}).items():
        source[0] = source[0].replace(f"<!-- {mark} -->", generate())
        app.env.note_reread()  # What they read is no part of the page.


def skip(app: Sphinx, what: str, name: str, member: object, *_: object) -> bool | None:
    """Leaves out fields, which their class describes, and what scikit-learn adds."""
    field = str(member.__doc__).startswith("Alias for field number")
    return True if field or name.endswith("_request") else None


def setup(app: Sphinx) -> None:
    """Adds to Sphinx what this site needs beyond the extensions."""
    app.connect("source-read", fill)
    app.connect("autodoc-skip-member", skip)
