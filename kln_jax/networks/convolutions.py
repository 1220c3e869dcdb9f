"""Convolutions as functions, lowered to the fastest equal map.

Where a convolution is a plain matrix product it is written as one, and on CPU also
where rearranging the images and multiplying is faster.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from kln_jax import backend

Padding = str | Sequence[tuple[int, int]]
Pads = tuple[tuple[int, int], tuple[int, int]]

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")
# What the windows of a group of images may take, so that they are still in the cache
# when they are multiplied: 5 to 10 MB were fastest for every layer of the networks.
_CACHE_BYTES = 10_000_000
# Channels from which Winograd's form was faster than XLA's convolution.
_WINOGRAD_CHANNELS = 32
_barrier: Callable[[Array], Array] = lax.optimization_barrier


def conv(
    x: Array,
    kernel: Array,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Padding = "SAME",
) -> Array:
    """Convolution without bias, equal to `lax.conv_general_dilated` on NHWC.

    Args:
      x: Images, shape ``(n, h, w, c_in)``.
      kernel: Weights, shape ``(kh, kw, c_in, c_out)``.
      strides: Step of the window along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels.

    Returns:
      Images, shape ``(n, h', w', c_out)``.

    Raises:
      ValueError: If ``x`` is no batch of images with the kernel's channels, or the
        padding is not one of the above.
    """
    _check_images(x, kernel)
    kh, kw, c_in, c_out = kernel.shape
    n, h, w, _ = x.shape
    pads = _conv_pads((h, w), (kh, kw), strides, padding)
    unpadded = pads == ((0, 0), (0, 0))
    if unpadded and (kh, kw) == (h, w):
        y = x.reshape(n, kh * kw * c_in) @ kernel.reshape(-1, c_out)
        return y.reshape(n, 1, 1, c_out)
    if unpadded and (kh, kw) == (1, 1) and strides == (1, 1):
        return _product(x, kernel[0, 0])
    if _products_beat_convolutions():
        if strides == (1, 1):
            return _unit_stride_conv(x, kernel, pads)
        if (
            strides == (2, 2)
            and (kh, kw) == (4, 4)
            and pads == ((1, 1), (1, 1))
            and w % 2 == 0
        ):
            return _halving_conv(x, kernel)
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

    The input is spread with ``strides`` - 1 zeros between its pixels, padded, and
    correlated with the kernel: with top padding p,

      out[s i + p - k] += x[i] kernel[k]   along h, and likewise along w.

    PyTorch's ConvTranspose2d(4, stride=2, padding=1), which doubles the side, is
    strides=(2, 2) and padding=((2, 2), (2, 2)) with the kernel flipped in h and w.

    Args:
      x: Images, shape ``(n, h, w, c_in)``.
      kernel: Weights, shape ``(kh, kw, c_in, c_out)``.
      strides: Pixels of the output for each pixel of the input, along h and w.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)) in pixels, of the
        spread input.

    Returns:
      Images, shape ``(n, h', w', c_out)``.

    Raises:
      ValueError: If ``x`` is no batch of images with the kernel's channels, or the
        padding is not one of the above.
    """
    _check_images(x, kernel)
    kh, kw, c_in, c_out = kernel.shape
    n, h, w, _ = x.shape
    pads = _conv_transpose_pads((kh, kw), strides, padding)
    full = ((kh - 1, kh - 1), (kw - 1, kw - 1))
    if pads == full and (kh, kw) == (1, 1) and strides == (1, 1):
        return _product(x, kernel[0, 0])
    if pads == full and (h, w) == (1, 1):
        # With the input channels last, the product and its two gradients all read
        # this one rearranged copy of the kernel.
        weights = kernel.reshape(-1, c_in, c_out).transpose(0, 2, 1)
        y = x.reshape(n, c_in) @ weights.reshape(-1, c_in).T
        return jnp.flip(y.reshape(n, kh, kw, c_out), (1, 2))
    if (
        _products_beat_convolutions()
        and strides == (2, 2)
        and (kh, kw) == (4, 4)
        and pads == ((2, 2), (2, 2))
    ):
        return _doubling_conv_transpose(x, kernel)
    return lax.conv_transpose(x, kernel, strides, pads, dimension_numbers=_DIMENSIONS)


