"""The definitions of the kernels, of CMMD and of MMD, in NumPy float64 with loops.

Written from the papers alone and without JAX, to be read beside it: slow, and the
judge of `kernels`, `cmmd`, `mmd` and `nystroem`. Two forms of CMMD stand here that
share no line beyond the Gram matrices, so that each also judges the other.
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


def _entrywise(k: Callable[[np.ndarray, np.ndarray], float]) -> Kernel:
    """The Gram matrix of a kernel of two vectors."""

    def gram(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        K = np.zeros((len(a), len(b)))
        for i in range(len(a)):
            for j in range(len(b)):
                K[i, j] = k(a[i], b[j])
        return K

    return gram


def laplacian(scale: float = 1.0) -> Kernel:
    """exp(-|a - b|_1 / scale)."""
    return _entrywise(
        lambda a, b: math.exp(-sum(abs(a[k] - b[k]) for k in range(len(a))) / scale)
    )


def rational_quadratic(bandwidth: float = 1.0, alpha: float = 1.0) -> Kernel:
    """(1 + |a - b|^2 / (2 alpha v))^-alpha of a variance v."""

    def k(a: np.ndarray, b: np.ndarray) -> float:
        distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        return (1 + distance / (2 * alpha * bandwidth)) ** -alpha

    return _entrywise(k)


def polynomial(degree: int = 3, offset: float = 1.0, scale: float = 1.0) -> Kernel:
    """(scale <a, b> + offset)^degree."""

    def k(a: np.ndarray, b: np.ndarray) -> float:
        product = sum(p * q for p, q in zip(a, b, strict=True))
        return (scale * product + offset) ** degree

    return _entrywise(k)


def median_bandwidth(x: np.ndarray) -> float:
    """The median of |x_i - x_j|^2 over the pairs i < j that differ; 1 if none do."""
    x = np.asarray(x, np.float64)
    distances = []
    for i in range(len(x)):
        for j in range(i):
            distance = sum((p - q) ** 2 for p, q in zip(x[i], x[j], strict=True))
            if distance > 0:
                distances.append(distance)
    return float(np.median(distances)) if distances else 1.0


def mmd(
    x: np.ndarray, y: np.ndarray, kernel: Kernel | None = None, unbiased: bool = False
) -> float:
    """The squared MMD, as sums over pairs; without i = j if unbiased."""
    kernel = kernel or gaussian_mixture()
    means = []
    for points in (x, y):
        K, n = kernel(points, points), len(points)
        pairs = [K[i, j] for i in range(n) for j in range(n) if i != j or not unbiased]
        means.append(sum(pairs) / len(pairs))
    cross = kernel(x, y)
    return float(means[0] + means[1] - 2 * cross.sum() / cross.size)


def kernel_ridge(
    x: np.ndarray,
    y: np.ndarray,
    x_new: np.ndarray,
    kernel: Kernel | None = None,
    ridge: float = 0.1,
) -> np.ndarray:
    """K(x_new, x) (K + ridge I)^-1 y."""
    kernel = kernel or gaussian_mixture()
    inverse = np.linalg.inv(kernel(x, x) + ridge * np.eye(len(x)))
    return kernel(x_new, x) @ inverse @ np.asarray(y, np.float64)


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
    """The trace form of Eq. 3/5: tr(H_s L_s) + tr(H_t L_t) - 2 tr(.. L_st ..)."""
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


def weighted_cmmd(
    x_s: np.ndarray,
    y_s: np.ndarray,
    x_t: np.ndarray,
    y_t: np.ndarray,
    weights_s: np.ndarray,
    weights_t: np.ndarray,
    kernel: Kernel | None = None,
    ridge: float = 0.1,
) -> float:
    """CMMD of the minimisers of sum_i w_i |y_i - C phi(x_i)|^2 + ridge |C|^2.

    C = sum_i a_i phi(x_i)^T, whose coefficients solve the normal equations
    K (W K + ridge I) a = K W y.
    """
    kernel = kernel or gaussian_mixture()
    coefficients = []
    for x, y, weights in ((x_s, y_s, weights_s), (x_t, y_t, weights_t)):
        W = np.diag(np.asarray(weights, np.float64))
        left = W @ kernel(x, x) + ridge * np.eye(len(x))
        coefficients.append(np.linalg.solve(left, W @ np.asarray(y, np.float64)))
    a_s, a_t = coefficients
    own = np.trace(a_s.T @ kernel(x_s, x_s) @ a_s)
    own += np.trace(a_t.T @ kernel(x_t, x_t) @ a_t)
    return float(own - 2 * np.trace(a_t.T @ kernel(x_t, x_s) @ a_s))


def cmmd_nystroem(
    x_s: np.ndarray,
    y_s: np.ndarray,
    x_t: np.ndarray,
    y_t: np.ndarray,
    landmarks: np.ndarray,
    kernel: Kernel | None = None,
    ridge: float = 0.1,
) -> float:
    """The CMMD of the kernel k_z(a)^T K_zz^-1 k_z(b), by the trace form."""
    kernel = kernel or gaussian_mixture()
    inverse = np.linalg.pinv(kernel(landmarks, landmarks), rcond=1e-12, hermitian=True)

    def projected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return kernel(a, landmarks) @ inverse @ kernel(landmarks, b)

    return cmmd(x_s, y_s, x_t, y_t, projected, ridge=ridge)


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
