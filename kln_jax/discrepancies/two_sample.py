r"""A two-sample test of conditional distributions by the CMMD.

The null hypothesis is that P(Y|X) is the same in s and in t; P(X) may differ. Then,
given the pooled points, the group of a point depends on its features alone, so new
groups can be drawn that are as likely as those observed. `cmmd_test` compares the
observed CMMD with that of the drawn groups.
"""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import solve
from jax.scipy.sparse.linalg import cg
from jax.typing import ArrayLike

from kln_jax.discrepancies.cmmd import check_ridge, check_sets
from kln_jax.discrepancies.float_arrays import (
    as_floats,
    check_key,
    float_type,
    matmul,
)
from kln_jax.discrepancies.kernels import (
    Kernel,
    gaussian_mixture,
    gram,
    largest_value,
    linear,
    median_bandwidth,
)

# Values that differ by less than the error of the linear solver are ties.
_TIE = 1e-4
_NEARLY_ALL = 0.98
# On points of median distance 1.
_MIXTURE = gaussian_mixture((0.25, 0.5, 1, 2, 4))
# Elements of one array of the solver: bounds the memory of a batch of resamples.
_BATCH_ELEMENTS = 2**22


class CMMDTestResult(NamedTuple):
    """What `cmmd_test` returns.

    Attributes:
      statistic: The CMMD of the residuals of s and t, a scalar, at least 0.
      p_value: The p-value, a scalar in ``[1 / (1 + num_resamples), 1]``.
    """

    statistic: Array
    p_value: Array


