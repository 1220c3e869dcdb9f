"""The definitions of KLN's kernels and of CMMD, in NumPy float64 with plain loops.

Written from the paper alone and without JAX, to be read beside it: slow, and
the judge of `kln_jax.kernels` and `kln_jax.cmmd`. Two forms of CMMD stand here
that share no line beyond the Gram matrices, so that each also judges the other.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]
BANDWIDTHS = (1.0, 3.0, 5.0, 7.0, 9.0)


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a_i - b_j|^2 as an (n, m) matrix."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    distances = np.zeros((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            for k in range(a.shape[1]):
                distances[i, j] += (a[i, k] - b[j, k]) ** 2
    return distances


def gaussian_mixture(
    bandwidths: Sequence[float] = BANDWIDTHS, reduction: str = "mean"
) -> Kernel:
    """exp(-|a - b|^2 / (2 v)), over the variances v averaged or summed."""

    def gram(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        distances = squared_distances(a, b)
        K = np.zeros_like(distances)
        for i in range(K.shape[0]):
            for j in range(K.shape[1]):
                for variance in bandwidths:
                    K[i, j] += math.exp(-distances[i, j] / (2 * variance))
        return K / len(bandwidths) if reduction == "mean" else K

    return gram


def linear(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The inner products <a_i, b_j>."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    L = np.zeros((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            for k in range(a.shape[1]):
                L[i, j] += a[i, k] * b[j, k]
    return L


def weight_matrix(K: np.ndarray, ridge: float) -> np.ndarray:
    """H = (K + ridge I)^-1 K (K + ridge I)^-1."""
    K = np.asarray(K, np.float64)
    inverse = np.linalg.inv(K + ridge * np.eye(len(K)))
    return inverse @ K @ inverse


def cmmd_from_grams(
    K_s: np.ndarray,
    K_t: np.ndarray,
    K_ts: np.ndarray,
    L_s: np.ndarray,
    L_t: np.ndarray,
    L_st: np.ndarray,
    ridge: float,
) -> float:
    """The trace form of Eq. 3/4: tr(H_s L_s) + tr(H_t L_t) - 2 tr(.. L_st ..)."""
    inverse_s = np.linalg.inv(K_s + ridge * np.eye(len(K_s)))
    inverse_t = np.linalg.inv(K_t + ridge * np.eye(len(K_t)))
    labelled = np.trace(K_s @ inverse_s @ L_s @ inverse_s)
    predicted = np.trace(K_t @ inverse_t @ L_t @ inverse_t)
    cross = np.trace(K_ts @ inverse_s @ L_st @ inverse_t)
    return float(labelled + predicted - 2 * cross)


def grams(
    x_s: np.ndarray,
    y_s: np.ndarray,
    x_t: np.ndarray,
    y_t: np.ndarray,
    kernel: Kernel,
    label_kernel: Kernel,
) -> tuple[np.ndarray, ...]:
    """K_s, K_t, K_ts (n_t, n_s), L_s, L_t, L_st (n_s, n_t)."""
    return (
        kernel(x_s, x_s),
        kernel(x_t, x_t),
        kernel(x_t, x_s),
        label_kernel(y_s, y_s),
        label_kernel(y_t, y_t),
        label_kernel(y_s, y_t),
    )


def cmmd(
    x_s: np.ndarray,
    y_s: np.ndarray,
    x_t: np.ndarray,
    y_t: np.ndarray,
    kernel: Kernel | None = None,
    label_kernel: Kernel = linear,
    ridge: float = 0.1,
) -> float:
    """CMMD of two labelled sets, through the trace form."""
    kernel = kernel or gaussian_mixture()
    return cmmd_from_grams(*grams(x_s, y_s, x_t, y_t, kernel, label_kernel), ridge)


def regressor_distance(
    x_s: np.ndarray,
    y_s: np.ndarray,
    x_t: np.ndarray,
    y_t: np.ndarray,
    kernel: Kernel | None = None,
    label_kernel: Kernel = linear,
    ridge: float = 0.1,
) -> float:
    """CMMD as the squared RKHS distance of two kernel ridge regressors.

    Each set's regressor maps x to the label features psi(y), in explicit
    coordinates (a factor of the Gram matrix of all labels). Coordinate c of it is
    f(x) = sum_i coefficients[i, c] k(x_i, x), and the squared norm of the
    difference of two such functions is the quadratic form of their coefficients.
    """
    kernel = kernel or gaussian_mixture()
    y = np.concatenate([y_s, y_t]).astype(np.float64)
    eigenvalues, eigenvectors = np.linalg.eigh(label_kernel(y, y))
    psi = eigenvectors * np.sqrt(np.maximum(eigenvalues, 0))
    n_s = len(x_s)
    regressors = []
    for x, targets in ((x_s, psi[:n_s]), (x_t, psi[n_s:])):
        regularised = kernel(x, x) + ridge * np.eye(len(x))
        regressors.append(np.linalg.solve(regularised, targets))

    points = np.concatenate([x_s, x_t])
    difference = np.concatenate([regressors[0], -regressors[1]])
    K = kernel(points, points)
    total = 0.0
    for c in range(difference.shape[1]):
        total += difference[:, c] @ K @ difference[:, c]
    return float(total)


def central_differences(
    f: Callable[..., float],
    args: Sequence[np.ndarray],
    argument: int,
    step: float = 1e-5,
) -> np.ndarray:
    """The gradient of f in one of its arguments, by central differences."""
    gradient = np.zeros_like(args[argument], dtype=np.float64)
    for index in np.ndindex(gradient.shape):
        values = []
        for sign in (1, -1):
            moved = [np.array(arg, np.float64) for arg in args]
            moved[argument][index] += sign * step
            values.append(f(*moved))
        gradient[index] = (values[0] - values[1]) / (2 * step)
    return gradient
