"""Runs packed into a few files, and read back from them.

- ``runs.jsonl.xz``: a line a run, all of a `Record` but the next two.
- ``metrics/*.npz.xz``: values after each epoch in columns, a file for each data set and
  setting; the column ``run`` has the ``id`` of the line, and NaN is no value.
- ``learned/*.npz.xz``: what a run of each data set learned, for its figures.

All bytes follow from the runs and from the order in which they were added.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import lzma
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kln_jax.analysis import learned, records
from kln_jax.analysis.records import Record
from kln_jax.analysis.suites import KLN
from kln_jax.storage import whole_files
from kln_jax.storage.checkpoints import CheckpointError
from kln_jax.storage.whole_files import DamagedError

_RUNS = "runs.jsonl.xz"
# What of a record stands in its line.
_IN_LINE = (
    *("came_from", "config", "changed", "full_epochs"),
    *("about", "result", "failure"),
)
# Keys that two runs of one experiment share beside those of the experiment.
_OF_EACH = ("dataset", "variant", "seed", "split_seed", "num_epochs")
# Columns of whole numbers, and those that tables show to the last digit.
_WHOLE = ("epoch", "step")
_DOUBLE = ("test_error_percent", "validation_error_percent", "wall_seconds")


def read_all(place: pathlib.Path) -> list[Record]:
    """Reads all runs of a place, packed or in working directories below it.

    Of a run that is there in both forms the working directory counts.

    Raises:
      ValueError: If there is none, or one is damaged.
    """
    found = _merged(read(place), place)
    if not found:
        raise ValueError(f"{place} holds no run that is finished.")
    return sorted(found.values(), key=_place)


def _place(record: Record) -> tuple[str, ...]:
    return record.config_name, *record.came_from.split("/")


def _merged(packed: Mapping[int, Record], place: pathlib.Path) -> dict[int, Record]:
    """Adds the runs below a place to packed ones, or puts them in their places."""
    merged, alike = dict(packed), collections.defaultdict(list)
    for number, record in packed.items():
        alike[_identity(record)].append(number)
    fresh = itertools.count(1 + max(packed, default=0))
    for directory in records.in_directories(place):
        record = records.of_directory(directory, place)
        numbers = alike[_identity(record)]
        same = (n for n in numbers if merged[n].is_same_experiment(record))
        number = next(same, 0)
        if not number:
            number = next(fresh)
            numbers.append(number)
        elif record.learned_at is None:
            shown = merged[number].learned_at
            record = dataclasses.replace(record, learned_at=shown)
        merged[number] = record
    return merged


def _identity(record: Record) -> tuple[Any, ...]:
    of_each = (record.config[key] for key in _OF_EACH)
    return *of_each, record.evaluate_on, record.partial_data, record.data


def read(place: pathlib.Path) -> dict[int, Record]:
    """Reads packed runs.

    Args:
      place: Where their files lie.

    Returns:
      The runs by their ids, in the order of the lines; none if there is no such file.

    Raises:
      DamagedError: If a file is damaged.
    """
    path = place / _RUNS
    if not path.exists():
        return {}
    metrics: dict[int, dict[str, np.ndarray]] = {}
    for file in sorted((place / "metrics").glob("*.npz.xz")):
        metrics |= _read_metrics(file)
    drawn = {
        int(learned.load_arrays(file)["run"]): file
        for file in sorted((place / "learned").glob("*.npz.xz"))
    }
    found = {}
    try:
        for line in lzma.decompress(path.read_bytes()).splitlines():
            row = json.loads(line)
            number = row.pop("id")
            # A run that diverged in its first epoch has none.
            of_run = metrics[number] if row["result"] else metrics.get(number, {})
            row["changed"] = tuple(row["changed"])
            row["learned_at"] = drawn.get(number)
            found[number] = Record(**row, metrics=of_run)
    except (ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise DamagedError(path, f"{type(error).__name__} {error}") from error
    return found


def _read_metrics(path: pathlib.Path) -> dict[int, dict[str, np.ndarray]]:
    """Reads the columns of each run of a file, whose rows are together."""
    columns = learned.load_arrays(path)
    if "run" not in columns or len({len(column) for column in columns.values()}) > 1:
        raise DamagedError(path, "its columns do not fit each other")
    ids, starts = np.unique(columns.pop("run"), return_index=True)
    parts = {
        name: np.split(column.astype(float), np.sort(starts)[1:])
        for name, column in columns.items()
    }
    return {
        int(number): {
            name: of_name[i]
            for name, of_name in parts.items()
            if not np.isnan(of_name[i]).all()
        }
        for i, number in enumerate(ids[np.argsort(starts)])
    }


def pack(place: pathlib.Path, results: pathlib.Path) -> Iterator[str]:
    """Adds the finished and diverged runs below a place to packed ones.

    A run that is there already takes its place. No file of the runs is changed.

    Args:
      place: Where the working directories lie.
      results: Where the packed ones lie; made if it is absent.

    Yields:
      A line for what cannot be packed of what runs learned, and one for all.

    Raises:
      ValueError: If there is no run, or one is damaged; then nothing is packed.
    """
    before = read(results)
    after = _merged(before, place)
    if not any(records.in_directories(place)):
        raise ValueError(f"{place} holds no run that is finished.")
    results.mkdir(parents=True, exist_ok=True)
    yield from _write_learned(after, results)
    _write_metrics(after, results)
    _write_rows(after, results)
    yield f"{results} has {len(after)} runs, {len(after) - len(before)} of them new."


def _write_learned(found: Mapping[int, Record], results: pathlib.Path) -> Iterator[str]:
    """Writes what the most complete run of KLN on each data set learned."""
    for record in most_complete(list(found.values())):
        path = results / "learned" / f"{record.config_name}.npz.xz"
        if record.learned_at == path or record.learned_at is None:
            continue
        number = next(n for n, one in found.items() if one is record)
        try:
            shown = learned.read(record.learned_at, record.config)
        # Its data, say, need not be on this machine.
        except (ValueError, OSError, CheckpointError) as error:
            yield f"{record.learned_at}: what it learned is not packed: {error}"
            continue
        arrays = {"run": np.asarray(number), **learned.to_arrays(shown)}
        learned.save_arrays(path, arrays)


def most_complete(found: Sequence[Record]) -> list[Record]:
    """Returns of each data set the run of KLN that its figures are drawn from."""
    chosen: dict[str, Record] = {}
    for record in sorted(found, key=lambda r: (r.partial_data, -r.epochs, r.seed)):
        if record.is_of(KLN) and record.learned_at:
            chosen.setdefault(record.config_name, record)
    return list(chosen.values())


def _write_rows(found: Mapping[int, Record], results: pathlib.Path) -> None:
    rows = (
        {"id": number, **{name: getattr(record, name) for name in _IN_LINE}}
        for number, record in sorted(found.items(), key=lambda item: _place(item[1]))
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    whole_files.write_whole(results / _RUNS, lzma.compress(lines.encode()))


def _write_metrics(found: Mapping[int, Record], results: pathlib.Path) -> None:
    by_file: dict[str, dict[int, Mapping[str, np.ndarray]]] = {}
    for number, record in sorted(found.items()):
        if record.metrics:
            setting = "semi" if record.variant.startswith("semi") else "supervised"
            name = f"{record.config_name}-{setting}"
            by_file.setdefault(name, {})[number] = record.metrics
    for name, of_runs in by_file.items():
        lengths = [len(metrics["epoch"]) for metrics in of_runs.values()]
        columns = {"run": np.repeat(np.array([*of_runs], np.int32), lengths)}
        for column in sorted({c for metrics in of_runs.values() for c in metrics}):
            values = [
                metrics.get(column, np.full(length, np.nan))
                for metrics, length in zip(of_runs.values(), lengths, strict=True)
            ]
            columns[column] = np.concatenate(values).astype(_dtype(column))
        learned.save_arrays(results / "metrics" / f"{name}.npz.xz", columns)


def _dtype(column: str) -> type[np.generic]:
    if column in _WHOLE:
        return np.int32
    return np.float64 if column in _DOUBLE else np.float32
