"""The paper's tables beside ours, as Markdown."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kln_jax.analysis.records import Record, alike, distinctions, matching
from kln_jax.analysis.suites import Suite, Value

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
    """Returns the rows of a suite's table, of the keys of `HEADER`.

    A row has the runs of one method on one data set of one length. Runs of other
    epochs, or on a part of the data, say so, and have no difference to the paper.
    What was not measured has a row if the paper measured it.

    Args:
      suite: The suite.
      records: Runs, of any suite.
    """
    found = []
    others = () if suite.is_of_one_set else (r.config_name for r in records)
    for name in dict.fromkeys((*suite.datasets, *others)):
        for entry in suite.entries:
            paper = suite.paper.get((entry.name, name), ())
            known = {"data": name, "method": entry.name, "paper": shown(paper)}
            row = dict.fromkeys(HEADER, "") | known
            groups = alike(matching(records, name, entry)) if entry.variant else []
            found += [
                row | _ours(group, groups, QUANTITIES[suite.quantity], paper)
                for group in groups
            ]
            if paper and not groups:
                found.append(row | {"ours": "not measured" if entry.variant else ""})
    return found


def _ours(
    records: Sequence[Record],
    groups: Sequence[Sequence[Record]],
    quantity: Quantity,
    paper: Value,
) -> dict[str, str]:
    """Returns the cells of some runs that differ by their seeds."""
    first, remarks = records[0], marks(records)
    last = mean_and_spread(map(quantity.last, records))
    comparable = paper and last and not reductions(first)
    remarks += distinctions(records, groups)
    remarks += sorted({record.device for record in records} - {""})
    return {
        "ours": shown(last),
        # The sum makes no -0.00.
        "ours - paper": (
            f"{round(last[0] - paper[0], 2) + 0.0:+.2f}" if comparable else ""
        ),
        "last ten epochs": shown(mean_and_spread(map(quantity.late, records))),
        "runs": str(len(records)),
        "epochs": str(first.epochs),
        "remarks": "; ".join(remarks),
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
    if collapsed := sum(record.has_collapsed for record in records):
        found.append(f"{collapsed} with a collapsed kernel")
    return found


def mean_and_spread(values: Iterable[float | None]) -> Value:
    """Returns the mean, and the standard deviation if there are several values.

    Args:
      values: Numbers; None for those that are not known.
    """
    known = [value for value in values if value is not None]
    if len(known) > 1:
        return float(np.mean(known)), float(np.std(known, ddof=1))
    return tuple(known)


def shown(value: Value) -> str:
    """Writes what `mean_and_spread` returns, "" for no value."""
    return " ± ".join(f"{number:.2f}" for number in value)


def markdown(table: Sequence[Mapping[str, str]]) -> str:
    """Returns rows as a Markdown table."""
    header = list(HEADER)
    lines = [header, ["---"] * len(header)]
    lines += [[row[name] for name in header] for row in table]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
