"""The training objectives: CMMD, reconstruction and confidence, as pure functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kln_jax.cmmd import cmmd
from kln_jax.kernels import Kernel, squared_distances


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
      A float32 scalar.

    Raises:
      ValueError: If the reduction is unknown.

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
    squares = jnp.square(images - reconstructions)
    mean = jnp.mean(squares)
    return mean * squares[0].size if reduction == "sum" else mean


def confidence(logits: Array) -> Array:
    r"""How unsure single predictions are, and how unbalanced all of them together.

    .. math::
      \frac{1}{n} \sum_i \mathcal{H}(p_i)
      - \frac{1}{C} \sum_c \log \frac{1}{n} \sum_i p_{ic}

    The first term is the mean entropy of the predictions, the second the
    cross-entropy of the uniform prior with their mean.

    Args:
      logits: Class scores, shape ``(n, C)``.

    Returns:
      A float32 scalar; log C where predictions are sure and balanced, its minimum.

    Examples:
      >>> float(jnp.exp(confidence(1e3 * jnp.eye(4))))
      4.0

    References:
      Section 3 of arXiv 2008.10165; Springenberg, CatGAN, arXiv 1511.06390.
    """
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_p) * log_p, axis=1))
    log_mean = jax.nn.logsumexp(log_p, axis=0) - jnp.log(len(logits))
    return entropy - jnp.mean(log_mean)


def kln_objective(
    z_s: Array,
    y_s: Array,
    z_t: Array,
    logits_t: Array,
    reconstruction: Array,
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
      z_s: Embeddings of the labelled batch, shape ``(n_s, d)``.
      y_s: Its one-hot labels, shape ``(n_s, C)``.
      z_t: Embeddings of the predicted batch, shape ``(n_t, d)``.
      logits_t: Its class scores, shape ``(n_t, C)``.
      reconstruction: The `reconstruction_error`, a scalar.
      kernel: Kernel on embeddings.
      label_kernel: Kernel on labels.
      ridge: Regularisation of the CMMD.
      reconstruction_weight: Beta, or beta 1, of the paper.
      confidence_weight: Beta 2 of the paper.

    Returns:
      The loss, and its terms by name.

    References:
      Equations 6 and 7 of arXiv 2008.10165.
    """
    terms = {
        "cmmd": cmmd(
            z_s,
            y_s,
            z_t,
            jax.nn.softmax(logits_t),
            kernel=kernel,
            label_kernel=label_kernel,
            ridge=ridge,
        ),
        "reconstruction": reconstruction,
        "confidence": confidence(logits_t),
    }
    loss = terms["cmmd"]
    # A term of weight zero is logged, but cannot make the loss non-finite.
    if reconstruction_weight:
        loss += reconstruction_weight * terms["reconstruction"]
    if confidence_weight:
        loss += confidence_weight * terms["confidence"]
    return loss, terms


def gram_diagnostics(
    z_s: Array, z_t: Array, *, kernel: Kernel, ridge: float
) -> dict[str, Array]:
    r"""Numbers that tell whether kernel and ridge fit the embeddings.

    The pivots are the squared diagonal of the Cholesky factors of
    :math:`\tilde K = K + \lambda I` of both batches. In exact arithmetic
    none is below the ridge, and their ratio is a lower bound of the condition number.

    Args:
      z_s: Embeddings of the labelled batch, shape ``(n_s, d)``.
      z_t: Embeddings of the predicted batch, shape ``(n_t, d)``.
      kernel: Kernel on embeddings.
      ridge: Regularisation of the CMMD.

    Returns:
      ``pivot_smallest`` and ``pivot_largest``, in units of the kernel, and
      ``median_squared_distance`` between different points of both batches, which a
      bandwidth is to be compared with.

    Examples:
      >>> from kln_jax.kernels import gaussian_mixture
      >>> z = jnp.array([[0.0], [100.0]])
      >>> numbers = gram_diagnostics(z, z, kernel=gaussian_mixture(), ridge=0.5)
      >>> print(f"{numbers['pivot_smallest']:.2f}")
      1.50
    """
    pivots = []
    for z in (z_s, z_t):
        K_tilde = kernel(z, z) + ridge * jnp.eye(len(z))
        pivots.append(jnp.square(jnp.diag(jnp.linalg.cholesky(K_tilde))))
    z = jnp.concatenate([z_s, z_t])
    rows, columns = jnp.triu_indices(len(z), 1)
    return {
        "pivot_smallest": jnp.min(jnp.concatenate(pivots)),
        "pivot_largest": jnp.max(jnp.concatenate(pivots)),
        "median_squared_distance": jnp.median(squared_distances(z, z)[rows, columns]),
    }
