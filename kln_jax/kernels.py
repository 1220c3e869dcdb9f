"""Kernels: callables that map two sets of vectors to their Gram matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


class Kernel(Protocol):
    """A positive semi-definite kernel: ``(n, d), (m, d) -> (n, m)``.

    Any callable of this form serves. One that is hashable and equal to another of
    the same settings, as those of this module are, is compiled once.
    """

    def __call__(self, a: Array, b: Array, /) -> Array:
        """Returns the Gram matrix of the rows of ``a`` and the rows of ``b``."""


def as_floats(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Returns the arrays in float32, or in float64 if one of them is.

    Kernel algebra needs float32 at least: with bfloat16 or TF32 features the Gram
    matrices lose positive definiteness.
    """
    converted = [jnp.asarray(array) for array in arrays]
    wide = any(array.dtype == jnp.float64 for array in converted)
    return tuple(
        array.astype(jnp.float64 if wide else jnp.float32) for array in converted
    )


def matmul(a: Array, b: Array) -> Array:
    """Returns ``a @ b`` at full precision on every platform."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _vectors(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Returns ``a`` and ``b`` as two sets of vectors of one length and dtype."""
    a, b = as_floats(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            "A kernel takes two sets of vectors, (n, d) and (m, d), but got shapes "
            f"{a.shape} and {b.shape}. Flatten images with x.reshape(len(x), -1)."
        )
    return a, b


def squared_distances(a: ArrayLike, b: ArrayLike) -> Array:
    r"""Squared Euclidean distances between the rows of two matrices.

    .. math:: D_{ij} = \|a_i - b_j\|^2 = \|a_i\|^2 + \|b_j\|^2 - 2 a_i^\top b_j

    The rows are centred first, so that the expansion keeps its precision far from
    the origin, and rounding below zero is clipped. What remains is a rounding error
    of the order of float32's epsilon (1e-7) times the largest squared distance from
    the centre. No ``(n, m, d)`` array is formed.

    Args:
      a: Vectors, shape ``(n, d)``.
      b: Vectors, shape ``(m, d)``.

    Returns:
      Distances, shape ``(n, m)``, float32 (float64 if an argument is).

    Raises:
      ValueError: If the arguments are not two matrices of equal width.

    Examples:
      >>> squared_distances([[0.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]])
      Array([[25.,  0.]], dtype=float32)
    """
    a, b = _vectors(a, b)
    # A shift does not change a distance, so the centre carries no gradient.
    centre = lax.stop_gradient(jnp.mean(b, axis=0, keepdims=True))
    a, b = a - centre, b - centre
    norms_a = jnp.sum(a * a, axis=1)[:, None]
    norms_b = jnp.sum(b * b, axis=1)[None, :]
    return jnp.maximum(norms_a + norms_b - 2.0 * matmul(a, b.T), 0.0)


def linear(a: ArrayLike, b: ArrayLike) -> Array:
    r"""The linear kernel, :math:`k(a, b) = a^\top b`.

    On one-hot labels it is the delta kernel.

    Args:
      a: Vectors, shape ``(n, d)``.
      b: Vectors, shape ``(m, d)``.

    Returns:
      Gram matrix, shape ``(n, m)``, float32 (float64 if an argument is).

    Raises:
      ValueError: If the arguments are not two matrices of equal width.

    Examples:
      >>> linear([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]])
      Array([[1., 0.]], dtype=float32)
    """
    a, b = _vectors(a, b)
    return matmul(a, b.T)


@dataclasses.dataclass(frozen=True)
class _GaussianMixture:
    """See `gaussian_mixture`. Equal settings compare equal and are compiled once."""

    bandwidths: tuple[float, ...]
    reduction: str

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        distances = squared_distances(a, b)
        # Added one by one: a (bandwidths, n, m) array is never formed.
        gram = jnp.zeros_like(distances)
        for bandwidth in self.bandwidths:
            gram += jnp.exp(distances * (-0.5 / bandwidth))
        return gram / len(self.bandwidths) if self.reduction == "mean" else gram


def gaussian_mixture(
    bandwidths: Sequence[float] = (1, 3, 5, 7, 9),
    *,
    reduction: Literal["mean", "sum"] = "mean",
) -> Callable[[ArrayLike, ArrayLike], Array]:
    r"""A mixture of Gaussian kernels.

    .. math:: k(a, b) = \frac{1}{B} \sum_{i=1}^{B} \exp(-\|a - b\|^2 / (2 b_i))

    A bandwidth is a variance, in squared units of the features. With the mean,
    :math:`k(x, x) = 1`; with the sum, :math:`k(x, x) = B`.

    Args:
      bandwidths: The variances :math:`b_i > 0`.
      reduction: Whether to take the ``"mean"`` or the ``"sum"`` over bandwidths.

    Returns:
      A `Kernel`.

    Raises:
      ValueError: If there is no bandwidth, one is not positive and finite, or the
        reduction is unknown.

    Examples:
      >>> kernel = gaussian_mixture((1, 3, 5, 7, 9))
      >>> kernel([[0.0]], [[0.0]])
      Array([[1.]], dtype=float32)

    References:
      Section 4 of arXiv 2008.10165.
    """
    values = tuple(float(bandwidth) for bandwidth in bandwidths)
    if not values or not all(0.0 < value < float("inf") for value in values):
        raise ValueError(
            f"bandwidths={values} must be one or more positive, finite variances, "
            "such as (1, 3, 5, 7, 9)."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction={reduction!r} must be "mean" or "sum".')
    return _GaussianMixture(values, reduction)
