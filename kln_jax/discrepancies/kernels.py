"""Kernels: callables that map two sets of vectors to their Gram matrix.

Those of this module add, scale, multiply and compose with an embedding:
``(k1 + 0.5 * k2 * k3).on(h)``. Their settings are numbers, not arrays that JAX
traces, so that equal kernels compare equal and are compiled once.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from kln_jax.discrepancies.float_arrays import as_floats, as_jax, matmul


class Kernel(Protocol):
    """A positive semi-definite kernel: ``(n, d), (m, d) -> (n, m)``.

    Any hashable callable of this form serves. One that is equal to another of the
    same settings, as those of this module are, is compiled once.
    """

    def __call__(self, a: Array, b: Array, /) -> Array:
        """Returns the Gram matrix of the rows of ``a`` and the rows of ``b``."""


class ComposableKernel(abc.ABC):
    r"""A kernel with operators; each gives a kernel again.

    ===============  =====================================================
    ``k1 + k2``      :math:`k_1(a, b) + k_2(a, b)`
    ``2.0 * k``      :math:`2 k(a, b)`; the factor is positive
    ``k1 * k2``      :math:`k_1(a, b) \, k_2(a, b)`
    ``k.on(h)``      :math:`k(h(a), h(b))`, the paper's :math:`k \circ h`
    ===============  =====================================================

    One of two operands may be any callable of the form of `Kernel`. To give a kernel
    of one's own these operators, derive it from this class as a frozen dataclass.

    Examples:
      >>> kernel = 0.5 * (gaussian_mixture((1,)) + laplacian(2.0))
      >>> kernel([[0.0]], [[0.0]])
      Array([[1.]], dtype=float32)
    """

    # Without this, NumPy would multiply the kernel by each entry of an array.
    __array_ufunc__ = None

    @abc.abstractmethod
    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        """Returns the Gram matrix of the rows of ``a`` and the rows of ``b``."""

    def __add__(self, other: Kernel) -> ComposableKernel:
        """Returns the sum with a kernel."""
        return _Sum(self, _operand(other)) if callable(other) else NotImplemented

    def __radd__(self, other: Kernel | int) -> ComposableKernel:
        """Returns the sum with a kernel that has no operators, or with sum()'s 0."""
        if isinstance(other, int) and other == 0:
            return self
        return _Sum(_operand(other), self) if callable(other) else NotImplemented

    def __mul__(self, other: Kernel | float) -> ComposableKernel:
        """Returns the product with a kernel or a positive number."""
        if callable(other):
            return _Product(self, _operand(other))
        return _Scaled(self, _positive("The factor of a kernel", other))

    def __rmul__(self, other: Kernel | float) -> ComposableKernel:
        """Returns the product with a number or a kernel that has no operators."""
        return _Product(_operand(other), self) if callable(other) else self * other

    def on(self, embedding: Callable[[Any], Array]) -> ComposableKernel:
        r"""Composes the kernel with an embedding: :math:`k(h(a), h(b))`.

        The kernel that results takes arrays of any rank and type, as they are, and so
        do `cmmd` and the other functions of this package as features. It is compiled
        once for each embedding, by identity: name ``h`` once, not a lambda for each
        call. For gradients in the parameters of ``h``, embed first:
        ``cmmd(h(x_s), y_s, h(x_t), y_t)``.

        Args:
          embedding: The function h, from ``(n, ...)`` to ``(n, d)``; hashable.

        Returns:
          A kernel of ``(n, ...)`` and ``(m, ...)``.

        Raises:
          ValueError: If the embedding is not a hashable callable.

        Examples:
          >>> import jax.numpy as jnp
          >>> flat = gaussian_mixture().on(lambda images: images.reshape(-1, 4))
          >>> flat(jnp.ones((3, 2, 2)), jnp.ones((5, 2, 2))).shape
          (3, 5)
        """
        if not (callable(embedding) and _hashable(embedding)):
            raise ValueError(
                f"embedding={embedding!r} must be a hashable callable, such as a "
                "function. Wrap it in one: def h(x): return embedding(x)."
            )
        return _On(self, embedding)


