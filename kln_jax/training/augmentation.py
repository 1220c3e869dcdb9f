"""Random crop, horizontal flip and normalisation of images, on the device.

All functions are pure. What is random is drawn per example from that example's
own key, so the result for an example does not depend on how a batch is split
over devices. Images are (n, height, width, channels) throughout.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Crop and flip may be given the same keys: each folds in its own number, as a
# key is good for one draw.
_CROP, _FLIP = 0, 1
# Squares of uint8 values, added up over this many images, fit into uint32.
_STATISTICS_CHUNK = 1024


def to_unit(images: jax.Array | np.ndarray) -> jax.Array:
    """Scales uint8 images to float32 in [0, 1].

    Args:
      images: uint8 images, shape ``(n, height, width, channels)``.

    Returns:
      float32 images of the same shape, ``images / 255``.

    Raises:
      ValueError: If the images are not uint8.

    Examples:
      >>> import numpy as np
      >>> float(to_unit(np.full((1, 1, 1, 1), 255, np.uint8))[0, 0, 0, 0])
      1.0
    """
    if images.dtype != jnp.uint8:
        raise ValueError(
            f"Images must be uint8 in 0..255, not {images.dtype}. Images that are in "
            "[0, 1] already need no to_unit."
        )
    return jnp.asarray(images, jnp.float32) / 255


def example_keys(key: jax.Array, positions: jax.Array) -> jax.Array:
    """Makes one key per example from its position in the global batch.

    Args:
      key: The key of this step.
      positions: Each example's position in the global batch, integers, shape ``(n,)``.

    Returns:
      n keys. Key i depends on ``key`` and ``positions[i]`` only.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, positions)


def random_crop(keys: jax.Array, images: jax.Array, *, padding: int) -> jax.Array:
    """Moves each image by up to ``padding`` pixels in either direction.

    The image is padded by reflection and cropped back to its size at a random
    place, the usual augmentation of CIFAR. Reflection (without the edge pixel
    repeated) is our choice: a black frame would be something that the decoder
    has to paint. All ``(2 padding + 1)^2`` places are equally likely.

    Args:
      keys: One for each example, shape ``(n,)``, as from `example_keys`.
      images: Images of any dtype, shape ``(n, height, width, channels)``.
      padding: The largest move, in pixels; 0 returns the images as they are.

    Returns:
      Images of the same shape and dtype.

    Raises:
      ValueError: If ``padding`` is negative or not below the image's sides.
    """
    _, height, width, channels = images.shape
    if not 0 <= padding < min(height, width):
        raise ValueError(
            f"padding={padding} must be in 0..{min(height, width) - 1} for images of "
            f"{height}x{width} pixels."
        )
    if padding == 0:
        return images
    padded = jnp.pad(
        images, ((0, 0), (padding, padding), (padding, padding), (0, 0)), "reflect"
    )

    def crop(key: jax.Array, image: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, _CROP)
        top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
        return jax.lax.dynamic_slice(image, (top, left, 0), (height, width, channels))

    return jax.vmap(crop)(keys, padded)


def random_flip(keys: jax.Array, images: jax.Array) -> jax.Array:
    """Mirrors each image left to right with probability 1/2.

    Args:
      keys: One for each example, shape ``(n,)``; `random_crop` may have used them.
      images: Images of any dtype, shape ``(n, height, width, channels)``.

    Returns:
      Images of the same shape and dtype.
    """
    flips = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, _FLIP)))(
        keys
    )
    return jnp.where(flips[:, None, None, None], images[:, :, ::-1], images)


def normalise(
    images: jax.Array, mean: jax.Array | np.ndarray, std: jax.Array | np.ndarray
) -> jax.Array:
    """Subtracts the mean of each channel and divides by its standard deviation.

    Args:
      images: Floating, in [0, 1], shape ``(n, height, width, channels)``.
      mean: In the images' unit, as from `channel_statistics`, shape ``(channels,)``.
      std: Positive, shape ``(channels,)``.

    Returns:
      ``(images - mean) / std``, in the images' dtype.
    """
    shape = (1, 1, 1, images.shape[-1])
    mean = jnp.reshape(jnp.asarray(mean, images.dtype), shape)
    std = jnp.reshape(jnp.asarray(std, images.dtype), shape)
    return (images - mean) / std


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes each channel's mean and standard deviation over a data set.

    The sums are of integers and hence exact; the results are rounded once. The
    images may be memory-mapped: they are read in chunks.

    Args:
      images: uint8 images, n > 0, shape ``(n, height, width, channels)``.

    Returns:
      ``(mean, std)``, float32 in the unit of `to_unit`, each of shape ``(channels,)``.

    Raises:
      ValueError: If the images are not uint8, there are none, or a channel has the
        same value everywhere.

    Examples:
      >>> import numpy as np
      >>> images = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
      >>> mean, std = channel_statistics(images)
      >>> float(mean[0]), float(std[0])
      (0.5, 0.5)
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.size == 0:
        raise ValueError(
            "Images must be uint8 of shape (n, height, width, channels) with "
            f"n > 0, not {images.dtype} of shape {images.shape}."
        )
    sums = np.zeros(images.shape[1:], np.uint64)
    squares = np.zeros(images.shape[1:], np.uint64)
    for start in range(0, len(images), _STATISTICS_CHUNK):
        chunk = images[start : start + _STATISTICS_CHUNK]
        sums += chunk.sum(axis=0, dtype=np.uint32)
        squares += np.square(chunk.astype(np.uint16)).sum(axis=0, dtype=np.uint32)
    count = images.size // images.shape[-1]
    mean, std = [], []
    for channel in range(images.shape[-1]):
        total = int(sums[..., channel].sum())
        variance = count * int(squares[..., channel].sum()) - total**2
        if variance == 0:
            raise ValueError(
                f"Channel {channel} is {total // count} in every pixel of all "
                f"{len(images)} images, so it cannot be normalised. Leave "
                "normalisation off or check the data."
            )
        mean.append(total / count / 255)
        std.append(variance**0.5 / count / 255)
    return np.array(mean, np.float32), np.array(std, np.float32)