def _products_beat_convolutions() -> bool:
    # XLA:CPU runs the gradients of convolutions by the kernel, and those of strided
    # ones by the images, many times slower than the products they equal, most of all
    # inside a compiled loop. On other devices convolutions are the safe choice.
    return backend.is_cpu()


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _unit_stride_conv(x: Array, kernel: Array, pads: Pads) -> Array:
    if _suits_winograd(x, kernel):
        return _winograd_conv(x, kernel, pads)
    return lax.conv_general_dilated(
        x, kernel, (1, 1), pads, dimension_numbers=_DIMENSIONS
    )


@partial(_unit_stride_conv.defjvp, symbolic_zeros=True)
def _unit_stride_conv_jvp(
    pads: Pads,
    primals: tuple[Array, Array],
    tangents: tuple[Array | SymbolicZero, Array | SymbolicZero],
) -> tuple[Array, Array]:
    """Derivatives whose transposes are the fastest gradients.

    A convolution is linear in the images and in the kernel. So each derivative is a
    convolution too, written in the form whose transpose XLA:CPU runs fastest.
    """
    (x, kernel), (dx, dkernel) = primals, tangents
    y = _unit_stride_conv(x, kernel, pads)
    parts: list[Array] = []
    if not isinstance(dx, SymbolicZero):
        parts.append(_transposed_gradient(dx, kernel, pads, y))
    if not isinstance(dkernel, SymbolicZero):
        suits = _suits_winograd(x, kernel)
        form = _winograd_conv if suits else _product_of_windows
        parts.append(form(x, dkernel, pads))
    return y, sum(parts[1:], start=parts[0])


def _transposed_gradient(dx: Array, kernel: Array, pads: Pads, y: Array) -> Array:
    """The transpose of the gradient by the images: a convolution of ``dx``.

    The gradient by the images is a convolution of the output's with the flipped
    kernel. Reverse mode transposes the transpose, and runs that convolution.
    """
    (kh, kw), ((top, bottom), (left, right)) = kernel.shape[:2], pads
    back = (kh - 1 - top, kh - 1 - bottom), (kw - 1 - left, kw - 1 - right)
    flipped = jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2)

    def gradient(dy: Array) -> Array:
        return _unit_stride_conv(dy, flipped, back)

    derivative: Array = jax.linear_transpose(gradient, y)(dx)[0]
    return derivative


def _suits_winograd(x: Array, kernel: Array) -> bool:
    """Whether Winograd's products are large enough, and their rounding small."""
    (kh, kw, *channels), size = kernel.shape, x.dtype.itemsize
    return (kh, kw) == (3, 3) and min(channels) >= _WINOGRAD_CHANNELS and size >= 4


def _winograd_conv(x: Array, kernel: Array, pads: Pads) -> Array:
    """Convolution 3 x 3 of stride 1 by Winograd's F(2 x 2, 3 x 3).

    A tile of 2 x 2 pixels of the output is A^T [(G k G^T) * (B^T d B)] A, with the
    4 x 4 pixels d of the input: 16 multiplications in the place of 36. For a group of
    images that stays in the cache, each of the 16 is a product of matrices.

    References:
      Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
    """
    n, h, w, c_in = x.shape
    (top, bottom), (left, right) = pads
    h, w = h + top + bottom - 2, w + left + right - 2
    rows, columns = (h + 1) // 2, (w + 1) // 2
    c_out = kernel.shape[-1]
    weights = _kernel_transform(kernel)

    def of_group(images: Array) -> Array:
        # One pixel more where the side is odd.
        high = (bottom + 2 * rows - h, right + 2 * columns - w)
        tiles = _padded(images, ((top, high[0]), (left, high[1])))
        products = [
            [
                _product(tile, weights[i, j])
                for j, tile in enumerate(_input_transform(row, axis=2))
            ]
            for i, row in enumerate(_input_transform(tiles, axis=1))
        ]
        halves = [_output_transform(row) for row in products]
        even, odd = zip(*halves, strict=True)
        pixels = jnp.stack(
            [jnp.stack(_output_transform(half), axis=2) for half in (even, odd)],
            axis=4,
        )
        return pixels.reshape(-1, 2 * rows, 2 * columns, c_out)

    size = 16 * rows * columns * (c_in + c_out) * x.dtype.itemsize
    # Transformed tiles are made anew for a gradient: they are four times the images.
    y: Array = lax.map(jax.checkpoint(of_group), _groups(x, size))
    return y.reshape(n, 2 * rows, 2 * columns, c_out)[:, :h, :w]


