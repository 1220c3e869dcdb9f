"""What a run learned, as figures show it: Z of some images, and what comes back."""

from __future__ import annotations

import io
import lzma
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from kln_jax.datasets import Dataset
from kln_jax.discrepancies.kernels import gaussian_mixture
from kln_jax.inference import trained_network
from kln_jax.inference.trained_network import TrainedNetwork
from kln_jax.storage import whole_files, working_directory
from kln_jax.training import augmentation, experiment, steps

# How many evaluation images are shown, and how many with their reconstructions.
_IMAGES, _EXAMPLES = 1000, 10
# What is kept in half precision: more is seen in no figure.
_HALVED = ("z", "reconstructions")

_apply = jax.jit(steps.apply_trained, static_argnums=0)


class Learned(NamedTuple):
    """What a run learned, on some of its evaluation images, in random order.

    Attributes:
      images: The images, shape ``(n, h, w, c)``, uint8.
      labels: Their class numbers, shape ``(n,)``.
      z: Their embeddings, shape ``(n, latent_dim)``.
      examples: Rows of the first image of each of some classes, shape ``(m,)``.
      reconstructions: What comes back of these, in [0, 1], shape ``(m, h, w, c)``.
      class_names: Names of all classes.
      config: The configuration of the run.
    """

    images: np.ndarray
    labels: np.ndarray
    z: np.ndarray
    examples: np.ndarray
    reconstructions: np.ndarray
    class_names: tuple[str, ...]
    config: Mapping[str, Any]

    @property
    def pixels(self) -> np.ndarray:
        """The images as rows of numbers in [0, 1]."""
        return np.asarray(augmentation.to_unit(self.images)).reshape(len(self.z), -1)

    def gram(self, features: np.ndarray) -> Array:
        """Returns the run's kernel between rows of features, shape ``(n, n)``."""
        kernel = gaussian_mixture(
            self.config["bandwidths"], reduction=self.config["kernel_reduction"]
        )
        return kernel(features, features)

    def first(self, count: int) -> Learned:
        """Leaves so many images, and the examples that are among them."""
        kept = self.examples < count
        return self._replace(
            images=self.images[:count],
            labels=self.labels[:count],
            z=self.z[:count],
            examples=self.examples[kept],
            reconstructions=self.reconstructions[kept],
        )


def load_run(directory: pathlib.Path) -> tuple[TrainedNetwork, Dataset]:
    """Reads the network of a run, and the data set that it had.

    Args:
      directory: Its working directory.

    Raises:
      ValueError: If there is no run, or none with a checkpoint, or its data are others.
      CheckpointError: If its checkpoints are damaged.
    """
    network = trained_network.load(directory)
    data = experiment.load_data(network.config)
    working_directory.check_data(directory, experiment.about(data))
    return network, data


def look_at(
    network: TrainedNetwork, data: Dataset, *, num_images: int = _IMAGES
) -> Learned:
    """Looks at what a network learned.

    Args:
      network: The network.
      data: Its data set.
      num_images: How many evaluation images to look at, at random.
    """
    # They may be sorted by class.
    rows = np.random.default_rng(0).permutation(len(data.eval_labels))[:num_images]
    images, labels = data.eval_images[rows], data.eval_labels[rows]
    model, state = network.model, network.state
    prediction = trained_network.predict_in_batches(
        model, state, images, reconstruction_reduction="mean"
    )
    _, examples = np.unique(labels, return_index=True)
    examples = examples[:_EXAMPLES]
    outputs = _apply(model, state, augmentation.to_unit(images[examples]))
    return Learned(
        images=images,
        labels=labels,
        z=prediction.z,
        examples=examples,
        reconstructions=np.asarray(outputs.reconstruction),
        class_names=data.class_names,
        config=network.config.to_dict(),
    )


def read(path: pathlib.Path, config: Mapping[str, Any]) -> Learned:
    """Reads what a run learned.

    Args:
      path: Its working directory, with checkpoints and its data at hand, or a file.
      config: Its configuration.

    Raises:
      ValueError: If the directory or the file is damaged, or the data are others.
      CheckpointError: If the checkpoints are damaged.
    """
    # Rounded alike, so that both forms of a run have the same figures.
    arrays = to_arrays(look_at(*load_run(path))) if path.is_dir() else load_arrays(path)
    try:
        found = {name: arrays[name] for name in Learned._fields[:5]}
        found |= {name: found[name].astype(np.float32) for name in _HALVED}
        names = tuple(arrays["class_names"].tolist())
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}.") from error
    return Learned(**found, class_names=names, config=config)


def to_arrays(learned: Learned) -> dict[str, np.ndarray]:
    """Returns all of it but the configuration, as arrays of half precision."""
    arrays = {name: np.asarray(value) for name, value in learned._asdict().items()}
    del arrays["config"]
    halved = {name: arrays[name].astype(np.float16) for name in _HALVED}
    return arrays | halved


def save_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file of arrays, equal bytes for equal arrays.

    Args:
      path: The .npz.xz file; its folder is made if it is absent.
      arrays: The arrays by name.
    """
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    # Which writes the date of no day but 1980-01-01 into it.
    np.savez(content, allow_pickle=False, **arrays)
    whole_files.write_whole(path, lzma.compress(content.getvalue()))


def load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a file of arrays.

    Args:
      path: The .npz.xz file.

    Raises:
      ValueError: If it is damaged.
      OSError: If it cannot be read.
    """
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(lzma.decompress(content))) as arrays:
            return dict(arrays)
    # What a damaged file raises depends on its damage.
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}. Restore it.") from error
