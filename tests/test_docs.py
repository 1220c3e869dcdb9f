"""The pages, notebooks and READMEs: what they show runs, and what they name exists.

The site itself is built by ``make docs``, where a warning is an error.
"""

import collections
import functools
import importlib.util
import json
import pathlib
import pkgutil
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import calibration, precision
from configs import default
from docs import modules
from kln_jax import cmmd
from kln_jax.analysis import packed
from kln_jax.analysis.suites import SUITES
from kln_jax.analysis.tables import HEADER
from tests.processes import environment

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# Read where they lie, not on the site.
READMES = [ROOT / "README.md", ROOT / "results" / "README.md"]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# The first draws thousands of groups of points, the others train a network.
SLOW = {"conditional-test", "kernel", "quickstart"}

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


def test_the_readme_is_short_and_lists_the_rooms_as_they_are():
    readme = (ROOT / "README.md").read_text()
    assert readme == modules.with_rooms(readme), "run: python -m docs.modules"
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
        for name, variant in re.findall(r"--config=configs/(\w+)\.py:?(\w*)", line):
            module = importlib.import_module(f"configs.{name}")
            assert module.get_config(*filter(None, [variant]))
        keys = re.findall(r"--config\.(\w+)=", line)
        assert set(keys) - {"KEY"} <= set(default.get_config())
    for name in re.findall(r"python -m\s+((?:kln_jax|benchmarks)[.\w]*)", text):
        assert importlib.util.find_spec(name)
    named = re.findall(r"analysis run (\w+)|for suite in ([\w ]+); do", text)
    assert {name for names in named for name in " ".join(names).split()} <= {*SUITES}


