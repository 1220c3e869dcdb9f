r"""The conditional maximum mean discrepancy (CMMD).

Two labelled sets, s and t, give two kernel ridge regressions from features x to the
feature map of labels y. The CMMD is the squared distance of the two conditional
embedding operators in the reproducing-kernel Hilbert space,

.. math::
  \mathrm{CMMD} = \langle H_s, L_s\rangle + \langle H_t, L_t\rangle
      - 2 \langle M, L_{st}\rangle,
  \qquad H = \tilde K^{-1} K \tilde K^{-1},
  \quad M = \tilde K_s^{-1} K_{ts}^\top \tilde K_t^{-1},
  \quad \tilde K = K + \lambda I,

where K are Gram matrices of features, L of labels, lambda is the ridge, and
:math:`\langle\cdot,\cdot\rangle` the sum of elementwise products (Equations 3 and 5
of arXiv 2008.10165). It is zero for equal sets in any order, symmetric in s and t,
and non-negative up to rounding, which is relative to the traces and not to their
difference.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve
from jax.typing import ArrayLike, DTypeLike

from kln_jax import backend
from kln_jax.discrepancies.blocks import gram_product, own_values
from kln_jax.discrepancies.float_arrays import (
    as_floats,
    float_type,
    is_real,
    matmul,
)
from kln_jax.discrepancies.kernels import (
    Kernel,
    as_features,
    check_kernel,
    gaussian_mixture,
    gram,
    largest_value,
    linear,
    takes_any_rank,
)


def cmmd(
    x_s: ArrayLike,
    y_s: ArrayLike,
    x_t: ArrayLike,
    y_t: ArrayLike,
    *,
    kernel: Kernel = gaussian_mixture((1, 3, 5, 7, 9)),
    label_kernel: Kernel = linear,
    ridge: float | Array = 0.1,
    weights_s: ArrayLike | None = None,
    weights_t: ArrayLike | None = None,
) -> Array:
    r"""CMMD between P(Y|X) of set s and P(Y|X) of set t.

    With the linear label kernel, L = Y Y^T and only C right-hand sides are solved
    for instead of 3n:

    .. math::
      A = \tilde K^{-1} Y, \qquad \mathrm{CMMD} = \langle A_s, K_s A_s\rangle
          + \langle A_t, K_t A_t\rangle - 2 \langle A_t, K_{ts} A_s\rangle
          = \langle D, K D\rangle,
      \quad D = \begin{pmatrix} A_s \\ -A_t \end{pmatrix},

    with K of all points of s and t.

    Weights :math:`w_i > 0` give the embeddings that minimise

    .. math:: \sum_i w_i \|\psi(y_i) - C \phi(x_i)\|^2 + \lambda \|C\|^2,
      \qquad \tilde K = K + \lambda W^{-1},

    with W their diagonal matrix. A point of weight 2 counts as two points, and weights
    of 1 change nothing.

    The function is compiled, differentiable in its arrays, and works under `jax.vmap`.
    Features and labels of any number type are computed in float32 (float64 if one of
    them is float64).

    Where rounding in float32 may be more than a thousandth of the value, it is computed
    again in float64, and returned in float32. This takes a kernel that gives float64
    of float64, and arrays that are known. Under jit, vmap and grad float32 stays, whose
    rounding is relative to the traces :math:`\langle A, K A\rangle`, and may be more
    of the CMMD of nearly equal sets.

    A ridge is refused with which rounding may be more than a thousandth of these
    traces. Under jit and vmap no value is there to look at. There only a ridge below
    n * eps * k(x, x), or not positive, gives NaN, a traced one too. Call the function
    once as it is, on typical arrays, to have it checked.

    Up to 4,096 points, of both sets together, the Gram matrix of all is held. Of more,
    with the linear label kernel and no ``kernel.on(h)``, one set's is held at a time,
    to be factorised in a copy, and of the rest 256 rows; the gradient factorises
    again. The peak is about three and a half such matrices (measured at 6,000 points a
    set), of which one of 25,000 points takes 2.5 GB in float32, and twice that where
    float64 is needed.

    Args:
      x_s: Features of set s, shape ``(n_s, d)``. A ``kernel.on(h)`` takes images or
        whatever h takes, ``(n_s, ...)``, of any type, as they are.
      y_s: One-hot labels or class probabilities of set s, shape ``(n_s, C)``.
      x_t: Features of set t, shape ``(n_t, d)``, of the same rank.
      y_t: One-hot labels or class probabilities of set t, shape ``(n_t, C)``.
      kernel: Kernel on features. A kernel that is made anew for each call and does
        not compare equal is compiled anew.
      label_kernel: Kernel on labels.
      ridge: The regularisation lambda > 0, in units of the kernel.
      weights_s: Weights of the points of set s, shape ``(n_s,)``; None for 1.
      weights_t: Weights of the points of set t, shape ``(n_t,)``; None for 1.

    Returns:
      The CMMD, a float32 scalar (float64 if an argument is).

    Raises:
      ValueError: If shapes do not fit, a weight is not positive, or the ridge is not
        positive or is too small for the precision of the arrays, and, but under jit,
        for these points.

    Examples:
      >>> import jax.numpy as jnp
      >>> x, y = jnp.array([[0.0], [4.0]]), jnp.eye(2)
      >>> print(f"{abs(cmmd(x, y, x, y)):.4f} {cmmd(x, y, x, y[::-1]):.4f}")
      0.0000 3.9519

    References:
      Equations 3 and 5 of arXiv 2008.10165; Ren et al., Conditional Generative
      Moment-Matching Networks, arXiv 1606.04218.
    """
    arrays = check_sets(
        "cmmd", kernel, label_kernel, x_s=x_s, y_s=y_s, x_t=x_t, y_t=y_t
    )
    x_s, y_s, x_t, y_t = arrays
    dtype = float_type(*arrays)
    weights = None
    if weights_s is not None or weights_t is not None:
        weights = (
            _weights("weights_s", weights_s, len(x_s), dtype),
            _weights("weights_t", weights_t, len(x_t), dtype),
        )
    n, largest = max(len(x_s), len(x_t)), largest_value(kernel, x_s, x_t)
    check_ridge(ridge, n, dtype, largest * _largest_weight(weights))
    options = dict(kernel=kernel, label_kernel=label_kernel)
    value: Array
    value, error, traces = _cmmd(*arrays, weights, jnp.asarray(ridge, float), **options)
    if isinstance(error, jax.core.Tracer):
        return value
    # Under grad alone the error is known, and the value is not.
    if not isinstance(value, jax.core.Tracer) and not error <= 1e-3 * value:
        wide = _cmmd_in_float64(arrays, weights, ridge, **options)
        if wide is not None:
            value, error, traces = (jnp.asarray(part, dtype) for part in wide)
    _check_error(error, traces, ridge, arrays)
    return value


def _weights(name: str, weights: ArrayLike | None, n: int, dtype: DTypeLike) -> Array:
    """Returns the weights of a set, or refuses them."""
    if weights is None:
        return jnp.ones(n, dtype)
    (array,) = as_floats(weights)
    if array.shape != (n,):
        raise ValueError(
            f"{name} {array.shape} must be one weight a point, of shape ({n},)."
        )
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if not ((values > 0) & (values < np.inf)).all():
            raise ValueError(
                f"{name} has {values.min():g} to {values.max():g}, but weights must be "
                "positive and finite: leave points of weight 0 out."
            )
    return array.astype(dtype)


def _largest_weight(weights: tuple[Array, Array] | None) -> float:
    """Returns the largest weight; 1 if not known."""
    if weights is None or any(isinstance(w, jax.core.Tracer) for w in weights):
        return 1.0
    return max(float(np.max(np.asarray(w))) for w in weights)


def _cmmd_in_float64(
    arrays: Sequence[Array],
    weights: tuple[Array, Array] | None,
    ridge: float | Array,
    *,
    kernel: Kernel,
    label_kernel: Kernel,
) -> tuple[np.ndarray, ...] | None:
    """Returns what `_cmmd` does of float32 arrays, in float64; None if it cannot."""
    known = jax.tree.leaves((arrays, weights, ridge))
    if (
        takes_any_rank(kernel)  # Its points are as they are, and so is what it gives.
        or float_type(*arrays) == np.float64
        or any(isinstance(array, jax.core.Tracer) for array in known)
    ):
        return None
    in_float64 = functools.partial(np.asarray, dtype=np.float64)
    with jax.enable_x64(True):
        wide = [jnp.asarray(in_float64(array)) for array in arrays]
        grams = (
            jax.eval_shape(kernel, *wide[::2]),
            jax.eval_shape(label_kernel, *wide[1::2]),
        )
        if any(gram_.dtype != np.float64 for gram_ in grams):
            return None
        found = _cmmd(
            *wide,
            jax.tree.map(lambda w: jnp.asarray(in_float64(w)), weights),
            jnp.asarray(float(ridge)),
            kernel=kernel,
            label_kernel=label_kernel,
        )
        return tuple(map(np.asarray, found))


# Of so many points the Gram matrix is held whole: 64 MB in float32.
_MOST_WHOLE = 4096


@functools.partial(jax.jit, static_argnames=("kernel", "label_kernel"))
def _cmmd(
    x_s: Array,
    y_s: Array,
    x_t: Array,
    y_t: Array,
    weights: tuple[Array, Array] | None,
    ridge: Array,
    *,
    kernel: Kernel,
    label_kernel: Kernel,
) -> tuple[Array, Array, Array]:
    """Returns the CMMD, a bound on its rounding, and its two traces together."""
    n = len(x_s)
    x = jnp.concatenate([x_s, x_t])
    roots = None if weights is None else jnp.sqrt(jnp.concatenate(weights))
    is_whole = len(x) <= _MOST_WHOLE or takes_any_rank(kernel)
    if label_kernel == linear and not is_whole:
        return _cmmd_by_blocks(x_s, y_s, x_t, y_t, roots, ridge, kernel=kernel)
    # From one Gram matrix of all points: equal points of s and t have equal rows in
    # it, to the last bit, so that what should cancel does.
    K, y_s, y_t = as_floats(gram(kernel, x, x), y_s, y_t)
    if roots is not None:
        # With V = W^-1/2 A, (W^1/2 K W^1/2 + ridge I) V = W^1/2 Y: weighted points are
        # solved for as others are.
        K *= roots[:, None] * roots[None, :]
    if label_kernel != linear:
        y = jnp.concatenate([y_s, y_t])
        K, L = as_floats(K, gram(label_kernel, y, y))
        if roots is not None:
            L *= roots[:, None] * roots[None, :]
        grams = K[:n, :n], K[n:, n:], K[n:, :n], L[:n, :n], L[n:, n:], L[:n, n:]
        found: tuple[Array, Array, Array] = _trace(*grams, ridge)
        return found
    if roots is not None:
        y_s, y_t = y_s * roots[:n, None], y_t * roots[n:, None]
    ridge = _or_nan(ridge, jnp.diagonal(K), max(n, len(x_t)))
    A_s, A_t = solve_both((K[:n, :n], y_s), (K[n:, n:], y_t), ridge)
    return _squared_distance(K, A_s, A_t), *_error(A_s, y_s, A_t, y_t, ridge)


def _cmmd_by_blocks(
    x_s: Array,
    y_s: Array,
    x_t: Array,
    y_t: Array,
    roots: Array | None,
    ridge: Array,
    *,
    kernel: Kernel,
) -> tuple[Array, Array, Array]:
    """Returns what `_cmmd` does, with one set's Gram matrix at a time."""
    n = len(x_s)
    x = jnp.concatenate([x_s, x_t])
    diagonal, y = as_floats(own_values(kernel, x), jnp.concatenate([y_s, y_t]))
    roots = jnp.ones_like(diagonal) if roots is None else roots
    ridge = _or_nan(ridge, diagonal * roots**2, max(n, len(x_t)))
    y *= roots[:, None]
    V_s = _solve_by_blocks(kernel, x_s, roots[:n], y[:n], ridge)
    # The zero makes the second wait for the first, and the reverse in the gradient.
    y_t = y[n:] + 0.0 * V_s[0, 0]
    V_t = _solve_by_blocks(kernel, x_t, roots[n:], y_t, ridge)
    difference = jnp.concatenate([V_s, -V_t]) * roots[:, None]
    value = jnp.sum(difference * gram_product(kernel, x, x, difference))
    return value, *_error(V_s, y[:n], V_t, y[n:], ridge)


