"""The training objectives: CMMD, reconstruction and confidence, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from kln_jax.discrepancies.cmmd import cmmd
from kln_jax.discrepancies.float_arrays import as_floats
from kln_jax.discrepancies.kernels import Kernel, squared_distances


def reconstruction_error(
    images: Array, reconstructions: Array, *, reduction: str = "sum"
) -> Array:
    r"""Squared error of the autoencoder.

    .. math:: \frac{1}{n} \sum_i \|x_i - \hat x_i\|^2

    Args:
      images: Images in [0, 1], shape ``(n, h, w, c)``.
      reconstructions: Images of the same shape.
      reduction: ``"sum"`` over pixels, as printed, or ``"mean"``.

    Returns:
      A float32 scalar (float64 if an argument is).

    Raises:
      ValueError: If the shapes differ, or the reduction is unknown.

    Examples:
      >>> x = jnp.ones((2, 4, 4, 1))
      >>> float(reconstruction_error(x, jnp.zeros_like(x)))
      16.0

    References:
      Equation 6 of arXiv 2008.10165.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(
            f'reconstruction_reduction={reduction!r} must be "sum" or "mean".'
        )
    images, reconstructions = as_floats(images, reconstructions)
    if images.shape != reconstructions.shape:
        raise ValueError(
            f"Images of shape {images.shape} have reconstructions of another, "
            f"{reconstructions.shape}."
        )
    squares = jnp.square(images - reconstructions)
    mean = jnp.mean(squares)
    return mean * squares[0].size if reduction == "sum" else mean


def confidence(logits: Array, class_prior: Array | None = None) -> Array:
    r"""How unsure single predictions are, and how unbalanced all of them together.

    .. math::
      \frac{1}{n} \sum_i \mathcal{H}(p_i)
      - \sum_c \pi_c \log \frac{1}{n} \sum_i p_{ic}

    The first term is the mean entropy of the predictions, the second the
    cross-entropy of the prior :math:`\pi` with their mean.

    Args:
      logits: Class scores, shape ``(n, C)``.
      class_prior: The prior P(Y), shape ``(C,)``; uniform if None.

    Returns:
      A float32 scalar (float64 if the scores are). Its minimum is the entropy of the
      prior, where predictions are sure and distributed as the prior.

    Examples:
      >>> float(jnp.exp(confidence(1e3 * jnp.eye(4))))
      4.0
      >>> float(jnp.exp(confidence(1e3 * jnp.eye(2), jnp.array([0.5, 0.5]))))
      2.0

    References:
      Section 3 of arXiv 2008.10165; Springenberg, CatGAN, arXiv 1511.06390.
    """
    (logits,) = as_floats(logits)
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_p) * log_p, axis=1))
    log_mean = jax.nn.logsumexp(log_p, axis=0) - jnp.log(len(logits))
    if class_prior is None:
        return entropy - jnp.mean(log_mean)
    return entropy - jnp.sum(class_prior.astype(log_mean.dtype) * log_mean)


class Batch(NamedTuple):
    """What an objective compares: a labelled batch s, and a batch t of predictions.

    Attributes:
      features_s: What the kernel acts on, for batch s, shape ``(n_s, d)``; Z in KLN.
      y_s: One-hot labels of s, shape ``(n_s, C)``.
      logits_s: Class scores of s, shape ``(n_s, C)``.
      features_t: What the kernel acts on, for batch t, shape ``(n_t, d)``.
      logits_t: Class scores of t, shape ``(n_t, C)``.
      reconstruction: The `reconstruction_error` of both, a scalar.
      class_prior: The prior of the `confidence`, shape ``(C,)``; uniform if None.
      y_t: One-hot labels of t, shape ``(n_t, C)``, for `symmetric`; None if unknown.
    """

    features_s: Array
    y_s: Array
    logits_s: Array
    features_t: Array
    logits_t: Array
    reconstruction: Array
    class_prior: Array | None = None
    y_t: Array | None = None


# From a batch to the loss, and its terms by name.
Objective = Callable[[Batch], tuple[Array, dict[str, Array]]]


