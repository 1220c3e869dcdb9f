"""The network, optimiser, kernels and objective that a configuration describes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kln_jax.discrepancies.kernels import ComposableKernel, gaussian_mixture, linear
from kln_jax.networks import models
from kln_jax.training import fixed_embeddings, objectives, optimizers
from kln_jax.training.configuration import Config, prior_numbers

# From the arrays of an embedding and images to features.
Embed = Callable[[Any, jax.Array], jax.Array]

# Steps are counted in int32.
_NUM_COUNTS = 2**31


def model(
    config: Config,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    axis_name: str | None = None,
) -> models.KLN:
    """Makes the network of a configuration.

    Args:
      config: The configuration.
      image_shape: Height, width and channels of the images.
      num_classes: Number of classes.
      axis_name: Device axis over which batch statistics are shared; None for none.
    """
    return models.build(
        config.network,
        image_shape=image_shape,
        num_classes=num_classes,
        latent_dim=config.latent_dim,
        z_distance=config.z_distance,
        width=config.width,
        dtype=jnp.dtype(config.dtype),
        axis_name=axis_name,
    )


def optimizer(config: Config, *, steps_per_epoch: int) -> optax.GradientTransformation:
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
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
    )


def kernels(config: Config) -> tuple[ComposableKernel, ComposableKernel]:
    """Returns the kernels on features and on labels.

    Args:
      config: The configuration.
    """
    on_features = gaussian_mixture(config.bandwidths, reduction=config.kernel_reduction)
    if config.label_kernel == "linear":
        return on_features, linear
    return on_features, gaussian_mixture(reduction=config.kernel_reduction)


def objective(config: Config) -> objectives.Objective:
    """Returns the objective of a configuration.

    Args:
      config: The configuration.
    """
    one_way = _one_way(config)
    if config.pairing == "symmetric":
        return objectives.symmetric(one_way)
    return one_way


def _one_way(config: Config) -> objectives.Objective:
    if config.objective == "reconstruction":
        return objectives.reconstruction_objective
    if config.objective == "cross_entropy":
        return functools.partial(
            objectives.cross_entropy_objective,
            reconstruction_weight=config.reconstruction_weight,
            confidence_weight=config.confidence_weight,
        )
    kernel, label_kernel = kernels(config)
    return functools.partial(
        objectives.kln_objective,
        kernel=kernel,
        label_kernel=label_kernel,
        ridge=config.ridge,
        reconstruction_weight=config.reconstruction_weight,
        confidence_weight=config.confidence_weight,
    )


def class_prior(
    config: Config, labels: np.ndarray, num_classes: int
) -> np.ndarray | None:
    """Returns the prior of the confidence term; None for the uniform one.

    Args:
      config: The configuration.
      labels: Class numbers of the labelled images, shape ``(L,)``.
      num_classes: Number C of classes.

    Returns:
      Probabilities, shape ``(C,)``, float32.

    Raises:
      ValueError: If the prior has another number of classes.
    """
    if config.class_prior == "uniform":
        return None
    if config.class_prior == "labelled":
        counts = np.bincount(labels, minlength=num_classes)
        return (counts / len(labels)).astype(np.float32)
    prior = prior_numbers(config.class_prior)
    if len(prior) != num_classes:
        raise ValueError(
            f"class_prior={config.class_prior!r} has {len(prior)} numbers, but there "
            f"are {num_classes} classes."
        )
    return np.asarray(prior, np.float32)


def embed(config: Config, model: models.KLN) -> Embed | None:
    """Returns what maps images to the features that the kernel acts on.

    Args:
      config: The configuration.
      model: The network.

    Returns:
      A function of the arrays of the embedding and of images, None for the network's
      own Z.
    """
    by_key: dict[str, Embed | None] = {
        "z": None,
        "pixels": fixed_embeddings.pixels,
        "pca": fixed_embeddings.project,
        "autoencoder": functools.partial(fixed_embeddings.encode, model=model),
    }
    return by_key[config.kernel_on]
