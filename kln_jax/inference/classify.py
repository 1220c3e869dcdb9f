"""Image files that a user names: found, read and classified."""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from kln_jax import datasets
from kln_jax.inference import trained_network
from kln_jax.inference.trained_network import TrainedNetwork

# How many images are read before they are classified.
_CHUNK = 100

# Called with a path that cannot be used, and the reason.
Report = Callable[[object, object], None]


class Classified(NamedTuple):
    """What a network says of an image file.

    Attributes:
      image: Path of the file.
      class_name: The most probable class.
      probability: The probability of that class.
      reconstruction_error: Squared error of the autoencoder.
    """

    image: str
    class_name: str
    probability: float
    reconstruction_error: float


def find_files(arguments: Iterable[str], report: Report) -> Iterator[pathlib.Path]:
    """Yields the files that arguments name.

    Args:
      arguments: Each a file, a folder, or ``"-"`` for the standard input, which has a
        path on each line.
      report: Called for what holds no image.

    Yields:
      The files, and of each folder its images and those of its subfolders.
    """
    for argument in arguments:
        if argument == "-" and not sys.stdin:
            report(argument, "the standard input is closed")
            continue
        if argument == "-":
            lines = (line.rstrip("\n") for line in sys.stdin)
            named = (line for line in lines if line not in ("", "-"))
            yield from find_files(named, report)
            continue
        path = pathlib.Path(argument)
        if not os.path.isdir(path):
            yield path
            continue
        inside = datasets.image_files(path, subfolders=True)
        for error in inside.unreadable:
            report(error.filename, error.strerror)
        if not inside.images and not inside.unreadable:
            report(path, "holds no .png, .jpg or .jpeg file")
        yield from inside.images


def classify_files(
    trained: TrainedNetwork, paths: Iterable[pathlib.Path], report: Report
) -> Iterator[Classified]:
    """Classifies image files, treated as `kln_jax.datasets` treats own images.

    Args:
      trained: The network.
      paths: The files; they are read some at a time.
      report: Called for each file that cannot be used.

    Yields:
      What the network says of each of the others, in their order.
    """
    margin = datasets.margin(trained.config.dataset, trained.image_shape[0])
    paths = iter(paths)
    while chunk := list(itertools.islice(paths, _CHUNK)):
        images, usable = [], []
        for path in chunk:
            try:
                images.append(
                    datasets.read_image(path, trained.image_shape, margin=margin)
                )
            # What a damaged file raises depends on its format and damage.
            except Exception as error:
                report(path, getattr(error, "strerror", None) or error)
            else:
                usable.append(path)
        if not images:
            continue
        prediction = trained_network.predict_in_batches(
            trained.model,
            trained.state,
            np.stack(images),
            reconstruction_reduction=trained.config.reconstruction_reduction,
        )
        for path, probabilities, squares in zip(
            usable,
            prediction.probabilities,
            prediction.reconstruction_error,
            strict=True,
        ):
            if not np.isfinite([*probabilities, squares]).all():
                report(path, "what the network says is not finite: training diverged")
                continue
            best = int(np.argmax(probabilities))
            yield Classified(
                str(path),
                trained.class_names[best],
                float(probabilities[best]),
                float(squares),
            )