def _operand(kernel: Kernel) -> Kernel:
    check_kernel("operand", kernel)
    return kernel


def _arrays(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Returns JAX arrays; one and the same for one, which is then embedded once."""
    array = as_jax(a)
    return array, array if b is a else as_jax(b)


@dataclasses.dataclass(frozen=True)
class _Sum(ComposableKernel):
    left: Kernel
    right: Kernel

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        a, b = _arrays(a, b)
        return jnp.add(*as_floats(gram(self.left, a, b), gram(self.right, a, b)))


@dataclasses.dataclass(frozen=True)
class _Product(ComposableKernel):
    left: Kernel
    right: Kernel

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        a, b = _arrays(a, b)
        return jnp.multiply(*as_floats(gram(self.left, a, b), gram(self.right, a, b)))


@dataclasses.dataclass(frozen=True)
class _Scaled(ComposableKernel):
    kernel: Kernel
    factor: float

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        return self.factor * self.kernel(*_arrays(a, b))


@dataclasses.dataclass(frozen=True)
class _On(ComposableKernel):
    kernel: Kernel
    embedding: Callable[[Any], Array]

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        a, b = _arrays(a, b)
        embedded = self.embedding(a)
        return self.kernel(embedded, embedded if b is a else self.embedding(b))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


# The inverse of what is smaller is not finite in float32, nor is what is larger.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def _number(name: str, value: float) -> float:
    """Returns a setting of a kernel as a Python float, which compares and hashes."""
    if isinstance(value, jax.core.Tracer) or np.ndim(value):
        raise ValueError(
            f"{name} is {value}, but must be a number that is known when the kernel "
            "is made. Under jit, scale the features instead: the Gaussian kernel of "
            "variance b is that of variance 1 on x / sqrt(b)."
        )
    try:
        return float(value)
    except OverflowError:  # Of a large integer.
        return float("inf")
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} is {value!r}, but must be a number, such as 1."
        ) from None


def _positive(name: str, value: float) -> float:
    number = _number(name, value)
    if not _SMALLEST <= number <= _LARGEST:
        raise ValueError(
            f"{name} is {number:g}, but must be positive and finite, from "
            f"{_SMALLEST:.2g} to {_LARGEST:.2g}, such as 1."
        )
    return number


def check_kernel(name: str, kernel: Any) -> None:
    """Refuses what is no kernel, or makes one and was not called.

    Args:
      name: Of the argument, for the error.
      kernel: Its value.

    Raises:
      ValueError: If it is no hashable function, or one that makes kernels.
    """
    if hasattr(kernel, "shape"):
        raise ValueError(
            f"{name} is an array of shape {kernel.shape}, but must be a function of "
            "two arrays of points; cmmd_from_grams takes Gram matrices."
        )
    if not callable(kernel):
        raise ValueError(
            f"{name}={kernel!r} must be a function of two arrays of points, such as "
            "gaussian_mixture()."
        )
    if not _hashable(kernel):
        raise ValueError(
            f"{name}={kernel!r} must be hashable, for it is compiled once. Make it a "
            "function or a frozen dataclass."
        )
    if kernel in (gaussian_mixture, laplacian, rational_quadratic, polynomial):
        maker = kernel.__name__
        raise ValueError(f"{name}={maker} makes a kernel: call it first, {maker}(...).")


def gram(kernel: Kernel, a: Array, b: Array) -> Array:
    """Returns the Gram matrix of two sets, or refuses what a kernel gives instead.

    Args:
      kernel: A callable, maybe from elsewhere.
      a: Points, shape ``(n, ...)``.
      b: Points, shape ``(m, ...)``.

    Returns:
      The kernel's values, shape ``(n, m)``.

    Raises:
      ValueError: If they have another shape, as those of a function of two single
        points have: broadcast, they would be a wrong Gram matrix.
    """
    values = kernel(a, b)
    if jnp.shape(values) != (expected := a.shape[:1] + b.shape[:1]):
        raise ValueError(
            f"The kernel {kernel!r} returned shape {jnp.shape(values)} of points "
            f"{a.shape} and {b.shape}, but must return their Gram matrix, {expected}. "
            "Make one of a function k of two single points by jax.vmap twice: "
            "jax.vmap(jax.vmap(k, (None, 0)), (0, None))."
        )
    return values


def takes_any_rank(kernel: Kernel) -> bool:
    """Returns whether a kernel embeds what it is given, which may be no vectors.

    Args:
      kernel: A kernel.

    Returns:
      Whether all its parts are of the form ``kernel.on(h)``.
    """
    match kernel:
        case _On():
            return True
        case _Sum(left, right) | _Product(left, right):
            return takes_any_rank(left) and takes_any_rank(right)
        case _Scaled(scaled, _):
            return takes_any_rank(scaled)
    return False


def largest_value(kernel: Kernel, *sets: Array) -> float:
    """Returns the largest k(x, x) of sets of vectors, or a bound; 1 if not known.

    It is not known of callables from elsewhere. Of kernels that have no bound it is
    not on an embedding, which would be computed for this alone, nor under jit.

    Args:
      kernel: A kernel.
      *sets: What it acts on, each of shape ``(n, d)``.

    Returns:
      The largest k(x, x). What is not known counts as 1 in sums and products.
    """
    known = bool(sets) and not any(isinstance(x, jax.core.Tracer) for x in sets)
    match kernel:
        case _GaussianMixture(bandwidths, "sum"):
            return float(len(bandwidths))
        case _Scaled(scaled, factor):
            return factor * largest_value(scaled, *sets)
        case _Sum(left, right):
            return largest_value(left, *sets) + largest_value(right, *sets)
        case _Product(left, right):
            return largest_value(left, *sets) * largest_value(right, *sets)
        case _On(embedded, _):
            return largest_value(embedded)
        case _Polynomial(degree, offset, scale) if known:
            try:
                return (scale * largest_value(linear, *sets) + offset) ** degree
            except OverflowError:
                return float("inf")
        case _Linear() if known:
            # Inside jit, of arrays from outside it.
            with jax.ensure_compile_time_eval():
                return max(float(jnp.max(jnp.sum(x * x, axis=1))) for x in sets)
    return 1.0


def as_features(kernel: Kernel, *arrays: ArrayLike) -> tuple[Array, ...]:
    """Returns points as a kernel takes them: as they are if it embeds, else floats.

    Args:
      kernel: A kernel.
      *arrays: Sets of points, each of shape ``(n, d)`` or ``(n, ...)``.

    Returns:
      The sets, of one type.

    Raises:
      ValueError: If sets to embed are of several types, or others not of real numbers.
    """
    if not takes_any_rank(kernel):
        return as_floats(*arrays)
    converted = tuple(map(as_jax, arrays))
    dtypes = [array.dtype.name for array in converted]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"The sets of points are of {' and '.join(dtypes)}, but what an embedding "
            "takes must be of one type: convert one of them."
        )
    return converted


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

    .. math:: D_{ij} = \|a_i - b_j\|^2 = \sum_k (a_{ik} - b_{jk})^2

    Differences are squared, one feature after the other, so that each distance is
    right to a few roundings, on any scale and wherever the points lie. Equal rows have
    distance 0. No ``(n, m, d)`` array is formed.

    The derivative takes products of matrices in their place:

    .. math:: \mathrm{d}D_{ij} = 2 (a_i - b_j)^\top (\mathrm{d}a_i - \mathrm{d}b_j)

    with rows less the most central one of ``b``. Its error is about epsilon (1e-7 in
    float32) times the distance of a row from that, beside :math:`\|a_i - b_j\|`.

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
    return _squared_distances(*_vectors(a, b))


@jax.custom_jvp
def _squared_distances(a: Array, b: Array) -> Array:
    return _sum_over_features(lambda p, q: (p - q) ** 2, a, b)


@_squared_distances.defjvp
def _squared_distances_jvp(
    points: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (a, b), (da, db) = points, tangents
    distances = _squared_distances(a, b)
    # The most central row of b, which outliers do not move, as they do the mean. A
    # shift does not change a distance, so it carries no gradient.
    centre = lax.stop_gradient(b[jnp.argmin(jnp.sum(distances, axis=0))])[None, :]
    centred_a, centred_b = a - centre, b - centre
    own = jnp.sum(centred_a * da, axis=1)[:, None]
    own += jnp.sum(centred_b * db, axis=1)[None, :]
    cross = matmul(centred_a, db.T) + matmul(da, centred_b.T)
    return distances, 2.0 * (own - cross)


def _sum_over_features(
    term: Callable[[Array, Array], Array], a: Array, b: Array
) -> Array:
    """Returns ``sum_k term(a_ik, b_jk)``, exact where features are equal.

    One feature at a time, also in the gradient: no ``(n, m, d)`` array is formed.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def summand(a_k: Array, b_k: Array) -> Array:
        return term(a_k[:, None], b_k[None, :])

    def add(total: Array, feature: tuple[Array, Array]) -> tuple[Array, None]:
        return total + summand(*feature), None

    zeros = jnp.zeros((len(a), len(b)), a.dtype)
    # Unrolled, what is added fits in a register and is written once in 16 times.
    sums: Array = lax.scan(add, zeros, (a.T, b.T), unroll=16)[0]
    return sums


@dataclasses.dataclass(frozen=True)
class _Linear(ComposableKernel):
    r"""The linear kernel, :math:`k(a, b) = a^\top b`.

    On one-hot labels it is 1 for equal classes, else 0. :math:`k(x, x) = \|x\|^2`.

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

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        a, b = _vectors(a, b)
        return matmul(a, b.T)


linear = _Linear()
r"""The linear kernel, :math:`k(a, b) = a^\top b`, with :math:`k(x, x) = \|x\|^2`."""


@dataclasses.dataclass(frozen=True)
class _GaussianMixture(ComposableKernel):
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
) -> ComposableKernel:
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
    # What is Iterable by its type alone: a string, and an array that is one number.
    is_single = isinstance(bandwidths, str) or getattr(bandwidths, "ndim", 1) == 0
    if is_single or not isinstance(bandwidths, Iterable):
        raise ValueError(
            f"The bandwidths are {bandwidths!r}, but must be a sequence of variances, "
            "such as (1, 3, 5, 7, 9)."
        )
    values = tuple(_number("A bandwidth", bandwidth) for bandwidth in bandwidths)
    if not values or not all(_SMALLEST <= value < float("inf") for value in values):
        raise ValueError(
            f"The bandwidths are {values}, but must be one or more positive, finite "
            f"variances, no less than {_SMALLEST:.2g}, such as (1, 3, 5, 7, 9)."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction={reduction!r} must be "mean" or "sum".')
    return _GaussianMixture(values, reduction)


@dataclasses.dataclass(frozen=True)
class _Laplacian(ComposableKernel):
    """See `laplacian`."""

    scale: float

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        # |p - q|, but with gradient 0 in place of 1 where they are equal.
        distances = _sum_over_features(
            lambda p, q: (p - q) * jnp.sign(p - q), *_vectors(a, b)
        )
        return jnp.exp(distances * (-1.0 / self.scale))


def laplacian(scale: float = 1.0) -> ComposableKernel:
    r"""The Laplacian kernel.

    .. math:: k(a, b) = \exp(-\|a - b\|_1 / s)

    The norm is the sum of absolute differences, as in scikit-learn's
    ``laplacian_kernel`` with ``gamma`` = 1 / s. The scale is a length in units of the
    features, not a variance; the norm grows with their number, and so should the
    scale. :math:`k(x, x) = 1`. Where features are equal, the gradient is 0.

    Args:
      scale: The length s > 0.

    Returns:
      A `Kernel`.

    Raises:
      ValueError: If the scale is not positive and finite.

    Examples:
      >>> print(f"{laplacian(2.0)([[0.0, 0.0]], [[1.0, -1.0]]).item():.3f}")
      0.368
    """
    return _Laplacian(_positive("The scale of laplacian", scale))


@dataclasses.dataclass(frozen=True)
class _RationalQuadratic(ComposableKernel):
    """See `rational_quadratic`."""

    bandwidth: float
    alpha: float

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        scaled = squared_distances(a, b) * (0.5 / self.alpha / self.bandwidth)
        return jnp.exp(-self.alpha * jnp.log1p(scaled))


def rational_quadratic(
    bandwidth: float = 1.0, *, alpha: float = 1.0
) -> ComposableKernel:
    r"""The rational quadratic kernel.

    .. math:: k(a, b) = \left(1 + \frac{\|a - b\|^2}{2 \alpha b}\right)^{-\alpha}

    A mixture of Gaussian kernels of all variances; that of variance b in the limit of
    large alpha. The bandwidth is a variance, in squared units of the features.
    :math:`k(x, x) = 1`.

    Args:
      bandwidth: The variance b > 0.
      alpha: The exponent > 0. The smaller it is, the heavier is the tail.

    Returns:
      A `Kernel`.

    Raises:
      ValueError: If a setting, or twice their product, is not positive and finite.

    Examples:
      >>> rational_quadratic(2.0)([[0.0]], [[0.0], [2.0]])
      Array([[1. , 0.5]], dtype=float32)
    """
    b = _positive("The bandwidth of rational_quadratic", bandwidth)
    a = _positive("The alpha of rational_quadratic", alpha)
    _positive("2 alpha b of rational_quadratic", 2 * a * b)
    return _RationalQuadratic(b, a)


@dataclasses.dataclass(frozen=True)
class _Polynomial(ComposableKernel):
    """See `polynomial`."""

    degree: int
    offset: float
    scale: float

    def __call__(self, a: ArrayLike, b: ArrayLike, /) -> Array:
        return (self.scale * linear(a, b) + self.offset) ** self.degree


def polynomial(
    degree: int = 3, *, offset: float = 1.0, scale: float = 1.0
) -> ComposableKernel:
    r"""The polynomial kernel.

    .. math:: k(a, b) = (\gamma\, a^\top b + c)^p

    :math:`k(x, x) = (\gamma \|x\|^2 + c)^p` has no bound: choose the scale so that it
    is near 1, for the ridge of `cmmd` is in its units. 1 / d is scikit-learn's.

    Args:
      degree: The exponent p, an integer > 0.
      offset: The constant c >= 0, which weighs terms of a degree below p.
      scale: The factor gamma > 0.

    Returns:
      A `Kernel`.

    Raises:
      ValueError: If the degree is not a positive integer, the offset is negative, the
        scale is not positive, or one is not finite.

    Examples:
      >>> polynomial(2)([[1.0, 2.0]], [[3.0, 0.0]])
      Array([[16.]], dtype=float32)
    """
    power = _number("The degree of polynomial", degree)
    if power < 1 or not power.is_integer():
        raise ValueError(
            f"The degree of polynomial is {degree}, but must be a positive integer, "
            "such as 3."
        )
    constant = _number("The offset of polynomial", offset)
    if not 0.0 <= constant < float("inf"):
        raise ValueError(
            f"The offset of polynomial is {offset}, but must be 0 or positive, and "
            "finite: with a negative one it is no kernel."
        )
    return _Polynomial(
        int(power), constant, _positive("The scale of polynomial", scale)
    )


def median_bandwidth(x: ArrayLike, *, stop_gradient: bool = True) -> Array:
    r"""The median of the squared distances between different points.

    .. math:: b = \operatorname{median} \{\|x_i - x_j\|^2 : x_i \ne x_j\}

    It is a variance, as `gaussian_mixture` takes it: at the median distance the kernel
    is :math:`\exp(-1/2) \approx 0.61`. Half of it is met as well, with which the
    kernel is :math:`1/e` there. Points that coincide do not count, nor those so close
    that the square underflows, so that it is never 0; where all do, it is 1. Where x is
    not finite, it is NaN.

    Outside jit, make a kernel of it: ``gaussian_mixture((median_bandwidth(x),))``.
    Under jit or vmap, where it is not a number yet, scale the features instead:
    ``gaussian_mixture((1,))`` on ``x / jnp.sqrt(median_bandwidth(x))``.

    Args:
      x: Points, shape ``(n, d)``, n > 1. All n^2 distances are held, 0.4 GB of 10,000
        points in float32: of a larger set, give a random sample.
      stop_gradient: Whether to treat it as a constant in gradients.

    Returns:
      The bandwidth, a float32 scalar (float64 if x is).

    Raises:
      ValueError: If x is not a matrix of two rows at least.

    Examples:
      >>> median_bandwidth([[0.0], [0.0], [2.0], [3.0]])
      Array(4., dtype=float32)

    References:
      Gretton et al., A kernel two-sample test, JMLR 13, 2012, Section 8.
    """
    (x,) = as_floats(x)
    if x.ndim != 2 or len(x) < 2:
        raise ValueError(
            f"median_bandwidth takes points (n, d), two at least, but got {x.shape}. "
            "Flatten images with x.reshape(len(x), -1)."
        )
    if stop_gradient:
        x = lax.stop_gradient(x)
    distances = _squared_distances(x, x)
    values = lax.stop_gradient(distances)
    num_zeros = jnp.sum(values == 0.0)
    count = values.size - num_zeros  # Even: each pair is there twice.
    low = _order_statistic(values, num_zeros + count // 2 - 1)
    above = jnp.where(values > low, values, jnp.max(values))
    is_both = jnp.sum(values <= low) > num_zeros + count // 2
    high = jnp.where(is_both, low, jnp.min(above))

    def derivative(value: Array) -> Array:
        # 0, with the mean derivative of the pairs at this distance.
        chosen = (values == value).astype(values.dtype)
        return jnp.sum(chosen * (distances - values)) / jnp.sum(chosen)

    median = 0.5 * low + 0.5 * high
    if not stop_gradient:
        median += 0.5 * (derivative(low) + derivative(high))
    median = jnp.where(count > 0, median, jnp.ones_like(median))
    return jnp.where(jnp.isfinite(x).all(), median, jnp.nan)


def _order_statistic(values: Array, rank: Array) -> Array:
    """Returns the value of a rank from 0, of values of at least 0, by bisection.

    Such floats are ordered as the integers of the same bits, so that as many steps as
    there are bits find it exactly, and nothing is sorted.
    """
    bits = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    ordered = lax.bitcast_convert_type(values, bits)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # The value is above low and at most high.
        middle = low + (high - low) // 2
        is_below = jnp.sum(ordered <= middle) > rank
        return jnp.where(is_below, low, middle), jnp.where(is_below, middle, high)

    bounds = jnp.full_like(ordered, -1, shape=()), jnp.max(ordered)
    num_steps = 8 * values.dtype.itemsize
    _, found = lax.fori_loop(0, num_steps, halve, bounds)
    value: Array = lax.bitcast_convert_type(found, values.dtype)
    return value