def _kernel_transform(kernel: Array) -> Array:
    """G k G^T, shape (4, 4, c_in, c_out)."""
    half = np.asarray(0.5, kernel.dtype)
    for axis in (0, 1):
        first, middle, last = jnp.split(kernel, 3, axis)
        outer = half * (first + last)
        kernel = jnp.concatenate(
            [first, outer + half * middle, outer - half * middle, last], axis
        )
    return kernel


def _input_transform(x: Array, axis: int) -> list[Array]:
    """B^T d along an axis: the four combinations of each tile."""
    shape = x.shape
    pairs = x.reshape(*shape[:axis], -1, 2, *shape[axis + 1 :])
    # The gradient of a split is one concatenation, that of indexing two paddings.
    first, second = (
        part.squeeze(axis + 1) for part in jnp.split(pairs, 2, axis=axis + 1)
    )
    tiles = first.shape[axis] - 1
    a, b = (lax.slice_in_dim(part, 0, tiles, axis=axis) for part in (first, second))
    c, d = (lax.slice_in_dim(part, 1, tiles + 1, axis=axis) for part in (first, second))
    return [a - c, b + c, c - b, b - d]


def _output_transform(parts: Sequence[Array]) -> tuple[Array, Array]:
    """A^T m: an even and an odd pixel of four products."""
    first, second, third, last = parts
    return first + second + third, second - third - last


def _product_of_windows(x: Array, kernel: Array, pads: Pads) -> Array:
    """Convolution of stride 1 as a product of its windows, whose gradient is fast."""
    kh, kw, _, c_out = kernel.shape
    n, h, w, _ = x.shape
    (top, bottom), (left, right) = pads
    h, w = h + top + bottom - kh + 1, w + left + right - kw + 1
    # In float32 at least, for a sum over groups in bfloat16 soon stops growing.
    weights = kernel.reshape(-1, c_out).T.astype(_wider(kernel.dtype, jnp.float32))

    def of_group(images: Array) -> Array:
        # The windows are the second factor of the kernel's gradient, whose rows
        # XLA:CPU reads faster.
        windows = _windows(images, (kh, kw), pads)
        return windows @ weights.astype(kernel.dtype).T

    size = kernel[..., 0].size * kernel.dtype.itemsize * h * w
    y: Array = lax.map(jax.checkpoint(of_group), _groups(x, size))
    return y.reshape(n, h, w, c_out)


def _windows(x: Array, size: tuple[int, int], pads: Pads) -> Array:
    """The window of each pixel of the output as a row (n * h' * w', kh * kw * c_in)."""
    (kh, kw), (n, _, _, c_in) = size, x.shape
    x = _padded(x, pads)
    h, w = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    taps = [x[:, i : i + h, j : j + w] for i in range(kh) for j in range(kw)]
    return jnp.concatenate(taps, axis=-1).reshape(n * h * w, kh * kw * c_in)


def _padded(x: Array, pads: Pads) -> Array:
    # Not jnp.pad, which cannot cut: the gradient of a wide padding does.
    sides = ((0, 0), *pads, (0, 0))
    return lax.pad(x, jnp.zeros((), x.dtype), [(low, high, 0) for low, high in sides])