def _solve_by_blocks(
    kernel: Kernel, x: Array, roots: Array, B: Array, ridge: Array
) -> Array:
    """Solves (W^1/2 K W^1/2 + ridge I) V = B, and keeps no matrix for the gradient.

    There it factorises again, and K has its derivative by blocks of its rows.
    """

    def times(V: Array) -> Array:
        product = gram_product(kernel, x, x, roots[:, None] * V)
        return roots[:, None] * product + ridge * V

    def solve_whole(_: Any, right: Array) -> Array:
        K, right = as_floats(gram(kernel, x, x), right)
        return _solve(K * roots[:, None] * roots[None, :], right, ridge)

    V: Array = lax.custom_linear_solve(times, B, solve_whole, symmetric=True)
    return V


def _error(
    A_s: Array, y_s: Array, A_t: Array, y_t: Array, ridge: Array
) -> tuple[Array, Array]:
    """Returns a bound on the rounding of a CMMD, and its traces, from coefficients."""
    squares = jnp.sum(A_s**2) + jnp.sum(A_t**2)
    # K A = y - ridge A, so that these are <A, K A>.
    traces = jnp.sum(A_s * y_s) + jnp.sum(A_t * y_t) - ridge * squares
    return _rounding(squares, len(A_s) + len(A_t)), lax.stop_gradient(traces)


