"""Experiments: trained, resumed and evaluated as a configuration says."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import pathlib
import platform
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kln_jax import datasets
from kln_jax.storage import whole_files, working_directory
from kln_jax.training import (
    fixed_embeddings,
    parallel,
    steps,
)
from kln_jax.training.compiled import compile_functions
from kln_jax.training.configuration import Config
from kln_jax.training.interruption import Interruption
from kln_jax.training.loop import NOTHING_NEW, DivergenceError, Ended, TrainingLoop
from kln_jax.training.steps import TrainState

logger = logging.getLogger("kln_jax")


@parallel.lost_processes_said()
def train_and_evaluate(
    config: Config,
    workdir: str | pathlib.Path | None = None,
    *,
    interruption: Interruption | None = None,
) -> dict[str, Any]:
    """Trains and evaluates as a configuration says, or resumes the run.

    The working directory gets ``config.json``, ``data.json`` (names of the classes,
    shape and number of the images), ``labelled.npy`` (rows of the labelled images),
    ``metrics.jsonl`` (a line an epoch), ``tensorboard/``, ``checkpoints/`` and, at the
    end, ``result.json``. Of several processes only the first reads and writes it.

    Args:
      config: The configuration.
      workdir: Working directory; None makes a fresh one below ``runs/``.
      interruption: Signals to listen to; none by default.

    Returns:
      The content of ``result.json``. Of several processes the first returns it, and
      the others an empty dictionary.

    Raises:
      ValueError: If the configuration, the data, the device or the working directory
        will not do, or another process trains there.
      DivergenceError: If training diverges; the last healthy state is saved.
      CheckpointError: If no checkpoint can be written, or none of those read.
      Interrupted: If a signal came; the state is saved.
      LostProcessError: If another process is gone.
    """
    parallel.choose_platform(config.platform)
    parallel.check_batch_size(config.batch_size)
    logger.info(parallel.describe())
    interruption = interruption or Interruption()
    with contextlib.ExitStack() as stack:
        directory = None
        if parallel.is_main():
            directory = (
                pathlib.Path(workdir).expanduser()
                if workdir
                else working_directory.fresh(f"{config.dataset}-{config.variant}")
            )
            # Before anything in it is read, so that what is checked stays so.
            stack.enter_context(working_directory.held(directory))
            logger.info("working directory: %s", directory)
        with interruption.may_leave(lambda: NOTHING_NEW):
            result, is_finished, moved = None, False, False
            if directory:
                _check_directory(directory, config)
                is_finished = (directory / "result.json").exists()
                moved = working_directory.reads_elsewhere(directory, config.data_dir)
                result = _read_result(directory) if is_finished else None
            is_finished, moved = map(
                bool, parallel.from_main(np.asarray([is_finished, moved]))
            )
            if is_finished and not moved:  # The data may no longer be there.
                return result or {}
            data = load_data(config)
            _check_everywhere(data)
            if directory:
                working_directory.check_data(directory, about(data))
            if is_finished:
                return result or {}
            labelled = parallel.from_main(_labelled_rows(directory, config, data))
            compiled = compile_functions(config, data)
        if directory:
            working_directory.prepare(
                directory, config.to_dict(), about(data), labelled
            )
        try:
            embedding = _fit_embedding(config, data, labelled, directory, interruption)
            loop = TrainingLoop(
                config, compiled, data, labelled, interruption, embedding
            )
            ended = loop.run(directory, show=parallel.is_main())
        except DivergenceError as error:
            if directory:
                working_directory.write_failure(directory, str(error))
            raise
        if directory is None:
            return {}
        result = _result(config, data, ended)
        working_directory.write_result(directory, result)
        return result


def train_in_memory(
    config: Config,
    data: datasets.Dataset,
    labelled: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    show: bool = False,
) -> TrainState:
    """Trains on a data set that is at hand, and writes nothing.

    Args:
      config: The configuration; keys that say how data are loaded are not read.
      data: The data set.
      labelled: Rows of its labelled images.
      weights: How often these are in batches s, in proportion, shape ``(L,)``; None
        for all as often.
      show: Whether to show the progress, on a bar or in the log.

    Returns:
      The trained state.

    Raises:
      ValueError: If the configuration or the data will not do.
      DivergenceError: If training diverges.
    """
    parallel.choose_platform("")
    parallel.check_batch_size(config.batch_size)
    compiled, interruption = compile_functions(config, data), Interruption()
    embedding = _fit_embedding(config, data, labelled, None, interruption)
    loop = TrainingLoop(
        config, compiled, data, labelled, interruption, embedding, weights
    )
    return loop.run(None, show=show).state


def load_data(config: Config) -> datasets.Dataset:
    """Loads the data set of a configuration, and logs what it is.

    Args:
      config: The configuration.

    Raises:
      DatasetError: If it is not there, or is not what the configuration says.
    """
    with parallel.main_first():  # It prepares and caches what the others read.
        data = datasets.load(
            config.dataset,
            data_dir=config.data_dir or None,
            evaluate_on=config.evaluate_on,
            validation_fraction=config.validation_fraction,
            test_fraction=config.test_fraction,
            use_extra=config.use_extra,
            allow_partial_data=config.allow_partial_data,
            image_size=config.image_size,
        )
    for line in data.summary():
        logger.info(line)
    if data.partial:
        logger.warning("Only a part of %s is here; the result says so.", config.dataset)
    return data


def about(data: datasets.Dataset) -> dict[str, Any]:
    """Returns what ``data.json`` says of a data set."""
    return dict(
        class_names=list(data.class_names),
        image_shape=list(data.train_images.shape[1:]),
        version=data.version,
        partial=data.partial,
        num_train_images=len(data.train_images),
        num_eval_images=len(data.eval_images),
    )


def summary(result: Mapping[str, Any]) -> str:
    """Says in one line how a run ended.

    Args:
      result: From `train_and_evaluate`.

    Examples:
      >>> result = dict(test_error_percent=25.0, num_test_images=8, epochs=2)
      >>> summary(result | {"wall_seconds": 3.2})
      'Test error 25.00 % (2 of 8 images) after 2 epochs, 3 s.'
    """
    part = "test" if "test_error_percent" in result else "validation"
    count, error = result[f"num_{part}_images"], result[f"{part}_error_percent"]
    return (
        f"{part.capitalize()} error {error:.2f} % ({round(error * count / 100)} of "
        f"{count} images) after {result['epochs']} epochs, "
        f"{result['wall_seconds']:.0f} s."
    )


def _check_directory(directory: pathlib.Path, config: Config) -> None:
    may_differ = set(Config.keys_of("whereabouts"))
    if config.allow_partial_data:  # What it allows, it need not find.
        may_differ.add("allow_partial_data")
    working_directory.check_config(directory, config.to_dict(), may_differ=may_differ)


def _check_everywhere(data: datasets.Dataset) -> None:
    """Refuses data that are not the same in all processes."""
    checksum = zlib.crc32(json.dumps(about(data)).encode()) >> 1  # Of 31 bits.
    (read,) = parallel.gather([checksum]).T
    if (read != read[0]).any():
        others = np.flatnonzero(read != read[0]).tolist()
        raise ValueError(
            f"Processes {others} read other data than process 0. Give all the same "
            "data_dir, with the same files."
        )
    # Hashing 600,000 images of 32x32x3 takes some 7 s: little beside their epochs.
    shared = datasets.shared_images(data.train_images, data.eval_images)
    if shared:
        logger.warning(
            "%d of %d %s images are, pixel for pixel, also among the training images.",
            shared,
            len(data.eval_images),
            data.evaluate_on,
        )


def _labelled_rows(
    directory: pathlib.Path | None, config: Config, data: datasets.Dataset
) -> np.ndarray:
    """Returns the rows of the labelled images: those of an earlier start, if any."""
    labels = data.train_labels
    count = config.num_labels or len(labels)
    if directory:
        stored = working_directory.stored_rows(directory, count, len(labels))
        if stored is not None:
            return stored
    if not config.num_labels:
        return np.arange(count, dtype=np.int32)
    return datasets.labelled_split(
        labels, count, seed=config.split_seed, class_names=data.class_names
    )


def _fit_embedding(
    config: Config,
    data: datasets.Dataset,
    labelled: np.ndarray,
    directory: pathlib.Path | None,
    interruption: Interruption,
) -> Any:
    """Returns the arrays of the embedding that the kernel acts on, () for none.

    An autoencoder is trained first: on all images, as the configuration trains.
    """
    if config.kernel_on == "pca":
        with interruption.may_leave(lambda: NOTHING_NEW):
            fitted = fixed_embeddings.principal_components(
                data.train_images, config.latent_dim
            )
        # Signs of eigenvectors may be others on another machine.
        return parallel.from_main(fitted)
    if config.kernel_on != "autoencoder":
        return ()
    logger.info("training the autoencoder on which the kernel acts")
    alone = config.replace(objective="reconstruction", kernel_on="z")
    compiled = compile_functions(alone, data)
    loop = TrainingLoop(alone, compiled, data, labelled, interruption)
    own = directory / "autoencoder" if directory else None
    try:
        state = loop.run(own, show=parallel.is_main()).state
    except DivergenceError as error:
        raise DivergenceError(f"of the autoencoder, {error}") from error
    return steps.without_optimizer(state)


def _read_result(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "result.json"
    result = whole_files.read_json(path)
    try:
        logger.info("this run is finished; nothing is left to do. %s", summary(result))
    except KeyError as error:
        raise whole_files.DamagedError(path, f"it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise whole_files.DamagedError(path, str(error)) from error
    return result


def _result(config: Config, data: datasets.Dataset, ended: Ended) -> dict[str, Any]:
    part = config.evaluate_on
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        f"{part}_error_percent": ended.scalars[f"{part}_error_percent"],
        f"num_{part}_images": len(data.eval_labels),
        "epochs": config.num_epochs,
        "steps": int(ended.state.step),
        "wall_seconds": ended.scalars["wall_seconds"],
        "seed": config.seed,
        "dataset": config.dataset,
        "variant": config.variant,
        "partial_data": data.partial,
        "versions": {"python": platform.python_version(), **versions},
        "device": parallel.describe_devices(),
    }
