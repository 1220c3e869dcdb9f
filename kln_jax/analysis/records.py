"""What is known of runs that have ended, from working directories or packed."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kln_jax.analysis import runs
from kln_jax.analysis.suites import Entry
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.storage.whole_files import DamagedError
from kln_jax.training import diagnosis, variants
from kln_jax.training.configuration import Config

# Keys that do not make another experiment, or that a record says by itself.
_NOT_OF_EXPERIMENT = {
    *Config.keys_of("whereabouts"),
    *Config.keys_of("run"),
    "dataset",
    # Keys of earlier versions that said where and how often a run computed and saved.
    *("compilation_cache", "profile", "keep_last", "keep_best"),
}

# The least epochs of a run whose last ten are told.
_LATE = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """What is known of a run that is finished or diverged.

    Attributes:
      came_from: Its working directory, below that of all runs.
      config: Its whole configuration, as in JSON.
      changed: Keys in which it differed from its configuration file and variant when
        it was read.
      full_epochs: Epochs of that configuration file.
      about: What ``data.json`` says of its data.
      result: What ``result.json`` says; None if it diverged.
      failure: How it diverged; "" if it did not.
      metrics: Values after each epoch by name, each of shape ``(epochs,)``; NaN where
        an epoch has none.
      learned_at: What tells what it learned: a working directory with checkpoints, or
        a file of `kln_jax.analysis.learned`; None if nothing does.
    """

    came_from: str
    config: Mapping[str, Any]
    changed: tuple[str, ...]
    full_epochs: int
    about: Mapping[str, Any]
    result: Mapping[str, Any] | None
    failure: str
    metrics: Mapping[str, np.ndarray]
    learned_at: pathlib.Path | None = None

    @property
    def config_name(self) -> str:
        """Name of its configuration file, such as ``"svhn"``."""
        dataset = str(self.config["dataset"])
        return {"svhn_cropped": "svhn"}.get(dataset, dataset)

    @property
    def variant(self) -> str:
        """The variant of that."""
        return str(self.config["variant"])

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.config["seed"])

    @property
    def epochs(self) -> int:
        """Epochs it was to make."""
        return int(self.config["num_epochs"])

    @property
    def evaluate_on(self) -> str:
        """Which images the error is of: ``"test"`` or ``"validation"``."""
        return str(self.config["evaluate_on"])

    @property
    def partial_data(self) -> bool:
        """Whether its data set was a part of the real one."""
        if self.result is not None:
            return bool(self.result["partial_data"])
        # Earlier versions wrote that of a run that did not diverge alone.
        return bool(self.about.get("partial", False))

    @property
    def data(self) -> str:
        """Which data, where the name of the set does not say it; "" where it does."""
        # Earlier versions did not write it.
        if self.config_name == "own_images" and "version" in self.about:
            return f"images of {self.about['version']}"
        if self.partial_data and "num_train_images" in self.about:
            return f"{self.about['num_train_images']} images to train"
        return ""

    @property
    def error(self) -> float | None:
        """Error after the last epoch, in percent; None if it diverged."""
        if self.result is None:
            return None
        return float(self.result[f"{self.evaluate_on}_error_percent"])

    @property
    def errors(self) -> np.ndarray:
        """Errors after each epoch, in percent."""
        return self.metrics[f"{self.evaluate_on}_error_percent"]

    @property
    def late_error(self) -> float | None:
        """Median of the last ten errors; None of a run with fewer, or that diverged."""
        if self.result is None or len(self.errors) < _LATE:
            return None
        return float(np.median(self.errors[-_LATE:]))

    @property
    def has_collapsed(self) -> bool:
        """Whether its kernel no longer told images apart after the last epoch."""
        names = "kernel_same", "kernel_different"
        if self.config["objective"] != "cmmd" or not self.metrics.keys() >= {*names}:
            return False
        same, different = (float(self.metrics[name][-1]) for name in names)
        return diagnosis.kernel_has_collapsed(same, different)

    @property
    def epoch_seconds(self) -> float | None:
        """Median seconds of an epoch, without the first, which compiles."""
        times = np.diff(self.metrics.get("wall_seconds", np.empty(0)))
        return float(np.median(times)) if self.result and times.size else None

    @property
    def device(self) -> str:
        """What it ran on; "" if it diverged."""
        return str(self.result["device"]) if self.result else ""

    @property
    def experiment(self) -> dict[str, Any]:
        """The keys that make the experiment, but for what is asked of it by name."""
        return {k: v for k, v in self.config.items() if k not in _NOT_OF_EXPERIMENT}

    def is_of(self, entry: Entry) -> bool:
        """Says whether it is of a method, whatever the defaults have become since.

        Args:
          entry: The method, of the data set of the run.
        """
        named = dict(entry.changes)
        return (
            self.variant == entry.variant
            and named.keys() >= set(self.changed)
            and all(self.config.get(key) == named[key] for key in named)
        )

    def is_same_experiment(self, other: Record) -> bool:
        """Says whether keys that both have are alike; versions differ in their keys."""
        mine, others = self.experiment, other.experiment
        return all(mine[key] == others[key] for key in mine.keys() & others.keys())


def of_directory(directory: pathlib.Path, root: pathlib.Path) -> Record:
    """Reads a working directory.

    Args:
      directory: The working directory of a run that is finished or diverged.
      root: Where all runs lie.

    Raises:
      DamagedError: If the run is damaged, in one line.
    """
    try:
        return _of_directory(directory, root)
    except DamagedError:  # It names what of the run is.
        raise
    except KeyError as error:
        raise DamagedError(directory, f"it has no {error}") from error
    except ValueError as error:
        raise DamagedError(directory, error) from error


def _of_directory(directory: pathlib.Path, root: pathlib.Path) -> Record:
    config = whole_files.read_json(directory / "config.json")
    is_finished = (directory / "result.json").exists()
    record = Record(
        came_from=directory.relative_to(root).as_posix(),
        config=config,
        changed=(),
        full_epochs=0,
        about=whole_files.read_json(directory / "data.json"),
        result=whole_files.read_json(directory / "result.json")
        if is_finished
        else None,
        failure="" if is_finished else runs.read_failure(directory / "diverged.json"),
        metrics=_columns(epoch_metrics.read_metrics(directory)),
        learned_at=directory if (directory / "checkpoints").exists() else None,
    )
    if is_finished and not record.metrics:
        raise DamagedError(directory, "it has no metrics.jsonl")
    base = variants.named_config(record.config_name, record.variant)
    full_epochs = base.num_epochs
    runs.set_epochs(base, record.epochs)
    unchanged = runs.as_json(base)
    changed = [
        key
        for key, value in record.experiment.items()
        # A key that one of them lacks is one of another version.
        if key in unchanged and value != unchanged[key]
    ]
    record = dataclasses.replace(
        record, changed=tuple(sorted(changed)), full_epochs=full_epochs
    )
    if is_finished:  # What a report needs is there.
        _ = record.error, record.errors, record.partial_data, record.device
    return record


def _columns(lines: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    names = sorted({name for line in lines for name in line})
    return {
        name: np.array([line.get(name, np.nan) for line in lines], float)
        for name in names
    }


def in_directories(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the working directories below a place that are finished or diverged."""
    names = ("result.json", "diverged.json")
    yield from sorted({path.parent for name in names for path in root.rglob(name)})