def _rounding(squares: Array, num_points: int) -> Array:
    """Returns a bound on the rounding error of a CMMD, from |A_s|^2 + |A_t|^2.

    An error E of a Gram matrix, its rounding and that of its factor, moves the value by
    <A, E A> to first order. The factor was chosen on 2,400 problems of 10 to 1,000
    points a set, and held on 720 others: wherever the bound is below 0.001 of the
    traces, so is the error.
    """
    factor = max(8.0, num_points / 40) * float(np.finfo(squares.dtype).eps)
    return lax.stop_gradient(factor * squares)


def _or_nan(ridge: Array, diagonal: Array, n: int) -> Array:
    """Returns a ridge, or NaN of one that `check_ridge` refuses: it may be traced."""
    bound = n * np.finfo(diagonal.dtype).eps * jnp.max(diagonal)
    ridge = ridge.astype(diagonal.dtype)
    return jnp.where(ridge >= lax.stop_gradient(bound), ridge, jnp.nan)


def _squared_distance(K: Array, A_s: Array, A_t: Array) -> Array:
    """Returns <D, K D> of the coefficients of two regressors, K on all points."""
    difference = jnp.concatenate([A_s, -A_t])
    return jnp.sum(difference * matmul(K, difference))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConditionalEmbedding:
    r"""A kernel ridge regression, as `conditional_embedding` makes it.

    .. math:: \hat\mu(x) = \sum_i k(x, x_i) A_i, \qquad A = \tilde K^{-1} Y

    A pytree of two arrays: it goes through jit, vmap and grad.

    Attributes:
      x: The features, shape ``(n, d)``, or of any rank with ``kernel.on(h)``.
      coefficients: A, shape ``(n, C)``.
      kernel: The kernel on features.
    """

    x: Array
    coefficients: Array
    kernel: Kernel = dataclasses.field(metadata=dict(static=True))

    def predict(self, x_new: ArrayLike) -> Array:
        r"""The kernel ridge mean at new points, :math:`K(x_{new}, x) A`.

        The rows are regressed labels, not probabilities: they need not sum to 1.

        Args:
          x_new: Features, shape ``(m, d)``.

        Returns:
          Predictions, shape ``(m, C)``.

        Raises:
          ValueError: If the features are not of the shape of the first ones, or, of a
            ``kernel.on(h)``, not of their type.
        """
        shape = np.shape(x_new)
        if not shape or shape[1:] != self.x.shape[1:]:
            raise ValueError(
                f"x_new {shape} must be (m, ...) of the features of x {self.x.shape}."
            )
        x_new, _ = as_features(self.kernel, x_new, self.x)
        predictions: Array = _predict(self, x_new)
        return predictions

    def distance(self, other: ConditionalEmbedding) -> Array:
        r"""The squared distance to another embedding: `cmmd` of the two sets.

        .. math:: \|\hat\mu_s - \hat\mu_t\|^2 = \langle D, K D\rangle,
          \quad D = \begin{pmatrix} A_s \\ -A_t \end{pmatrix}

        in the reproducing-kernel Hilbert space, with the linear label kernel.

        Args:
          other: An embedding with an equal kernel and as many labels.

        Returns:
          The distance, a float32 scalar (float64 if an array is).

        Raises:
          ValueError: If the kernels, or the shapes of a point or label, differ, or
            ``other`` is no embedding.
        """
        if not isinstance(other, ConditionalEmbedding):
            raise ValueError(
                "distance takes another conditional_embedding, but got "
                f"{type(other).__name__}. Make one of its points and labels."
            )
        if self.kernel != other.kernel:
            raise ValueError(
                f"The kernels of the embeddings, {self.kernel} and {other.kernel}, "
                "must be equal: each has a space of its own."
            )
        shapes = [(z.x.shape, z.coefficients.shape) for z in (self, other)]
        if len({(x[1:], coefficients[1:]) for x, coefficients in shapes}) > 1:
            raise ValueError(
                "The embeddings must be of features and labels of one length, but "
                f"have x {shapes[0][0]} and {shapes[1][0]}, coefficients "
                f"{shapes[0][1]} and {shapes[1][1]}."
            )
        value: Array = _distance(self, other)
        return value


