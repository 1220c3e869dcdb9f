"""The training loop: the only module that reads a configuration."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import logging
import pathlib
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tqdm.contrib.logging import logging_redirect_tqdm

from kln_jax import datasets, metrics, networks, objectives, optim, parallel, steps
from kln_jax.augment import channel_statistics
from kln_jax.checkpoint import Checkpoints
from kln_jax.cmmd import check_ridge
from kln_jax.kernels import Kernel, gaussian_mixture, linear
from kln_jax.steps import TrainingData, TrainState

logger = logging.getLogger("kln_jax")

# Keys that say where a run computes, not what: a run may go on with others.
_WHEREABOUTS = ("data_dir", "platform", "checkpoint_every")

# The key to turn first when a metric of a step is not finite.
_KNOBS = {
    "cmmd": "ridge (raise it)",
    "reconstruction": "learning_rate (lower it) or clip_norm (set it)",
    "confidence": "learning_rate (lower it) or clip_norm (set it)",
    "loss": "learning_rate (lower it) or clip_norm (set it)",
    "gradient_norm": "ridge (raise it) or learning_rate (lower it)",
}


class NonFiniteError(RuntimeError):
    """A loss, gradient or parameter is not finite; the message says which and when."""


class Run(NamedTuple):
    """A run read back from its working directory.

    Attributes:
      config: Its configuration.
      data: Its data set.
      labelled: Rows of the labelled images.
      model: Its network.
      state: Its newest state.
    """

    config: ConfigDict
    data: datasets.Dataset
    labelled: np.ndarray
    model: networks.KLN
    state: TrainState


class _Program(NamedTuple):
    """The compiled functions of a run, each over all devices."""

    init: Callable[[jax.Array], TrainState]
    train_epoch: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    # The same for a number of steps, to end an epoch that was begun earlier.
    train_steps: Callable[[int], Callable[..., Any]]
    evaluate: Callable[..., dict[str, jax.Array]]
    steps_per_epoch: int


def train_and_evaluate(
    config: ConfigDict, workdir: str | None = None
) -> dict[str, Any]:
    """Trains and evaluates as a configuration says, or goes on with it.

    The working directory gets ``config.json``, ``metrics.jsonl`` (a line an epoch),
    ``tensorboard/``, ``checkpoints/``, ``labelled.npy`` (rows of the labelled
    images) and, at the end, ``result.json``.

    Args:
      config: All keys of ``configs/default.py``.
      workdir: Working directory; None makes a fresh one below ``runs/``.

    Returns:
      The content of ``result.json``.

    Raises:
      ValueError: If the configuration, the data, the device or the working directory
        will not do.
      NonFiniteError: If training diverges; the last finite state is saved.
    """
    _validate(config)
    parallel.choose_platform(config.platform)
    parallel.check_batch_size(config.batch_size)
    logger.info(parallel.describe())
    directory = pathlib.Path(workdir) if workdir else None
    if directory:
        _check_same_config(config, directory)
        if (directory / "result.json").exists():
            result = json.loads((directory / "result.json").read_text())
            print(f"This run is finished; nothing is left to do.\n{_closing(result)}")
            print(f"Everything lies in {directory}.")
            return result

    data = _load(config)
    _warn_of_shared_images(data)
    labelled = _labelled_rows(config, data.train_labels, directory)
    program = _compile(config, data)

    directory = directory or _fresh_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    print(f"Working directory: {directory}")
    metrics.write_json(directory / "config.json", json.loads(config.to_json()))
    _store_rows(directory / "labelled.npy", labelled)
    result = _run(config, data, labelled, program, directory)
    metrics.write_json(directory / "result.json", result)
    print(f"{_closing(result)}\nEverything lies in {directory}.")
    return result


def load_run(workdir: str | pathlib.Path) -> Run:
    """Reads a run back from its working directory.

    Args:
      workdir: Working directory of `train_and_evaluate`.

    Returns:
      The `Run`, with its newest checkpoint.

    Raises:
      ValueError: If there is no run, or none with a checkpoint.
    """
    directory = pathlib.Path(workdir)
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no run: config.json is missing.")
    config = ConfigDict(json.loads((directory / "config.json").read_text()))
    data = _load(config)
    model = _model(config, data)
    labelled = _labelled_rows(config, data.train_labels, directory)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        state = checkpoints.restore_latest(_compile(config, data).init(_key(config)))
    if state is None:
        raise ValueError(f"{directory} holds no checkpoint yet.")
    return Run(config, data, labelled, model, state)


def _run(
    config: ConfigDict,
    data: datasets.Dataset,
    labelled: np.ndarray,
    program: _Program,
    directory: pathlib.Path,
) -> dict[str, Any]:
    """Trains from the newest checkpoint, or from the start, to the last epoch."""
    key = _key(config)
    replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
    train_data = TrainingData(
        *replicate((data.train_images, data.train_labels, labelled))
    )
    eval_data = replicate((data.eval_images, data.eval_labels))
    spe = program.steps_per_epoch
    with Checkpoints(directory / "checkpoints") as checkpoints:
        state = replicate(program.init(key))
        restored = checkpoints.restore_latest(state)
        if restored is not None:
            state = restored
            logger.info("continuing after step %d", state.step)
        done, steps_done = divmod(int(state.step), spe)
        with (
            metrics.MetricWriter(directory, last_epoch=done) as writer,
            metrics.progress_bar(config.num_epochs, done=done) as bar,
            logging_redirect_tqdm([logger]),
        ):
            start = time.perf_counter() - writer.wall_seconds
            scalars = writer.last
            for epoch in range(done + 1, config.num_epochs + 1):
                train, first = program.train_epoch, (epoch - 1) * spe
                if steps_done:  # An epoch that was begun earlier is ended.
                    train = program.train_steps(spe - steps_done)
                    first, steps_done = first + steps_done, 0
                state, stacked = train(state, train_data, key)
                stacked = jax.device_get(stacked)
                _check_finite(stacked, state, checkpoints, first)
                _warn_of_collapse(stacked.pop("predicted"), data.class_names, epoch)
                scalars = {
                    "epoch": epoch,
                    **metrics.epoch_means(stacked),
                    **_evaluate(program, state, eval_data, config.evaluate_on),
                    "wall_seconds": round(time.perf_counter() - start, 2),
                }
                if epoch % config.checkpoint_every == 0 or epoch == config.num_epochs:
                    checkpoints.save(int(state.step), state)
                writer.write(int(state.step), scalars)
                metrics.show(bar, scalars, logger)
    part = config.evaluate_on
    return {
        f"{part}_error_percent": scalars[f"{part}_error_percent"],
        f"num_{part}_images": len(data.eval_labels),
        "epochs": config.num_epochs,
        "steps": int(state.step),
        "wall_seconds": scalars["wall_seconds"],
        "seed": config.seed,
        "dataset": config.dataset,
        "variant": config.variant,
        "partial_data": data.partial,
        "versions": _versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _model(config: ConfigDict, data: datasets.Dataset) -> networks.KLN:
    return networks.build(
        config.network,
        image_shape=data.train_images.shape[1:],
        num_classes=len(data.class_names),
        latent_dim=config.latent_dim,
        width=config.width,
        dtype=jnp.dtype(config.dtype),
        axis_name=steps.AXIS,
    )


def _key(config: ConfigDict) -> jax.Array:
    return jax.random.key(config.seed)


def _compile(config: ConfigDict, data: datasets.Dataset) -> _Program:
    """Makes the functions of a run from its configuration."""
    image_shape = data.train_images.shape[1:]
    side = min(image_shape[:2])
    if config.crop_padding >= side:
        raise ValueError(
            f"crop_padding={config.crop_padding} must be below {side}, the side of the "
            "images in pixels."
        )
    steps_per_epoch = max(1, len(data.train_images) // config.batch_size)
    model = _model(config, data)
    optimizer = optim.optimiser(
        config.optimizer,
        optim.step_schedule(
            config.learning_rate,
            milestones=[epoch * steps_per_epoch for epoch in config.lr_milestones],
            decay=config.lr_decay,
            warmup_steps=config.warmup_steps,
        ),
        momentum=config.momentum,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
    )
    kernel, label_kernel = _kernels(config)
    reconstruction_error = functools.partial(
        objectives.reconstruction_error, reduction=config.reconstruction_reduction
    )
    train_step = steps.make_train_step(
        model,
        optimizer,
        functools.partial(
            objectives.kln_objective,
            kernel=kernel,
            label_kernel=label_kernel,
            ridge=config.ridge,
            reconstruction_weight=config.reconstruction_weight,
            confidence_weight=config.confidence_weight,
        ),
        reconstruction_error,
        kernel=kernel,
        crop_padding=config.crop_padding,
        flip=config.flip,
    )
    channels = image_shape[-1]
    mean, std = (
        channel_statistics(data.train_images)
        if config.normalise
        else (np.zeros(channels), np.ones(channels))
    )

    def train_steps(num_steps: int) -> Callable[..., Any]:
        train = steps.make_train_epoch(
            train_step,
            batch_size=config.batch_size,
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
            shared_batch=config.pairing == "shared",
        )
        return parallel.data_parallel(train, axis_name=steps.AXIS, donate=True)

    return _Program(
        init=jax.jit(
            lambda key: steps.init_state(
                model, optimizer, key, mean=mean, std=std, image_shape=image_shape
            )
        ),
        train_epoch=train_steps(steps_per_epoch),
        train_steps=train_steps,
        evaluate=parallel.data_parallel(
            steps.make_evaluate(
                model, reconstruction_error, batch_size=2 * config.batch_size
            ),
            axis_name=steps.AXIS,
        ),
        steps_per_epoch=steps_per_epoch,
    )


def _kernels(config: ConfigDict) -> tuple[Kernel, Kernel]:
    """Returns the kernels on Z and on labels."""
    mixture = gaussian_mixture(config.bandwidths, reduction=config.kernel_reduction)
    return mixture, {"linear": linear, "gaussian": mixture}[config.label_kernel]


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


def _labelled_rows(
    config: ConfigDict, labels: np.ndarray, directory: pathlib.Path | None
) -> np.ndarray:
    """Returns the rows of the labelled images: those of an earlier start, if any."""
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
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        np.save(file, rows)
    temporary.replace(path)


def _validate(config: ConfigDict) -> None:
    """Refuses what no run can mean, before anything is loaded or written."""
    least = dict(num_epochs=1, batch_size=1, checkpoint_every=1, latent_dim=1)
    least |= dict(num_labels=0, width=0, crop_padding=0)
    least |= dict(learning_rate=0, momentum=0, b1=0, b2=0, weight_decay=0, lr_decay=0)
    least |= dict(warmup_steps=0, clip_norm=0)
    least |= dict(reconstruction_weight=0, confidence_weight=0)
    for name, bound in least.items():
        # Not <, so that NaN is refused as well.
        if not bound <= config[name] < float("inf"):
            raise ValueError(f"{name}={config[name]} must be at least {bound}.")
    choices = dict(
        optimizer=("sgd", "adam"),
        label_kernel=("linear", "gaussian"),
        kernel_reduction=("mean", "sum"),
        reconstruction_reduction=("sum", "mean"),
        pairing=("independent", "shared"),
        dtype=("float32", "bfloat16"),
    )
    for name, allowed in choices.items():
        if config[name] not in allowed:
            raise ValueError(f"{name}={config[name]!r} must be one of {allowed}.")
    if any(not isinstance(epoch, int) for epoch in config.lr_milestones):
        raise ValueError(f"lr_milestones={config.lr_milestones} must be whole epochs.")
    _kernels(config)
    check_ridge(config.ridge, config.batch_size, jnp.dtype(jnp.float32))


def _check_same_config(config: ConfigDict, directory: pathlib.Path) -> None:
    """Refuses to go on in the working directory of another configuration."""
    path = directory / "config.json"
    if not path.exists():
        return
    earlier = json.loads(path.read_text())
    present = json.loads(config.to_json())
    different = [
        f"{name} ({earlier.get(name, 'absent')} there, {present.get(name, 'absent')} "
        "now)"
        for name in sorted(earlier.keys() | present.keys())
        if name not in _WHEREABOUTS and earlier.get(name) != present.get(name)
    ]
    if different:
        raise ValueError(
            f"{directory} holds a run of another configuration: "
            f"{', '.join(different)}. Choose another --workdir, or the same values."
        )


def _fresh_directory(config: ConfigDict) -> pathlib.Path:
    """Returns a new directory's name, with data set, variant and time in it."""
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    name = f"{config.dataset}-{config.variant}-{now}"
    candidates = [name, *(f"{name}-{i}" for i in range(2, 100))]
    paths = (pathlib.Path("runs") / candidate for candidate in candidates)
    return next(path for path in paths if not path.exists())