def _anchors(page):
    """What a link to a page can name: its headings, and the keys."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    keys = default.get_config().keys() if page.stem == "configuration" else ()
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
    config = default.get_config()
    for key, value in stated:
        assert config[key] == type(config[key])(value.strip('"')), key


def _table(page, header):
    """The rows of the table of a page that has this header."""
    _, found = _text(page).split(f"| {' | '.join(header)} |\n", maxsplit=1)
    rows = found[: found.index("\n\n")].splitlines()[1:]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


@functools.cache
def _report():
    """The rows of the report that have runs, each with its suite."""
    rows = []
    for line in (ROOT / "results" / "report.md").read_text().splitlines():
        if heading := re.match(r"`(\w+)`: ", line):
            suite = heading[1]
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line[2:-1].split("|")]
            rows.append({"suite": suite, **dict(zip(HEADER, cells, strict=True))})
    return [row for row in rows if row["runs"].isdecimal()]


def _measured():
    """The means and deviations of the report, by suite, data set and method."""
    return {(r["suite"], r["data"], r["method"]): r["ours"] for r in _report()}


METHODS = {
    "kernel on pixels": "identity",
    "kernel on principal components": "PCA",
    "kernel on an autoencoder": "autoencoder",
    "KLN in bfloat16": "in bfloat16",
    "cross-entropy and confidence": "cross-entropy",
    "KLN with warm-up": "with warm-up",
}


def test_the_errors_of_the_digits_that_pages_state_are_those_of_the_report():
    measured, suites = _measured(), ("ablations", "semi_ablations")
    rows = _table(DOCS / "reproduce.md", ["method", "all labels", "100 labels"])
    assert len(rows) == 13
    for name, *errors in rows:
        for suite, error in zip(suites, errors, strict=True):
            method = suite, "digits", METHODS.get(name, name)
            assert measured.get(method, "") == error, method
    found = [measured[suite, "digits", "KLN"] for suite in suites]
    header = f"test error, ours     {found[0]} %  {found[1]} %".replace("±", "+-")
    assert header in (ROOT / "configs" / "digits.py").read_text()


def test_the_errors_that_the_readme_states_are_those_of_the_report():
    measured = {
        (r["suite"], r["data"], r["method"], r["epochs"], r["runs"]): r["ours"]
        for r in _report()
    }
    header = ["data", "labels", "epochs, seeds"]
    header += ["KLN", "cross-entropy", "KLN in the paper"]
    rows = _table(ROOT / "README.md", header)
    assert len(rows) == 5
    for data, labels, length, *errors, paper in rows:
        suite = "ablations" if labels.startswith("all ") else "semi_ablations"
        names = {"scikit-learn's digits": "digits", "MNIST, a part": "mnist"}
        data = names.get(data, "fashion_mnist")
        for method, error in zip(("KLN", "cross-entropy"), errors, strict=True):
            assert measured[(suite, data, method, *length.split(", "))] == error
        if paper:
            table = "table1" if suite == "ablations" else "table7"
            (printed,) = {
                r["paper"]
                for r in _report()
                if (r["suite"], r["data"], r["method"]) == (table, data, "KLN")
            }
            assert paper == printed


def test_the_errors_of_mnist_that_a_page_states_are_those_of_the_report():
    measured = {
        (row["suite"], row["method"], row["epochs"]): row["ours"]
        for row in _report()
        if row["data"] == "mnist"
    }
    rows = _table(DOCS / "reproduce.md", ["method", "6 epochs", "20 epochs", "paper"])
    assert len(rows) == 9
    for name, *errors, _ in rows:
        name, few, _ = name.partition(", 100 labels")
        method = METHODS.get(name, name)
        suite = "table7" if few else "table1"
        for epochs, error in zip(("6", "20"), errors, strict=True):
            accuracy = measured.get(("table6", method, epochs), "")
            if accuracy and name != "KLN":
                mean, *spread = accuracy.split(" ± ")
                assert error == " ± ".join([f"{100 - float(mean):.2f}", *spread])
            else:
                assert error == measured.get((suite, method, epochs), "")


# Of the studies of fragility.
EPOCHS = {"digits": 12, "mnist": 3}
CHOICES = ("neither", "warm-up", "clipping", "both", "Z normalised")


@functools.cache
def _fragility():
    """Configuration and last metrics of each run of the studies of fragility."""
    found = [
        (record.config, {name: float(v[-1]) for name, v in record.metrics.items()})
        for record in packed.read_all(ROOT / "results")
        if record.config["width"] < 1
        and record.epochs == EPOCHS[record.config["dataset"]]
    ]
    assert len(found) == 8 * 100 * 3
    return found


def _choice(config):
    """What keeps the first steps of a run from harm, as a page calls it."""
    if config["normalise_z"]:
        return "Z normalised"
    of_both = {(0, 0): "neither", (1, 0): "warm-up", (0, 1): "clipping", (1, 1): "both"}
    return of_both[config["warmup_steps"] > 0, config["clip_norm"] > 0]


def test_the_runs_without_classes_that_a_page_states_are_those_of_the_studies():
    header = ["labels", "kernel on labels", "choice", "ridge", "such runs"]
    header += ["kernel within a class", "between classes", "gradient of the classifier"]
    rows, told = _table(DOCS / "reproduce.md", header), 0
    deep = [run for run in _fragility() if run[0]["network"] == "conv_large"]
    for labels, label_kernel, choice, ridges, number, *ranges in rows:
        least, *largest = map(float, ridges.split(" to "))
        of_row = [
            last
            for config, last in deep
            if (config["num_labels"] == 0) == (labels == "all")
            and label_kernel in (config["label_kernel"], "both")
            and choice in (_choice(config), "any")
            and least <= config["ridge"] <= (largest or [least])[0]
        ]
        failed = [last for last in of_row if last["test_error_percent"] >= 85]
        assert number == f"{len(failed)} of {len(of_row)}"
        told += len(failed)
        keys = "kernel_same", "kernel_different", "gradient_norm_classifier"
        for key, digits, stated in zip(
            keys, (".2f", ".2f", ".2g"), ranges, strict=True
        ):
            values = [last[key] for last in failed]
            assert stated == f"{min(values):{digits}} to {max(values):{digits}}"
    assert told == sum(last["test_error_percent"] >= 85 for _, last in deep)


def _of_plane(suite, data, label_kernel, reduction="sum"):
    """Configuration and last metrics of the runs of a study with these choices."""
    network = "conv_large" if "deep" in suite else "mnist"
    return [
        (config, last)
        for config, last in _fragility()
        if (config["network"], config["dataset"]) == (network, data)
        and (config["num_labels"] > 0) == ("semi" in suite)
        and config["label_kernel"] == label_kernel
        and config["reconstruction_reduction"] == reduction
    ]


def test_the_errors_by_choice_that_a_page_states_are_those_of_the_studies():
    header = ["suite", "data", "kernel on labels", *CHOICES, "ridge 1"]
    rows = _table(DOCS / "reproduce.md", header)
    assert len(rows) == 16
    for suite, data, label_kernel, *stated in rows:
        runs = _of_plane(suite.strip("`"), data, label_kernel)
        for choice, of_choice in zip([*CHOICES, "ridge 1"], stated, strict=True):
            errors = collections.defaultdict(list)
            for config, last in runs:
                of_run = "ridge 1" if config["ridge"] == 1 else _choice(config)
                if of_run == choice:
                    key = config["ridge"], _choice(config)
                    errors[key].append(last["test_error_percent"])
            assert {len(of_cell) for of_cell in errors.values()} == {3}
            assert len(errors) == (5 if choice == "ridge 1" else 4)
            # A mean that ends in 5 is stored a little above or below.
            means = [round(np.mean(cell), 4) for cell in errors.values()]
            assert of_choice == f"{min(means):.1f} to {max(means):.1f}"


def test_the_reconstructions_that_a_page_states_are_those_of_the_studies():
    header = ["suite", "data", *CHOICES, "clipping, mean", "mean image"]
    rows = _table(DOCS / "reproduce.md", header)
    assert len(rows) == 8
    for suite, data, *stated, _ in rows:
        columns = [(choice, "sum") for choice in CHOICES] + [("clipping", "mean")]
        for (choice, reduction), value in zip(columns, stated, strict=True):
            errors = [
                last["test_reconstruction"]
                * (config["image_size"] ** 2 if reduction == "mean" else 1)
                for config, last in _of_plane(
                    suite.strip("`"), data, "linear", reduction
                )
                if (_choice(config), config["ridge"] < 1) == (choice, True)
            ]
            assert len(errors) == 12
            assert value == f"{np.median(errors):.1f}", (suite, data, choice)


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