def cmmd_test(
    x_s: ArrayLike,
    y_s: ArrayLike,
    x_t: ArrayLike,
    y_t: ArrayLike,
    *,
    key: Array,
    kernel: Kernel | None = None,
    label_kernel: Kernel = linear,
    ridge: float | Array | None = None,
    num_resamples: int = 999,
    log_density_ratio: Callable[[Array], Array] | None = None,
) -> CMMDTestResult:
    r"""Tests whether P(Y|X) is the same in sets s and t, whose P(X) may differ.

    The statistic is the CMMD of the residuals r of one kernel ridge regression of
    y on x that is fitted to both sets together. To subtract the same function of x
    on both sides does not change how the conditional distributions differ, and
    removes most of the bias of the ridge, which depends on where the points lie.
    With signs S = +1 for the points of s, -1 for those of t, and K of all points,

    .. math::
      T(S) = \langle S A, K S A\rangle, \qquad
      \left(\tfrac{1}{2}(K + S K S) + \lambda I\right) A = r.

    Under the null hypothesis, and given all x and y, the groups have the law

    .. math::
      P(S) \propto \prod_{i: S_i = 1} \frac{p_s(x_i)}{p_t(x_i)},
      \qquad \#\{i: S_i = 1\} = n_s.

    Independent groups :math:`S_1, \dots, S_B` are drawn from it, exactly, and

    .. math:: p = \frac{1 + \#\{b: T(S_b) \ge T(S)\}}{1 + B}.

    If the density ratio is given, the test has its level for any sample size. If it
    is estimated (the default: kernel logistic regression of the group on x), the
    level is approximate. The ridges of both regressions are chosen by leave-one-out.
    The function works under `jax.jit` and `jax.vmap`.

    It warns, but under those, if the kernel sees nothing: if nearly all of its values
    between two points are about 0, or about k(x, x), or if most resamples tie.

    Args:
      x_s: Features of set s, shape ``(n_s, d)``, or of any rank with ``kernel.on(h)``.
      y_s: One-hot labels or real values of set s, shape ``(n_s, C)``.
      x_t: Features of set t, shape ``(n_t, d)``.
      y_t: One-hot labels or real values of set t, shape ``(n_t, C)``.
      key: Key of the resamples. The same key gives the same p-value.
      kernel: Kernel on features. The default is a mixture of Gaussian kernels of
        a quarter to four times `median_bandwidth` of both sets together. It depends
        on no group, so that the level is that of a fixed kernel.
      label_kernel: Kernel on y. The linear kernel compares class probabilities of
        one-hot labels, but only the means of real values; a Gaussian mixture
        compares their distributions, and costs ``n_s + n_t`` right-hand sides.
      ridge: The regularisation lambda > 0 of the statistic, in units of the kernel.
        The default, a tenth of the trace of K, is much larger than `cmmd`'s: a small
        ridge gives noise the weight that smooth differences need.
      num_resamples: The number B of drawn groups, at least 19.
      log_density_ratio: Known :math:`\log p_s(x) - \log p_t(x)` up to a constant:
        ``(n, d) -> (n,)``.

    Returns:
      The statistic and the p-value, float32 scalars (float64 if an array is); not a
      number if the data or the density ratio are not finite. Of y of extreme scale
      the statistic, but not the p-value, may be out of range: 0 or infinite.

    Raises:
      ValueError: If shapes do not fit, a set has fewer than two points, there are
        too few resamples, or the ridge is not positive or is too small for the
        precision of the arrays.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> x = jnp.linspace(-1.0, 1.0, 40)[:, None]
      >>> result = cmmd_test(x, x, x + 0.5, x + 1.5, key=jax.random.key(0))
      >>> print(f"{result.p_value:.3f}")
      0.001

    References:
      Berrett, Wang, Barber and Samworth, The conditional permutation test, Journal
      of the Royal Statistical Society B 82 (2020), arXiv 1807.05405; Section 3 of
      arXiv 2008.10165 for the CMMD.
    """
    x_s, y_s, x_t, y_t = check_sets(
        "cmmd_test",
        kernel or _MIXTURE,
        label_kernel,
        x_s=x_s,
        y_s=y_s,
        x_t=x_t,
        y_t=y_t,
    )
    check_key(key)
    n_s, n_t = len(x_s), len(x_t)
    if min(n_s, n_t) < 2:
        raise ValueError(
            f"n_s={n_s} and n_t={n_t} must be at least 2: one point says nothing "
            "about how y varies given x. Give more points."
        )
    if not isinstance(num_resamples, numbers.Integral) or num_resamples < 19:
        raise ValueError(
            f"num_resamples={num_resamples} must be a whole number of at least 19: "
            "with fewer no p-value reaches 0.05. Use 999."
        )
    if ridge is not None:
        dtype = float_type(x_s, y_s)
        largest = largest_value(kernel or _MIXTURE, x_s, x_t)
        check_ridge(ridge, n_s + n_t, dtype, largest)
        ridge = jnp.asarray(ridge, float)
    x, y = jnp.concatenate([x_s, x_t]), jnp.concatenate([y_s, y_t])
    log_odds = None
    if log_density_ratio is not None:
        if not callable(log_density_ratio):
            raise ValueError(
                "log_density_ratio must be a function of points (n, ...) to their n "
                f"values, but is {type(log_density_ratio).__name__}. Pass lambda x: ..."
            )
        log_odds = jnp.asarray(log_density_ratio(x), float)
        if log_odds.shape != (n_s + n_t,):
            raise ValueError(
                f"log_density_ratio must return shape {(n_s + n_t,)}, one value a "
                f"point, but returned {log_odds.shape}. Drop further axes."
            )
    if kernel is None:
        x = x / jnp.sqrt(median_bandwidth(x))
    statistic, p_value, shares = _cmmd_test(
        x,
        y,
        log_odds,
        ridge,
        key,
        n_s=n_s,
        kernel=kernel or _MIXTURE,
        label_kernel=label_kernel,
        num_resamples=int(num_resamples),
    )
    _warn(shares)
    return CMMDTestResult(statistic, p_value)


def _warn(shares: Array) -> None:
    """Warns of a kernel that sees nothing; of what is traced nothing is known."""
    if isinstance(shares, jax.core.Tracer):
        return
    zeros, ones, ties = map(float, shares)
    for share, what in (
        (zeros, "kernel values between two points are about 0"),
        (ones, "kernel values between two points are about k(x, x)"),
        (ties, "resamples have the observed statistic"),
    ):
        if share > _NEARLY_ALL:
            warnings.warn(
                f"{share:.0%} of the {what}, so that cmmd_test can hardly reject. "
                "Leave the kernel out, for one of the scale of the points, or give "
                "gaussian_mixture((median_bandwidth(x),)) of all points x.",
                stacklevel=3,
            )


