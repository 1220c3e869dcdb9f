"""The paper's networks: autoencoders for small images, and a classifier on Z.

The kernels of convolutions start from linen's default (LeCun normal); the paper names
no initialisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from kln_jax.networks import layers

# A 4x4 convolution that halves the side, and the transposed one that doubles it.
_HALVE: dict[str, Any] = {"strides": (2, 2), "padding": ((1, 1), (1, 1))}
_DOUBLE: dict[str, Any] = {"strides": (2, 2), "padding": ((2, 2), (2, 2))}


class Outputs(NamedTuple):
    """What `KLN` computes for a batch of images.

    Attributes:
      z: Embeddings, shape ``(n, latent_dim)``, float32.
      reconstruction: Images in [0, 1], shape ``(n, h, w, c)``, float32.
      logits: Logarithms of class probabilities up to a constant, shape ``(n, C)``,
        float32.
    """

    z: Array
    reconstruction: Array
    logits: Array


def _batch_norm(
    axis_name: str | None, dtype: DTypeLike, *, train: bool, **options: Any
) -> nn.BatchNorm:
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,  # PyTorch's 0.1.
        epsilon=1e-5,
        axis_name=axis_name,
        dtype=dtype,
        **options,
    )


class _Normalised(nn.Module):
    """Batch normalisation, then (leaky) ReLU.

    Attributes:
      slope: Slope of the ReLU below zero.
      axis_name: Device axis over which the statistics are shared.
      dtype: dtype of the computation; statistics are float32 in any case.
    """

    slope: float
    axis_name: str | None
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        x = _batch_norm(self.axis_name, self.dtype, train=train)(x)
        return nn.leaky_relu(x, self.slope)


class _Network(nn.Module):
    """What encoders and decoders have in common.

    Attributes:
      width: Channels or hidden units relative to those named in the class.
      axis_name: Device axis over which batch statistics are shared.
      dtype: dtype of the computation.
    """

    width: float = 1.0
    axis_name: str | None = None
    dtype: DTypeLike = jnp.float32

    def _scaled(self, *channels: int) -> tuple[int, ...]:
        return tuple(max(1, round(self.width * count)) for count in channels)

    def _normalised(self, x: Array, slope: float, *, train: bool) -> Array:
        return _Normalised(slope, self.axis_name, self.dtype)(x, train=train)


class Encoder(_Network):
    """Maps images to embeddings.

    Attributes:
      latent_dim: Dimensions of Z.
      width: Channels or hidden units relative to those that the network names.
      axis_name: Device axis over which batch statistics are shared.
      dtype: dtype of the computation.
    """

    latent_dim: int = 128

    def __call__(self, x: Array, positions: Array, *, train: bool) -> Array:
        """Maps images ``(n, h, w, c)`` to embeddings ``(n, latent_dim)``.

        Args:
          x: The images.
          positions: Places of the images in the global batch, to which dropout masks
            belong, shape ``(n,)``, int32.
          train: Whether batch statistics and dropout are those of training.
        """
        raise NotImplementedError


class Decoder(_Network):
    """Maps embeddings to images.

    Attributes:
      channels: Channels of the images.
      width: Channels or hidden units relative to those that the network names.
      axis_name: Device axis over which batch statistics are shared.
      dtype: dtype of the computation.
    """

    channels: int = 1

    def __call__(self, z: Array, *, train: bool) -> Array:
        """Maps embeddings ``(n, latent_dim)`` to images ``(n, h, w, channels)``.

        Args:
          z: The embeddings.
          train: Whether batch statistics are those of the batch.
        """
        raise NotImplementedError


class MnistEncoder(Encoder):
    """The paper's encoder for 28x28 grey images.

    4x4 conv 64, stride 2; 4x4 conv 128, stride 2; 7x7 conv 1024; 1x1 conv 128. All
    but the first with batch normalisation, all with LeakyReLU (slope 0.2, DCGAN's).
    """

    @nn.compact
    def __call__(self, x: Array, positions: Array, *, train: bool) -> Array:
        """Maps images ``(n, 28, 28, c)`` to embeddings ``(n, latent_dim)``."""
        del positions  # It has no dropout.

        def conv(x: Array, features: int, side: int, **geometry: Any) -> Array:
            return layers.Conv(
                features, (side, side), use_bias=False, dtype=self.dtype, **geometry
            )(x)

        def normalised(x: Array) -> Array:
            return self._normalised(x, 0.2, train=train)

        first, second, third = self._scaled(64, 128, 1024)
        x = layers.Conv(first, (4, 4), dtype=self.dtype, **_HALVE)(x)
        x = nn.leaky_relu(x, 0.2)
        x = normalised(conv(x, second, 4, **_HALVE))
        x = normalised(conv(x, third, 7, padding="VALID"))
        x = normalised(conv(x, self.latent_dim, 1))
        return x.reshape(len(x), -1)


class MnistDecoder(Decoder):
    """The paper's decoder for 28x28 grey images.

    1x1 deconv 1024; 7x7 deconv 128; 4x4 deconv 64, stride 2; 4x4 deconv to the
    image, stride 2. All but the last with batch normalisation and ReLU; then sigmoid.
    """

    @nn.compact
    def __call__(self, z: Array, *, train: bool) -> Array:
        """Maps embeddings ``(n, latent_dim)`` to images ``(n, 28, 28, channels)``."""

        def deconv(x: Array, features: int, side: int, **geometry: Any) -> Array:
            x = layers.ConvTranspose(
                features, (side, side), use_bias=False, dtype=self.dtype, **geometry
            )(x)
            return self._normalised(x, 0.0, train=train)

        first, second, third = self._scaled(1024, 128, 64)
        x = deconv(z[:, None, None, :], first, 1)
        x = deconv(x, second, 7, padding="VALID")
        x = deconv(x, third, 4, **_DOUBLE)
        x = layers.ConvTranspose(self.channels, (4, 4), dtype=self.dtype, **_DOUBLE)(x)
        return nn.sigmoid(x.astype(jnp.float32))


class MlpEncoder(Encoder):
    """Two hidden layers of 1024, with batch normalisation and ReLU, then Z.

    For the baseline CGMMN-MLP, of which the paper says no more than its name.
    """

    @nn.compact
    def __call__(self, x: Array, positions: Array, *, train: bool) -> Array:
        """Maps images ``(n, h, w, c)`` to embeddings ``(n, latent_dim)``."""
        del positions  # It has no dropout.
        (hidden,) = self._scaled(1024)
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.Dense(hidden, use_bias=False, dtype=self.dtype)(x)
            x = self._normalised(x, 0.0, train=train)
        return nn.Dense(self.latent_dim, dtype=self.dtype)(x)


class MlpDecoder(Decoder):
    """The mirror image of `MlpEncoder`, then sigmoid: images of 28x28 pixels."""

    @nn.compact
    def __call__(self, z: Array, *, train: bool) -> Array:
        """Maps embeddings ``(n, latent_dim)`` to images ``(n, 28, 28, channels)``."""
        x, (hidden,) = z, self._scaled(1024)
        for _ in range(2):
            x = nn.Dense(hidden, use_bias=False, dtype=self.dtype)(x)
            x = self._normalised(x, 0.0, train=train)
        x = nn.Dense(28 * 28 * self.channels, dtype=self.dtype)(x)
        x = nn.sigmoid(x.astype(jnp.float32))
        return x.reshape(len(x), 28, 28, self.channels)


class ConvLargeEncoder(Encoder):
    """The encoder for 32x32 colour images: Laine and Aila's network of nine layers.

    Three 3x3 convs of 128, max-pool, dropout; three of 256, max-pool, dropout; 3x3
    conv 512 without padding; 1x1 convs 256 and 128; global average pool. Each conv
    with batch normalisation and LeakyReLU (slope 0.1).
    """

    @nn.compact
    def __call__(self, x: Array, positions: Array, *, train: bool) -> Array:
        """Maps images ``(n, 32, 32, c)`` to embeddings ``(n, latent_dim)``."""

        def conv(x: Array, features: int, side: int, padding: str = "SAME") -> Array:
            x = layers.Conv(
                features,
                (side, side),
                padding=padding,
                use_bias=False,
                dtype=self.dtype,
            )(x)
            return self._normalised(x, 0.1, train=train)

        first, second, third = self._scaled(128, 256, 512)
        for features in (first, second):
            for _ in range(3):
                x = conv(x, features, 3)
            x = layers.max_pool(x)
            x = layers.Dropout(0.5)(x, positions, deterministic=not train)
        x = conv(x, third, 3, padding="VALID")
        x = conv(x, second, 1)
        x = conv(x, self.latent_dim, 1)
        return jnp.mean(x.astype(jnp.float32), axis=(1, 2))


class ConvLargeDecoder(Decoder):
    """Four deconvs to a 32x32 image; the paper gives their number only.

    4x4 deconvs: 512 (to 4x4 pixels), 256, 128 and the image, stride 2 from the
    second on. All but the last with batch normalisation and ReLU; then sigmoid.
    """

    @nn.compact
    def __call__(self, z: Array, *, train: bool) -> Array:
        """Maps embeddings ``(n, latent_dim)`` to images ``(n, 32, 32, channels)``."""

        def deconv(x: Array, features: int, **geometry: Any) -> Array:
            x = layers.ConvTranspose(
                features, (4, 4), use_bias=False, dtype=self.dtype, **geometry
            )(x)
            return self._normalised(x, 0.0, train=train)

        first, second, third = self._scaled(512, 256, 128)
        x = deconv(z[:, None, None, :], first, padding="VALID")
        x = deconv(x, second, **_DOUBLE)
        x = deconv(x, third, **_DOUBLE)
        x = layers.ConvTranspose(self.channels, (4, 4), dtype=self.dtype, **_DOUBLE)(x)
        return nn.sigmoid(x.astype(jnp.float32))


class KLN(nn.Module):
    """Autoencoder and softmax classifier, trained together.

    Attributes:
      encoder: Maps images to Z; `MnistEncoder`, `MlpEncoder` or `ConvLargeEncoder`.
      decoder: Maps Z to images; the decoder of the same name.
      num_classes: Number C of classes.
      z_distance: Mean squared distance in a batch to which Z is standardised, without
        a learned scale; 0 for Z as it comes.
      axis_name: Device axis over which its batch statistics are shared.
    """

    encoder: Encoder
    decoder: Decoder
    num_classes: int
    z_distance: float = 0.0
    axis_name: str | None = None

    @nn.compact
    def __call__(
        self, x: Array, positions: Array | None = None, *, train: bool = False
    ) -> Outputs:
        """Computes embeddings, reconstructions and class scores.

        Args:
          x: Images, shape ``(n, h, w, c)``.
          positions: Places of the images in the global batch, shape ``(n,)``, int32;
            the dropout mask of an image belongs to its place. Default 0 ... n - 1.
          train: Whether batch statistics and dropout are those of training.

        Returns:
          The `Outputs`.
        """
        if positions is None:
            positions = jnp.arange(len(x), dtype=jnp.int32)
        z = self.encoder(x, positions, train=train).astype(jnp.float32)
        if self.z_distance:
            # A learned scale would let Z collapse, or grow out of the kernel's sight.
            fixed: dict[str, Any] = dict(use_scale=False, use_bias=False)
            z = _batch_norm(
                self.axis_name,
                jnp.float32,
                train=train,
                name="standardise_z",
                **fixed,
            )(z)
            # Dimensions of variance 1 have a mean squared distance of 2 each.
            z *= math.sqrt(self.z_distance / (2 * z.shape[-1]))
        logits = nn.Dense(self.num_classes, name="classifier")(z)
        return Outputs(z, self.decoder(z, train=train), logits)


_NETWORKS = {
    "mnist": (MnistEncoder, MnistDecoder, 28),
    "mlp": (MlpEncoder, MlpDecoder, 28),
    "conv_large": (ConvLargeEncoder, ConvLargeDecoder, 32),
}
# Side in pixels of the images that each takes.
SIDES = {name: side for name, (_, _, side) in _NETWORKS.items()}


def build(
    network: str,
    *,
    image_shape: Sequence[int],
    num_classes: int,
    latent_dim: int = 128,
    z_distance: float = 0.0,
    width: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
) -> KLN:
    """Makes the `KLN` of a named network.

    Args:
      network: ``"mnist"``, ``"mlp"`` or ``"conv_large"``.
      image_shape: Height, width and channels of the images.
      num_classes: Number of classes.
      latent_dim: Dimensions of Z.
      z_distance: Mean squared distance to which Z is standardised; 0 for none.
      width: Channels of the hidden layers relative to the paper's.
      dtype: dtype of the networks' computation; parameters, batch statistics, Z and
        logits are float32.
      axis_name: Device axis over which batch statistics are shared.

    Returns:
      The module.

    Raises:
      ValueError: If the name is unknown or the images are not of its size.

    Examples:
      >>> model = build("mnist", image_shape=(28, 28, 1), num_classes=10)
    """
    if network not in _NETWORKS:
        raise ValueError(f"network={network!r} must be one of {sorted(_NETWORKS)}.")
    encoder, decoder, side = _NETWORKS[network]
    if tuple(image_shape[:2]) != (side, side):
        raise ValueError(
            f"network={network!r} takes images of {side}x{side} pixels, but the data "
            f"set has {image_shape[0]}x{image_shape[1]}. Take another network, or "
            f"image_size={side} where the data set leaves the choice."
        )
    common: dict[str, Any] = dict(width=width, axis_name=axis_name, dtype=dtype)
    return KLN(
        encoder=encoder(latent_dim=latent_dim, **common),
        decoder=decoder(channels=image_shape[2], **common),
        num_classes=num_classes,
        z_distance=z_distance,
        axis_name=axis_name,
    )
