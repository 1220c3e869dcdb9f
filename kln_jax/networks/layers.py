"""Layers of the networks: convolutions, pooling, dropout that ignores sharding.

`Conv` and `ConvTranspose` have the names, parameters, initial values and results of
the linen layers of the same name; only their lowering, in
`kln_jax.networks.convolutions`, differs.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array
from jax.typing import DTypeLike

from kln_jax.networks import convolutions
from kln_jax.networks.convolutions import Padding


class _Convolution(nn.Module):
    """The parameters and the bias of a convolution; a subclass says of which."""

    features: int
    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: DTypeLike | None = None

    function: ClassVar[Callable[..., Array]]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps images ``(n, h, w, c_in)`` to images ``(n, h', w', features)``."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        # float32 also where the process has enabled float64.
        initialise = nn.linear.default_kernel_init
        kernel = self.param("kernel", initialise, shape, jnp.float32)
        x, kernel = promote_dtype(x, kernel, dtype=self.dtype)
        y = self.function(x, kernel, strides=self.strides, padding=self.padding)
        if not self.use_bias:
            return y
        bias = self.param(
            "bias", nn.initializers.zeros_init(), (self.features,), jnp.float32
        )
        # In float32 at least: the gradient of the bias is a long sum, and XLA:CPU adds
        # bfloat16 numbers up in bfloat16, where the sum soon stops growing.
        wide = convolutions._wider(y.dtype, bias.dtype)
        total = y.astype(wide) + bias.astype(wide).reshape(1, 1, 1, -1)
        return total.astype(y.dtype)


class Conv(_Convolution):
    """Equal to `flax.linen.Conv` on NHWC images, in the fastest lowering.

    Attributes:
      features: Channels of the output.
      kernel_size: (kh, kw) of the window.
      strides: Step of the window along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels.
      use_bias: Whether a bias is added.
      dtype: dtype of the computation; None takes that of the input and parameters.
    """

    function = staticmethod(convolutions.conv)


class ConvTranspose(_Convolution):
    """Equal to `flax.linen.ConvTranspose` on NHWC images, in the fastest lowering.

    Attributes:
      features: Channels of the output.
      kernel_size: (kh, kw) of the window.
      strides: Pixels of the output for each pixel of the input, along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels, of the
        input spread by ``strides``.
      use_bias: Whether a bias is added.
      dtype: dtype of the computation; None takes that of the input and parameters.
    """

    function = staticmethod(convolutions.conv_transpose)


class Dropout(nn.Module):
    """Dropout whose mask belongs to the example, not to its place in a shard.

    The mask of an example is drawn from the "dropout" key folded with the example's
    position in the global batch. So it is the same however the batch is sharded.

    Attributes:
      rate: Probability that a value is set to 0, in [0, 1).

    Raises:
      ValueError: If ``rate`` is outside [0, 1).
    """

    rate: float

    def __post_init__(self) -> None:
        """Checks the rate."""
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"rate={self.rate} must be at least 0, for no dropout, and below 1."
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, positions: Array, *, deterministic: bool) -> Array:
        """Drops values of ``x`` and scales the kept ones by 1 / (1 - rate).

        Args:
          x: Examples, shape ``(n, ...)``.
          positions: Places of the examples in the global batch, shape ``(n,)``, int32.
          deterministic: Return ``x`` as it is, as in evaluation.

        Returns:
          An array like ``x``.
        """
        if deterministic or self.rate == 0:
            return x
        key = self.make_rng("dropout")
        keep = jax.vmap(
            lambda position: jax.random.bernoulli(
                jax.random.fold_in(key, position), 1 - self.rate, x.shape[1:]
            )
        )(positions)
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))


def max_pool(x: Array) -> Array:
    """Maximum over 2 x 2 windows that do not overlap.

    Where several values of a window share the maximum, its gradient goes to the
    first of them in either direction. The maximum of a window with NaN is NaN.

    Args:
      x: Images, shape ``(n, h, w, c)``, h and w even.

    Returns:
      Images, shape ``(n, h / 2, w / 2, c)``.

    Raises:
      ValueError: If h or w is odd.
    """
    n, h, w, c = x.shape
    if h % 2 or w % 2:
        raise ValueError(
            f"Images are {h} x {w}, but max_pool needs even sides. Pad or crop them."
        )
    # Not `max`, whose gradient divides by the number of values equal to the maximum:
    # none is where XLA computes them twice with other roundings.
    x = x.reshape(n, h // 2, 2, w // 2, 2, c)
    x = _maximum(x[:, :, 0], x[:, :, 1])
    return _maximum(x[:, :, :, 0], x[:, :, :, 1])


def _maximum(a: Array, b: Array) -> Array:
    # A comparison with NaN is false, which alone would keep NaN in b only.
    return jnp.where((a >= b) | jnp.isnan(a), a, b)