@functools.partial(
    jax.jit, static_argnames=("n_s", "kernel", "label_kernel", "num_resamples")
)
def _cmmd_test(
    x: Array,
    y: Array,
    log_odds: Array | None,
    ridge: Array | None,
    key: Array,
    *,
    n_s: int,
    kernel: Kernel,
    label_kernel: Kernel,
    num_resamples: int,
) -> tuple[Array, Array, Array]:
    K, y = as_floats(gram(kernel, x, x), y)
    S = jnp.where(jnp.arange(len(x)) < n_s, 1.0, -1.0).astype(K.dtype)
    # In units of the largest value sums and squares neither overflow nor vanish.
    Y, unit = _in_units(_label_features(y, label_kernel).astype(K.dtype))
    rounding = 8.0 * np.finfo(Y.dtype).eps * jnp.max(jnp.abs(Y), axis=0)
    Y -= jnp.mean(Y, axis=0, keepdims=True)
    # What is left of a constant is no difference.
    Y = jnp.where(jnp.max(jnp.abs(Y), axis=0) <= rounding, 0.0, Y)
    Y, unit_left = _in_units(Y)
    P_y, P_s = _smoothers(K, Y, S)
    log_odds = _fit_log_odds(P_s, S) if log_odds is None else log_odds.astype(K.dtype)
    resamples = _draw_groups(key, log_odds, n_s, num_resamples)
    lam = _scale(K) / 10.0 if ridge is None else ridge.astype(K.dtype)
    R = Y - matmul(P_y, Y)
    # The observed groups among the others: the error of the solver is that of all.
    T = _statistics(K, R, jnp.concatenate([S[None, :], resamples]), lam)
    # The observed groups, drawn again, are a tie whatever the rounding; so are they
    # with s and t exchanged, which T does not tell apart.
    same = jnp.abs(matmul(resamples, S)) == len(S)
    # Written so that a resample that is not a number counts against rejection.
    exceed = jnp.sum(same | ~(T[1:] < T[0] * (1.0 - _TIE)))
    p_value = ((1 + exceed) / (1 + num_resamples)).astype(K.dtype)
    unit *= unit_left
    # The solver starts at zero, and would leave it there.
    finite = jnp.all(jnp.isfinite(R)) & jnp.all(jnp.isfinite(log_odds))
    ties = jnp.mean((jnp.abs(T[1:] - T[0]) <= _TIE * T[0]) & ~same & (T[0] > 0.0))
    statistic = T[0] * unit * unit
    statistic, p_value = (
        jnp.where(finite, value, jnp.nan) for value in (statistic, p_value)
    )
    return statistic, p_value, jnp.stack([*_flat_shares(K), ties.astype(K.dtype)])


def _flat_shares(K: Array) -> tuple[Array, Array]:
    """Returns the shares of pairs whose kernel value is about 0, and about k(x, x)."""
    norms = jnp.sqrt(jnp.abs(jnp.diagonal(K)))
    sizes = norms[:, None] * norms[None, :]
    pairs = len(K) * (len(K) - 1)
    zeros = jnp.sum((jnp.abs(K) < 1e-3 * sizes).astype(K.dtype)) / pairs
    ones = jnp.sum((sizes * (1.0 - 1e-3) < K).astype(K.dtype)) - len(K)
    return zeros, ones / pairs


def _in_units(values: Array) -> tuple[Array, Array]:
    """Returns values in units of the largest, and the unit; 1 where all are 0."""
    largest = jnp.max(jnp.abs(values))
    unit = jnp.where(largest > 0.0, largest, 1.0)
    return values / unit, unit


def _label_features(y: Array, label_kernel: Kernel) -> Array:
    """Vectors whose inner products are the label kernel."""
    if label_kernel == linear:
        return y
    (L,) = as_floats(gram(label_kernel, y, y))
    values, vectors = jnp.linalg.eigh(L)
    features: Array = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]
    return features


def _scale(K: Array) -> Array:
    """The trace; 1 of a kernel that is 0 at all points, as `linear` at the origin."""
    trace = jnp.trace(K)
    return jnp.where(trace == 0.0, 1.0, trace)


