"""Writes the tables and figures of all runs below a directory."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from kln_jax.analysis import figures, learned, packed, protocol, tables
from kln_jax.analysis.learned import Learned
from kln_jax.analysis.records import Record, alike, comparable, matching
from kln_jax.analysis.suites import SUITES, Entry, Suite
from kln_jax.storage import whole_files
from kln_jax.storage.checkpoints import CheckpointError

logger = logging.getLogger("kln_jax")

_OF_A_RUN = {
    "histograms": figures.histograms,
    "heatmaps": figures.heatmaps,
    "reconstructions": figures.reconstruction_grid,
    "map": figures.latent_map,
}


def write(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Writes ``report.md``, ``report.csv``, ``report.tex`` and ``figures/``.

    What a run learned is drawn of one run of each data set, the longest of KLN with
    all labels. Figures that are there already, of runs that are gone, stay.

    Args:
      out: Where all runs lie, in working directories or packed.

    Yields:
      Each file.

    Raises:
      ValueError: If no run is finished there.
    """
    records = packed.read_all(out)
    shown = {**SUITES, "others": _others(records)}
    found = {name: tables.rows(suite, records) for name, suite in shown.items()}
    (out / "figures").mkdir(exist_ok=True)
    for name, draw in _figures(records):
        path = out / "figures" / f"{name}.png"
        try:
            figures.save(draw(), path)
        # A few images, say, have no pair of one class. The tables do without.
        except ValueError as error:
            logger.warning("No %s: %s", path, error)
            continue
        yield path
    drawn = sorted((out / "figures").glob("*.png"))
    pictures = [path.relative_to(out) for path in drawn]
    for suffix, text in (
        ("md", _markdown(shown, records, found, pictures)),
        ("csv", tables.comma_separated(shown, found)),
        ("tex", tables.latex(shown, found)),
    ):
        path = out / f"report.{suffix}"
        whole_files.write_whole(path, text.encode())
        yield path


def _others(records: Sequence[Record]) -> Suite:
    """Returns the methods of runs that are of no suite, as a suite."""
    config_names = {record.config_name for record in records}
    known = {
        record
        for suite in SUITES.values()
        for entry in suite.entries
        for name in config_names
        for record in matching(records, name, entry)
    }
    entries = {}
    for record in records:
        if record not in known:
            changes = tuple((key, record.config[key]) for key in record.changed)
            of_changes = (f"{key}={value}" for key, value in changes)
            name = ", ".join([record.variant, *of_changes])
            entries[name] = Entry(name, record.variant, changes)
    return Suite("Runs of no suite", "error", (), tuple(entries.values()))


def _commands(name: str, suite: Suite, records: Sequence[Record]) -> list[str]:
    """Returns what makes the runs of a suite that there are, or else all of it."""
    every = [entry.name for entry in suite.entries if entry.variant]
    made: dict[tuple[str, ...], list[str]] = {}
    for config_name in dict.fromkeys(record.config_name for record in records):
        if suite.is_of_one_set and config_name not in suite.datasets:
            continue
        for entry in suite.entries:
            for group in alike(matching(records, config_name, entry)):
                made.setdefault(_options(suite, group), []).append(entry.name)
    lines = []
    for given, methods in (made or {(): every}).items():
        line = ["python -m kln_jax.analysis run", name, "--out=DIR", *given]
        if set(methods) != set(every):
            line += ["--methods", *map(shlex.quote, dict.fromkeys(methods))]
        lines.append(" ".join(line))
    return lines


def _options(suite: Suite, group: Sequence[Record]) -> tuple[str, ...]:
    """Returns in what runs that are alike depart from those of their suite."""
    first, count = group[0], 1 + max(record.seed for record in group)
    options = {
        f"--datasets {first.config_name}": (first.config_name,) != suite.datasets,
        f"--epochs={first.epochs}": first.epochs != first.full_epochs,
        "--allow_partial_data": first.partial_data,
        f"--seeds={count}": count != suite.seeds,
    }
    return tuple(option for option, is_given in options.items() if is_given)


def _markdown(
    shown: Mapping[str, Suite],
    records: Sequence[Record],
    found: Mapping[str, list[dict[str, str]]],
    pictures: Sequence[pathlib.Path],
) -> str:
    sections = [
        "# Runs, and the paper's tables\n\n"
        "Mean ± standard deviation over seeds. *Last ten epochs* has the median of the "
        "values after each of them, of runs that have as many; nothing is chosen by "
        "the test set. Runs of other epochs, or on a part of the data, say so, and "
        "have no difference to the paper. Above each table are the commands of its "
        "runs, which take `--data_dir` for prepared data.\n"
    ]
    if comparisons := protocol.report(records):
        sections.append(f"## Comparisons by the protocol\n\n{comparisons}")
    for name, suite in shown.items():
        if not found[name]:
            continue
        parts = [f"## {suite.title}", tables.markdown(found[name])]
        if name in SUITES:
            lines = "\n".join(_commands(name, suite, records))
            parts.insert(1, f"```sh\n{lines}\n```")
        parts.insert(-1, f"{tables.QUANTITIES[suite.quantity].text}.")
        sections.append("\n\n".join(parts))
    sections.append("## Figures\n")
    sections += [f"![{path.stem}]({path})\n" for path in pictures]
    return "\n".join(sections)


