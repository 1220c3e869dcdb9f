"""Writes the tables and figures of all runs below a directory."""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """Writes ``report.md`` and ``figures/``.

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
    path = out / "report.md"
    text = _markdown(shown, found, protocol.report(records), pictures)
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


def _markdown(
    shown: Mapping[str, Suite],
    found: Mapping[str, list[dict[str, str]]],
    comparisons: str,
    pictures: Sequence[pathlib.Path],
) -> str:
    sections = [
        "# Runs, and the paper's tables\n\n"
        "Mean ± standard deviation over seeds. *Last ten epochs* has the median of the "
        "values after each of them, of runs that have as many; nothing is chosen by "
        "the test set. Runs of other epochs, or on a part of the data, say so, and "
        "have no difference to the paper. `python -m kln_jax.analysis run SUITE "
        "--out=DIR` makes the runs of a suite, whose name stands above its table.\n"
    ]
    if comparisons:
        sections.append(f"## Comparisons by the protocol\n\n{comparisons}")
    for name, suite in shown.items():
        if found[name]:
            what = f"`{name}`: {tables.QUANTITIES[suite.quantity].text}."
            table = tables.markdown(found[name])
            sections.append(f"## {suite.title}\n\n{what}\n\n{table}")
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
            if suite.figure and suite.quantity == "error" and len(groups) > 1:
                title = f"{config_name}: {suite.title}"
                draw = functools.partial(_of_a_suite, suite, groups, title)
                yield f"{config_name}-{name}", draw
    for record in packed.most_complete(records):
        assert record.learned_at  # Or it would not have been chosen.
        try:
            shown = learned.read(record.learned_at, record.config)
        # Its data, say, need not be on this machine: the tables do without.
        except (ValueError, OSError, CheckpointError) as error:
            logger.warning("No figures of %s: %s", record.learned_at, error)
            continue
        for kind, draw_kind in _OF_A_RUN.items():
            draw = functools.partial(_of_a_run, draw_kind, shown, record)
            yield f"{record.config_name}-{kind}", draw


def _of_a_suite(
    suite: Suite, groups: Mapping[str, Sequence[Record]], title: str
) -> Figure:
    """Draws a suite; what holds for all its runs stands in the title."""
    groups = _of_shared_seeds(groups)
    marks = [tables.reductions(group[0]) for group in groups.values()]
    common = [mark for mark in marks[0] if all(mark in of_one for of_one in marks)]
    counts = sorted({len(group) for group in groups.values()})
    number = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    common.append(f"{number} seed{'s' * (counts[-1] > 1)}")
    found = {}
    for method, group in groups.items():
        own = [mark for mark in tables.marks(group) if mark not in common]
        found["\n".join([method, *own])] = [
            record.error if suite.figure == "sweep" else record.errors.tolist()
            for record in group
            if record.error is not None
        ]
    draw: Callable[..., Figure] = getattr(figures, suite.figure)
    return draw(found, f"{title}\n{', '.join(common)}")


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
    """Returns the runs of each method that has some, the fullest that are alike.

    All runs of a sweep are alike: a point has no room to say what its runs are.
    """
    found = {
        entry.name: matching(records, config_name, entry)
        for entry in suite.entries
        if entry.variant
    }
    if suite.figure == "sweep":
        groups = comparable(itertools.chain(*found.values()))
        shown = max(groups, key=len, default=[])
        found = {name: [r for r in of if r in shown] for name, of in found.items()}
    return {name: alike(group)[0] for name, group in found.items() if group}
