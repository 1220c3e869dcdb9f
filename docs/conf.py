"""How Sphinx makes the site from this folder.

All that can be read is read when the site is built: the reference from docstrings, the
keys from their declaration, the figures from the notebooks, which are run. A page
asks no other host for anything: formulas are drawn here, as SVG.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import pathlib
import pkgutil
import re
import shutil
import sys
from typing import Any
from xml.etree import ElementTree

import ziamath
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode
from ziamath.tex import tex2mml

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
sys.path.insert(0, str(ROOT))
# Of the processes of the notebooks, where tqdm would ask for ipywidgets.
os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:IProgress not found"}

kln_jax = importlib.import_module("kln_jax")

project = "kln_jax"
version = release = kln_jax.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
smartquotes = False  # What is typed is what is shown: "test", --workdir.

html_theme = "furo"
html_title = "kln_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_math_renderer = "svg"
ziamath.config.math.color = "currentColor"

myst_enable_extensions = ["attrs_inline", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove-warn"  # What a notebook warns of fails the build.

autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "no-value": True,
    "special-members": "__call__",
}
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # The docstrings say more: shapes, units, bounds.
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 88

# A name in single backticks is one of Python's, and must exist: see `resolve`.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(?!kln_jax).*")]  # Types of other libraries.

# The reference, by headings.
GROUPS = {
    "Kernels and discrepancies": "discrepancies discrepancies.kernels "
    "discrepancies.cmmd discrepancies.mmd discrepancies.nystroem "
    "discrepancies.two_sample discrepancies.float_arrays",
    "Data": "datasets",
    "Networks": "networks networks.models networks.layers",
    "Platform": "backend",
    "Files of a run": "storage storage.working_directory storage.checkpoints "
    "storage.epoch_metrics storage.whole_files",
    "Training": "training training.experiment training.configuration training.parts "
    "training.loop training.compiled training.steps training.objectives "
    "training.optimizers training.augmentation training.fixed_embeddings "
    "training.parallel training.interruption",
    "Trained networks": "inference inference.estimator inference.trained_network "
    "inference.classify inference.export",
    "Analysis": "analysis analysis.suites analysis.runs analysis.report "
    "analysis.tables analysis.figures analysis.view",
}


def modules() -> list[str]:
    """Returns the names of the public modules of the package."""
    found = pkgutil.walk_packages(kln_jax.__path__, "kln_jax.")
    return [module.name for module in found if "._" not in module.name]


def write_reference(app: Sphinx) -> None:
    """Writes a page for each module into docs/api, and no other."""
    folder = pathlib.Path(app.srcdir) / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in modules():
        title = f"{name}\n{'=' * len(name)}\n\n"
        page = folder / f"{name.removeprefix('kln_jax.')}.rst"
        page.write_text(f"{title}.. automodule:: {name}\n")


def keys() -> str:
    """Returns a table of the keys of each group, each key with an anchor."""
    fields = importlib.import_module("kln_jax.training.configuration").FIELDS
    lines: list[str] = []
    for group, members in itertools.groupby(fields.values(), lambda key: key.group):
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
    names = sorted(path.stem for path in CONFIGS.glob("*.py"))
    names.remove("default")
    imported = {name: importlib.import_module(f"configs.{name}") for name in names}
    return {name: inspect.getdoc(module) for name, module in imported.items()}


def changes() -> str:
    """Returns a table of what each configuration sets to other than the default."""
    default = importlib.import_module("configs.default").get_config()
    lines = ["| configuration | keys |", "|:---|:---|"]
    for name, variant in itertools.product(configurations(), ("supervised", "semi")):
        try:
            config = importlib.import_module(f"configs.{name}").get_config(variant)
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


def module_tables() -> str:
    """Returns a table of each group of modules, with the first line of each."""
    ungrouped = set(modules())
    lines: list[str] = []
    for heading, names in GROUPS.items():
        lines += [f"## {heading}", "", "| module | |", "|:---|:---|"]
        for name in names.split():
            module = importlib.import_module(f"kln_jax.{name}")
            first = str(inspect.getdoc(module)).partition("\n")[0]
            lines += [f"| [`{module.__name__}`](api/{name}.rst) | {first} |"]
            ungrouped.remove(module.__name__)
        pages = [f"api/{name}" for name in names.split()]
        lines += ["", "```{toctree}", ":hidden:", "", *pages, "```", ""]
    if ungrouped:
        raise ValueError(f"docs/conf.py has modules that are in no group: {ungrouped}.")
    return "\n".join(lines)


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Puts into a page what its marks, such as ``<!-- keys -->``, name."""
    generators = {
        "configuration": {"keys": keys, "changes": changes},
        "reproduce": {"configurations": headers},
        "api": {"modules": module_tables},
    }
    for mark, generate in generators.get(page, {}).items():
        source[0] = source[0].replace(f"<!-- {mark} -->", generate())
        app.env.note_reread()  # What they read is no part of the page.


