"""The pages, notebooks and READMEs: what they show runs, and what they name exists.

The site itself is built by ``make docs``, where a warning is an error.
"""

import functools
import importlib.util
import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import pytest

from benchmarks import calibration, precision
from docs import modules, tables
from kln_jax import cmmd
from kln_jax.analysis.suites import SUITES
from kln_jax.training import variants
from tests.processes import environment

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# Read where they lie, not on the site.
READMES = [ROOT / "README.md", ROOT / "results" / "README.md"]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# The first draws thousands of groups of points, the others train a network.
SLOW = {"conditional-test", "few-labels", "kernel", "own-images", "quickstart"}

RUN = """
import json, pathlib, sys
namespace = {}
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
"""


@functools.cache
def _text(page):
    """The Markdown of a page or of a notebook."""
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    prose = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(source) for source in prose)


def _code(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def _name(page):
    return str(page.relative_to(ROOT).with_suffix(""))


def _each(name, paths):
    """A test for each of some files; those that take minutes are slow ones."""
    marks = [pytest.mark.slow if path.stem in SLOW else () for path in paths]
    parameters = [pytest.param(p, marks=m) for p, m in zip(paths, marks, strict=True)]
    return pytest.mark.parametrize(name, parameters, ids=_name)


@_each("notebook", NOTEBOOKS)
def test_a_notebook_runs_without_a_warning(notebook):
    # In a process of its own and on one device, as a reader runs it.
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, str(notebook)],
        cwd=notebook.parent,
        env=environment(MPLBACKEND="agg", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=_name)
def test_a_notebook_holds_no_output(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


@_each("page", [p for p in [*PAGES, *READMES] if _code(p, "python")])
@jax.numpy_dtype_promotion("standard")  # As a reader has them.
@jax.numpy_rank_promotion("allow")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")  # As in a checkout.
    namespace = {}
    for block in _code(page, "python"):
        exec(block, namespace)


def test_the_readme_is_short_and_shows_code():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    assert _code(ROOT / "README.md", "python")


def test_every_room_has_its_page():
    folders = (path.parent.name for path in (ROOT / "kln_jax").glob("*/__init__.py"))
    assert sorted(folders) == sorted(modules.ROOMS[1:])
    assert all(
        line.endswith(".")
        for room in modules.ROOMS
        for line in modules.modules(room).values()
    )


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=_name)
def test_the_commands_of_a_page_name_what_exists(page):
    text = page.read_text()
    for line in re.split(r"(?<!\\)\n", text):
        pattern = r"--config=(?:configs/)?([a-z]\w+)\b(?:\.py)?:?(\w*)"
        for name, variant in re.findall(pattern, line):
            assert variants.named_config(name, variant or "supervised")
        keys = re.findall(r"--config\.(\w+)=", line)
        assert set(keys) - {"KEY"} <= set(variants.default_config())
    for name in re.findall(r"python -m\s+((?:kln_jax|benchmarks)[.\w]*)", text):
        assert importlib.util.find_spec(name)
    named = re.findall(r"analysis run (\w+)|for suite in ([\w ]+); do", text)
    assert {name for names in named for name in " ".join(names).split()} <= {*SUITES}


def _anchors(page):
    """What a link to a page can name: its headings, and the keys."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    keys = variants.default_config().keys() if page.stem == "configuration" else ()
    return slugs | {f"key-{key}" for key in keys}


@pytest.mark.parametrize("page", [*PAGES, *READMES, *NOTEBOOKS], ids=_name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        if re.match(r"kln_jax(\.|$)", anchor):
            pkgutil.resolve_name(anchor)  # A module, or what is in one; else it raises.
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if page not in READMES:  # The site has no other pages.
            assert linked.suffix != ".md" or linked.resolve().parent == DOCS, target
        assert not anchor or anchor in _anchors(linked), target


def test_the_defaults_that_the_pages_state_are_the_defaults():
    stated = re.findall(
        r"\[`(\w+)`\]\(configuration\.md#key-\w+\) = `([^`]+)`",
        _text(DOCS / "reproduce.md"),
    )
    assert len(stated) >= 6
    config = variants.default_config()
    for key, value in stated:
        assert config[key] == type(config[key])(value.strip('"')), key


def _table(page, header):
    """The rows of the table of a page that has this header."""
    _, found = _text(page).split(f"| {' | '.join(header)} |\n", maxsplit=1)
    rows = found[: found.index("\n\n")].splitlines()[1:]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


@pytest.mark.parametrize("page", tables.PAGES, ids=_name)
def test_the_tables_of_results_are_those_of_the_runs(page):
    assert tables.with_tables(_text(page)) == _text(page), "run: python -m docs.tables"
    assert "<!-- table: " in _text(page)


def test_the_values_of_large_features_that_a_page_states_are_those_of_the_benchmark():
    header = ["points", "largest error of a squared distance", "CMMD", "exact"]
    rows = _table(DOCS / "numerics.md", header)
    with jax.enable_x64(True):
        for row, problem in zip(rows, precision.large().values(), strict=True):
            # Those of float32 that are wrong differ between processors.
            _, wide = precision.in_both(problem)
            assert row[-1] == f"{cmmd(*wide):.3f}"


@pytest.mark.parametrize("confidence", [0.95, 0.99])
def test_the_range_of_a_level_that_a_page_states_is_that_of_chance(confidence):
    low, high = calibration.interval(500, confidence)
    stated = f"{low:.3f} to {high:.3f} in {100 * confidence:.0f} %"
    assert stated in _text(DOCS / "conditional-test.md")
