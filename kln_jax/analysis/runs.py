"""Makes the runs of a suite, and reads what runs there are."""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import json
import pathlib
import pkgutil
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from kln_jax.analysis.suites import Entry, Suite
from kln_jax.storage import epoch_metrics, whole_files, working_directory
from kln_jax.training import experiment
from kln_jax.training.interruption import Interruption

# Keys that do not make another experiment, or that a record says by itself.
_NOT_OF_EXPERIMENT = {
    *working_directory.WHEREABOUTS,
    "seed",
    "split_seed",
    "num_epochs",
    "evaluate_on",
    "allow_partial_data",
    "variant",
}

# The least epochs of a run whose last ten are told.
_LATE = 10


class Record(NamedTuple):
    """What is known of a run.

    Attributes:
      directory: Its working directory.
      config_name: Name of its configuration, such as ``"svhn"``.
      variant: Its variant.
      changes: Keys in which it differs from that, with their values.
      seed: Its seed.
      epochs: Epochs it was to make.
      all_epochs: Epochs of the configuration.
      partial_data: Whether its data set was a part of the real one.
      data: Which data, where the name does not say it: "" or in words.
      evaluate_on: Which images the error is of: ``"test"`` or ``"validation"``.
      error: Error after the last epoch, in percent; None if it diverged.
      late_error: Median of the errors after the last ten epochs; None of a run that
        has fewer.
      epoch_seconds: Median seconds of an epoch, without the first, which compiles;
        None of several seeds at once.
      device: What it ran on; "" if it diverged.
    """

    directory: pathlib.Path
    config_name: str
    variant: str
    changes: tuple[tuple[str, Any], ...]
    seed: int
    epochs: int
    all_epochs: int
    partial_data: bool
    data: str
    evaluate_on: str
    error: float | None
    late_error: float | None
    epoch_seconds: float | None
    device: str


def configuration(name: str, variant: str) -> ConfigDict:
    """Returns a configuration of ``configs/``.

    Args:
      name: Its file, without ``.py``.
      variant: Its variant.

    Raises:
      ValueError: If there is none.
    """
    try:
        folder = importlib.import_module("configs").__path__
    except ModuleNotFoundError:
        folder = []
    # The default has every key, but is of no data set.
    names = sorted({found.name for found in pkgutil.iter_modules(folder)} - {"default"})
    if name not in names:
        raise ValueError(
            f"{name!r} must be one of the configurations in configs/ here, {names}. "
            "Start from the root of a checkout of kln_jax."
        )
    module = importlib.import_module(f"configs.{name}")
    config: ConfigDict = module.get_config(variant)
    return config


def make(
    suite: Suite,
    out: pathlib.Path,
    *,
    data_dir: str = "",
    config_names: Sequence[str] = (),
    methods: Sequence[str] = (),
    seeds: int | None = None,
    epochs: int | None = None,
    allow_partial_data: bool = False,
    interruption: Interruption | None = None,
) -> Iterator[str]:
    """Makes the runs of a suite that are not finished, one after the other.

    Each has its own directory, ``OUT/CONFIG/METHOD/SEED``, where METHOD names the
    epochs if they are not all; suites share runs. A run that was interrupted goes on;
    one that diverged is not tried again. Checkpoints are kept of the first seed only,
    for the figures.

    Args:
      suite: The suite.
      out: Where the runs lie.
      data_dir: Where prepared data sets lie.
      config_names: Configurations instead of the suite's.
      methods: Names of the methods, or patterns such as ``"KLN*"``, if not all.
      seeds: Number of seeds instead of the suite's.
      epochs: Epochs, if not all; milestones move in proportion.
      allow_partial_data: Whether data sets may be of other than the known sizes.
      interruption: Signals to listen to.

    Yields:
      A line for each run, as it ends.

    Raises:
      ValueError: If there is no such method, configuration or data set.
    """
    wanted = [entry for entry in suite.entries if entry.variant]
    names = [entry.name for entry in wanted]
    found = {pattern: fnmatch.filter(names, pattern) for pattern in methods or "*"}
    if unknown := sorted(pattern for pattern in found if not found[pattern]):
        raise ValueError(f"methods {unknown} must be among {names}.")
    wanted = [entry for entry in wanted if entry.name in set().union(*found.values())]
    planned = []  # All of it before the first run, which may take hours.
    for seed in range(seeds or suite.seeds):
        for name in config_names or suite.datasets:
            for entry in wanted:
                config = configuration(name, entry.variant)
                method = _slug(entry, config)
                config.update(dict(entry.changes))
                config.update(seed=seed, split_seed=seed, keep_last=1)
                config.data_dir = data_dir
                config.allow_partial_data |= allow_partial_data
                if epochs and epochs != config.num_epochs:
                    set_epochs(config, epochs)
                    method += f",epochs={epochs}"
                planned.append((config, out / name / method / str(seed)))
    for config, directory in planned:
        yield _make(config, directory, interruption, keep=config.seed == 0)


def set_epochs(config: ConfigDict, epochs: int) -> None:
    """Sets the number of epochs, and milestones at the same parts of them."""
    config.lr_milestones = tuple(
        max(1, round(milestone * epochs / config.num_epochs))
        for milestone in config.lr_milestones
    )
    config.num_epochs = epochs


