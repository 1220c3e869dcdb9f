"""Runs: trained from a configuration, and read back."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from kln_jax import datasets
from kln_jax.networks import models
from kln_jax.storage import epoch_metrics, whole_files, working_directory
from kln_jax.training import configuration, fixed_embeddings, parallel, steps
from kln_jax.training.compiled import make_model, make_program
from kln_jax.training.interruption import Interruption
from kln_jax.training.loop import NOTHING_NEW, Ended, Training
from kln_jax.training.steps import TrainState

logger = logging.getLogger("kln_jax")


class DivergenceError(RuntimeError):
    """A loss, gradient or parameter is not finite or too large; the message says it."""


class Run(NamedTuple):
    """A run read back from its working directory.

    Attributes:
      config: Its configuration.
      data: Its data set.
      labelled: Rows of the labelled images.
      model: Its network.
      state: Its newest state, or its best.
    """

    config: ConfigDict
    data: datasets.Dataset
    labelled: np.ndarray
    model: models.KLN
    state: TrainState


@parallel.lost_processes_said()
def train_and_evaluate(
    config: ConfigDict,
    workdir: str | None = None,
    *,
    interruption: Interruption | None = None,
) -> dict[str, Any]:
    """Trains and evaluates as a configuration says, or goes on with it.

    The working directory gets ``config.json``, ``data.json`` (names of the classes,
    shape and number of the images), ``labelled.npy`` (rows of the labelled images),
    ``metrics.jsonl`` (a line an epoch), ``tensorboard/``, ``checkpoints/`` and, at the
    end, ``result.json``. Of several processes only the first reads and writes it.
    With ``num_seeds`` above 1 it gets such a directory for each seed instead, named
    by it. Its end clears JAX's caches of compiled functions, of all that the process
    has compiled.

    Args:
      config: All keys of ``configs/default.py``.
      workdir: Working directory; None makes a fresh one below ``runs/``.
      interruption: Signals to listen to; none by default.

    Returns:
      The content of ``result.json``; with ``num_seeds`` above 1 that of each seed, by
      the name of its directory. Of several processes the first returns it, and the
      others an empty dictionary.

    Raises:
      ValueError: If the configuration, the data, the device or the working directory
        will not do, or another process trains there.
      DivergenceError: If training diverges; the last healthy state is saved. Of
        several seeds the others are trained to their end before.
      CheckpointError: If no checkpoint can be written, or none of those read.
      Interrupted: If a signal came; the state is saved.
      LostProcessError: If another process is gone.
    """
    configuration.validate(config)
    parallel.choose_platform(config.platform)
    configuration.check_devices(config)
    parallel.cache_compilations(config.compilation_cache)
    logger.info(parallel.describe())
    is_main = parallel.is_main()
    if not is_main:
        logger.setLevel(logging.ERROR)  # The first one says the rest.
    interruption = interruption or Interruption()
    place = pathlib.Path(workdir) if workdir and is_main else None
    # By the name of its directory in that place: "" is the place itself.
    configs = configuration.of_each_seed(config)
    with interruption.may_leave(lambda: NOTHING_NEW):
        if place:
            working_directory.check_place(place, config)
            for name, own in configs.items():
                working_directory.check(place / name, own)
        finished = [
            bool(place and (place / name / "result.json").exists()) for name in configs
        ]
        moved = place is not None and any(
            working_directory.reads_elsewhere(place / name, config) for name in configs
        )
        *finished, moved = parallel.from_main(np.asarray([*finished, moved])).tolist()
        if all(finished) and not moved:  # It may be that the data are no longer there.
            return _finished(place, list(configs))
        with parallel.main_first():  # It prepares and caches what the others read.
            data = _load(config)
        working_directory.check_everywhere(data)
        if place:
            for name in configs:
                working_directory.check_data(place / name, data)
        if all(finished):
            return _finished(place, list(configs))
        _warn_of_shared_images(data)
        left = [name for name, done in zip(configs, finished, strict=True) if not done]
        labelled = []
        for name in left:
            directory = place / name if place else None
            rows = working_directory.labelled_rows(
                directory, configs[name], data.train_labels
            )
            labelled.append(parallel.from_main(rows))
        program = make_program(config, data, several=config.num_seeds > 1)

    directories: list[pathlib.Path | None] = [None] * len(left)
    held = contextlib.ExitStack()
    if is_main:
        place = place or working_directory.fresh(config)
        directories = [place / name for name in left]
        print(f"Working directory: {place}", flush=True)
        for name, rows in zip(left, labelled, strict=True):
            working_directory.prepare(place / name, configs[name], data, rows)
            held.enter_context(working_directory.held(place / name))
    with held, parallel.programs_forgotten():
        embedding = _embedding(config, data, labelled[0], directories[0], interruption)
        training = Training(
            [configs[name] for name in left],
            data,
            labelled,
            program,
            interruption,
            embedding,
        )
        ended = training.run(directories, show=is_main)
    failures = {
        name: one.failure for name, one in zip(left, ended, strict=True) if one.failure
    }
    results = {}
    if place:
        for name, one in zip(left, ended, strict=True):
            if one.failure:
                whole_files.write_json(place / name / "diverged.json", one.failure)
            else:
                result = _result(configs[name], data, one, seeds_at_once=len(left))
                whole_files.write_json(place / name / "result.json", result)
                (place / name / "diverged.json").unlink(missing_ok=True)
        results = {
            name: _read_result(place / name)
            for name in configs
            if (place / name / "result.json").exists()
        }
        if results:
            print(f"{_closing(list(results.values()))}\nEverything lies in {place}.")
    if failures:
        raise DivergenceError(_failure(failures, len(configs)))
    return results.get("", results)


def train_in_memory(
    config: ConfigDict,
    data: datasets.Dataset,
    labelled: np.ndarray,
    *,
    show: bool = False,
) -> Run:
    """Trains on a data set that is at hand, and writes nothing.

    At its end JAX's caches of compiled functions are cleared, the caller's among them.

    Args:
      config: All keys of ``configs/default.py``, of which those that say how data are
        loaded and where it computes may be left out.
      data: The data set.
      labelled: Rows of its labelled images.
      show: Whether to show each epoch, on a bar or in the log.

    Returns:
      The trained `Run`.

    Raises:
      ValueError: If the configuration or the data will not do.
      DivergenceError: If training diverges.
    """
    configuration.validate(config)
    parallel.choose_platform("")
    configuration.check_devices(config)
    program, interruption = make_program(config, data), Interruption()
    with parallel.programs_forgotten():
        embedding = _embedding(config, data, labelled, None, interruption)
        training = Training(
            [config], data, [labelled], program, interruption, embedding
        )
        state = _run_alone(training, None, show=show)
    return Run(config, data, labelled, make_model(config, data), state)


def load_run(workdir: str | pathlib.Path, *, best: bool = False) -> Run:
    """Reads a run back from its working directory.

    Args:
      workdir: Working directory of `train_and_evaluate`.
      best: Whether to take the state with the smallest validation error, of a run
        with ``keep_best``, instead of the newest.

    Returns:
      The `Run`.

    Raises:
      ValueError: If there is no run, or none with such a checkpoint, or its data are
        no longer those that it had.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    config = working_directory.read_config(directory)
    data = _load(config)
    working_directory.check_data(directory, data)
    labelled = working_directory.labelled_rows(directory, config, data.train_labels)
    model = make_model(config, data)
    image_shape = data.train_images.shape[1:]
    state = working_directory.restore(directory, config, model, image_shape, best=best)
    return Run(config, data, labelled, model, state)