@jax.jit
def _predict(embedding: ConditionalEmbedding, x_new: Array) -> Array:
    K_new = gram(embedding.kernel, x_new, embedding.x)
    return matmul(*as_floats(K_new, embedding.coefficients))


@jax.jit
def _distance(s: ConditionalEmbedding, t: ConditionalEmbedding) -> Array:
    x = jnp.concatenate(as_features(s.kernel, s.x, t.x))
    K = gram(s.kernel, x, x)
    return _squared_distance(*as_floats(K, s.coefficients, t.coefficients))


def conditional_embedding(
    x: ArrayLike,
    y: ArrayLike,
    *,
    kernel: Kernel = gaussian_mixture((1, 3, 5, 7, 9)),
    ridge: float | Array = 0.1,
) -> ConditionalEmbedding:
    r"""Regresses labels on features: the conditional embedding of P(Y|X).

    Its ``predict`` is the kernel ridge mean, and the ``distance`` of two of them is
    the `cmmd` of their sets, which this lets be taken apart: each set is solved for
    once, however many others it is compared with.

    A ridge is refused, but under jit, with which rounding may be more than a thousandth
    of the trace :math:`\langle A, K A\rangle`; nothing is computed in float64 in its
    place. The rounding of a ``distance`` is relative to the traces too.

    Args:
      x: Features, shape ``(n, d)``, or of any rank with ``kernel.on(h)``.
      y: One-hot labels, class probabilities or other targets, shape ``(n, C)``.
      kernel: Kernel on features.
      ridge: The regularisation lambda > 0, in units of the kernel.

    Returns:
      The embedding, differentiable in both arrays.

    Raises:
      ValueError: If shapes do not fit, or the ridge is not positive or is too small
        for the precision of the arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> x, y = jnp.array([[0.0], [4.0]]), jnp.eye(2)
      >>> embedding = conditional_embedding(x, y)
      >>> embedding.predict(jnp.array([[0.5]])).argmax()
      Array(0, dtype=int32)
      >>> print(f"{embedding.distance(conditional_embedding(x, y[::-1])):.4f}")
      3.9519

    References:
      Song et al., Hilbert space embeddings of conditional distributions, ICML 2009.
    """
    x, y = check_sets("conditional_embedding", kernel, x=x, y=y)
    check_ridge(ridge, len(x), float_type(x, y), largest_value(kernel, x))
    embedding: ConditionalEmbedding
    embedding, error, trace = _conditional_embedding(
        x, y, jnp.asarray(ridge, float), kernel=kernel
    )
    _check_error(error, trace, ridge, (x, y))
    return embedding


