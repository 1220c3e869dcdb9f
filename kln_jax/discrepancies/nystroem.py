r"""CMMD of many points, through a low-rank approximation of the kernel (Nystroem).

The kernel is replaced by that of its projection on m landmarks z, whose features have
m coordinates,

.. math:: \phi(x) = B\, k(z, x), \qquad B K_{zz} B^\top = I,

so that the two kernel ridge regressors of `kln_jax.cmmd` become m x C matrices,

.. math::
  W = (\Phi \Phi^\top + \lambda I)^{-1} \Phi Y, \qquad
  \mathrm{CMMD} \approx \|W_s - W_t\|^2 .

With all points as landmarks it is exact, but for directions that are rounding.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from kln_jax.discrepancies.cmmd import check_ridge, check_sets, solve_both
from kln_jax.discrepancies.float_arrays import as_floats, check_key, float_type, matmul
from kln_jax.discrepancies.kernels import Kernel, gaussian_mixture, gram, largest_value

# Large enough for products at full speed, small beside a set that needs landmarks.
_BLOCK_ROWS = 1024


def cmmd_nystroem(
    x_s: ArrayLike,
    y_s: ArrayLike,
    x_t: ArrayLike,
    y_t: ArrayLike,
    *,
    num_landmarks: int,
    key: Array,
    kernel: Kernel = gaussian_mixture((1, 3, 5, 7, 9)),
    ridge: float | Array = 0.1,
) -> Array:
    r"""CMMD of large sets from m landmarks, with the linear label kernel.

    Time grows with (n_s + n_t) m^2 + m^3 and memory with (n_s + n_t)(d + C) + m^2, in
    place of n^3 and n^2; the same holds of the gradient. Never negative, and zero for
    equal sets in any order up to rounding.

    Directions of the kernel below 8 eps (1e-6 in float32) of its strongest are left
    out, for they are rounding. With kernels wider than the data float32 loses some of
    the value to that, whatever m, and the more, the smaller the ridge is (see
    docs/numerics.md). float64 does not.

    Of the ridge only n * eps * k(x, x) is refused: no bound on the rounding is
    compared with the value, as `cmmd` does.

    The function is compiled, differentiable in its four arrays (for given random
    choices), and works under `jax.vmap`.

    Args:
      x_s: Features of set s, shape ``(n_s, d)``, or of any rank with
        ``kernel.on(h)``. For a large network h, embed first.
      y_s: One-hot labels or class probabilities of set s, shape ``(n_s, C)``.
      x_t: Features of set t, shape ``(n_t, d)``.
      y_t: One-hot labels or class probabilities of set t, shape ``(n_t, C)``.
      num_landmarks: How many points m to project on, at most n_s + n_t. The error
        falls with m: fast for few features and a wide kernel, slowly for many.
      key: Random key of the choice of landmarks; see `draw_landmarks`.
      kernel: Kernel on features.
      ridge: The regularisation lambda > 0, in units of the kernel. To regularise
        sets of other sizes alike, let it grow with them; the error falls with it.

    Returns:
      An approximation of `cmmd`, a float32 scalar (float64 if an argument is).

    Raises:
      ValueError: If shapes do not fit, the number of landmarks is not in range, or the
        ridge is not positive or is too small for the precision of the arrays.

    Examples:
      >>> import jax
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> x_s, x_t = (jax.random.normal(key, (300, 2)) for key in keys[:2])
      >>> y_s = jax.nn.one_hot((x_s[:, 0] > 0).astype(int), 2)
      >>> y_t = jax.nn.one_hot((x_t[:, 0] > 1).astype(int), 2)
      >>> from kln_jax import cmmd
      >>> exact = cmmd(x_s, y_s, x_t, y_t)
      >>> value = cmmd_nystroem(x_s, y_s, x_t, y_t, num_landmarks=60, key=keys[2])
      >>> bool(abs(value / exact - 1) < 0.05)
      True

    References:
      Williams and Seeger, Using the Nystroem method to speed up kernel machines,
      NIPS 2000; Equation 3 of arXiv 2008.10165.
    """
    arrays = check_sets("cmmd_nystroem", kernel, x_s=x_s, y_s=y_s, x_t=x_t, y_t=y_t)
    (n_s, n_t), largest = map(len, arrays[::2]), largest_value(kernel, *arrays[::2])
    check_ridge(ridge, max(n_s, n_t), float_type(*arrays), largest)
    check_key(key)
    if (
        not isinstance(num_landmarks, numbers.Integral)
        or not 1 <= num_landmarks <= n_s + n_t
    ):
        raise ValueError(
            f"num_landmarks={num_landmarks!r} must be a whole number from 1 to that of "
            f"points, {n_s} + {n_t} = {n_s + n_t}, such as {min(500, n_s + n_t)}."
        )
    value: Array = _cmmd_nystroem(
        *arrays,
        jnp.asarray(ridge, float),
        key,
        num_landmarks=int(num_landmarks),
        kernel=kernel,
    )
    return value


@functools.partial(jax.jit, static_argnames=("num_landmarks", "kernel"))
def _cmmd_nystroem(
    x_s: Array,
    y_s: Array,
    x_t: Array,
    y_t: Array,
    ridge: Array,
    key: Array,
    *,
    num_landmarks: int,
    kernel: Kernel,
) -> Array:
    z = draw_landmarks(key, x_s, x_t, num_landmarks)
    K, y_s, y_t = as_floats(gram(kernel, z, z), y_s, y_t)
    B = _whitening(K)

    def features(x: Array) -> Array:
        (K_xz,) = as_floats(gram(kernel, x, z))
        return matmul(B, K_xz.T)

    ridge = ridge.astype(K.dtype)
    W_s, W_t = solve_both(
        _moments(features, x_s, y_s), _moments(features, x_t, y_t), ridge
    )
    return jnp.sum((W_s - W_t) ** 2)


def _whitening(K: Array) -> Array:
    """Returns B, of which B K B^T is the identity, or 0 where K is but rounding.

    Features of such directions would be noise: in float32 and with smooth kernels, the
    error would grow with the number of landmarks.
    """
    # Constant, for eigenvectors of equal eigenvalues have no gradient. B has that of
    # the Cholesky factor, which is the identity up to rounding.
    eigenvalues, eigenvectors = jnp.linalg.eigh(lax.stop_gradient(K))
    kept = eigenvalues > 8.0 * np.finfo(K.dtype).eps * eigenvalues[-1]
    scales = jnp.where(kept, lax.rsqrt(jnp.where(kept, eigenvalues, 1.0)), 0.0)
    T = eigenvectors * scales[None, :]
    rest = jnp.diag((~kept).astype(K.dtype))
    L = jnp.linalg.cholesky(matmul(T.T, matmul(K, T)) + rest)
    return solve_triangular(L, T.T, lower=True)


def _moments(
    features: Callable[[Array], Array], x: Array, y: Array
) -> tuple[Array, Array]:
    """Returns Phi Phi^T and Phi Y of one set, from sums over blocks of its rows."""
    n = len(x)
    num_blocks = -(-n // _BLOCK_ROWS)
    rows = -(-n // num_blocks)
    padding = num_blocks * rows - n

    # Computed again in the gradient: what is kept of a block is x and y.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def products(x: Array, y: Array, weights: Array) -> tuple[Array, Array]:
        Phi = features(x) * weights
        return matmul(Phi, Phi.T), matmul(Phi, y)

    def add(
        sums: tuple[Array, Array], block: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], None]:
        return jax.tree.map(jnp.add, sums, products(*block)), None

    # Filled up with points of the set, for which every embedding is defined.
    x, y = (jnp.concatenate([array, array[:padding]]) for array in (x, y))
    weights = (jnp.arange(num_blocks * rows) < n).astype(y.dtype)
    blocks = tuple(
        array.reshape(num_blocks, rows, *array.shape[1:]) for array in (x, y)
    )
    blocks += (weights.reshape(num_blocks, 1, rows),)
    shapes = jax.eval_shape(products, *(array[0] for array in blocks))
    zeros = jax.tree.map(lambda sum_: jnp.zeros(sum_.shape, sum_.dtype), shapes)
    sums: tuple[Array, Array] = lax.scan(add, zeros, blocks)[0]
    return sums


def draw_landmarks(key: Array, x_s: Array, x_t: Array, num_landmarks: int) -> Array:
    """Draws landmarks from two sets, without replacement.

    Half of them come from each set, or all points of a set that has fewer: both
    regressors need landmarks near their own points.

    Args:
      key: Random key.
      x_s: Points of set s, shape ``(n_s, ...)``.
      x_t: Points of set t, shape ``(n_t, ...)``.
      num_landmarks: How many, at most n_s + n_t.

    Returns:
      The landmarks, shape ``(num_landmarks, ...)``.
    """
    num_s = min(len(x_s), max(num_landmarks // 2, num_landmarks - len(x_t)))
    key_s, key_t = jax.random.split(key)
    from_s = jax.random.permutation(key_s, len(x_s))[:num_s]
    from_t = jax.random.permutation(key_t, len(x_t))[: num_landmarks - num_s]
    return jnp.concatenate([x_s[from_s], x_t[from_t]])
