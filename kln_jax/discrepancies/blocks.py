"""Gram matrices of many points, of which a block of rows is held at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from kln_jax.discrepancies.float_arrays import as_floats, matmul
from kln_jax.discrepancies.kernels import Kernel, gram, takes_any_rank

# Small beside the sets of which memory is short.
_BLOCK_ROWS = 256


def gram_product(kernel: Kernel, a: Array, b: Array, W: Array) -> Array:
    """Returns K(a, b) W, by 256 rows of K at a time, also in the gradient.

    Args:
      kernel: A kernel. One that embeds its points does it once, with the whole K.
      a: Points, shape ``(n, ...)``.
      b: Points, shape ``(m, ...)``.
      W: Matrix, shape ``(m, k)``, of the type of K.

    Returns:
      The product, shape ``(n, k)``.
    """
    rows = len(a) if takes_any_rank(kernel) else _BLOCK_ROWS

    # Computed again in the gradient: no more than a block of the Gram matrix is held.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(block: Array) -> Array:
        return matmul(*as_floats(gram(kernel, block, b), W))

    num_whole = len(a) // rows
    products = []
    if num_whole:  # A loop of no block would be traced all the same.
        blocks = a[: num_whole * rows].reshape(num_whole, rows, *a.shape[1:])
        products.append(lax.map(product, blocks).reshape(-1, W.shape[1]))
    if num_whole * rows < len(a):
        products.append(product(a[num_whole * rows :]))
    return jnp.concatenate(products)


def own_values(kernel: Kernel, x: Array) -> Array:
    """Returns k(x, x) of each point.

    Args:
      kernel: A kernel.
      x: Points, shape ``(n, ...)``.

    Returns:
      The diagonal of the Gram matrix, shape ``(n,)``.
    """

    def own_value(point: Array) -> Array:
        return as_floats(gram(kernel, point[None], point[None]))[0][0, 0]

    rows = len(x) if takes_any_rank(kernel) else _BLOCK_ROWS
    values: Array = lax.map(own_value, x, batch_size=rows)
    return values