def comparable(records: Iterable[Record]) -> list[list[Record]]:
    """Groups runs of as many epochs on the same data, the fullest ones first.

    Args:
      records: Runs on a data set, of any method.
    """
    found = itertools.groupby(sorted(records, key=_length_and_data), _length_and_data)
    return [list(group) for _, group in found]


def alike(records: Iterable[Record]) -> list[list[Record]]:
    """Groups runs of a method whose numbers may be averaged, the fullest ones first.

    Args:
      records: Runs of a method on a data set, of any seed and length.

    Returns:
      Groups of runs of as many epochs on the same data, with the same keys.
    """
    groups: list[list[Record]] = []
    for found in comparable(records):
        of_length: list[list[Record]] = []
        for record in found:
            fitting = (g for g in of_length if g[0].is_same_experiment(record))
            group = next(fitting, None)
            if group is None:
                of_length.append([record])
            else:
                group.append(record)
        groups += of_length
    return groups


def _length_and_data(record: Record) -> tuple[bool, bool, int, str]:
    is_on_test = record.evaluate_on == "test"
    return not is_on_test, record.partial_data, -record.epochs, record.data


def distinctions(
    group: Sequence[Record], groups: Sequence[Sequence[Record]]
) -> list[str]:
    """Says in which keys runs differ from others of their method, length and data.

    Args:
      group: Some runs that are alike.
      groups: All groups of their method.
    """
    mine = group[0].experiment
    others = [
        other[0].experiment
        for other in groups
        if _length_and_data(other[0]) == _length_and_data(group[0])
    ]
    return [
        f"{key}={value}"
        for key, value in sorted(mine.items())
        if any(other.get(key, value) != value for other in others)
    ]


def matching(records: Iterable[Record], config_name: str, entry: Entry) -> list[Record]:
    """Returns the runs of a method on a data set, of any seed and length."""
    return [r for r in records if r.config_name == config_name and r.is_of(entry)]