def _check_finite(
    stacked: Mapping[str, np.ndarray],
    state: TrainState,
    checkpoints: Checkpoints,
    first_step: int,
) -> None:
    """Stops a run that diverged, once its last finite state is saved."""
    found = metrics.first_nonfinite(stacked, tuple(_KNOBS))
    leaves = jax.tree.leaves((state.params, state.batch_stats))
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
    if found is None and finite:
        return
    if finite:
        checkpoints.save(int(state.step), state)
    if found is None:
        raise NonFiniteError(
            f"Parameters are not finite after step {int(state.step)}; nothing of this "
            "epoch is saved. Turn learning_rate (lower it) or clip_norm (set it)."
        )
    step, name = found
    raise NonFiniteError(
        f"{name} is {stacked[name][step]} at step {first_step + step}; the state "
        f"before it is saved. Turn {_KNOBS[name]}."
    )


def _warn_of_collapse(
    predicted: np.ndarray, class_names: tuple[str, ...], epoch: int
) -> None:
    """Warns of classes that were never predicted, of predictions (steps, C)."""
    missing = np.flatnonzero(predicted.sum(axis=0) == 0)
    if missing.size:
        logger.warning(
            "epoch %d: never predicted: %s. If this lasts, the classes have collapsed: "
            "raise ridge, or set warmup_steps and clip_norm.",
            epoch,
            ", ".join(f"class {class_names[i]}" for i in missing),
        )


def _evaluate(
    program: _Program, state: TrainState, eval_data: Any, part: str
) -> dict[str, float]:
    sums = jax.device_get(program.evaluate(state, *eval_data))
    count, correct = int(sums["confusion"].sum()), int(np.trace(sums["confusion"]))
    return {
        f"{part}_error_percent": 100.0 * (count - correct) / count,
        f"{part}_reconstruction": float(sums["reconstruction"]) / count,
    }


def _closing(result: Mapping[str, Any]) -> str:
    part = "test" if "test_error_percent" in result else "validation"
    error, count = result[f"{part}_error_percent"], result[f"num_{part}_images"]
    return (
        f"{part.capitalize()} error {error:.2f} % ({round(error * count / 100)} of "
        f"{count} images) after {result['epochs']} epochs, "
        f"{result['wall_seconds']:.0f} s."
    )


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **versions}
