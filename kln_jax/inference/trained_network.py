"""A trained network without its data set: read it, and apply it to uint8 images."""

from __future__ import annotations

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from kln_jax.networks.models import KLN
from kln_jax.storage import whole_files
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import augmentation, configuration, objectives, parts, steps
from kln_jax.training.configuration import Config
from kln_jax.training.steps import TrainState

# What a batch of images is filled up to, so that there is one program for all.
_BATCH_SIZE = 100


class TrainedNetwork(NamedTuple):
    """A trained network.

    Attributes:
      config: The configuration of its run.
      class_names: Names of the C classes.
      image_shape: Height, width and channels of its images.
      model: The network, whose batch statistics are those of one device.
      state: Its state, without that of the optimiser.
    """

    config: Config
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    model: KLN
    state: TrainState


class Prediction(NamedTuple):
    """What a network says of n images, in arrays of JAX or of NumPy.

    Attributes:
      probabilities: Of each class, shape ``(n, C)``, float32.
      z: Embeddings, shape ``(n, latent_dim)``, float32.
      reconstruction_error: Squared error of the autoencoder on images in [0, 1],
        summed or averaged over pixels as in training, shape ``(n,)``, float32.
    """

    probabilities: Any
    z: Any
    reconstruction_error: Any


def load(workdir: str | pathlib.Path) -> TrainedNetwork:
    """Reads the network of a run; its data set need not be there.

    Args:
      workdir: Working directory of the run.

    Returns:
      The `TrainedNetwork`, with the newest state of the run.

    Raises:
      ValueError: If there is no run, or none with a checkpoint.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    config = configuration.read(directory)
    if not (directory / "data.json").exists():
        raise ValueError(f"{directory} holds no run: data.json is missing.")
    about = whole_files.read_json(directory / "data.json")
    try:
        class_names = tuple(about["class_names"])
        height, width, channels = about["image_shape"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"data.json of {directory} was written by another version of kln_jax: "
            f"{error}"
        ) from error
    image_shape = height, width, channels
    model = parts.model(config, image_shape=image_shape, num_classes=len(class_names))
    state = _restore(directory / "checkpoints", config, model, image_shape)
    return TrainedNetwork(config, class_names, image_shape, model, state)


def _restore(
    directory: pathlib.Path,
    config: Config,
    model: KLN,
    image_shape: tuple[int, int, int],
) -> TrainState:
    """Reads the newest state of a run, without that of the optimiser."""
    channels = image_shape[-1]
    like = jax.eval_shape(
        lambda key: steps.init_state(
            model,
            # How long an epoch is changes nothing of the layout.
            parts.optimizer(config, steps_per_epoch=1),
            key,
            mean=np.zeros(channels),
            std=np.ones(channels),
            image_shape=image_shape,
        ),
        jax.random.key(config.seed),
    )
    with Checkpoints(directory, read_only=True) as checkpoints:
        restored = checkpoints.restore(like)
    if restored is None:
        raise ValueError(f"{directory.parent} holds no checkpoint.")
    return steps.without_optimizer(restored.state)


def predict(
    model: KLN, state: TrainState, images: Array, *, reconstruction_reduction: str
) -> Prediction:
    """Applies a trained network.

    Args:
      model: The network.
      state: Its state.
      images: Images, shape ``(n, h, w, c)``, uint8.
      reconstruction_reduction: ``"sum"`` or ``"mean"`` over pixels.

    Returns:
      The `Prediction`.
    """
    unit = augmentation.to_unit(images)
    outputs = steps.apply_trained(model, state, unit)
    error = functools.partial(
        objectives.reconstruction_error, reduction=reconstruction_reduction
    )
    return Prediction(
        jax.nn.softmax(outputs.logits),
        outputs.z,
        jax.vmap(lambda x, y: error(x[None], y[None]))(unit, outputs.reconstruction),
    )


# Equal networks share a program, those of several estimators among them.
_compiled = jax.jit(predict, static_argnames=("model", "reconstruction_reduction"))


def predict_in_batches(
    model: KLN,
    state: TrainState,
    images: np.ndarray,
    *,
    reconstruction_reduction: str,
) -> Prediction:
    """Applies a trained network to any number of images, in batches of one size.

    Args:
      model: The network.
      state: Its state.
      images: Images, shape ``(n, h, w, c)``, uint8, n > 0.
      reconstruction_reduction: ``"sum"`` or ``"mean"`` over pixels.

    Returns:
      The `Prediction`, of NumPy arrays.
    """
    state = jax.device_put(state)
    predictions = []
    for start in range(0, len(images), _BATCH_SIZE):
        batch = images[start : start + _BATCH_SIZE]
        missing = _BATCH_SIZE - len(batch)
        filled = np.pad(batch, [(0, missing), (0, 0), (0, 0), (0, 0)])
        prediction = jax.device_get(
            _compiled(
                model, state, filled, reconstruction_reduction=reconstruction_reduction
            )
        )
        predictions.append([part[: len(batch)] for part in prediction])
    return Prediction(*map(np.concatenate, zip(*predictions, strict=True)))
