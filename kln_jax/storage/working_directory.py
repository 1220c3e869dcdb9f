"""What lies in the working directory of a run, and whether a run may use it."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from kln_jax import datasets
from kln_jax.networks import models
from kln_jax.storage import whole_files
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import configuration, parallel, steps
from kln_jax.training.steps import TrainState

# Keys that say where a run computes, not what: a run may go on with others.
WHEREABOUTS = (
    "data_dir",
    "platform",
    "compilation_cache",
    "profile",
    "checkpoint_every",
    "checkpoint_every_steps",
    "keep_last",
    "keep_best",
)
# Keys of what happens at a step that is not healthy: a run may go on with others, and
# one that diverged can in no other way.
_AT_UNHEALTHY_STEPS = ("on_nonfinite", "max_skipped_steps", "divergence_bound")
# Keys that reading a run needs beside those at which `validate` looks.
_READ = (
    *("dataset", "data_dir", "allow_partial_data", "validation_fraction"),
    *("evaluate_on", "use_extra", "image_size", "test_fraction", "normalise", "flip"),
    *("network", "normalise_z", "platform", "compilation_cache", "variant"),
)


def fresh(config: ConfigDict) -> pathlib.Path:
    """Returns a new directory's name, with data set, variant and time in it.

    Args:
      config: The configuration of the run.
    """
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    name = f"{config.dataset}-{config.variant}-{now}"
    candidates = [name, *(f"{name}-{i}" for i in range(2, 100))]
    paths = (pathlib.Path("runs") / candidate for candidate in candidates)
    return next(path for path in paths if not path.exists())


def check_place(place: pathlib.Path, config: ConfigDict) -> None:
    """Refuses to mix a run with the directories of several seeds in one place.

    Args:
      place: The working directory of the command.
      config: Its configuration.

    Raises:
      ValueError: If several seeds find a run or a file there, or one finds several.
    """
    is_run = (place / "config.json").exists()
    if config.num_seeds == 1:
        if not is_run and (seeds := _seeds(place)):
            raise ValueError(
                f"--workdir={place} {_holds(place, seeds)} Choose another, or that one."
            )
    elif is_run or (place.exists() and not place.is_dir()):
        raise ValueError(
            f"--workdir={place} is a {'run' if place.is_dir() else 'file'}, but "
            f"num_seeds={config.num_seeds} makes a directory for each seed in it. "
            "Choose another."
        )


def _seeds(place: pathlib.Path) -> list[str]:
    """Returns the names of directories that ``num_seeds`` made there."""
    found = (path.parent.name for path in place.glob("*/config.json"))
    return sorted((name for name in found if name.isdecimal()), key=int)


def _holds(place: pathlib.Path, seeds: list[str]) -> str:
    return (
        f"holds the runs of several seeds ({', '.join(seeds)}); that of one is "
        f"{place / seeds[0]}."
    )


def check(directory: pathlib.Path, config: ConfigDict) -> None:
    """Refuses a working directory that is none, or of another configuration.

    Args:
      directory: The working directory, which need not be there.
      config: The configuration of the run.

    Raises:
      ValueError: If it is a file, or holds another run or a damaged one.
    """
    path = directory / "config.json"
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--workdir={directory} is a file. Choose a directory.")
    if not path.exists():
        if (directory / "result.json").exists() or (directory / "checkpoints").exists():
            raise ValueError(
                f"{directory} holds a run without config.json, which says what it is. "
                "Choose another --workdir."
            )
        return
    skipped = {*WHEREABOUTS, *_AT_UNHEALTHY_STEPS}
    if config.allow_partial_data:  # What it allows, it need not find.
        skipped.add("allow_partial_data")
    earlier, present = (
        {name: value for name, value in values.items() if name not in skipped}
        for values in (whole_files.read_json(path), json.loads(config.to_json()))
    )
    if different := whole_files.differences(earlier, present):
        raise ValueError(
            f"{directory} holds a run of another configuration: {different}. Choose "
            "another --workdir, or the same values."
        )


def reads_elsewhere(directory: pathlib.Path, config: ConfigDict) -> bool:
    """Says whether a run had its data from another place than it is to have now.

    Args:
      directory: Its working directory, which need not be there.
      config: Its configuration now.
    """
    path = directory / "config.json"
    return (
        path.exists() and whole_files.read_json(path).get("data_dir") != config.data_dir
    )


def check_data(directory: pathlib.Path, data: datasets.Dataset) -> None:
    """Refuses to go on with a run on data other than it began with.

    Args:
      directory: The working directory, which need not be there.
      data: The data set of the run.

    Raises:
      ValueError: If its data were others.
    """
    path = directory / "data.json"
    if not path.exists():
        return
    earlier, present = whole_files.read_json(path), _about(data)
    # Earlier versions of kln_jax wrote less of it, and later ones may write more.
    known = earlier.keys() & present.keys()
    earlier, present = ({k: values[k] for k in known} for values in (earlier, present))
    if different := whole_files.differences(earlier, present):
        raise ValueError(
            f"{directory} holds a run on other data: {different}. Choose another "
            "--workdir, or put the same data back."
        )


def check_everywhere(data: datasets.Dataset) -> None:
    """Refuses data that are not the same in all processes.

    Args:
      data: The data set that this process has read.

    Raises:
      ValueError: If some process, not only this one, has read another.
    """
    checksum = zlib.crc32(json.dumps(_about(data)).encode()) >> 1  # Of 31 bits.
    (read,) = parallel.gather([checksum]).T
    if (read != read[0]).any():
        others = np.flatnonzero(read != read[0]).tolist()
        raise ValueError(
            f"Processes {others} read other data than process 0. Give all the same "
            "data_dir, with the same files."
        )


def _about(data: datasets.Dataset) -> dict[str, Any]:
    """Returns what ``data.json`` says of a data set."""
    return dict(
        class_names=list(data.class_names),
        image_shape=list(data.train_images.shape[1:]),
        version=data.version,
        partial=data.partial,
        num_train_images=len(data.train_images),
        num_eval_images=len(data.eval_images),
    )


def prepare(
    directory: pathlib.Path,
    config: ConfigDict,
    data: datasets.Dataset,
    labelled: np.ndarray,
) -> None:
    """Makes a working directory, with all that is known before training.

    Args:
      directory: The working directory.
      config: The configuration of the run.
      data: Its data set.
      labelled: Rows of the labelled images.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole_files.write_json(directory / "config.json", json.loads(config.to_json()))
    whole_files.write_json(directory / "data.json", _about(data))
    _store_rows(directory / "labelled.npy", labelled)


