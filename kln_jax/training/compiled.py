"""The compiled functions of a run, made from its configuration and its data set."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from kln_jax import backend
from kln_jax.datasets import Dataset
from kln_jax.training import (
    fixed_embeddings,
    objectives,
    parallel,
    parts,
    steps,
)
from kln_jax.training.augmentation import channel_statistics
from kln_jax.training.configuration import FIELDS, Config
from kln_jax.training.steps import Method, Rows, TrainState

logger = logging.getLogger("kln_jax")

T = TypeVar("T")

# Largest loss, and norm of the gradient before clipping, of a healthy step. The first
# norms are 75 to 349 on the network for MNIST, and up to 2,336 on the deeper one.
DIVERGENCE_BOUND = 1e6


class Compiled(NamedTuple):
    """The compiled functions of a run, each but the first over all devices.

    Attributes:
      init: Makes the first state from a key, and from mean and standard deviation of
        each channel.
      draw_rows: Draws the images of an epoch.
      train: Makes some of its steps.
      evaluate: Counts the errors on other images.
      steps_per_epoch: Steps of an epoch.
      channels: That mean and standard deviation.
    """

    init: Callable[[jax.Array, np.ndarray, np.ndarray], TrainState]
    draw_rows: Callable[..., Rows]
    train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., dict[str, jax.Array]]
    steps_per_epoch: int
    channels: tuple[np.ndarray, np.ndarray]


def compile_functions(config: Config, data: Dataset) -> Compiled:
    """Makes the functions of a run; runs that differ in their data alone share them.

    Args:
      config: The configuration.
      data: The data set.

    Raises:
      ValueError: If the configuration and the images do not go together.
    """
    _check(config, data)
    shape = data.train_images.shape
    # What no program depends on: which images there are, and where and how long a run
    # computes.
    others = {
        name: key.default
        for name, key in FIELDS.items()
        if key.group in ("Data", "Run") or key.owner != "experiment"
    }
    made = _compile(config.replace(**others), shape, len(data.class_names))
    if not config.normalise:
        return made
    return made._replace(channels=channel_statistics(data.train_images))


@functools.lru_cache(maxsize=4)
def _compile(config: Config, shape: tuple[int, ...], num_classes: int) -> Compiled:
    """Makes them for images that are not normalised."""
    method = make_method(config, shape, num_classes)

    def init(key: jax.Array, mean: np.ndarray, std: np.ndarray) -> TrainState:
        return steps.init_state(
            method.model,
            method.optimizer,
            key,
            mean=mean,
            std=std,
            image_shape=(shape[1], shape[2], shape[3]),
        )

    def over_devices(
        function: Callable[..., T], *, donate: bool = False
    ) -> Callable[..., T]:
        of_method = functools.partial(function, method)
        return parallel.data_parallel(of_method, axis_name=steps.AXIS, donate=donate)

    return Compiled(
        init=jax.jit(init, compiler_options=_quickly()),
        draw_rows=over_devices(steps.draw_rows),
        train=over_devices(steps.train_steps, donate=True),
        evaluate=over_devices(steps.evaluate),
        steps_per_epoch=method.steps_per_epoch,
        channels=(np.zeros(shape[-1]), np.ones(shape[-1])),
    )


def make_method(config: Config, shape: tuple[int, ...], num_classes: int) -> Method:
    """Makes what a step consists of.

    Args:
      config: The configuration.
      shape: Shape of the training images, ``(N, h, w, c)``.
      num_classes: Number of classes.
    """
    count, height, width, channels = shape
    steps_per_epoch = max(1, count // config.batch_size)
    model = parts.model(
        config,
        image_shape=(height, width, channels),
        num_classes=num_classes,
        axis_name=steps.AXIS,
    )
    kernel, _ = parts.kernels(config)
    return Method(
        model=model,
        optimizer=parts.optimizer(config, steps_per_epoch=steps_per_epoch),
        objective=parts.objective(config),
        reconstruction_error=functools.partial(
            objectives.reconstruction_error, reduction=config.reconstruction_reduction
        ),
        kernel=kernel,
        ridge=config.ridge,
        embed=parts.embed(config, model),
        batch_size=config.batch_size,
        steps_per_epoch=steps_per_epoch,
        shared_batch=config.pairing == "shared",
        crop_padding=config.crop_padding,
        flip=config.flip,
        bound=DIVERGENCE_BOUND,
    )


def _check(config: Config, data: Dataset) -> None:
    """Refuses or warns of what a configuration cannot do with these images."""
    image_shape = data.train_images.shape[1:]
    side = min(image_shape[:2])
    if config.crop_padding >= side:
        raise ValueError(
            f"crop_padding={config.crop_padding} must be below {side}, the side of the "
            "images in pixels."
        )
    if config.kernel_on == "pca":
        fixed_embeddings.check_count(config.latent_dim, math.prod(image_shape))
    count = len(data.train_images)
    for kind, number in ("training", count), ("labelled", config.num_labels or count):
        if config.batch_size > number:
            logger.warning(
                "batch_size=%d is more than the %d %s images: a batch has some of "
                "them more than once.",
                config.batch_size,
                number,
                kind,
            )
            break


def _quickly() -> dict[str, int] | None:
    """Returns the options that compile what runs only once.

    XLA:CPU would optimise the random numbers of all layers for seconds, to save
    milliseconds, and with no other values but for rounding.
    """
    return {"xla_backend_optimization_level": 1} if backend.is_cpu() else None