@functools.partial(jax.jit, static_argnames="kernel")
def _conditional_embedding(
    x: Array, y: Array, ridge: Array, *, kernel: Kernel
) -> tuple[ConditionalEmbedding, Array, Array]:
    K, y = as_floats(gram(kernel, x, x), y)
    ridge = _or_nan(ridge, jnp.diagonal(K), len(K))
    A = _solve(K, y, ridge)
    embedding = ConditionalEmbedding(x, A, kernel)
    return embedding, *_error(A, y, A[:0], y[:0], ridge)


def cmmd_from_grams(
    K_s: ArrayLike,
    K_t: ArrayLike,
    K_ts: ArrayLike,
    L_s: ArrayLike,
    L_t: ArrayLike,
    L_st: ArrayLike,
    *,
    ridge: float | Array,
) -> Array:
    r"""CMMD from Gram matrices, in the trace form.

    .. math::
      \mathrm{tr}(H_s L_s) + \mathrm{tr}(H_t L_t)
          - 2\,\mathrm{tr}(\tilde K_s^{-1} K_{ts}^\top \tilde K_t^{-1} L_{st}^\top)

    In the cross term of Equation 5, with the factors in another order, the paper
    prints :math:`L_{ts}`, which does not fit; :math:`L_{st}` is meant.

    Args:
      K_s: Gram matrix of the features of set s, shape ``(n_s, n_s)``.
      K_t: Gram matrix of the features of set t, shape ``(n_t, n_t)``.
      K_ts: Gram matrix of the features of t and s, shape ``(n_t, n_s)``.
      L_s: Gram matrix of the labels of set s, shape ``(n_s, n_s)``.
      L_t: Gram matrix of the labels of set t, shape ``(n_t, n_t)``.
      L_st: Gram matrix of the labels of s and t, shape ``(n_s, n_t)``.
      ridge: The regularisation lambda > 0, in units of K.

    Returns:
      The CMMD, a float32 scalar (float64 if an argument is).

    Raises:
      ValueError: If shapes do not fit, or the ridge is not positive or is too small
        for the precision of the arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> I, J = jnp.eye(2), jnp.eye(2)[::-1]
      >>> print(f"{cmmd_from_grams(I, I, I, I, I, J, ridge=0.1):.4f}")
      3.3058

    References:
      Equations 3 and 5 of arXiv 2008.10165.
    """
    arrays = dict(K_s=K_s, K_t=K_t, K_ts=K_ts, L_s=L_s, L_t=L_t, L_st=L_st)
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    n_s, n_t = (shapes[name][0] if shapes[name] else 0 for name in ("K_s", "K_t"))
    expected = dict(K_s=(n_s, n_s), K_t=(n_t, n_t), K_ts=(n_t, n_s))
    expected |= dict(L_s=(n_s, n_s), L_t=(n_t, n_t), L_st=(n_s, n_t))
    if shapes != expected or not n_s or not n_t:
        raise ValueError(
            "cmmd_from_grams takes K_s, L_s (n_s, n_s); K_t, L_t (n_t, n_t); K_ts "
            f"(n_t, n_s); L_st (n_s, n_t), none empty, but got {_listed(shapes)}."
        )
    floats = as_floats(*arrays.values())
    check_ridge(ridge, max(n_s, n_t), floats[0].dtype, _largest_entry(*floats[:2]))
    value: Array
    value, error, traces = _trace(*floats, jnp.asarray(ridge, floats[0].dtype))
    _check_error(error, traces, ridge, floats)
    return value


