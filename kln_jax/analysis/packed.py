"""Runs packed into a few files, and read back from them.

- ``runs.jsonl``: a line a run: what defines it, and its result.
- ``shared.json``: what runs share, once: configurations, data sets, versions. A line
  names one of each, and has the keys in which it differs from that configuration.
- ``metrics/*.npz``: values after each epoch in columns, a file for each data set and
  setting; the column ``run`` has the ``id`` of the line, and NaN is no value.
- ``learned/*.npz``: what a run of each data set learned, for its figures.

All bytes follow from the runs and from the order in which they were added.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kln_jax.analysis import learned, records, runs
from kln_jax.analysis.records import Record
from kln_jax.analysis.suites import KLN, SUITES
from kln_jax.storage import whole_files
from kln_jax.storage.checkpoints import CheckpointError
from kln_jax.storage.whole_files import DamagedError

_RUNS, _SHARED = "runs.jsonl", "shared.json"
# Keys of a configuration that stand in the line of each run.
_OF_EACH = ("dataset", "variant", "seed", "split_seed", "num_epochs")
# Values of result.json that do so too, as they are or by what is shared.
_OF_EACH_RESULT = {"dataset", "variant", "seed", "epochs", "versions"}
# Columns of whole numbers.
_WHOLE = ("epoch", "step")


def read_all(place: pathlib.Path) -> list[Record]:
    """Reads all runs of a place, packed or in working directories below it.

    Of a run that is there in both forms the working directory counts.

    Raises:
      ValueError: If there is none, or one is damaged.
    """
    found = [records.of_directory(d, place) for d in records.in_directories(place)]
    again = _Known(dict(enumerate(found)))
    found += [one for one in read(place).values() if again.find(one) is None]
    if not found:
        raise ValueError(f"{place} holds no run that is finished.")
    return sorted(found, key=_place)


def _place(record: Record) -> tuple[str, ...]:
    return record.config_name, *record.came_from.split("/")


def read(place: pathlib.Path) -> dict[int, Record]:
    """Reads packed runs.

    Args:
      place: The directory of ``runs.jsonl``.

    Returns:
      The runs by their ids, in the order of the lines; none if there is no such file.

    Raises:
      DamagedError: If a file is damaged.
    """
    path = place / _RUNS
    if not path.exists():
        return {}
    shared = whole_files.read_json(place / _SHARED)
    metrics: dict[int, dict[str, np.ndarray]] = {}
    for file in sorted((place / "metrics").glob("*.npz")):
        metrics |= _read_metrics(file)
    drawn = {
        int(learned.load_arrays(file)["run"]): file
        for file in sorted((place / "learned").glob("*.npz"))
    }
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            record = _from_row(row, shared, metrics)
            found[row["id"]] = dataclasses.replace(
                record, learned_at=drawn.get(row["id"])
            )
        except (ValueError, KeyError, TypeError) as error:
            why = f"line {number}: {type(error).__name__} {error}"
            raise DamagedError(path, why) from error
    return found


def _from_row(
    row: Mapping[str, Any],
    shared: Mapping[str, Any],
    metrics: Mapping[int, Mapping[str, np.ndarray]],
) -> Record:
    defaults = shared["configurations"][row["configuration"]]
    result = row.get("result")
    if result is not None:
        result = {
            **result,
            "dataset": row["dataset"],
            "variant": row["variant"],
            "seed": row["seed"],
            "epochs": row["num_epochs"],
            "versions": shared["versions"][row["versions"]],
        }
    return Record(
        came_from=row["came_from"],
        config={**defaults, **row["keys"], **{key: row[key] for key in _OF_EACH}},
        changed=tuple(row["changed"]),
        full_epochs=row["full_epochs"],
        about=shared["data"][row["data"]],
        result=result,
        failure=row.get("failure", ""),
        # One that diverged in its first epoch has none.
        metrics=metrics[row["id"]] if result else metrics.get(row["id"], {}),
    )


def _read_metrics(path: pathlib.Path) -> dict[int, dict[str, np.ndarray]]:
    """Reads the columns of each run of a file."""
    columns = learned.load_arrays(path)
    if "run" not in columns or len({len(column) for column in columns.values()}) > 1:
        raise DamagedError(path, "its columns do not fit each other")
    ids, starts = np.unique(columns.pop("run"), return_index=True)
    order = np.argsort(starts)
    parts = {
        name: np.split(column.astype(float), np.sort(starts)[1:])
        for name, column in columns.items()
    }
    return {
        int(ids[k]): {
            name: parts[name][i] for name in parts if not np.isnan(parts[name][i]).all()
        }
        for i, k in enumerate(order)
    }


def pack(place: pathlib.Path, results: pathlib.Path) -> Iterator[str]:
    """Adds the finished and diverged runs below a place to packed ones.

    A run that is there already is skipped if it is the same in all, and replaced if
    not. No file of the runs is changed.

    Args:
      place: Where the working directories lie.
      results: The directory of ``runs.jsonl``; made if it is absent.

    Yields:
      A line for each run that is not simply added, and one for all.

    Raises:
      ValueError: If there is no run, or, once the others are packed, if some are
        damaged.
    """
    before = read(results)
    after, known = dict(before), _Known(before)
    added, damaged = 0, 0
    directories = list(records.in_directories(place))
    if not directories:
        raise ValueError(f"{place} holds no run that is finished.")
    for directory in directories:
        try:
            record = records.of_directory(directory, place)
        except DamagedError as error:
            damaged += 1
            yield str(error)
            continue
        earlier = known.find(record)
        if earlier is not None and _is_equal(after[earlier], record):
            if record.learned_at:  # It may not have been looked at before.
                kept = after[earlier].learned_at or record.learned_at
                after[earlier] = dataclasses.replace(after[earlier], learned_at=kept)
            yield f"{directory}: skipped, for it is there already"
            continue
        if earlier is not None:
            yield f"{directory}: replaces {after.pop(earlier).came_from}"
            known.forget(earlier)
        # The metrics of what is replaced stay until its line is gone.
        number = 1 + max((*before, *after), default=0)
        after[number] = record
        known.add(number, record)
        added += 1
    results.mkdir(parents=True, exist_ok=True)
    yield from _write_learned(after, results)
    _write_metrics(before | after, results)
    _write_rows(after, results)
    if before.keys() - after.keys():
        _write_metrics(after, results)
    yield f"{added} of {len(directories)} runs packed; {results} has {len(after)}."
    if damaged:
        raise ValueError(
            f"{damaged} of {len(directories)} runs are damaged, as said above, and not "
            "packed; the others are."
        )


class _Known:
    """Finds runs that are of the same experiment, data, seed and length."""

    def __init__(self, found: Mapping[int, Record]) -> None:
        self._by_identity: dict[tuple[Any, ...], dict[int, Record]] = {}
        for number, record in found.items():
            self.add(number, record)

    def find(self, record: Record) -> int | None:
        same = self._by_identity.get(self._identity(record), {})
        return next((n for n, r in same.items() if r.is_same_experiment(record)), None)

    def add(self, number: int, record: Record) -> None:
        self._by_identity.setdefault(self._identity(record), {})[number] = record

    def forget(self, number: int) -> None:
        for same in self._by_identity.values():
            same.pop(number, None)

    @staticmethod
    def _identity(record: Record) -> tuple[Any, ...]:
        of_each = (record.config[key] for key in _OF_EACH)
        data = record.evaluate_on, record.partial_data, record.data
        return *of_each, *data


def _is_equal(one: Record, other: Record) -> bool:
    return (
        (one.config, one.about, one.result) == (other.config, other.about, other.result)
        and one.failure == other.failure
        and one.metrics.keys() == other.metrics.keys()
        and all(
            np.array_equal(column, other.metrics[name], equal_nan=True)
            for name, column in one.metrics.items()
        )
    )


def _write_learned(found: Mapping[int, Record], results: pathlib.Path) -> Iterator[str]:
    """Writes what the most complete run of KLN on each data set learned."""
    for record in most_complete(list(found.values())):
        path = results / "learned" / f"{record.config_name}.npz"
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
        _write_arrays(path, arrays)


def most_complete(found: Sequence[Record]) -> list[Record]:
    """Returns of each data set the run of KLN that its figures are drawn from."""
    chosen: dict[str, Record] = {}
    for record in sorted(found, key=lambda r: (r.partial_data, -r.epochs, r.seed)):
        if record.is_of(KLN) and record.learned_at:
            chosen.setdefault(record.config_name, record)
    return list(chosen.values())


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
            values = np.concatenate(
                [
                    metrics.get(column, np.full(length, np.nan))
                    for metrics, length in zip(of_runs.values(), lengths, strict=True)
                ]
            )
            is_whole = column in _WHOLE
            columns[column] = values.astype(np.int32) if is_whole else values
        _write_arrays(results / "metrics" / f"{name}.npz", columns)


def _write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    # Which writes the date of no day but 1980-01-01 into it.
    np.savez_compressed(content, allow_pickle=False, **arrays)
    if not path.exists() or path.read_bytes() != content.getvalue():
        whole_files.write_whole(path, content.getvalue())


def _write_rows(found: Mapping[int, Record], results: pathlib.Path) -> None:
    """Writes what runs share, then a line for each."""
    path = results / _SHARED
    shared: dict[str, dict[str, Any]] = {
        "configurations": {},
        "data": {},
        "versions": {},
    }
    if path.exists():
        shared = whole_files.read_json(path)
    methods = _methods(found)
    ordered = sorted(found.items(), key=lambda item: (_place(item[1]), item[0]))
    rows = [_row(number, one, shared, methods[number]) for number, one in ordered]
    whole_files.write_json(path, shared)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    whole_files.write_whole(results / _RUNS, "".join(lines).encode())


def _row(
    number: int,
    record: Record,
    shared: dict[str, dict[str, Any]],
    methods: Mapping[str, str],
) -> dict[str, Any]:
    """Returns the line of a run, and adds to what is shared."""
    config = {k: v for k, v in record.config.items() if k not in _OF_EACH}
    known = shared["configurations"]
    # Another version of this package may have other keys.
    name = next((n for n, c in known.items() if c.keys() == config.keys()), None)
    if name is None:
        name = str(len(known) + 1)
        known[name] = _defaults(config)
    row = {
        "id": number,
        **{key: record.config[key] for key in _OF_EACH},
        "full_epochs": record.full_epochs,
        "methods": methods,
        "configuration": name,
        "keys": {k: v for k, v in sorted(config.items()) if v != known[name][k]},
        "changed": record.changed,
        "data": _name_of(record.about, shared["data"], f"{record.config_name}-"),
    }
    if record.result is None:
        row["failure"] = record.failure
    else:
        versions = record.result.get("versions", {})
        row["versions"] = _name_of(versions, shared["versions"], "")
        row["result"] = {
            k: v for k, v in record.result.items() if k not in _OF_EACH_RESULT
        }
    return {**row, "came_from": record.came_from}


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of each key, where the package has the same keys today."""
    defaults = runs.as_json(importlib.import_module("configs.default").get_config())
    return {key: defaults.get(key, config[key]) for key in config}


def _name_of(content: Any, known: dict[str, Any], prefix: str) -> str:
    """Returns the name of what is shared, which is added if it is new."""
    for name, other in known.items():
        if name.startswith(prefix) and other == content:
            return name
    count = sum(name.startswith(prefix) for name in known)
    known[f"{prefix}{count + 1}"] = content
    return f"{prefix}{count + 1}"


def _methods(found: Mapping[int, Record]) -> dict[int, dict[str, str]]:
    """Returns the suites of each run, with the method that it is there."""
    methods: dict[int, dict[str, str]] = {number: {} for number in found}
    names = {record.config_name for record in found.values()}
    for suite_name, suite in SUITES.items():
        shown = {n for n in names if not suite.is_of_one_set or n in suite.datasets}
        for entry in suite.entries:
            for number, record in found.items():
                if record.config_name in shown and record.is_of(entry):
                    methods[number][suite_name] = entry.name
    return methods