def _run_alone(
    training: Training, directory: pathlib.Path | None, *, show: bool
) -> TrainState:
    """Trains one seed to its end, and returns its last state."""
    (ended,) = training.run([directory], show=show)
    if ended.failure:
        raise DivergenceError(ended.failure)
    return ended.state


def _embedding(
    config: ConfigDict,
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
    alone = config.copy_and_resolve_references()
    alone.update(objective="reconstruction", kernel_on="z")
    program = make_program(alone, data)
    training = Training([alone], data, [labelled], program, interruption)
    own = directory / "autoencoder" if directory else None
    try:
        state = _run_alone(training, own, show=parallel.is_main())
    except DivergenceError as error:
        failure = f"of the autoencoder, {error}"
        if directory:
            whole_files.write_json(directory / "diverged.json", failure)
        raise DivergenceError(failure) from error
    return steps.without_optimizer(state)


def _load(config: ConfigDict) -> datasets.Dataset:
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


def _warn_of_shared_images(data: datasets.Dataset) -> None:
    # Hashing 600,000 images of 32x32x3 takes some 7 s: little beside their epochs.
    shared = datasets.shared_images(data.train_images, data.eval_images)
    if shared:
        logger.warning(
            "%d of %d %s images are, pixel for pixel, also among the training images.",
            shared,
            len(data.eval_images),
            data.evaluate_on,
        )


def _finished(place: pathlib.Path | None, names: Sequence[str]) -> dict[str, Any]:
    if place is None:
        return {}
    results = {name: _read_result(place / name) for name in names}
    whole = "This run is" if len(names) == 1 else "These runs are"
    print(f"{whole} finished; nothing is left to do.")
    print(f"{_closing(list(results.values()))}\nEverything lies in {place}.")
    return results.get("", results)


def _read_result(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "result.json"
    result = whole_files.read_json(path)
    try:
        _closing([result])
    except KeyError as error:
        raise whole_files.DamagedError(path, f"it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise whole_files.DamagedError(path, str(error)) from error
    return result


def _result(
    config: ConfigDict, data: datasets.Dataset, ended: Ended, *, seeds_at_once: int
) -> dict[str, Any]:
    part, state, scalars = config.evaluate_on, ended.state, ended.scalars
    return {
        f"{part}_error_percent": scalars[f"{part}_error_percent"],
        f"num_{part}_images": len(data.eval_labels),
        "epochs": config.num_epochs,
        "steps": int(state.step),
        "skipped_steps": int(state.skipped),
        "wall_seconds": scalars["wall_seconds"],
        "seeds_at_once": seeds_at_once,
        "seed": config.seed,
        "dataset": config.dataset,
        "variant": config.variant,
        "partial_data": data.partial,
        "versions": _versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _failure(failures: Mapping[str, str], count: int) -> str:
    """Says which of so many seeds diverged; each has said before how it did."""
    if count == 1:
        return failures[""]
    which = f"seed{'s' * (len(failures) > 1)} {', '.join(failures)}"
    others = " The others are finished." if len(failures) < count else ""
    return (
        f"{len(failures)} of {count} seeds diverged, as said above: {which}. What they "
        f"made before is saved.{others}"
    )


def _closing(results: Sequence[Mapping[str, Any]]) -> str:
    """Says how runs of one or of several seeds ended."""
    part = "test" if "test_error_percent" in results[0] else "validation"
    count, epochs = results[0][f"num_{part}_images"], results[0]["epochs"]
    errors = [result[f"{part}_error_percent"] for result in results]
    of = f"{round(errors[0] * count / 100)} of {count} images"
    if len(results) > 1:
        of = f"mean ± standard deviation of {len(results)} seeds"
    seconds = max(result["wall_seconds"] for result in results)
    return (
        f"{part.capitalize()} error {epoch_metrics.mean_and_spread(errors)} % ({of}) "
        f"after {epochs} epochs, {seconds:.0f} s."
    )


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **versions}
