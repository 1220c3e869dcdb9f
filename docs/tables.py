"""The tables of results on the pages, from the runs in results/.

To renew them: ``python -m docs.tables``.
"""

import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kln_jax.analysis import packed, records, runs, tables
from kln_jax.analysis.records import Record
from kln_jax.analysis.suites import CE, KLN, SUITES, Entry
from kln_jax.training import variants

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "reproduce.md")
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Keys that every run of a table has in common, or that only say how it is measured.
_UNSAID = {"width", "validation_fraction"}


@functools.cache
def _runs() -> list[Record]:
    return packed.read_all(ROOT / "results")


def with_tables(page: str) -> str:
    """Returns the text of a page with its tables as the results are now."""
    writers = {
        "readme": _readme,
        "digits": _digits,
        "cifar10": lambda found: _tried(found, "cifar10", "supervised"),
        "mnist_semi": lambda found: _tried(found, "mnist", "semi"),
    }
    return _BLOCK.sub(
        lambda block: f"{block[1]}{writers[block[2]](_runs())}{block[3]}", page
    )


def _tried(found: Sequence[Record], config_name: str, setting: str) -> str:
    """Returns what was tried on validation images, by setting and by error."""
    of_setting = [
        record
        for record in found
        if record.config_name == config_name
        and record.evaluate_on == "validation"
        and record.variant.startswith("semi") == (setting == "semi")
    ]
    lines = []
    for group in records.alike(of_setting):
        config = group[0].config
        keys = [
            f"`{key}={config[key]}`" for key in group[0].changed if _acts(key, config)
        ]
        objective = "cross-entropy" if group[0].variant.endswith("ce") else "KLN"
        cells = (
            ", ".join([objective, *keys]),
            str(group[0].epochs),
            str(len(group)),
            _mean(record.error for record in group),
            *(
                f"{np.mean([r.metrics[f'kernel_{pairs}'][-1] for r in group]):.2f}"
                for pairs in ("same", "different")
            ),
        )
        lines.append(cells)
    lines.sort(key=lambda cells: (int(cells[1]), float(cells[3].split()[0])))
    header = ("objective, keys", "epochs", "seeds", "validation error, %")
    return _markdown((*header, "kernel within a class", "between classes"), lines)


def _acts(key: str, config: Mapping[str, Any]) -> bool:
    """Says whether a key tells runs of a table apart."""
    if key == "lr_milestones":  # One after the end does nothing.
        return any(epoch < config["num_epochs"] for epoch in config[key])
    return key not in _UNSAID


_DEEP = (("lr_milestones", [2]), ("pairing", "symmetric"), ("width", 0.125))
_OF_CE = (
    ("learning_rate", 0.1),
    ("reconstruction_weight", 0.0),
    ("z_distance", 0.0),
)
# By data and labels: name of the configuration and epochs, KLN and cross-entropy.
_README = {
    ("scikit-learn's digits", "all 1,437"): ("digits", 12, KLN, CE),
    ("scikit-learn's digits", "100 of 1,437"): (
        "digits",
        12,
        Entry("KLN", "semi"),
        Entry("cross-entropy", "semi_ce"),
    ),
    ("Fashion-MNIST", "all 60,000"): ("fashion_mnist", 3, KLN, CE),
    ("CIFAR-10, an eighth of the width", "all 50,000"): (
        "cifar10",
        3,
        Entry("KLN", "supervised", _DEEP),
        Entry("cross-entropy", "ce", (*_DEEP, *_OF_CE)),
    ),
}


def _readme(found: Sequence[Record]) -> str:
    """Returns the test errors of KLN and of cross-entropy on each data set."""
    lines = []
    for (data, labels), (config_name, epochs, *methods) in _README.items():
        groups = [
            [
                record
                for record in records.matching(found, config_name, method)
                if record.epochs == epochs and record.evaluate_on == "test"
            ]
            for method in methods
        ]
        counts = " and ".join(map(str, dict.fromkeys(map(len, groups))))
        errors = (_mean(record.error for record in group) for group in groups)
        lines.append((data, labels, f"{epochs}, {counts}", *errors))
    header = ("data", "labels", "epochs, seeds", "KLN", "cross-entropy")
    return _markdown(header, lines)


def _digits(found: Sequence[Record]) -> str:
    """Returns the test errors of each method on scikit-learn's digits."""
    semi = {entry.name: entry for entry in SUITES["semi_ablations"].entries}
    lines = []
    for entry in SUITES["ablations"].entries:
        cells = (
            _mean(record.error for record in _whole(found, of)) if of else ""
            for of in (entry, semi.get(entry.name))
        )
        lines.append((entry.name, *cells))
    return _markdown(("method", "all labels", "100 labels"), lines)


def _whole(found: Sequence[Record], entry: Entry) -> list[Record]:
    """Returns the runs of a method on the digits as it is defined today."""
    config = runs.as_json(variants.named_config("digits", entry.variant))
    config |= dict(entry.changes)
    return [
        run
        for run in records.matching(found, "digits", entry)
        if run.epochs == run.full_epochs
        and all(
            config.get(key, value) == value for key, value in run.experiment.items()
        )
    ]


def _mean(errors: Iterable[float | None]) -> str:
    return tables.shown(tables.mean_and_spread(errors)) or "not measured"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    marks = [":---", *["---:"] * (len(header) - 1)]
    rows = (header, marks, *lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text()))
