"""Exports of trained networks, which predict without this package.

``python -m kln_jax.inference export --workdir=DIR OUT`` writes one: an artefact of
`jax.export`, with network, weights and preprocessing in one file, for any number of
images and for CPU, NVIDIA GPU and TPU. To use it takes JAX and the package flatbuffers,
with which JAX reads it, but not this package::

    import jax.export

    with open("OUT", "rb") as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    prediction = exported.call(images)

``images`` are uint8, shape ``(b, h, w, c)``, of the size and the channels that
``exported.in_avals`` says. The result is a dictionary of float32 arrays:

- ``probabilities`` of the classes, shape ``(b, C)``, in the order that is printed
  when the file is written;
- ``z``, the embeddings, shape ``(b, latent_dim)``;
- ``reconstruction_error``, the squared error of the autoencoder, shape ``(b,)``.

``exported.call`` compiles once for each b, and inside ``jax.jit`` it is a function
like any other. JAX promises to read such a file for six months after the version that
wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.export
import numpy as np
from jax import Array

from kln_jax.inference import trained_network
from kln_jax.inference.trained_network import TrainedNetwork

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    trained: TrainedNetwork, *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
) -> jax.export.Exported:
    """Exports a trained network as a function of uint8 images.

    Args:
      trained: From `kln_jax.inference.trained_network.load`.
      platforms: On which it is to run, of `PLATFORMS`.

    Returns:
      What ``call`` and ``serialize`` belong to; the module says how to call it.

    Raises:
      ValueError: If a platform is unknown.
    """
    unknown = [name for name in platforms if name not in PLATFORMS]
    if unknown or not platforms:
        raise ValueError(
            f"platforms={','.join(platforms)!r} must be some of {','.join(PLATFORMS)}."
        )

    def predict_one(image: Array) -> dict[str, Array]:
        prediction = trained_network.predict(
            trained.model,
            trained.state,
            image[None],
            reconstruction_reduction=trained.config.reconstruction_reduction,
        )
        return {name: rows[0] for name, rows in prediction._asdict().items()}

    # Of one image and mapped: the networks ask for the length of their batch, which
    # has no number here.
    function = jax.jit(jax.vmap(predict_one))
    images = jax.export.symbolic_args_specs(
        np.empty((1, *trained.image_shape), np.uint8), "b, ..."
    )
    return jax.export.export(function, platforms=platforms)(images)
