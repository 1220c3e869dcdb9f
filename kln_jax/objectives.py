"""The training objectives: CMMD, reconstruction and confidence, as pure functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kln_jax.cmmd import cmmd
from kln_jax.kernels import Kernel


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
