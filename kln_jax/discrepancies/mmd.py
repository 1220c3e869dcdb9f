"""The maximum mean discrepancy (MMD) of two sets of points, without labels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kln_jax.discrepancies.blocks import gram_product, own_values
from kln_jax.discrepancies.float_arrays import as_floats
from kln_jax.discrepancies.kernels import (
    Kernel,
    as_features,
    check_kernel,
    gaussian_mixture,
    gram,
    takes_any_rank,
)


def mmd(
    x: ArrayLike,
    y: ArrayLike,
    *,
    kernel: Kernel = gaussian_mixture((1, 3, 5, 7, 9)),
    unbiased: bool = False,
) -> Array:
    r"""Squared MMD between the distributions of two sets of points.

    .. math::
      \mathrm{MMD}^2 = \frac{1}{n^2} \sum_{i,j} k(x_i, x_j)
          + \frac{1}{m^2} \sum_{i,j} k(y_i, y_j)
          - \frac{2}{n m} \sum_{i,j} k(x_i, y_j)

    is the V-statistic: the squared distance of two mean embeddings, never negative up
    to rounding, and too large on average. The U-statistic, ``unbiased=True``, leaves
    the pairs i = j out of the first two sums and divides them by n(n - 1) and
    m(m - 1): its mean is the squared MMD of the distributions, 0 if they are equal, so
    that it takes either sign.

    `cmmd` compares P(Y|X), this compares P(X). The function is compiled,
    differentiable in both arrays, and works under `jax.vmap`. It holds 256 rows of the
    Gram matrix of all points at a time: with its gradient it takes about 0.5 GB for
    25,000 + 25,000 points in float32. With a ``kernel.on(h)`` it holds the whole
    matrix, 10 GB: embed first.

    Args:
      x: Points, shape ``(n, d)``, or of any rank with ``kernel.on(h)``.
      y: Points, shape ``(m, d)``.
      kernel: Kernel on points.
      unbiased: Whether to return the U-statistic, which takes two points a set.

    Returns:
      The squared MMD, a float32 scalar (float64 if an argument is).

    Raises:
      ValueError: If shapes do not fit, or there are too few points.

    Examples:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[0.0], [1.0]])
      >>> print(f"{abs(mmd(x, x)):.2f} {mmd(x, x + 3.0):.2f}")
      0.00 1.11

    References:
      Gretton et al., A kernel two-sample test, JMLR 13, 2012, Equations 3 and 5.
    """
    check_kernel("kernel", kernel)
    shapes = np.shape(x), np.shape(y)
    if not (
        all(shape and 0 not in shape for shape in shapes)
        and all(takes_any_rank(kernel) or len(shape) == 2 for shape in shapes)
        and shapes[0][1:] == shapes[1][1:]
    ):
        raise ValueError(
            "mmd takes points (n, d) and (m, d), none empty, but got x "
            f"{shapes[0]}, y {shapes[1]}. Flatten images with x.reshape(len(x), -1), "
            "or embed them by a kernel.on(h)."
        )
    x, y = as_features(kernel, x, y)
    if unbiased and min(len(x), len(y)) < 2:
        raise ValueError(
            f"The unbiased mmd takes two points a set at least, but got {len(x)} and "
            f"{len(y)}. Use unbiased=False."
        )
    value: Array = _mmd(x, y, kernel=kernel, unbiased=unbiased)
    return value


@functools.partial(jax.jit, static_argnames=("kernel", "unbiased"))
def _mmd(x: Array, y: Array, *, kernel: Kernel, unbiased: bool) -> Array:
    n, m = len(x), len(y)
    z = jnp.concatenate([x, y])
    dtype = jax.eval_shape(lambda z: as_floats(gram(kernel, z, z))[0], z[:1]).dtype
    s, t = jnp.full(n, 1 / n, dtype), jnp.full(m, 1 / m, dtype)
    # The means over s less those over t; and of unbiased ones each.
    means = [jnp.concatenate([s, -t])]
    if unbiased:
        means += [jnp.pad(s, (0, m)), jnp.pad(t, (n, 0))]
    W = jnp.stack(means, axis=1)
    total = jnp.sum(W * gram_product(kernel, z, z, W), axis=0)
    value: Array = total[0]
    if unbiased:
        diagonal = own_values(kernel, z)
        for mean, own in ((total[1], diagonal[:n]), (total[2], diagonal[n:])):
            value += (mean - jnp.mean(own)) / (len(own) - 1)
    return value