def _groups(images: Array, size: int) -> Array:
    """Splits images into equal groups that stay in a processor's cache.

    Args:
      images: Shape ``(n, ...)``.
      size: Bytes that an image takes on the way.
    """
    n = len(images)
    fit = range(1, min(n, _CACHE_BYTES // size) + 1)
    count = max((count for count in fit if n % count == 0), default=1)
    return images.reshape(n // count, count, *images.shape[1:])


def _product(x: Array, weights: Array) -> Array:
    # On two axes, since XLA:CPU runs the gradients of a product with more slower.
    y = x.reshape(-1, x.shape[-1]) @ weights
    return y.reshape(*x.shape[:-1], weights.shape[-1])


def _halving_conv(x: Array, kernel: Array) -> Array:
    """Convolution 4 x 4, stride 2, padding 1, even width: windows, one product."""
    n, h, w, c_in = x.shape
    # A pair of neighbouring columns is one pixel of 2 * c_in channels: the window is
    # then two pairs in each of four rows, and copies long runs.
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    x = x.reshape(n, h + 2, w // 2 + 1, 2 * c_in)
    windows = jnp.concatenate(
        [x[:, i : i + h - 1 : 2, j : j + w // 2] for i in range(4) for j in range(2)],
        axis=-1,
    )
    # XLA:CPU makes the long sum of the kernel's gradient twice as fast with the longer
    # side last; the barrier keeps it from turning the product round.
    weights = _barrier(kernel.reshape(16 * c_in, -1).T)
    return _product(windows, weights.T)


def _doubling_conv_transpose(x: Array, kernel: Array) -> Array:
    """Transposed convolution 4 x 4, stride 2, padding 2: one product, overlap-add."""
    n, h, w, c_in = x.shape
    c_out = kernel.shape[-1]
    y = _product(x, kernel.transpose(2, 0, 1, 3).reshape(c_in, -1))
    y = _overlap_add(y.reshape(n, h, w, 4, 4 * c_out), axis=1)
    return _overlap_add(y.reshape(n, 2 * h, w, 4, c_out), axis=2)


def _overlap_add(y: Array, axis: int) -> Array:
    """Adds the four taps of each pixel up to twice as many pixels along ``axis``.

    Tap k of input pixel i lands on output pixel 2 i + 2 - k: the even pixel 2 i takes
    tap 2 of i and tap 0 of i - 1; the odd pixel 2 i + 1 tap 1 of i and tap 3 of i + 1.

    Args:
      y: The taps before the channels, shape ``(n, h, w, 4, c)``.
      axis: 1 (h) or 2 (w).
    """
    size = y.shape[axis]
    # The gradient of a split is one concatenation, that of indexing four paddings.
    tap_0, tap_1, tap_2, tap_3 = (tap.squeeze(3) for tap in jnp.split(y, 4, axis=3))
    nothing = jnp.zeros_like(lax.slice_in_dim(tap_0, 0, 1, axis=axis))
    before = lax.slice_in_dim(tap_0, 0, size - 1, axis=axis)
    after = lax.slice_in_dim(tap_3, 1, size, axis=axis)
    even = tap_2 + jnp.concatenate([nothing, before], axis)
    odd = tap_1 + jnp.concatenate([after, nothing], axis)
    shape = list(even.shape)
    shape[axis] = 2 * size
    return jnp.stack([even, odd], axis + 1).reshape(shape)


def _check_images(x: Array, kernel: Array) -> None:
    if x.ndim != 4 or x.shape[-1] != kernel.shape[2]:
        raise ValueError(
            f"The input has shape {x.shape}, but the kernel {kernel.shape} needs "
            f"(n, h, w, {kernel.shape[2]}). Reshape the input to that."
        )


def _pairs(padding: Padding) -> Pads:
    if isinstance(padding, str):
        raise ValueError(
            f'padding={padding!r} must be "SAME", "VALID" or '
            "((top, bottom), (left, right))."
        )
    (top, bottom), (left, right) = padding
    return (top, bottom), (left, right)


def _conv_pads(
    size: tuple[int, int],
    kernel_size: tuple[int, int],
    strides: tuple[int, int],
    padding: Padding,
) -> Pads:
    if padding not in ("SAME", "VALID"):
        return _pairs(padding)
    return _pairs(lax.padtype_to_pads(size, kernel_size, strides, padding))


def _conv_transpose_pads(
    kernel_size: tuple[int, int], strides: tuple[int, int], padding: Padding
) -> Pads:
    if padding not in ("SAME", "VALID"):
        return _pairs(padding)
    pads = []
    for k, s in zip(kernel_size, strides, strict=True):
        if padding == "VALID":
            low, high = k - 1, max(k, s) - 1
        else:
            low = k - 1 if s >= k else -(-(k + s - 2) // 2)
            high = k + s - 2 - low
        pads.append((low, high))
    return _pairs(pads)


def _wider(*dtypes: DTypeLike) -> DTypeLike:
    return max(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)
