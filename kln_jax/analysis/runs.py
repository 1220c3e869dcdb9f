"""Makes the runs of a suite."""

from __future__ import annotations

import fnmatch
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from kln_jax.analysis.suites import Entry, Suite
from kln_jax.storage import whole_files
from kln_jax.training import experiment, variants
from kln_jax.training.configuration import Config
from kln_jax.training.interruption import Interruption
from kln_jax.training.loop import DivergenceError


def set_epochs(config: ConfigDict, epochs: int) -> None:
    """Sets the number of epochs, and milestones at the same parts of them."""
    config.lr_milestones = tuple(
        max(1, round(milestone * epochs / config.num_epochs))
        for milestone in config.lr_milestones
    )
    config.num_epochs = epochs


def as_json(config: ConfigDict) -> dict[str, Any]:
    """Returns the keys of a configuration as ``config.json`` has them."""
    content: dict[str, Any] = json.loads(config.to_json())
    return content


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
    wanted = selected([entry for entry in suite.entries if entry.variant], methods)
    planned = []  # All of it before the first run, which may take hours.
    for seed in range(seeds or suite.seeds):
        for name in config_names or suite.datasets:
            for entry in wanted:
                config = variants.named_config(name, entry.variant)
                method = _directory_of(entry, config)
                config.update(dict(entry.changes))
                config.update(seed=seed, split_seed=seed)
                config.data_dir = data_dir
                config.allow_partial_data |= allow_partial_data
                if epochs and epochs != config.num_epochs:
                    set_epochs(config, epochs)
                    method += f",epochs={epochs}"
                planned.append((config, out / name / method / str(seed)))
    for config, directory in planned:
        yield _make(config, directory, interruption, keep=config.seed == 0)


def selected(entries: Sequence[Entry], methods: Sequence[str]) -> list[Entry]:
    """Returns the entries of some names.

    Args:
      entries: Methods.
      methods: Names, or patterns such as ``"KLN*"``; all if there are none.

    Raises:
      ValueError: If a pattern has no method.
    """
    names = [entry.name for entry in entries]
    found = {pattern: fnmatch.filter(names, pattern) for pattern in methods or "*"}
    if unknown := sorted(pattern for pattern in found if not found[pattern]):
        raise ValueError(f"methods {unknown} must be among {names}.")
    wanted = set().union(*found.values())
    return [entry for entry in entries if entry.name in wanted]


def _directory_of(entry: Entry, config: ConfigDict) -> str:
    """Names a method by its variant, and by the keys in which it differs from that.

    A value of a sweep may be the default: then its run is that of the variant.
    """
    changes = (
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in entry.changes
        if config.get(key) != value
    )
    return ",".join([entry.variant, *changes])


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
            Config.from_mapping(config), directory, interruption=interruption
        )
    except DivergenceError as divergence:
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
