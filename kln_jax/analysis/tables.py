"""The paper's tables beside ours, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kln_jax.analysis.records import Record, alike, distinctions, matching
from kln_jax.analysis.suites import Entry, Suite, Value

HEADER = (
    "data",
    "method",
    "paper",
    "ours",
    "ours - paper",
    "last ten epochs",
    "runs",
    "epochs",
    "remarks",
)

# The numbers of `ours`: columns of the CSV alone.
_NUMBERS = ("mean", "standard deviation")

_NOT_MEASURED = {"ours": "not measured"}


class Quantity(NamedTuple):
    """What the numbers of a table are.

    Attributes:
      text: Its name and unit.
      last: From a record to its number after the last epoch, None if it has none.
      late: To that of the last ten epochs.
    """

    text: str
    last: Callable[[Record], float | None]
    late: Callable[[Record], float | None]


QUANTITIES = {
    "error": Quantity(
        "test error, %",
        operator.attrgetter("error"),
        operator.attrgetter("late_error"),
    ),
    "accuracy": Quantity(
        "test accuracy, %",
        lambda record: None if record.error is None else 100.0 - record.error,
        lambda record: None if record.late_error is None else 100.0 - record.late_error,
    ),
    "seconds": Quantity(
        "median seconds of an epoch, with whatever else the machine did",
        operator.attrgetter("epoch_seconds"),
        lambda record: None,
    ),
}


def rows(suite: Suite, records: Sequence[Record]) -> list[dict[str, str]]:
    """Returns the rows of a suite's table, of the keys of `HEADER` and the numbers.

    A row has the runs of one method on one data set of one length. Runs of other
    epochs, or on a part of the data, say so, and have no difference to the paper.
    Data sets that are not of the suite have rows for what was measured. What is not
    measured of a grid of methods shares a row.

    Args:
      suite: The suite.
      records: Runs, of any suite.
    """
    found = []
    others = () if suite.is_of_one_set else (r.config_name for r in records)
    for name in dict.fromkeys((*suite.datasets, *others)):
        missing = 0
        for entry in suite.entries:
            paper = suite.paper.get((entry.name, name), ())
            if not entry.variant:
                found += [_row(name, entry, paper)] if paper else []
                continue
            groups = alike(matching(records, name, entry))
            found += [
                _row(name, entry, paper)
                | _ours(group, groups, QUANTITIES[suite.quantity], paper)
                for group in groups
            ]
            if name not in suite.datasets or groups:
                continue
            if suite.figure == "grid":
                missing += 1
            else:
                found.append(_row(name, entry, paper) | _NOT_MEASURED)
        if missing:
            found.append(_row(name, Entry(f"{missing} more"), ()) | _NOT_MEASURED)
    return found


def _row(config_name: str, entry: Entry, paper: Value) -> dict[str, str]:
    known = {"data": config_name, "method": entry.name, "paper": _shown(paper)}
    return dict.fromkeys((*HEADER, *_NUMBERS), "") | known


def _ours(
    records: Sequence[Record],
    groups: Sequence[Sequence[Record]],
    quantity: Quantity,
    paper: Value,
) -> dict[str, str]:
    """Returns the cells of some runs that differ by their seeds."""
    first, remarks = records[0], marks(records)
    last = _statistics(records, quantity.last)
    comparable = paper and last and not reductions(first)
    remarks += distinctions(records, groups)
    remarks += sorted({record.device for record in records} - {""})
    return {
        "ours": _shown(last),
        # The sum makes no -0.00.
        "ours - paper": (
            f"{round(last[0] - paper[0], 2) + 0.0:+.2f}" if comparable else ""
        ),
        "last ten epochs": _shown(_statistics(records, quantity.late)),
        "runs": str(len(records)),
        "epochs": str(first.epochs),
        "remarks": "; ".join(remarks),
        **dict(zip(_NUMBERS, map("{:.4f}".format, last), strict=False)),
    }


def reductions(record: Record) -> list[str]:
    """Says in what a run is other than that of the paper's table."""
    found = []
    if record.partial_data:
        found.append("part of the data")
    if record.data:
        found.append(record.data)
    if record.epochs != record.full_epochs:
        found.append(f"{record.epochs} of {record.full_epochs} epochs")
    if record.evaluate_on != "test":
        found.append(f"error on {record.evaluate_on} images")
    return found


def marks(records: Sequence[Record]) -> list[str]:
    """Says what must stand beside the numbers of runs that may be averaged."""
    found = reductions(records[0])
    if diverged := sum(record.error is None for record in records):
        found.append(f"{diverged} diverged")
    return found


def _statistics(
    records: Sequence[Record], of: Callable[[Record], float | None]
) -> Value:
    """Returns the mean, and the standard deviation if there are several values."""
    values = [value for record in records if (value := of(record)) is not None]
    if len(values) > 1:
        return float(np.mean(values)), float(np.std(values, ddof=1))
    return tuple(values)


def _shown(value: Value) -> str:
    return " ± ".join(f"{number:.2f}" for number in value)


def markdown(table: Sequence[Mapping[str, str]]) -> str:
    """Returns rows as a Markdown table."""
    header = list(HEADER)
    lines = [header, ["---"] * len(header)]
    lines += [[row[name] for name in header] for row in table]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def latex(
    shown: Mapping[str, Suite], found: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Returns the rows of suites as LaTeX tables, which may be longer than a page.

    They need the packages booktabs and longtable.

    Args:
      shown: The suites.
      found: The rows of each.
    """
    special = str.maketrans({sign: rf"\{sign}" for sign in "%_&#${}"} | {"±": r"$\pm$"})
    head = [r"\toprule", rf"{' & '.join(HEADER)} \\", r"\midrule"]
    parts = []
    for name, table in found.items():
        if not table:
            continue
        caption = f"{shown[name].title} ({QUANTITIES[shown[name].quantity].text})"
        cells = ([row[key].translate(special) for key in HEADER] for row in table)
        lines = [
            f"% {name}",
            rf"\begin{{longtable}}{{ll{'r' * (len(HEADER) - 3)}l}}",
            rf"\caption{{{caption.translate(special)}}} \\",
            *head,
            r"\endfirsthead",
            *head,
            r"\endhead",
            r"\bottomrule",
            r"\endfoot",
            *(rf"{' & '.join(row)} \\" for row in cells),
            r"\end{longtable}",
        ]
        parts.append("".join(f"{line}\n" for line in lines))
    return "\n".join(parts)


def comma_separated(
    shown: Mapping[str, Suite], found: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Returns the rows of suites as CSV, with a header.

    Args:
      shown: The suites.
      found: The rows of each.
    """
    content = io.StringIO()
    columns = ("suite", *HEADER, "quantity", *_NUMBERS)
    writer = csv.DictWriter(content, columns, lineterminator="\n")
    writer.writeheader()
    for name, table in found.items():
        of_suite = {"suite": name, "quantity": QUANTITIES[shown[name].quantity].text}
        writer.writerows({**of_suite, **row} for row in table)
    return content.getvalue()