@contextlib.contextmanager
def held(directory: pathlib.Path) -> Iterator[None]:
    """Keeps a working directory from other processes, where the file system can.

    Args:
      directory: The working directory, prepared.

    Raises:
      ValueError: If another process holds it.
    """
    # Of its files the one that is written once. A process that ends holds none.
    with (directory / "labelled.npy").open("r+b") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process trains in {directory}. Wait for its end, or choose "
                "another --workdir."
            ) from None
        except (ImportError, OSError):
            pass  # Neither Windows nor every file system has such locks.
        yield


def read_config(directory: pathlib.Path) -> ConfigDict:
    """Reads the configuration of a run.

    Args:
      directory: Its working directory.

    Returns:
      The configuration, checked.

    Raises:
      ValueError: If there is none, or it is not one of this version.
    """
    if not (directory / "config.json").exists():
        seeds = _seeds(directory)
        raise ValueError(
            f"{directory} {_holds(directory, seeds)}"
            if seeds
            else f"{directory} holds no run: config.json is missing."
        )
    config = ConfigDict(whole_files.read_json(directory / "config.json"))
    missing = next((key for key in _READ if key not in config), None)
    try:
        configuration.validate(config)
    except (AttributeError, KeyError) as error:
        # More than the name: ml_collections says which key it resembles.
        missing, *_ = re.findall(r"\w+", str(error))
    if missing:
        raise ValueError(
            f"config.json of {directory} was written by another version of kln_jax: it "
            f"has no {missing}."
        )
    return config


def restore(
    directory: pathlib.Path,
    config: ConfigDict,
    model: models.KLN,
    image_shape: tuple[int, int, int],
    *,
    best: bool,
) -> TrainState:
    """Reads the state of a run, of NumPy arrays.

    Args:
      directory: Its working directory.
      config: Its configuration.
      model: Its network.
      image_shape: Height, width and channels of its images.
      best: Whether to take the one with the smallest validation error.

    Raises:
      ValueError: If there is no such checkpoint, or it is of another layout.
      CheckpointError: If the checkpoints are damaged.
    """
    channels = image_shape[-1]
    like = jax.eval_shape(
        lambda key: steps.init_state(
            model,
            # How long an epoch is changes nothing of the layout.
            configuration.optimizer(config, steps_per_epoch=1),
            key,
            mean=np.zeros(channels),
            std=np.ones(channels),
            image_shape=image_shape,
        ),
        jax.random.key(config.seed),
    )
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(like, best=best)
    if restored is None:
        raise ValueError(f"{directory} holds no checkpoint.")
    return restored.state


def labelled_rows(
    directory: pathlib.Path | None, config: ConfigDict, labels: np.ndarray
) -> np.ndarray:
    """Returns the rows of the labelled images: those of an earlier start, if any.

    Args:
      directory: The working directory; None if there is none.
      config: The configuration of the run.
      labels: Class numbers of the training images, shape ``(n,)``.

    Raises:
      ValueError: If the stored rows do not fit.
    """
    count = config.num_labels or len(labels)
    path = directory / "labelled.npy" if directory else None
    if path and path.exists():
        return _stored_rows(path, count, len(labels))
    if not config.num_labels:
        return np.arange(count, dtype=np.int32)
    return datasets.labelled_split(labels, count, seed=config.split_seed)


def _stored_rows(path: pathlib.Path, count: int, size: int) -> np.ndarray:
    """Reads rows of labelled images and checks them against the data."""
    fix = "Remove the file to draw them anew, or choose another --workdir."
    try:
        with path.open("rb") as file:
            rows = np.lib.format.read_array(file, allow_pickle=False)
    # What a damaged file raises depends on its damage.
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}). {fix}") from error
    if rows.dtype.kind not in "iu" or rows.shape != (count,):
        raise ValueError(
            f"{path} must hold {count} integers, the rows of the labelled images, not "
            f"{rows.dtype} of shape {rows.shape}. {fix}"
        )
    if rows.min() < 0 or rows.max() >= size or len(np.unique(rows)) < count:
        raise ValueError(
            f"{path} must hold {count} different rows of 0..{size - 1}, those of the "
            f"training images, but has {len(np.unique(rows))} from {rows.min()} to "
            f"{rows.max()}. {fix}"
        )
    return rows.astype(np.int32)


def _store_rows(path: pathlib.Path, rows: np.ndarray) -> None:
    """Writes the rows of the labelled images once, whole or not at all."""
    if path.exists():
        return
    content = io.BytesIO()
    np.save(content, rows)
    whole_files.write_whole(path, content.getvalue())