def kln_objective(
    batch: Batch,
    *,
    kernel: Kernel,
    label_kernel: Kernel,
    ridge: float,
    reconstruction_weight: float,
    confidence_weight: float,
) -> tuple[Array, dict[str, Array]]:
    r"""KLN's objective, supervised or semi-supervised.

    .. math::
      \mathrm{CMMD}(Z_s, Y_s; Z_t, \hat Y_t) + \beta_1 \, \mathrm{reconstruction}
          + \beta_2 \, \mathrm{confidence}(\hat Y_t)

    Supervised, :math:`\beta_2` is zero and both batches come from the labelled images.

    Args:
      batch: The `Batch`.
      kernel: Kernel on features.
      label_kernel: Kernel on labels.
      ridge: Regularisation of the CMMD.
      reconstruction_weight: Beta, or beta 1, of the paper.
      confidence_weight: Beta 2 of the paper.

    Returns:
      The loss, and its terms by name.

    References:
      Equations 6 and 7 of arXiv 2008.10165.
    """
    value = cmmd(
        batch.features_s,
        batch.y_s,
        batch.features_t,
        jax.nn.softmax(batch.logits_t),
        kernel=kernel,
        label_kernel=label_kernel,
        ridge=ridge,
    )
    return _with_penalties(
        {"cmmd": value}, batch, reconstruction_weight, confidence_weight
    )


def cross_entropy_objective(
    batch: Batch, *, reconstruction_weight: float, confidence_weight: float
) -> tuple[Array, dict[str, Array]]:
    r"""The baseline: cross-entropy of the labelled batch in the place of CMMD.

    .. math::
      -\frac{1}{n_s} \sum_i \log \hat p(y_i | x_i)
          + \beta_1 \, \mathrm{reconstruction}
          + \beta_2 \, \mathrm{confidence}(\hat Y_t)

    Args:
      batch: The `Batch`.
      reconstruction_weight: Beta, or beta 1, of the paper.
      confidence_weight: Beta 2 of the paper.

    Returns:
      The loss, and its terms by name.

    Examples:
      >>> even = jnp.zeros((3, 4))
      >>> batch = Batch(even, jnp.eye(3, 4), even, even, even, jnp.zeros(()))
      >>> options = dict(reconstruction_weight=0.1, confidence_weight=0.0)
      >>> loss, _ = cross_entropy_objective(batch, **options)
      >>> print(f"{jnp.exp(loss):.3f}")
      4.000
    """
    losses = optax.losses.softmax_cross_entropy(batch.logits_s, batch.y_s)
    return _with_penalties(
        {"cross_entropy": jnp.mean(losses)},
        batch,
        reconstruction_weight,
        confidence_weight,
    )


def symmetric(objective: Objective) -> Objective:
    r"""Makes an objective use the labels of both batches.

    .. math:: \frac{1}{2} (f(s, t) + f(t, s))

    Args:
      objective: The objective f, which uses the labels of its first batch alone.

    Returns:
      The mean of the objective and of the same with the batches exchanged.

    Examples:
      >>> even = jnp.zeros((3, 4))
      >>> batch = Batch(even, jnp.eye(3, 4), even, even, even, jnp.zeros(()))
      >>> batch = batch._replace(y_t=jnp.eye(3, 4))
      >>> options = dict(reconstruction_weight=0.1, confidence_weight=0.0)
      >>> def one_way(batch):
      ...     return cross_entropy_objective(batch, **options)
      >>> loss, _ = symmetric(one_way)(batch)
      >>> print(f"{jnp.exp(loss):.3f}")
      4.000
    """

    def mean(batch: Batch) -> tuple[Array, dict[str, Array]]:
        assert batch.y_t is not None  # The configuration has all labels.
        exchanged = batch._replace(
            features_s=batch.features_t,
            y_s=batch.y_t,
            logits_s=batch.logits_t,
            features_t=batch.features_s,
            logits_t=batch.logits_s,
            y_t=batch.y_s,
        )
        found: tuple[Array, dict[str, Array]] = jax.tree.map(
            lambda one, other: (one + other) / 2, objective(batch), objective(exchanged)
        )
        return found

    return mean