def _smoothers(K: Array, Y: Array, S: Array) -> tuple[Array, Array]:
    """Ridge smoothers (K + lambda I)^-1 K of Y and of the groups, by leave-one-out."""
    centred = S - jnp.mean(S)
    targets = jnp.concatenate([Y, centred[:, None]], axis=1)
    ridges = _scale(K) * 0.25 ** jnp.arange(8, dtype=K.dtype)

    def smoother(lam: Array) -> Array:
        return solve(K + lam * jnp.eye(len(K), dtype=K.dtype), K, assume_a="pos").T

    def errors(lam: Array) -> Array:
        P = smoother(lam)
        held_out = (targets - matmul(P, targets)) / (1.0 - jnp.diag(P))[:, None]
        squares = jnp.sum(held_out**2, axis=0)
        return jnp.stack([jnp.sum(squares[:-1]), squares[-1]])

    # One factorisation after the other: XLA's CPU runtime of JAX 0.10 can lock up
    # when batched ones that do not depend on each other share its threads.
    best = ridges[jnp.argmin(lax.map(errors, ridges), axis=0)]
    P = lax.map(smoother, best)
    return P[0], P[1]


def _fit_log_odds(P: Array, S: Array) -> Array:
    """Kernel logistic regression of the groups on x, less the constant.

    With the bound 1/4 on the curvature of the logistic loss, a step of the penalised
    fit is one application of the ridge smoother, and no step overshoots.
    """
    in_s = 0.5 * (S + 1.0)
    offset = jnp.log(jnp.sum(in_s) / jnp.sum(1.0 - in_s))

    def step(f: Array, _: None) -> tuple[Array, None]:
        gradient = in_s - jax.nn.sigmoid(f + offset)
        return matmul(P, f + 4.0 * gradient), None

    return lax.scan(step, jnp.zeros_like(S), None, length=200)[0]


def _draw_groups(key: Array, log_odds: Array, n_s: int, num: int) -> Array:
    """Draws signs of given odds and a given number of +1: shape ``(num, n)``.

    This is conditional Bernoulli sampling: points are visited in order, and a point
    enters s with its probability given how many places are left for how many points.
    """
    # Odds beyond exp(50) are certainties, and keep the logarithms finite.
    g = jnp.clip(log_odds - jnp.median(log_odds), -50.0, 50.0)
    places = jnp.arange(n_s + 1)

    def extend(row: Array, g_i: Array) -> tuple[Array, Array]:
        shifted = jnp.concatenate([jnp.full((1,), -jnp.inf, row.dtype), row[:-1]])
        return jnp.logaddexp(row, g_i + shifted), row

    # rows[i, k]: log of the total weight of the sets of k of the points after i.
    nothing = jnp.where(places == 0, 0.0, -jnp.inf).astype(g.dtype)
    _, rows = lax.scan(extend, nothing, g, reverse=True)
    uniform = jax.random.uniform(key, (len(g), num), g.dtype)

    def visit(left: Array, point: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        row, g_i, u = point
        odds = g_i + row[jnp.maximum(left - 1, 0)] - row[left]
        enters = (left > 0) & (u < jax.nn.sigmoid(odds))
        return left - enters.astype(left.dtype), enters

    _, enters = lax.scan(visit, jnp.full((num,), n_s), (rows, g, uniform))
    return jnp.where(enters.T, 1.0, -1.0).astype(g.dtype)


def _statistics(K: Array, R: Array, signs: Array, lam: Array) -> Array:
    """CMMD of residuals R for each row of signs, from batches of linear systems.

    Conjugate gradients multiply all systems of a batch by the one pooled Gram in one
    product, but stop each by its own error: the value of a row does not depend on the
    others. The condition of a system is at most 1 + trace(K) / lambda.
    """
    conjugate_gradients: Callable[..., tuple[Array, None]] = cg

    def statistic(row: Array) -> Array:
        S = row[:, None]

        def system(A: Array) -> Array:
            return 0.5 * (matmul(K, A) + S * matmul(K, S * A)) + lam * A

        A, _ = conjugate_gradients(system, R, tol=1e-5, maxiter=500)
        return jnp.sum(S * A * matmul(K, S * A))

    size = max(1, min(len(signs), _BATCH_ELEMENTS // R.size))
    statistics: Array = lax.map(statistic, signs, batch_size=size)
    return statistics
