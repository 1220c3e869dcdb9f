"""Convolutions lowered to the fastest equal map, and dropout that ignores sharding.

`Conv` and `ConvTranspose` have the names, parameters, initial values and results of
the linen layers of the same name. Only the lowering differs: where a convolution is a
plain matrix product, or a product after a rearrangement, it is written as one.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array, lax
from jax.typing import DTypeLike

Padding = str | Sequence[tuple[int, int]]

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def conv(
    x: Array,
    kernel: Array,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Padding = "SAME",
) -> Array:
    """Convolution without bias, equal to `lax.conv_general_dilated` on NHWC.

    Args:
      x: images (n, h, w, c_in).
      kernel: weights (kh, kw, c_in, c_out).
      strides: step of the window along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels.

    Returns:
      Images (n, h', w', c_out).
    """
    kh, kw, c_in, c_out = kernel.shape
    n, h, w, _ = x.shape
    pads = _conv_pads((h, w), (kh, kw), strides, padding)
    unpadded = pads == [(0, 0), (0, 0)]
    if unpadded and (kh, kw) == (h, w):
        return (x.reshape(n, -1) @ kernel.reshape(-1, c_out)).reshape(n, 1, 1, c_out)
    if unpadded and (kh, kw) == (1, 1) and strides == (1, 1):
        return x @ kernel[0, 0]
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=_DIMENSIONS
    )


def conv_transpose(
    x: Array,
    kernel: Array,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Padding = "SAME",
) -> Array:
    """Transposed convolution without bias, equal to `lax.conv_transpose` on NHWC.

    The input is spread with `strides` - 1 zeros between its pixels, padded, and
    correlated with the kernel. PyTorch's ConvTranspose2d(4, stride=2, padding=1),
    which doubles the side, is strides=(2, 2) and padding=((2, 2), (2, 2)), with the
    kernel flipped along both sides.

    Args:
      x: images (n, h, w, c_in).
      kernel: weights (kh, kw, c_in, c_out).
      strides: pixels of the output for each pixel of the input, along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels, of the
        spread input.

    Returns:
      Images (n, h', w', c_out).
    """
    kh, kw, _, c_out = kernel.shape
    n, h, w, _ = x.shape
    pads = _conv_transpose_pads((kh, kw), strides, padding)
    full = [(kh - 1, kh - 1), (kw - 1, kw - 1)]
    if pads == full and (h, w) == (1, 1):
        y = jnp.einsum("nc,hwco->nhwo", x.reshape(n, -1), kernel)
        return jnp.flip(y, (1, 2))
    if pads == full and (kh, kw) == (1, 1) and strides == (1, 1):
        return x @ kernel[0, 0]
    if strides == (2, 2) and (kh, kw) == (4, 4) and pads == [(2, 2), (2, 2)]:
        return _double(x, kernel)
    return lax.conv_transpose(x, kernel, strides, pads, dimension_numbers=_DIMENSIONS)


def _double(x: Array, kernel: Array) -> Array:
    """Transposed convolution 4x4, stride 2, padding (2, 2): product and overlap-add."""
    n, h, w, c_in = x.shape
    c_out = kernel.shape[-1]
    # Input pixel i reaches output pixels 2i + 2 - k. Tap k = 2a + b adds to output
    # phase b (0: even, 1: odd), a pixel later (a = 0) or earlier (a = 1).
    taps = kernel.transpose(2, 0, 1, 3).reshape(c_in, -1)
    y = (x @ taps).reshape(n, h, w, 4, 4, c_out)
    rows = [
        jnp.pad(y[:, :, :, 2], ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)))
        + jnp.pad(y[:, :-1, :, 0], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0))),
        y[:, :, :, 1] + jnp.pad(y[:, 1:, :, 3], ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0))),
    ]
    y = jnp.stack(rows, 2).reshape(n, 2 * h, w, 4, c_out)
    columns = [
        y[:, :, :, 2] + jnp.pad(y[:, :, :-1, 0], ((0, 0), (0, 0), (1, 0), (0, 0))),
        y[:, :, :, 1] + jnp.pad(y[:, :, 1:, 3], ((0, 0), (0, 0), (0, 1), (0, 0))),
    ]
    return jnp.stack(columns, 3).reshape(n, 2 * h, 2 * w, c_out)


def _conv_pads(
    size: tuple[int, int],
    kernel_size: tuple[int, int],
    strides: tuple[int, int],
    padding: Padding,
) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        return [
            (int(low), int(high))
            for low, high in lax.padtype_to_pads(size, kernel_size, strides, padding)
        ]
    return [(low, high) for low, high in padding]


def _conv_transpose_pads(
    kernel_size: tuple[int, int], strides: tuple[int, int], padding: Padding
) -> list[tuple[int, int]]:
    if not isinstance(padding, str):
        return [(low, high) for low, high in padding]
    pads = []
    for k, s in zip(kernel_size, strides, strict=True):
        if padding == "VALID":
            total, low = k + s - 2 + max(k - s, 0), k - 1
        else:
            total = k + s - 2
            low = k - 1 if s > k - 1 else -(-total // 2)
        pads.append((low, total - low))
    return pads


class Conv(nn.Module):
    """Equal to `flax.linen.Conv` on NHWC images, in the fastest lowering.

    Attributes:
      features: channels of the output.
      kernel_size: (kh, kw) of the window.
      strides: step of the window along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels.
      use_bias: whether a bias is added.
      dtype: dtype of the computation; None takes that of the input and parameters.
      kernel_init: initialiser of the kernel.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: DTypeLike | None = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps images (n, h, w, c_in) to images (n, h', w', features)."""
        x, kernel, bias = _parameters(self, x)
        y = conv(x, kernel, strides=self.strides, padding=self.padding)
        return y if bias is None else y + bias.reshape(1, 1, 1, -1)


class ConvTranspose(nn.Module):
    """Equal to `flax.linen.ConvTranspose` on NHWC images, in the fastest lowering.

    Attributes:
      features: channels of the output.
      kernel_size: (kh, kw) of the window.
      strides: pixels of the output for each pixel of the input, along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels, of the
        input spread by `strides`.
      use_bias: whether a bias is added.
      dtype: dtype of the computation; None takes that of the input and parameters.
      kernel_init: initialiser of the kernel.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: DTypeLike | None = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps images (n, h, w, c_in) to images (n, h', w', features)."""
        x, kernel, bias = _parameters(self, x)
        y = conv_transpose(x, kernel, strides=self.strides, padding=self.padding)
        return y if bias is None else y + bias.reshape(1, 1, 1, -1)


def _parameters(
    layer: Conv | ConvTranspose, x: Array
) -> tuple[Array, Array, Array | None]:
    shape = (*layer.kernel_size, x.shape[-1], layer.features)
    kernel = layer.param("kernel", layer.kernel_init, shape)
    bias = (
        layer.param("bias", nn.initializers.zeros_init(), (layer.features,))
        if layer.use_bias
        else None
    )
    return promote_dtype(x, kernel, bias, dtype=layer.dtype)


class Dropout(nn.Module):
    """Dropout whose mask belongs to the example, not to its place in a shard.

    The mask of an example is drawn from the "dropout" key folded with the example's
    position in the global batch. So it is the same however the batch is sharded.

    Attributes:
      rate: probability that a value is set to 0, in [0, 1).

    Raises:
      ValueError: if `rate` is outside [0, 1).
    """

    rate: float

    def __post_init__(self) -> None:
        """Checks the rate."""
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"rate is {self.rate}, but must be at least 0 and below 1; "
                "choose such a rate, 0 for no dropout"
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Array, positions: Array, *, deterministic: bool) -> Array:
        """Drops values of `x` and scales the kept ones by 1 / (1 - rate).

        Args:
          x: examples (n, ...).
          positions: position of each example in the global batch (n,), int32.
          deterministic: return `x` as it is, as in evaluation.

        Returns:
          An array like `x`.
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