@jax.jit
def _trace(
    K_s: Array,
    K_t: Array,
    K_ts: Array,
    L_s: Array,
    L_t: Array,
    L_st: Array,
    ridge: Array,
) -> tuple[Array, Array, Array]:
    """Returns what `_cmmd` does."""
    n_s, n_t = L_st.shape
    diagonal = jnp.concatenate([jnp.diagonal(K_s), jnp.diagonal(K_t)])
    ridge = _or_nan(ridge, diagonal, max(n_s, n_t))
    # One factorisation a Gram: all its right-hand sides are solved for together.
    solved_s, solved_t = solve_both(
        (K_s, jnp.concatenate([K_s, L_s, K_ts.T], axis=1)),
        (K_t, jnp.concatenate([K_t, L_t, L_st.T], axis=1)),
        ridge,
    )
    P_s, Q_s, R_s = jnp.split(solved_s, [n_s, 2 * n_s], axis=1)
    P_t, Q_t, R_t = jnp.split(solved_t, [n_t, 2 * n_t], axis=1)
    cross = jnp.sum(R_s * R_t.T)
    # tr(H L) = tr(K~^-1 K K~^-1 L) = tr(P Q).
    own_s, own_t = jnp.sum(P_s * Q_s.T), jnp.sum(P_t * Q_t.T)
    # tr(K~^-1 L K~^-1), as K~^-1 = (I - P) / ridge: the sum of squared coefficients.
    squares = (jnp.trace(Q_s) + jnp.trace(Q_t) - own_s - own_t) / ridge
    traces = lax.stop_gradient(own_s + own_t)
    return (own_s - cross) + (own_t - cross), _rounding(squares, n_s + n_t), traces


