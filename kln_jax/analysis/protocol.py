"""Compares methods in a fair way: choose on validation images, then test once.

1. Each method is trained with each setting of `GRID` that it has, with one seed. Its
   setting is the one with the lowest error on validation images after the last epoch.
2. With that setting it is trained with several seeds, which all methods share. The
   error on the test images is measured then, and decides nothing.
3. Two methods are compared by the differences of their errors with the same seed: the
   mean, and its 95 % confidence interval by Student's t.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from kln_jax.analysis import packed, records, runs, tables
from kln_jax.analysis.records import Record
from kln_jax.analysis.suites import CE, CGMMN, KLN, Entry, Suite
from kln_jax.training import variants
from kln_jax.training.interruption import Interruption

# What is chosen; each value is the paper's, CGMMN's, or that of plain cross-entropy.
GRID: dict[str, tuple[float, ...]] = {
    "learning_rate": (0.02, 0.1),
    "reconstruction_weight": (0.0, 0.1),
    "ridge": (0.01, 0.1),
}
# The part of the training images that is held out while choosing, where a data set has
# no validation images.
_HELD_OUT = 0.1

METHODS = (
    KLN,
    CE,
    Entry("KLN, labels of both batches", "supervised", (("pairing", "symmetric"),)),
    Entry("cross-entropy, labels of both batches", "ce", (("pairing", "symmetric"),)),
    Entry("KLN, one shared batch", "supervised", (("pairing", "shared"),)),
    CGMMN,
    Entry("CGMMN, independent batches", "cgmmn", (("pairing", "independent"),)),
    Entry("kernel on pixels", "identity"),
    Entry("kernel on principal components", "pca"),
    Entry("kernel on an autoencoder", "autoencoder"),
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all runs of a comparison have in common.

    Attributes:
      config_name: Name of the configuration file.
      epochs: Epochs of each run.
      width: Width of the network.
    """

    config_name: str
    epochs: int
    width: float


class Difference(NamedTuple):
    """Errors of a method less those of another, in percentage points.

    Attributes:
      mean: Mean over the seeds that both have.
      low: Lower end of its 95 % confidence interval.
      high: Upper end.
    """

    mean: float
    low: float
    high: float


def settings(method: Entry) -> list[Entry]:
    """Returns a method with each setting of `GRID` that it has.

    Args:
      method: One of `METHODS`.
    """
    has = {
        "learning_rate": True,
        # CGMMN has no autoencoder, and cross-entropy no Gram matrix.
        "reconstruction_weight": method.variant != "cgmmn",
        "ridge": method.variant != "ce",
    }
    keys = [key for key in GRID if has[key]]
    return [
        method._replace(changes=(*method.changes, *zip(keys, values, strict=True)))
        for values in itertools.product(*(GRID[key] for key in keys))
    ]


def compare(
    setup: Setup,
    out: pathlib.Path,
    *,
    data_dir: str = "",
    seeds: int,
    methods: Sequence[str] = (),
    interruption: Interruption | None = None,
) -> Iterator[str]:
    """Chooses the setting of each method, and then trains it with several seeds.

    Runs that are finished are not made again, and one that was stopped goes on.

    Args:
      setup: What all runs have in common.
      out: Where the runs lie.
      data_dir: Where prepared data sets lie.
      seeds: How many seeds.
      methods: Names or patterns of `METHODS`, if not all.
      interruption: Signals to listen to.

    Yields:
      A line for each run and each choice.

    Raises:
      ValueError: If there is no such method, configuration or data set.
    """

    def make(entries: Sequence[Entry], seeds: int) -> Iterator[str]:
        yield from runs.make(
            Suite("", "error", (setup.config_name,), tuple(entries)),
            out,
            data_dir=data_dir,
            seeds=seeds,
            epochs=setup.epochs,
            interruption=interruption,
        )

    chosen = []
    for method in runs.selected(METHODS, methods):
        yield from make(_on_validation(setup, method), 1)
        choice = choose(setup, method, packed.read_all(out))
        if choice is None:
            raise ValueError(
                f"{setup.config_name} in data_dir={data_dir!r} is a part of the data "
                "set: a comparison takes the whole."
            )
        setting, error = choice
        yield f"{method.name}: {_written(method, setting)}, {error:.2f} %"
        chosen.append(_of(setup, setting))
    yield from make(chosen, seeds)


