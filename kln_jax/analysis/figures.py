"""Figures of the paper's kind, from a run's working directory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kln_jax import augment, steps
from kln_jax.kernels import gaussian_mixture
from kln_jax.networks import Outputs
from kln_jax.training import Run

# One look for all figures: colours that the colour-blind can tell apart.
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
}
SAME, DIFFERENT = "#0072b2", "#d55e00"


def overview(run: Run, *, num_images: int = 300) -> Figure:
    """Shows what a run learned: its kernel on pixels and on Z, and its autoencoder.

    Args:
      run: A run read back.
      num_images: How many evaluation images the histograms take, the first.

    Returns:
      A figure with two histograms of kernel values, of pairs of the same and of
      different classes, and with images above their reconstructions.
    """
    images, labels = (
        run.data.eval_images[:num_images],
        run.data.eval_labels[:num_images],
    )
    outputs = embed(run, images)
    pixels = np.asarray(augment.to_unit(images)).reshape(len(images), -1)
    config = run.config
    kernel = gaussian_mixture(config.bandwidths, reduction=config.kernel_reduction)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.9), layout="constrained")
        axes = figure.subplot_mosaic(
            [["pixels", "z", "images"]], width_ratios=[1, 1, 1.25]
        )
        for name, features in (("pixels", pixels), ("z", np.asarray(outputs.z))):
            gram = np.asarray(kernel(features, features))
            kernel_histogram(axes[name], gram, labels)
        axes["pixels"].set_title("kernel on pixels")
        axes["z"].set_title("kernel on Z, learned")
        axes["z"].legend(frameon=False, loc="upper center")
        reconstructions(axes["images"], images, outputs.reconstruction, labels)
        axes["images"].set_title("test images, and from Z")
    return figure


def embed(run: Run, images: np.ndarray) -> Outputs:
    """Applies a run's network to uint8 images ``(n, h, w, c)``."""
    predict = jax.jit(functools.partial(steps.predict, run.model))
    return predict(run.state, augment.to_unit(images))


def kernel_histogram(axes: Axes, gram: np.ndarray, labels: np.ndarray) -> None:
    """Draws the values of a kernel between images of the same and other classes.

    Args:
      axes: Where to draw.
      gram: Gram matrix, shape ``(n, n)``.
      labels: Class numbers, shape ``(n,)``.
    """
    same, different = pair_values(gram, labels)
    bins = np.linspace(0.0, max(1.0, same.max(), different.max()), 41).tolist()
    for values, colour, name in (
        (same, SAME, "same class"),
        (different, DIFFERENT, "different classes"),
    ):
        weights = np.full(len(values), 100.0 / len(values))
        axes.hist(values, bins, weights=weights, color=colour, alpha=0.7, label=name)
    axes.set_xlabel("kernel value")
    axes.set_ylabel("% of pairs")


def pair_values(gram: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of a kernel between different images, each pair once.

    Args:
      gram: Gram matrix, shape ``(n, n)``.
      labels: Class numbers, shape ``(n,)``.

    Returns:
      Those of pairs of the same class, and those of pairs of different classes.

    Examples:
      >>> pair_values(np.array([[1.0, 0.9, 0.1], [0.9, 1, 0.2], [0.1, 0.2, 1]]),
      ...             np.array([0, 0, 1]))
      (array([0.9]), array([0.1, 0.2]))
    """
    rows, columns = np.triu_indices(len(labels), k=1)
    values, same = gram[rows, columns], labels[rows] == labels[columns]
    return values[same], values[~same]


def reconstructions(
    axes: Axes,
    images: np.ndarray,
    reconstructed: jnp.ndarray,
    labels: np.ndarray,
    *,
    columns: int = 5,
) -> None:
    """Draws the first image of each class above its reconstruction.

    Args:
      axes: Where to draw.
      images: uint8 images, shape ``(n, h, w, c)``.
      reconstructed: Their reconstructions in [0, 1], of the same shape.
      labels: Class numbers, shape ``(n,)``.
      columns: Images in a row.
    """
    _, first = np.unique(labels, return_index=True)
    first = first[: 2 * columns]
    pairs = [
        np.concatenate(
            [_framed(images[i] / 255.0), _framed(np.asarray(reconstructed[i]))]
        )
        for i in first
    ]
    axes.imshow(_tiled(pairs, columns), cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()


def _framed(image: np.ndarray) -> np.ndarray:
    return np.pad(image, ((1, 1), (1, 1), (0, 0)), constant_values=1.0)


def _tiled(images: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Sets images side by side, with a white margin between rows."""
    height, width, channels = images[0].shape
    rows = [images[i : i + columns] for i in range(0, len(images), columns)]
    blank = np.ones((height, width, channels))
    margin = np.ones((2, columns * width, channels))
    lines: list[np.ndarray] = []
    for row in rows:
        padded = [*row, *[blank] * (columns - len(row))]
        lines += [np.concatenate(padded, axis=1), margin]
    return np.concatenate(lines[:-1]).squeeze()