def weight_matrix(K: ArrayLike, *, ridge: float | Array) -> Array:
    r"""The matrix that weighs pairs of labels in the CMMD.

    .. math:: H = \tilde K^{-1} K \tilde K^{-1}, \qquad \tilde K = K + \lambda I

    It is what the paper's heat maps show. A ridge is refused, but under jit, with which
    rounding may be more than a thousandth of the trace of H.

    Args:
      K: Gram matrix of features, shape ``(n, n)``.
      ridge: The regularisation lambda > 0, in units of K.

    Returns:
      H, shape ``(n, n)``, float32 (float64 if K is).

    Raises:
      ValueError: If K is not square, or the ridge is not positive or is too small
        for the precision of K.

    Examples:
      >>> import jax.numpy as jnp
      >>> weight_matrix(jnp.eye(2), ridge=1.0).round(3)
      Array([[0.25, 0.  ],
             [0.  , 0.25]], dtype=float32)

    References:
      Section 3.1 of arXiv 2008.10165.
    """
    (K,) = as_floats(K)
    if K.ndim != 2 or K.shape[0] != K.shape[1] or not K.size:
        raise ValueError(f"weight_matrix takes a Gram matrix (n, n), got {K.shape}.")
    check_ridge(ridge, len(K), K.dtype, _largest_entry(K))
    H: Array
    H, error, trace = _weight_matrix(K, jnp.asarray(ridge, K.dtype))
    _check_error(error, trace, ridge, (K,))
    return H


@jax.jit
def _weight_matrix(K: Array, ridge: Array) -> tuple[Array, Array, Array]:
    ridge = _or_nan(ridge, jnp.diagonal(K), len(K))
    P = _solve(K, K, ridge)
    H = _solve(K, P.T, ridge)
    # As K~^-1 = (I - P) / ridge, whose squares are those of A of the labels I.
    trace = jnp.trace(H)
    squares = ((len(K) - jnp.trace(P)) / ridge - trace) / ridge
    H = 0.5 * (H + H.T)  # Symmetric, as it is without rounding.
    return H, _rounding(squares, len(K)), lax.stop_gradient(trace)


def solve_both(
    s: tuple[Array, Array], t: tuple[Array, Array], ridge: Array
) -> tuple[Array, Array]:
    """Solves K~ A = B for the pairs (K, B) of s and t, as one batch where it pays.

    Not on CPU: XLA shares the factorisations of a batch out to its threads and blocks
    one until all are done. That costs a step of the MNIST network a sixteenth, and two
    such calls at once, which vmap makes of these, can lock each other up.

    Args:
      s: Gram matrix, shape ``(n_s, n_s)``, and right-hand sides, ``(n_s, m_s)``.
      t: The same of t, ``(n_t, n_t)`` and ``(n_t, m_t)``.
      ridge: The regularisation lambda, a scalar.

    Returns:
      The solutions, shapes ``(n_s, m_s)`` and ``(n_t, m_t)``.
    """
    fits = s[0].shape == t[0].shape and s[1].shape == t[1].shape
    if fits and not backend.is_cpu():
        K, B = (jnp.stack(pair) for pair in zip(s, t, strict=True))
        A = jax.vmap(_solve, in_axes=(0, 0, None))(K, B, ridge)
        return A[0], A[1]
    A_s = _solve(*s, ridge)
    K, B = t
    # The zero makes the second wait for the first.
    return A_s, _solve(K + 0.0 * A_s[0, 0], B, ridge)


def _solve(K: Array, B: Array, ridge: Array) -> Array:
    """Solves (K + ridge I) A = B by one Cholesky factorisation."""
    K_tilde = K + ridge.astype(K.dtype) * jnp.eye(len(K), dtype=K.dtype)
    return solve(K_tilde, B, assume_a="pos")


