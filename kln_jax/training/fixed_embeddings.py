"""Fixed embeddings of images, for a kernel that is not learned.

Each takes its arrays and images in [0, 1], shape ``(n, h, w, c)``, and returns
features ``(n, d)``. The arrays lie on each device beside the training set.
"""

from __future__ import annotations

import numpy as np
from jax import Array

from kln_jax.discrepancies.float_arrays import matmul
from kln_jax.networks.models import KLN
from kln_jax.training import steps
from kln_jax.training.steps import TrainState

# Images at a time: 600,000 in colour would be 15 GB in float64.
_BLOCK = 10_000


def pixels(arrays: tuple[()], images: Array) -> Array:
    """The identity: each value of an image is a feature.

    Args:
      arrays: None, an empty tuple.
      images: Images in [0, 1], shape ``(n, h, w, c)``.

    Returns:
      Features, shape ``(n, h w c)``.

    Examples:
      >>> pixels((), np.ones((5, 28, 28, 1))).shape
      (5, 784)
    """
    del arrays  # It has none.
    return images.reshape(len(images), -1)


def project(arrays: tuple[Array, Array], images: Array) -> Array:
    """Projects pixels on `principal_components`, without scaling.

    Args:
      arrays: The mean image, shape ``(h w c,)``, and the components, ``(h w c, d)``.
      images: Images in [0, 1], shape ``(n, h, w, c)``.

    Returns:
      Features, shape ``(n, d)``.
    """
    mean, components = arrays
    return matmul(pixels((), images) - mean[None], components)


def encode(state: TrainState, images: Array, *, model: KLN) -> Array:
    """Embeds images by the encoder of a trained network.

    Args:
      state: Its trained state.
      images: Images in [0, 1], shape ``(n, h, w, c)``.
      model: The network.

    Returns:
      Z, shape ``(n, latent_dim)``.
    """
    return steps.apply_trained(model, state, images).z


def check_count(count: int, size: int) -> None:
    """Refuses more principal components than an image has values.

    Args:
      count: How many components.
      size: How many values.

    Raises:
      ValueError: If there are fewer values.
    """
    if count > size:
        raise ValueError(
            f"latent_dim={count} must be at most {size}, the number of values of an "
            "image, where kernel_on='pca'."
        )


def principal_components(
    images: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fits the arrays of `project`.

    Args:
      images: Training images, shape ``(N, h, w, c)``, uint8.
      count: How many components, those of the largest variance.

    Returns:
      The mean image, shape ``(h w c,)``, and the components, orthonormal columns
      ``(h w c, count)``, both float32.

    Raises:
      ValueError: If an image has fewer values than there are components.

    Examples:
      >>> images = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 1), np.uint8)
      >>> arrays = principal_components(images, 3)
      >>> project(arrays, images / 255.0).shape
      (50, 3)
    """
    size = images[0].size
    check_count(count, size)
    mean, second_moment = np.zeros(size), np.zeros((size, size))
    for start in range(0, len(images), _BLOCK):
        x = images[start : start + _BLOCK].reshape(-1, size) / 255.0
        mean += x.sum(axis=0) / len(images)
        second_moment += x.T @ x / len(images)
    _, vectors = np.linalg.eigh(second_moment - np.outer(mean, mean))
    components = vectors[:, ::-1][:, :count]
    return mean.astype(np.float32), components.astype(np.float32)
