"""What a configuration may be, and the parts that it makes of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from kln_jax.discrepancies.cmmd import check_ridge
from kln_jax.discrepancies.kernels import (
    ComposableKernel,
    gaussian_mixture,
    largest_value,
    linear,
)
from kln_jax.networks import models
from kln_jax.training import fixed_embeddings, objectives, optimizers, steps

# By the key kernel_on: from the network to what the kernel acts on, None for its Z.
_EMBEDDINGS: dict[str, Callable[[models.KLN], Any]] = {
    "z": lambda model: None,
    "pixels": lambda model: fixed_embeddings.pixels,
    "pca": lambda model: fixed_embeddings.project,
    "autoencoder": lambda model: functools.partial(
        fixed_embeddings.encode, model=model
    ),
}

# Keys that say where a run computes, not what: a run may be resumed with others.
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

# How many keys `jax.random.key` makes.
_NUM_SEEDS = 2**32
# Its Gram matrices take 1.6 GB each.
_LARGEST_BATCH = 20_000
# A hidden layer of so many times the paper's channels is beyond any device.
_LARGEST_WIDTH = 100
# Steps are counted in int32.
_NUM_COUNTS = 2**31


def validate(config: ConfigDict) -> None:
    """Refuses what no run can mean, before anything is loaded or written.

    Args:
      config: All keys of ``configs/default.py``.

    Raises:
      ValueError: If a value will not do.
    """
    whole = dict(num_epochs=1, batch_size=1, checkpoint_every=1, latent_dim=1)
    whole |= dict(num_labels=0, crop_padding=0, warmup_steps=0, seed=0)
    whole |= dict(profile=0, checkpoint_every_steps=0, keep_last=1, keep_best=0)
    whole |= dict(max_skipped_steps=1, num_seeds=1, split_seed=0)
    real = dict(width=0, divergence_bound=1)
    real |= dict(learning_rate=0, momentum=0, b1=0, b2=0, weight_decay=0, lr_decay=0)
    real |= dict(clip_norm=0, reconstruction_weight=0, confidence_weight=0)
    real |= dict(ridge=0)
    for name, bound in (real | whole).items():
        value = config[name]
        kind, text = (int, "whole ") if name in whole else ((int, float), "")
        # Not <, so that NaN is refused as well.
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or not bound <= value < float("inf")
        ):
            raise ValueError(
                f"{name}={value!r} must be a {text}number of at least {bound}."
            )
        if name in whole and not name.endswith("seed") and value >= _NUM_COUNTS:
            raise ValueError(
                f"{name}={value} must be below 2**31, for counts take no more bits."
            )
    if config.width > _LARGEST_WIDTH:
        raise ValueError(
            f"width={config.width} must be at most {_LARGEST_WIDTH}; the paper's are "
            "width=1."
        )
    if not config.width:
        raise ValueError("width=0 leaves no channels; the paper's are width=1.")
    if config.seed + config.num_seeds > _NUM_SEEDS:
        raise ValueError(
            f"seed={config.seed} must be below 2**32 with num_seeds={config.num_seeds} "
            "added, for random keys take no more bits."
        )
    for name in ("momentum", "b1", "b2"):
        if config[name] >= 1:
            raise ValueError(f"{name}={config[name]} must be below 1.")
    if config.batch_size > _LARGEST_BATCH:
        raise ValueError(
            f"batch_size={config.batch_size} must be at most {_LARGEST_BATCH}: CMMD "
            "factorises matrices of batch_size x batch_size."
        )
    choices: dict[str, tuple[Any, ...]] = dict(
        network=tuple(models.SIDES),
        optimizer=("sgd", "adam"),
        objective=("cmmd", "cross_entropy", "reconstruction"),
        kernel_on=tuple(_EMBEDDINGS),
        label_kernel=("linear", "gaussian"),
        kernel_reduction=("mean", "sum"),
        reconstruction_reduction=("sum", "mean"),
        pairing=("independent", "shared"),
        dtype=("float32", "bfloat16"),
        on_nonfinite=("stop", "skip"),
    )
    for name, allowed in choices.items():
        if config[name] not in allowed:
            raise ValueError(f"{name}={config[name]!r} must be one of {allowed}.")
    for name in ("flip", "normalise", "normalise_z", "use_extra", "allow_partial_data"):
        value = config.get(name, False)  # Data in memory have no use for the last two.
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False.")
    if config.kernel_on != "z" and config.objective != "cmmd":
        raise ValueError(
            f"objective={config.objective!r} has no kernel to act on "
            f"{config.kernel_on!r}: set kernel_on='z', or objective='cmmd'."
        )
    if config.keep_best and config.evaluate_on != "validation":
        raise ValueError(
            f"keep_best={config.keep_best} needs evaluate_on='validation' (and a "
            "validation_fraction): nothing is chosen by the test set."
        )
    if config.num_seeds > 1 and config.profile:
        raise ValueError(
            f"num_seeds={config.num_seeds} cannot be traced "
            f"(profile={config.profile}): set profile=0, or trace one seed with "
            "num_seeds=1."
        )
    if config.num_seeds > 1 and config.kernel_on == "autoencoder":
        raise ValueError(
            f"num_seeds={config.num_seeds} does not go with kernel_on='autoencoder', "
            "which trains another network first: train each with num_seeds=1 "
            f"(seed={config.seed}, ...)."
        )
    milestones = config.lr_milestones
    if (
        not isinstance(milestones, (tuple, list))
        or any(type(epoch) is not int or epoch < 1 for epoch in milestones)
        or list(milestones) != sorted(milestones)
    ):
        raise ValueError(
            f"lr_milestones={milestones!r} must be whole epochs in ascending order, "
            "from 1 on, such as (50, 100, 130)."
        )
    kernel, _ = kernels(config)
    check_ridge(
        config.ridge, config.batch_size, jnp.dtype(jnp.float32), largest_value(kernel)
    )


def model(
    config: ConfigDict, *, image_shape: tuple[int, int, int], num_classes: int
) -> models.KLN:
    """Makes the network of a configuration.

    Args:
      config: The configuration.
      image_shape: Height, width and channels of the images.
      num_classes: Number of classes.
    """
    return models.build(
        config.network,
        image_shape=image_shape,
        num_classes=num_classes,
        latent_dim=config.latent_dim,
        normalise_z=config.normalise_z,
        width=config.width,
        dtype=jnp.dtype(config.dtype),
        axis_name=steps.AXIS,
    )


def optimizer(
    config: ConfigDict, *, steps_per_epoch: int
) -> optax.GradientTransformation:
    """Makes the optimiser of a configuration.

    Args:
      config: The configuration.
      steps_per_epoch: Steps in an epoch, the unit of its milestones.

    Raises:
      ValueError: If a milestone is at a step that cannot be counted.
    """
    milestones = [epoch * steps_per_epoch for epoch in config.lr_milestones]
    if max(milestones, default=0) >= _NUM_COUNTS:
        raise ValueError(
            f"lr_milestones={config.lr_milestones!r} must lie below step 2**31, with "
            f"{steps_per_epoch} steps an epoch."
        )
    return optimizers.optimizer(
        config.optimizer,
        optimizers.step_schedule(
            config.learning_rate,
            milestones=milestones,
            decay=config.lr_decay,
            warmup_steps=config.warmup_steps,
        ),
        momentum=config.momentum,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
    )


def kernels(config: ConfigDict) -> tuple[ComposableKernel, ComposableKernel]:
    """Returns the kernels on features and on labels.

    Args:
      config: The configuration.

    Raises:
      ValueError: If bandwidths will not do.
    """

    def mixture(key: str) -> ComposableKernel:
        try:
            return gaussian_mixture(config[key], reduction=config.kernel_reduction)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    on_features, on_labels = mixture("bandwidths"), mixture("label_bandwidths")
    return on_features, on_labels if config.label_kernel == "gaussian" else linear


def objective(config: ConfigDict) -> steps.Objective:
    """Returns the objective of a configuration.

    Args:
      config: The configuration.
    """
    if config.objective == "reconstruction":
        return objectives.reconstruction_objective
    weights = dict(
        reconstruction_weight=config.reconstruction_weight,
        confidence_weight=config.confidence_weight,
    )
    if config.objective == "cross_entropy":
        return functools.partial(objectives.cross_entropy_objective, **weights)
    kernel, label_kernel = kernels(config)
    return functools.partial(
        objectives.kln_objective,
        kernel=kernel,
        label_kernel=label_kernel,
        ridge=config.ridge,
        **weights,
    )


def embed(
    config: ConfigDict, model: models.KLN
) -> Callable[[Any, jax.Array], jax.Array] | None:
    """Returns what maps images to the features that the kernel acts on.

    Args:
      config: The configuration.
      model: The network.

    Returns:
      A function of the arrays of the embedding and of images, None for the network's
      own Z.
    """
    return _EMBEDDINGS[config.kernel_on](model)
