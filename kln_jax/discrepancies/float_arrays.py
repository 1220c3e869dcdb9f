"""Arrays as kernel algebra takes them: their types, and products at full precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike


def is_real(dtype: DTypeLike) -> bool:
    """Returns whether a type is one of real numbers.

    Args:
      dtype: Of an array.

    Returns:
      Whether it is boolean, integer or floating.
    """
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def as_jax(array: ArrayLike) -> Array:
    """Returns an array of JAX; integers that do not fit in its own become floats.

    Args:
      array: An array or a list, of any type that JAX has.

    Returns:
      The array. Of JAX or NumPy, it keeps its type where JAX has that.
    """
    if hasattr(array, "__array__") and not isinstance(array, Array):
        array = np.asarray(array)
        if not array.dtype.isnative:  # As files hold them: HDF5, FITS, IDX.
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.kind in "iu" and array.size:
            # JAX would let them wrap around.
            bounds = np.iinfo(jnp.asarray(array.ravel()[:0]).dtype)
            if not bounds.min <= array.min() <= array.max() <= bounds.max:
                return jnp.asarray(array, float)
    try:
        return jnp.asarray(array)
    except OverflowError:  # Of Python's integers.
        return jnp.asarray(array, float)


def _as_real(array: ArrayLike) -> Array:
    try:
        converted = as_jax(array)
    except TypeError:
        dtype = getattr(array, "dtype", type(array).__name__)
    else:
        dtype = converted.dtype
        if is_real(dtype):
            return converted
    raise ValueError(f"An array of {dtype} was given, but must be of real numbers.")


def as_floats(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Returns the arrays in float32, or in float64 if one of them is.

    Kernel algebra needs float32 at least: with bfloat16 or TF32 features the Gram
    matrices lose positive definiteness.

    Args:
      *arrays: Arrays or lists of real numbers.

    Returns:
      The arrays, of one type.

    Raises:
      ValueError: If an array is not of real numbers.
    """
    converted = [_as_real(array) for array in arrays]
    dtype = float_type(*converted)
    return tuple(array.astype(dtype) for array in converted)


def float_type(*arrays: Array) -> np.dtype[Any]:
    """Returns the type in which arrays are computed.

    Args:
      *arrays: Of any types.

    Returns:
      float32, or float64 if one of them is.
    """
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return np.dtype(np.float64 if wide else np.float32)


def matmul(a: Array, b: Array) -> Array:
    """Returns ``a @ b`` at full precision on every platform.

    Args:
      a: Matrix, shape ``(n, k)``.
      b: Matrix, shape ``(k, m)``, or vector, ``(k,)``.

    Returns:
      The product, shape ``(n, m)`` or ``(n,)``.
    """
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def check_key(key: Any) -> None:
    """Refuses a seed in the place of a random key.

    Args:
      key: What was given.

    Raises:
      ValueError: If it is not one random key, of JAX's new type or its old one.
    """
    is_key = isinstance(key, Array) and (
        key.ndim == 0
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        else key.ndim == 1 and key.dtype == jnp.uint32
    )
    if not is_key:
        raise ValueError(
            f"key={key!r} must be a random key, such as jax.random.key(0)."
        )
