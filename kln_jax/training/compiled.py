"""The compiled functions of a run, made from its configuration."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

from kln_jax import backend, datasets
from kln_jax.networks import models
from kln_jax.training import (
    configuration,
    fixed_embeddings,
    objectives,
    parallel,
    steps,
)
from kln_jax.training.augmentation import channel_statistics
from kln_jax.training.steps import TrainingData, TrainState

logger = logging.getLogger("kln_jax")

T = TypeVar("T")


class Program(NamedTuple):
    """The compiled functions of a run, each but the first over all devices.

    Of several seeds, each but the first takes and gives arrays with a leading axis of
    seeds, except for the images, the labels, the embedding and the epoch.

    Attributes:
      init: Makes the first state from a key; of one seed.
      rows: Draws the images of an epoch.
      train: Makes some of its steps.
      evaluate: Counts the errors on other images.
      steps_per_epoch: Steps of an epoch.
      several: Whether they are of several seeds.
    """

    init: Callable[[jax.Array], TrainState]
    rows: Callable[..., steps.Rows]
    train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., dict[str, jax.Array]]
    steps_per_epoch: int
    several: bool

    def pack(self, trees: Sequence[T]) -> T:
        """Returns what the functions take, from the NumPy arrays of each seed."""
        if not self.several:
            return trees[0]
        stacked: T = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
        return stacked

    def unpack(self, tree: T, index: int) -> T:
        """Returns the arrays of one seed, by its place, from what they give."""
        return seed_at(tree, index) if self.several else tree


def make_program(
    config: ConfigDict, data: datasets.Dataset, *, several: bool = False
) -> Program:
    """Makes the functions of a run, or of several seeds, from its configuration.

    Args:
      config: All keys of ``configs/default.py``.
      data: The data set.
      several: Whether the functions are those of several seeds.

    Raises:
      ValueError: If the configuration and the images do not go together.
    """
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
    if late := [e for e in config.lr_milestones if e >= config.num_epochs]:
        logger.warning(
            "lr_milestones=%s: %s come after all steps of %d epochs and do nothing.",
            tuple(config.lr_milestones),
            late,
            config.num_epochs,
        )
    steps_per_epoch = max(1, count // config.batch_size)
    model = make_model(config, data)
    optimizer = configuration.optimizer(config, steps_per_epoch=steps_per_epoch)
    kernel, _ = configuration.kernels(config)
    reconstruction_error = functools.partial(
        objectives.reconstruction_error, reduction=config.reconstruction_reduction
    )
    train_step = steps.make_train_step(
        model,
        optimizer,
        configuration.objective(config),
        reconstruction_error,
        kernel=kernel,
        embed=configuration.embed(config, model),
        shared_batch=config.pairing == "shared",
        diagnostics=functools.partial(
            objectives.gram_diagnostics, kernel=kernel, ridge=config.ridge
        ),
        diagnose_every=steps_per_epoch,
        bound=config.divergence_bound,
        max_skipped=config.max_skipped_steps if config.on_nonfinite == "skip" else 0,
        crop_padding=config.crop_padding,
        flip=config.flip,
    )
    channels = image_shape[-1]
    mean, std = (
        channel_statistics(data.train_images)
        if config.normalise
        else (np.zeros(channels), np.ones(channels))
    )

    def over_devices(
        function: Callable[..., T], *in_axes: Any, donate: bool = False
    ) -> Callable[..., T]:
        function = steps.over_seeds(function, in_axes) if several else function
        return parallel.data_parallel(function, axis_name=steps.AXIS, donate=donate)

    # Seeds share all of the data but the choice of those that are labelled.
    data_axes = TrainingData(None, None, 0, None)  # type: ignore[arg-type]
    return Program(
        init=jax.jit(
            lambda key: steps.init_state(
                model, optimizer, key, mean=mean, std=std, image_shape=image_shape
            ),
            compiler_options=_quickly(),
        ),
        rows=over_devices(
            steps.make_epoch_rows(
                batch_size=config.batch_size,
                steps_per_epoch=steps_per_epoch,
                shared_batch=config.pairing == "shared",
            ),
            *(data_axes, 0, None),
        ),
        train=over_devices(
            steps.make_train_steps(train_step, steps_per_epoch=steps_per_epoch),
            *(0, data_axes, 0, 0, 0),
            donate=True,
        ),
        evaluate=over_devices(
            steps.make_evaluate(
                model, reconstruction_error, batch_size=2 * config.batch_size
            ),
            *(0, None, None),
        ),
        steps_per_epoch=steps_per_epoch,
        several=several,
    )


def _quickly() -> dict[str, int] | None:
    """Returns the options that compile what runs only once.

    XLA:CPU would optimise the random numbers of all layers for seconds, to save
    milliseconds, and with no other values but for rounding.
    """
    if backend.is_cpu():
        return {"xla_backend_optimization_level": 1}
    return None


def make_model(config: ConfigDict, data: datasets.Dataset) -> models.KLN:
    """Makes the network of a configuration, for a data set."""
    return configuration.model(
        config,
        image_shape=data.train_images.shape[1:],
        num_classes=len(data.class_names),
    )


def seed_at(tree: T, index: int | jax.Array) -> T:
    """Returns the arrays of one seed, by its place, from those of several."""
    own: T = jax.tree.map(lambda leaf: leaf[index], tree)
    return own