def resolve(
    app: Sphinx,
    env: BuildEnvironment,
    node: addnodes.pending_xref,
    shown: nodes.Element,
) -> nodes.Element | None:
    """Resolves a name in single backticks that is not written in full.

    Either one object of the reference has this name, to which it is linked; or it is
    one that the module knows, or an argument or attribute of what is documented.
    Otherwise it does not exist, and Sphinx warns.
    """
    if node.get("reftype") != "obj":
        return None
    name, module = node["reftarget"], node.get("py:module")
    if not re.fullmatch(r"[\w.]+", name):
        return shown
    domain = env.domains.python_domain
    matches = domain.find_obj(env, module, node.get("py:class"), name, "obj", 1)
    documented = [entry for _, entry in matches if entry.objtype != "module"]
    if len(documented) == 1:
        entry = documented[0]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, shown
        )
    names = vars(sys.modules[module]) if module else {}
    first, *rest = name.split(".")
    found = names.get(first) or sys.modules.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return shown if found is not None or first in _arguments(node) else None


def _arguments(node: nodes.Element) -> set[str]:
    """Returns the arguments and attributes of the objects that a node documents."""
    arguments: set[str] = set()
    parent: nodes.Node | None = node
    while parent := parent.parent:
        if isinstance(parent, addnodes.desc):
            signature = parent[0]
            found: Any = sys.modules[signature["module"]]
            for part in signature["fullname"].split("."):
                found = getattr(found, part)
            arguments |= inspect.signature(found).parameters.keys()
            arguments |= set(
                re.findall(r"^ +(\w+): ", found.__doc__ or "", re.MULTILINE)
            )
    return arguments


def skip(
    app: Sphinx, what: str, name: str, member: object, skipped: bool, options: object
) -> bool | None:
    """Leaves out fields, which the class describes, and members of other packages."""
    field = str(member.__doc__).startswith("Alias for field number")
    origin = getattr(member, "__module__", None) or "kln_jax"
    foreign = not origin.startswith("kln_jax")
    return True if field or foreign else None


def mark_code(
    app: Sphinx, what: str, name: str, member: object, options: object, lines: list[str]
) -> None:
    """Makes code of what a module sets in after a colon, which a terminal shows too."""
    for i, line in enumerate(lines[:-2] if what == "module" else ()):
        if re.search(r"[^:]:$", line) and not lines[i + 1]:
            lines[i] += ":" * lines[i + 2].startswith("  ")


def sign(
    app: Sphinx,
    what: str,
    name: str,
    member: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leaves out of a signature what is not its author's; types go by their names."""
    if signature == "(*args, **kwargs)":
        return "", returned  # A protocol is not called.
    if signature:
        signature = re.sub(r", parent=<[^>]*>, name=None", "", signature)
        signature = re.sub(r"<class '([^']*)'>", r"\1", signature)
    return signature, returned


def draw_dashes(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Draws the dash between a name and what is said of it."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            drawn = text.replace(" -- ", " \N{EN DASH} ", 1)
            text.parent.replace(text, nodes.Text(drawn))


def draw(formula: str, *, inline: bool) -> str:
    """Draws a formula as SVG, in the colour of its text and growing with it."""
    mathml = tex2mml(formula, inline=inline)
    # ziamath takes each hat for a wide one; a plain one is meant.
    drawn = ziamath.Math(mathml.replace("&#x00302;", "&#x2C6;"), size=16.5)
    svg = drawn.svgxml()
    for side in ("width", "height"):
        svg.set(side, f"{float(svg.get(side)) / 16:.4f}em")
    svg.set("style", f"vertical-align: {drawn.getyofst() / 16:.4f}em")
    svg.set("role", "img")
    svg.set("aria-label", formula)
    return ElementTree.tostring(svg, encoding="unicode")


def write_inline(writer: Any, node: nodes.math) -> None:
    """Writes a formula in a line of text."""
    writer.body.append(draw(node.astext(), inline=True))
    raise nodes.SkipNode


def write_block(writer: Any, node: nodes.math_block) -> None:
    """Writes formulas of their own lines, one after each blank line."""
    for formula in node.astext().strip().split("\n\n"):
        writer.body.append(f'<div class="math">{draw(formula, inline=False)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Adds to Sphinx what this site needs beyond the extensions."""
    app.add_html_math_renderer("svg", (write_inline, None), (write_block, None))
    app.connect("builder-inited", write_reference)
    app.connect("source-read", fill)
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", mark_code)
    app.connect("autodoc-process-signature", sign)
    app.connect("doctree-resolved", draw_dashes)
    app.connect("missing-reference", resolve)