def _make(
    config: ConfigDict,
    directory: pathlib.Path,
    interruption: Interruption | None,
    *,
    keep: bool,
) -> str:
    failure = directory / "diverged.json"
    if failure.exists():
        return f"{directory}: diverged, {read_failure(failure)}"
    try:
        result = experiment.train_and_evaluate(
            config, str(directory), interruption=interruption
        )
    except experiment.DivergenceError as divergence:
        return f"{directory}: diverged, {divergence}"
    if not keep:
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        shutil.rmtree(directory / "autoencoder", ignore_errors=True)
    error = result[f"{config.evaluate_on}_error_percent"]
    return f"{directory}: {config.evaluate_on} error {error:.2f} %"


def read_failure(path: pathlib.Path) -> str:
    """Reads how a run diverged.

    Raises:
      whole_files.DamagedError: If the file is damaged.
    """
    try:
        return str(json.loads(path.read_text()))
    except ValueError as error:
        raise whole_files.DamagedError(path, error) from error


def _changes(entry: Entry, config: ConfigDict) -> list[tuple[str, Any]]:
    """Returns in what a method differs from the configuration of its variant.

    A value of a sweep may be the default: then its run is that of the variant.
    """
    return [(key, value) for key, value in entry.changes if config.get(key) != value]


def _slug(entry: Entry, config: ConfigDict) -> str:
    changes = (
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in _changes(entry, config)
    )
    return ",".join([entry.variant, *changes])


def read(out: pathlib.Path) -> list[Record]:
    """Reads all runs below a directory that are finished or diverged.

    Raises:
      ValueError: If there is none, or one is damaged.
    """
    ended = {
        path.parent
        for name in ("result.json", "diverged.json")
        for path in out.rglob(name)
    }
    records = []
    for directory in sorted(ended):
        try:
            records.append(_record(directory))
        except whole_files.DamagedError:  # It names what of the run is.
            raise
        except KeyError as error:
            raise whole_files.DamagedError(directory, f"it has no {error}") from error
        except ValueError as error:
            raise whole_files.DamagedError(directory, error) from error
    if not records:
        raise ValueError(f"{out} holds no run that is finished.")
    return records


def _record(directory: pathlib.Path) -> Record:
    config = whole_files.read_json(directory / "config.json")
    about = whole_files.read_json(directory / "data.json")
    name = _config_name(config["dataset"])
    base = configuration(name, config["variant"])
    all_epochs = base.num_epochs
    set_epochs(base, config["num_epochs"])
    unchanged = json.loads(base.to_json())
    changes = {
        key: value
        for key, value in config.items()
        if key not in _NOT_OF_EXPERIMENT and value != unchanged.get(key)
    }
    lines = epoch_metrics.read_metrics(directory)
    # Earlier versions wrote that of a run that did not diverge alone.
    partial = about.get("partial", False)
    measured: dict[str, Any] = dict(
        error=None, late_error=None, epoch_seconds=None, device=""
    )
    if (directory / "result.json").exists():  # It did not diverge.
        result = whole_files.read_json(directory / "result.json")
        error = f"{config['evaluate_on']}_error_percent"
        errors = [line[error] for line in lines]
        if not errors:
            raise whole_files.DamagedError(directory, "it has no metrics.jsonl")
        partial = result["partial_data"]
        # The times of several seeds at once are of all of them.
        is_alone = result.get("seeds_at_once", 1) == 1
        measured = dict(
            error=result[error],
            late_error=(
                float(np.median(errors[-_LATE:])) if len(errors) >= _LATE else None
            ),
            epoch_seconds=_epoch_seconds(lines) if is_alone else None,
            device=result["device"],
        )
    return Record(
        directory=directory,
        config_name=name,
        variant=config["variant"],
        changes=tuple(sorted(changes.items())),
        seed=config["seed"],
        epochs=config["num_epochs"],
        all_epochs=all_epochs,
        partial_data=partial,
        data=_which_data(name, about, partial=partial),
        evaluate_on=config["evaluate_on"],
        **measured,
    )


def _which_data(name: str, about: Mapping[str, Any], *, partial: bool) -> str:
    """Says which data those of a run are, where the data set's name does not."""
    # Earlier versions did not write it.
    if name == "own_images" and "version" in about:
        return f"images of {about['version']}"
    if partial and "num_train_images" in about:
        return f"{about['num_train_images']} images to train"
    return ""


def _config_name(dataset: str) -> str:
    return {"svhn_cropped": "svhn"}.get(dataset, dataset)


def _epoch_seconds(lines: Sequence[dict[str, Any]]) -> float | None:
    times = np.diff([line["wall_seconds"] for line in lines])
    return float(np.median(times)) if times.size else None


def alike(records: Iterable[Record]) -> list[list[Record]]:
    """Groups runs of a method whose numbers may be averaged, the fullest ones first.

    Args:
      records: Runs of a method on a data set, of any seed and length.

    Returns:
      Groups of runs of as many epochs on the same data.
    """

    def key(record: Record) -> tuple[Any, ...]:
        on_test = record.evaluate_on == "test"
        return not on_test, record.partial_data, -record.epochs, record.data

    found = itertools.groupby(sorted(records, key=key), key)
    return [list(group) for _, group in found]


def matching(records: Iterable[Record], config_name: str, entry: Entry) -> list[Record]:
    """Returns the runs of a method on a data set, of any seed and length."""
    of_variant = [
        record
        for record in records
        if (record.config_name, record.variant) == (config_name, entry.variant)
    ]
    if not of_variant:  # The configuration need not have the variant.
        return []
    config = configuration(config_name, entry.variant)
    changes = tuple(sorted(_changes(entry, config)))
    return [record for record in of_variant if record.changes == changes]