def _figures(
    records: Sequence[Record],
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yields names of figures, of what there are runs for, and what draws them."""
    for config_name in sorted({record.config_name for record in records}):
        for name, suite in SUITES.items():
            if suite.is_of_one_set and config_name not in suite.datasets:
                continue
            groups = _groups(suite, records, config_name)
            num_groups = sum(map(bool, groups.values()))
            if num_groups < 2 or suite.quantity != "error":
                continue
            title = f"{config_name}: {suite.title}"
            yield (
                f"{config_name}-{name}",
                functools.partial(_of_a_suite, suite, groups, title),
            )
    for record in packed.most_complete(records):
        assert record.learned_at  # Or it would not have been chosen.
        try:
            shown = learned.read(record.learned_at, record.config)
        # Its data, say, need not be on this machine: the tables do without.
        except (ValueError, OSError, CheckpointError) as error:
            logger.warning("No figures of %s: %s", record.learned_at, error)
            continue
        for kind, draw in _OF_A_RUN.items():
            yield (
                f"{record.config_name}-{kind}",
                functools.partial(_of_a_run, draw, shown, record),
            )


def _of_a_suite(
    suite: Suite, groups: Mapping[str, Sequence[Record]], title: str
) -> Figure:
    """Draws a suite; what holds for all its runs stands in the title."""
    draw, of_runs = _OF_A_SUITE[suite.figure]
    if suite.figure != "grid":
        groups = _of_shared_seeds(groups)
    marks = [tables.reductions(group[0]) for group in groups.values() if group]
    common = [mark for mark in marks[0] if all(mark in of_one for of_one in marks)]
    counts = [len(group) for group in groups.values() if group]
    fewest, most = min(counts), max(counts)
    number = f"{fewest} to {most}" if fewest < most else f"{most}"
    common.append(f"{number} seed{'s' * (most > 1)}")
    found = {}
    for method, group in groups.items():
        label = method
        # The cells of a grid, whose names are places, say by themselves what diverged.
        if suite.figure != "grid":
            own = [mark for mark in tables.marks(group) if mark not in common]
            label = "\n".join([method, *own])
        found[label] = of_runs(group)
    return draw(found, f"{title}\n{', '.join(common)}".strip())


def _of_shared_seeds(
    groups: Mapping[str, Sequence[Record]],
) -> Mapping[str, Sequence[Record]]:
    """Leaves the runs of the seeds that all methods have, if there are any.

    Seeds differ by their labelled images more than many methods do.
    """
    seeds = ({record.seed for record in group} for group in groups.values())
    shared = set.intersection(*seeds)
    if not shared:
        return groups
    return {
        method: [record for record in group if record.seed in shared]
        for method, group in groups.items()
    }


def _of_a_run(
    draw: Callable[[Learned], Figure], shown: Learned, record: Record
) -> Figure:
    figure = draw(shown)
    title = "\n".join([record.config_name, ", ".join(tables.reductions(record))])
    figure.suptitle(title.strip(), fontsize=9)
    return figure


def _groups(
    suite: Suite, records: Sequence[Record], config_name: str
) -> dict[str, list[Record]]:
    """Returns the runs of each method, the fullest ones that are alike.

    All runs of a sweep or a grid are alike, as most are. A method of a grid that has
    none such is empty.
    """
    found = {
        entry.name: matching(records, config_name, entry)
        for entry in suite.entries
        if entry.variant
    }
    if suite.figure == "curves":
        return {name: alike(group)[0] for name, group in found.items() if group}
    # A point or cell has no room to say what its runs are.
    groups = comparable(itertools.chain(*found.values()))
    shown = max(groups, key=len, default=[])
    found = {name: [r for r in group if r in shown] for name, group in found.items()}
    if suite.figure == "grid":  # Which shows what is missing.
        return found
    return {name: group for name, group in found.items() if group}


def _errors(records: Sequence[Record]) -> list[float | None]:
    return [record.error for record in records]


def _curves(records: Sequence[Record]) -> list[Sequence[float]]:
    return [record.errors.tolist() for record in records if record.error is not None]


# By the figure that a suite names: what draws it, and from what of a method's runs.
_OF_A_SUITE: dict[str, tuple[Callable[..., Figure], Callable[..., list[Any]]]] = {
    "curves": (figures.curves, _curves),
    "sweep": (figures.sweep, _errors),
    "grid": (figures.grid, _errors),
}
