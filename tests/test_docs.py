"""The pages and notebooks of docs/: what they show runs, and what they name exists.

The site itself is built by ``make docs``, where a warning is an error.
"""

import csv
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

from configs import default
from tests.processes import environment

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# The first draws thousands of groups of points, the second trains a network.
SLOW = {"conditional-test", "kernel"}

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
    return page.stem


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in NOTEBOOKS
    ],
    ids=_name,
)
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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _code(page, "python")], ids=_name
)
@jax.numpy_dtype_promotion("standard")  # As a reader has them.
@jax.numpy_rank_promotion("allow")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in _code(page, "python"):
        exec(block, namespace)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_commands_of_a_page_name_what_exists(page):
    for line in re.split(r"(?<!\\)\n", page.read_text()):
        for name, variant in re.findall(r"--config=configs/(\w+)\.py:?(\w*)", line):
            module = importlib.import_module(f"configs.{name}")
            assert module.get_config(*filter(None, [variant]))
        keys = re.findall(r"--config\.(\w+)=", line)
        assert set(keys) - {"KEY"} <= set(default.get_config())
        for name in re.findall(r"python -m (kln_jax[.\w]*)", line):
            assert importlib.util.find_spec(name)


def _anchors(page):
    """What a link to a page can name: its headings, and the keys."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    keys = default.get_config().keys() if page.stem == "configuration" else ()
    return slugs | {f"key-{key}" for key in keys}


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=_name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        if anchor.startswith("kln_jax."):
            pkgutil.resolve_name(anchor)  # A module, or what is in one; else it raises.
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), target
        # The site has no other pages.
        assert linked.suffix != ".md" or linked.resolve().parent == DOCS, target
        assert not anchor or anchor in _anchors(linked), target


def test_the_defaults_that_the_pages_state_are_the_defaults():
    stated = re.findall(
        r"\[`(\w+)`\]\(configuration\.md#key-\w+\) = `([^`]+)`",
        _text(DOCS / "reproduce.md"),
    )
    assert len(stated) >= 6
    config = default.get_config()
    for key, value in stated:
        assert config[key] == type(config[key])(value.strip('"')), key


def test_the_errors_by_choice_that_a_page_states_are_those_of_the_report():
    stated = re.findall(
        r"^\| `(fragility\w*)` \| (\w+) \| (\w+) \| (.*) \|$",
        _text(DOCS / "reproduce.md"),
        re.MULTILINE,
    )
    assert len(stated) >= 15
    found, runs = {}, {}
    with (ROOT / "results" / "report.csv").open() as file:
        for row in csv.DictReader(file):
            if re.fullmatch(r"ridge .* labels, sum", row["method"]) and row["runs"]:
                ridge, choice, label_kernel, _ = row["method"].split(", ")
                plane = row["suite"], row["data"], label_kernel.split()[0]
                choice = "ridge 1" if ridge == "ridge 1" else choice
                errors = found.setdefault(plane, {}).setdefault(choice, [])
                errors.append(float(row["ours"].split()[0]))
                runs.setdefault(plane, set()).add(int(row["runs"]))
    choices = "none", "warm-up", "clipping", "both", "normalised Z", "ridge 1"
    for suite, data, label_kernel, cells in stated:
        plane = suite, data, label_kernel
        errors = [found[plane][choice] for choice in choices]
        ranges = [f"{min(cell):.1f} to {max(cell):.1f}" for cell in errors]
        assert cells.split(" | ") == ranges, plane
        assert list(map(len, errors)) == [4, 4, 4, 4, 4, 5]
        assert runs[plane] == {3}