def reconstruction_objective(batch: Batch) -> tuple[Array, dict[str, Array]]:
    """Reconstruction alone: an autoencoder, which knows of no labels.

    Args:
      batch: The `Batch`.

    Returns:
      The loss, and its terms by name.
    """
    return batch.reconstruction, {"reconstruction": batch.reconstruction}


def _with_penalties(
    terms: dict[str, Array],
    batch: Batch,
    reconstruction_weight: float,
    confidence_weight: float,
) -> tuple[Array, dict[str, Array]]:
    """Returns the loss and its terms, of which one is given."""
    (loss,) = terms.values()
    terms["reconstruction"] = batch.reconstruction
    terms["confidence"] = confidence(batch.logits_t, batch.class_prior)
    # A term of weight zero is logged, but cannot make the loss non-finite.
    if reconstruction_weight:
        loss += reconstruction_weight * terms["reconstruction"]
    if confidence_weight:
        loss += confidence_weight * terms["confidence"]
    return loss, terms


# What `gram_diagnostics` returns.
DIAGNOSTICS = (
    *("pivot_smallest", "pivot_largest", "median_squared_distance"),
    *("kernel_same_sum", "kernel_same_count"),
    *("kernel_different_sum", "kernel_different_count"),
)


def gram_diagnostics(
    features_s: Array,
    features_t: Array,
    labels_s: Array,
    *,
    kernel: Kernel,
    ridge: float,
) -> dict[str, Array]:
    r"""Numbers that tell whether kernel and ridge fit the features.

    The pivots are the squared diagonal of the Cholesky factors of
    :math:`\tilde K = K + \lambda I` of both batches. In exact arithmetic
    none is below the ridge, and of a kernel whose k(x, x) is constant their ratio is a
    lower bound of the condition number.

    Args:
      features_s: What the kernel acts on, for batch s, shape ``(n_s, d)``.
      features_t: The same for batch t, shape ``(n_t, d)``.
      labels_s: Class numbers of batch s, shape ``(n_s,)``.
      kernel: Kernel on features.
      ridge: Regularisation of the CMMD.

    Returns:
      ``pivot_smallest`` and ``pivot_largest``, in units of the kernel;
      ``median_squared_distance`` between different points of both batches, which a
      bandwidth is to be compared with; and sums and counts of the kernel's values over
      pairs of s of the ``same`` class and of ``different`` classes, such as
      ``kernel_same_sum``.

    Examples:
      >>> from kln_jax.discrepancies.kernels import gaussian_mixture
      >>> z, kernel = jnp.array([[0.0], [100.0]]), gaussian_mixture()
      >>> numbers = gram_diagnostics(z, z, jnp.arange(2), kernel=kernel, ridge=0.5)
      >>> print(f"{numbers['pivot_smallest']:.2f}")
      1.50
    """
    pivots: list[Array] = []
    sums: dict[str, Array] = {}
    for x in (features_s, features_t):
        K = kernel(x, x)
        sums = sums or _kernel_sums(K, labels_s)
        K_tilde = K + ridge * jnp.eye(len(x), dtype=K.dtype)
        if pivots:  # The zero makes the second one wait, as in `cmmd.solve_both`.
            K_tilde += 0.0 * pivots[0][0]
        pivots.append(jnp.square(jnp.diag(jnp.linalg.cholesky(K_tilde))))
    x = jnp.concatenate([features_s, features_t])
    rows, columns = jnp.triu_indices(len(x), 1)
    return {
        "pivot_smallest": jnp.min(jnp.concatenate(pivots)),
        "pivot_largest": jnp.max(jnp.concatenate(pivots)),
        "median_squared_distance": jnp.median(squared_distances(x, x)[rows, columns]),
        **sums,
    }


def _kernel_sums(K: Array, labels: Array) -> dict[str, Array]:
    """Sums and counts of kernel values over pairs of the same and other classes."""
    same = labels[:, None] == labels[None, :]
    pairs = {"same": same & ~jnp.eye(len(labels), dtype=bool), "different": ~same}
    sums = {}
    for name, mask in pairs.items():
        sums[f"kernel_{name}_sum"] = jnp.sum(jnp.where(mask, K, 0.0))
        sums[f"kernel_{name}_count"] = jnp.sum(mask)
    return sums