def choose(
    setup: Setup, method: Entry, found: Sequence[Record]
) -> tuple[Entry, float] | None:
    """Returns the setting of a method with the lowest validation error, and that.

    Args:
      setup: What all runs of the comparison have in common.
      method: One of `METHODS`.
      found: Runs, of any comparison.

    Returns:
      The setting and the error in percent; None if a setting was not tried. One that
      diverged has lost.
    """
    errors = []
    for setting, tried in zip(
        settings(method), _on_validation(setup, method), strict=True
    ):
        of_setting = _runs_of(setup, tried, found)
        if not of_setting:
            return None
        error = of_setting[0].error
        errors.append((np.inf if error is None else error, setting))
    error, setting = min(errors, key=lambda pair: pair[0])
    return setting, error


def difference(
    errors: Mapping[int, float], others: Mapping[int, float]
) -> Difference | None:
    """Compares errors of two methods, seed by seed.

    Args:
      errors: Errors of a method by seed, in percent.
      others: Those of another.

    Returns:
      Its errors less those of the other; None if they share fewer than two seeds.

    Examples:
      >>> found = difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.5, 2: 3.5})
      >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})")
      1.00 (-0.24 to 2.24)
    """
    shared = sorted(errors.keys() & others.keys())
    if len(shared) < 2:
        return None
    gaps = np.array([errors[seed] - others[seed] for seed in shared])
    margin = stats.t.ppf(0.975, len(gaps) - 1) * stats.sem(gaps)
    mean = float(gaps.mean())
    return Difference(mean, mean - float(margin), mean + float(margin))


def report(found: Sequence[Record]) -> str:
    """Returns the comparisons among runs as Markdown, "" if there are none.

    Args:
      found: Runs, of any suite.
    """
    return "\n".join(_section(setup, found) for setup in _setups(found))


def _setups(found: Sequence[Record]) -> list[Setup]:
    """Returns the comparisons of which a method was chosen."""
    candidates = {
        Setup(record.config_name, record.epochs, float(record.config["width"]))
        for record in found
        if record.evaluate_on == "validation"
    }
    return [
        setup
        for setup in sorted(candidates, key=dataclasses.astuple)
        if any(choose(setup, method, found) for method in METHODS)
    ]


def _section(setup: Setup, found: Sequence[Record]) -> str:
    lines = [
        f"### {setup.config_name}, width {setup.width:g}, {setup.epochs} epochs\n",
        "| method | chosen | validation error, % | seeds | test error, % "
        "| less that of KLN |",
        "|:---|:---|---:|---:|---:|---:|",
    ]
    of_kln: Mapping[int, float] = {}  # Stays so where KLN was not run.
    for method in METHODS:
        chosen = choose(setup, method, found)
        if chosen is None:
            continue
        setting, error = chosen
        made = _runs_of(setup, _of(setup, setting), found)
        errors = {run.seed: run.error for run in made if run.error is not None}
        if method is KLN:
            of_kln = errors
        gap = None if method is KLN else difference(errors, of_kln)
        cells = (
            method.name,
            _written(method, setting),
            f"{error:.2f}",
            str(len(errors)),
            tables.shown(tables.mean_and_spread(errors.values())) or "not measured",
            f"{gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})" if gap else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _written(method: Entry, setting: Entry) -> str:
    return ", ".join(
        f"{key} {value:g}" for key, value in setting.changes[len(method.changes) :]
    )


def _on_validation(setup: Setup, method: Entry) -> list[Entry]:
    """Returns each setting of a method, with its error on validation images."""
    config = variants.named_config(setup.config_name, method.variant)
    held_out = config.validation_fraction or _HELD_OUT
    validation = (("evaluate_on", "validation"), ("validation_fraction", held_out))
    return [
        _of(setup, setting._replace(changes=(*setting.changes, *validation)))
        for setting in settings(method)
    ]


def _of(setup: Setup, entry: Entry) -> Entry:
    """Returns an entry with the width of a comparison, and with what names it."""
    changes: tuple[tuple[str, Any], ...] = (*entry.changes, ("width", setup.width))
    of_changes = ", ".join(f"{key}={value}" for key, value in changes)
    return Entry(f"{entry.name}, {of_changes}", entry.variant, changes)


def _runs_of(setup: Setup, entry: Entry, found: Sequence[Record]) -> list[Record]:
    """Returns the runs of an entry, on whole data, one a seed, in their order."""
    wanted = dict(entry.changes).get("evaluate_on", "test")
    fitting = {
        record.seed: record
        for record in records.matching(found, setup.config_name, entry)
        if record.epochs == setup.epochs
        and record.evaluate_on == wanted
        and not record.partial_data
    }
    return [fitting[seed] for seed in sorted(fitting)]