def check_sets(
    function: str, kernel: Kernel, label_kernel: Kernel = linear, **arrays: ArrayLike
) -> list[Array]:
    """Returns the arrays of one or two sets as a function computes with them.

    A kernel that embeds its inputs takes features as they are. All else is floats.

    Args:
      function: Its name, for errors.
      kernel: Kernel on features.
      label_kernel: Kernel on labels.
      **arrays: Features, ``(n, d)`` or ``(n, ...)``, labels, ``(n, C)``, of a second
        set features and labels.

    Returns:
      The arrays, in the same order.

    Raises:
      ValueError: If a kernel is none, shapes do not fit, or an array is not of what
        the kernels take.
    """
    check_kernel("kernel", kernel)
    check_kernel("label_kernel", label_kernel)
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    features, labels = [list(shapes.values())[start::2] for start in (0, 1)]
    any_rank = takes_any_rank(kernel)
    if not (
        all(0 not in shape for shape in shapes.values())
        and all(any_rank or len(shape) == 2 for shape in features)
        and all(len(shape) == 2 for shape in labels)
        and all(x[:1] == y[:1] for x, y in zip(features, labels, strict=True))
        and len({shape[1:] for shape in features}) == 1
        and len({shape[1:] for shape in labels}) == 1
    ):
        raise ValueError(
            f"{function} takes features {'(n, ...)' if any_rank else '(n, d)'} and "
            "labels (n, C), of one n within a set, one d and one C, none empty, but "
            f"got {_listed(shapes)}. Flatten features with x.reshape(len(x), -1), or "
            "embed them by a kernel.on(h); give class numbers as "
            "jax.nn.one_hot(y, C), real values as y[:, None]."
        )
    values = list(arrays.values())
    if not any_rank:
        return list(as_floats(*values))
    x, y = as_features(kernel, *values[::2]), as_floats(*values[1::2])
    return [array for pair in zip(x, y, strict=True) for array in pair]


def _largest_entry(*grams: Array) -> float:
    """Returns the largest k(x, x) of Gram matrices; 1 if not known, under jit."""
    if any(isinstance(K, jax.core.Tracer) for K in grams):
        return 1.0
    with jax.ensure_compile_time_eval():  # Inside jit, of arrays from outside it.
        return max(float(jnp.max(jnp.diagonal(K))) for K in grams)


def check_ridge(
    ridge: float | Array, n: int, dtype: DTypeLike, largest: float = 1.0
) -> None:
    """Refuses a ridge with which the Cholesky factor of K~ would be noise.

    Args:
      ridge: The regularisation lambda. A traced one has no value yet to look at.
      n: Number of points of a Gram matrix.
      dtype: Type of its entries.
      largest: The largest k(x, x), in whose units the ridge is.

    Raises:
      ValueError: If the ridge is not one positive, finite number, or is too small.
    """
    traced = isinstance(ridge, jax.core.Tracer)
    if not _is_number(ridge) or not (traced or 0.0 < float(ridge) < float("inf")):
        raise ValueError(f"ridge={ridge!r} must be a positive, finite number.")
    if traced:
        return
    # Rounding moves the eigenvalues of a Gram matrix by up to this. Features that are
    # not finite have none, and are to give NaN.
    bound = n * float(np.finfo(dtype).eps) * largest
    if float(ridge) < bound < float("inf"):
        raise ValueError(
            f"ridge={float(ridge):g} is below n * eps * k(x, x) = {bound:.2g}, the "
            f"rounding error of sums of {n} kernel values up to {largest:.3g} in "
            f"{np.dtype(dtype).name}. Use a larger ridge, such as "
            f"{max(0.1 * largest, 10 * bound):.2g}, or float64 arrays with "
            "jax_enable_x64."
        )


def _check_error(
    error: Array, traces: Array, ridge: float | Array, arrays: Sequence[Array]
) -> None:
    """Refuses a value of which rounding may be more than a thousandth of its traces."""
    if isinstance(error, jax.core.Tracer) or float(error) <= 1e-3 * float(traces):
        return
    if not all(bool(jnp.isfinite(x).all()) for x in arrays if is_real(x.dtype)):
        return
    share = float(error) / float(traces) if traces > 0 else 1.0
    raise ValueError(
        f"ridge={float(ridge):g} is too small for these points in {error.dtype.name}: "
        f"rounding may be {share:.1g} of the traces, and at most 0.001 is let through. "
        "Use a larger ridge, a narrower kernel, or float64 arrays with jax_enable_x64."
    )


def _is_number(value: Any) -> bool:
    if not hasattr(value, "dtype"):
        # An integer may be too large for a float.
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return is_real(value.dtype) and jnp.ndim(value) == 0


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
