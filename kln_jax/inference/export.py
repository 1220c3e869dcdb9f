"""Exports a trained network: python -m kln_jax.inference.export --workdir=DIR OUT.

OUT is an artefact of `jax.export`: network, weights and preprocessing in one file, for
any number of images and for CPU, NVIDIA GPU and TPU. To use it takes JAX and the
package flatbuffers, with which JAX reads it, but not this package:

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

import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.export
import jax.numpy as jnp
from jax import Array

from kln_jax.inference.predict import Parser
from kln_jax.storage import whole_files

if TYPE_CHECKING:
    from kln_jax.inference.trained_network import Trained

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    trained: Trained, *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
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
    from kln_jax.inference import trained_network

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
    height, width, channels = trained.image_shape
    shape = jax.export.symbolic_shape(f"b, {height}, {width}, {channels}")
    return jax.export.export(function, platforms=platforms)(
        jax.ShapeDtypeStruct(shape, jnp.uint8)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
      argv: The arguments; None means those of the process.

    Returns:
      The exit status.
    """
    parser = Parser(
        "kln_jax.inference.export",
        "[--platforms=cpu,cuda,tpu] OUT",
        "Writes a trained network as one file, which predicts without this package.",
    )
    parser.add_argument(
        "--platforms",
        default="cpu,cuda,tpu",
        help=f"where it is to run, of {','.join(PLATFORMS)}; default: %(default)s",
    )
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="the file")
    arguments = parser.parse_args(argv)
    trained = parser.load(arguments)
    out = arguments.out
    try:
        exported = export(trained, platforms=arguments.platforms.split(","))
        whole_files.write_whole(out, exported.serialize())
    except (ValueError, OSError) as error:
        parser.stop(error)
    height, width, channels = trained.image_shape
    with parser.printing():
        print(
            f"Wrote {out}: uint8 images (b, {height}, {width}, {channels}) of classes"
        )
        for number, name in enumerate(trained.class_names):
            print(f"{number:4}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
