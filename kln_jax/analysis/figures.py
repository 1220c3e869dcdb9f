"""Figures of the paper's kind, of one run or of several."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    AutoLocator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)
from sklearn.manifold import TSNE

from kln_jax.analysis.learned import Learned
from kln_jax.discrepancies.cmmd import weight_matrix
from kln_jax.storage import whole_files

# One look for all figures.
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 160,
    "figure.facecolor": "white",
}
# Which the colour-blind can tell apart.
SAME, DIFFERENT = "#0072b2", "#d55e00"
# As many as a PNG can name, which takes a third of the room of all.
_COLOURS = 256


def png(figure: Figure) -> bytes:
    """Returns a figure as PNG, of a palette of colours."""
    content, small = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(content, format="png")
    image = PIL.Image.open(content).convert("RGB")
    image = image.quantize(_COLOURS, dither=PIL.Image.Dither.NONE)
    image.save(small, "png", optimize=True)
    return small.getvalue()


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure as `png`, whole or not at all."""
    whole_files.write_whole(path, png(figure))


def overview(learned: Learned) -> Figure:
    """Shows what a run learned: its kernel on pixels and on Z, and its autoencoder.

    Args:
      learned: What it learned; the first 300 images are shown.

    Returns:
      A figure with two histograms of kernel values, of pairs of the same and of
      different classes, and with images above their reconstructions.
    """
    learned = learned.first(300)
    is_learned = [learned.config[key] for key in ("objective", "kernel_on")]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 2.9), layout="constrained")
        axes = figure.subplot_mosaic(
            [["pixels", "z", "images"]], width_ratios=[1, 1, 1.25]
        )
        for name, features in (("pixels", learned.pixels), ("z", learned.z)):
            gram = np.asarray(learned.gram(features))
            kernel_histogram(axes[name], *pair_values(gram, learned.labels))
        axes["pixels"].set_title("kernel on pixels")
        suffix = ", learned" if is_learned == ["cmmd", "z"] else ""
        axes["z"].set_title(f"kernel on Z{suffix}")
        axes["z"].legend(frameon=False, loc="upper center")
        _draw_reconstructions(axes["images"], learned)
    return figure


def histograms(learned: Learned) -> Figure:
    """Shows the values of the kernel on pixels and on Z, with how far they overlap.

    Args:
      learned: What a run learned.

    Raises:
      ValueError: If the images have no pair of one class, or none of two.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        for axes, (name, features) in zip(
            figure.subplots(1, 2),
            (("raw pixels", learned.pixels), ("Z", learned.z)),
            strict=True,
        ):
            gram = np.asarray(learned.gram(features))
            same, different = pair_values(gram, learned.labels)
            kernel_histogram(axes, same, different)
            overlap, auc = separation(same, different)
            axes.set_title(f"kernel on {name}: overlap {overlap:.2f}, AUC {auc:.3f}")
        axes.legend(frameon=False, loc="upper center")
    return figure


def heatmaps(learned: Learned, *, num_images: int = 100) -> Figure:
    """Shows the weight matrix H of images of all classes, and of one class alone.

    Each panel has colours of its own, as its title says: entries differ in size.

    Args:
      learned: What a run learned.
      num_images: How many images each, sorted by class.
    """
    labels = learned.labels
    mixed = np.argsort(labels[:num_images], kind="stable")
    single = np.flatnonzero(labels == labels.min())[:num_images]
    of_single = f"class {learned.class_names[labels.min()]}"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.6, 5.6), layout="constrained")
        for column, (rows, which) in zip(
            figure.subplots(2, 2).T,
            ((mixed, "all classes, sorted"), (single, of_single)),
            strict=True,
        ):
            for axes, (name, features) in zip(
                column, (("raw pixels", learned.pixels), ("Z", learned.z)), strict=True
            ):
                gram = learned.gram(features[rows])
                H = np.asarray(weight_matrix(gram, ridge=learned.config["ridge"]))
                # The diagonal outshines the rest.
                bound = np.quantile(np.abs(H - np.diag(np.diag(H))), 0.99)
                colours = dict(cmap="RdBu_r", vmin=-bound, vmax=bound)
                image = axes.imshow(H, interpolation="nearest", **colours)
                title = f"H on {name}, {which}\ncolours to ±{bound:.2g}"
                # The name of a class is no formula.
                axes.set_title(title, parse_math=False)
                axes.set(xlabel="image", ylabel="image")
                figure.colorbar(image, ax=axes, shrink=0.8, extend="both")
    return figure


def reconstruction_grid(learned: Learned) -> Figure:
    """Shows an image of each of ten classes, and below it what comes back from its Z.

    Args:
      learned: What a run learned.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.2), layout="constrained")
        _draw_reconstructions(figure.subplots(), learned)
    return figure


def latent_map(learned: Learned) -> Figure:
    """Shows Z in two dimensions, by t-SNE, in the colours of the classes.

    Args:
      learned: What a run learned.

    Raises:
      ValueError: If there is one image, or Z has one dimension.
    """
    z, labels, names = learned.z, learned.labels, learned.class_names
    if min(z.shape) < 2:
        raise ValueError(
            "a map takes at least two images and two dimensions of Z, not "
            f"{len(z)} and {z.shape[1]}."
        )
    # At most scikit-learn's: t-SNE looks at three times as many neighbours.
    perplexity = min(30.0, (len(z) - 1) / 3)
    points = TSNE(perplexity=perplexity, random_state=0).fit_transform(z)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.8), layout="constrained")
        axes = figure.subplots()
        drawn = []
        for label in range(len(names)):
            chosen = points[labels == label]
            drawn.append(
                axes.scatter(chosen[:, 0], chosen[:, 1], s=8, color=f"C{label % 10}")
            )
        title = f"Z of {learned.config['evaluate_on']} images, t-SNE"
        axes.set(xticks=[], yticks=[], title=title)
        if len(names) <= 10:
            legend = axes.legend(
                drawn,
                names,
                frameon=False,
                loc="center left",
                bbox_to_anchor=(1, 0.5),
                markerscale=2,
            )
            for text in legend.get_texts():  # A name is no formula.
                text.set_parse_math(False)
    return figure


def curves(errors: Mapping[str, Sequence[Sequence[float]]], title: str) -> Figure:
    """Shows test errors by epoch: means over seeds, of up to five methods with ranges.

    Args:
      errors: Of each method its runs: errors in percent after each epoch. A method
        without runs stands in the legend alone.
      title: What is shown.
    """
    above_zero = [e for runs in errors.values() for run in runs for e in run if e > 0]
    least = min(above_zero, default=1.0)
    has_ranges = len(errors) <= 5  # More lie upon each other.
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.subplots()
        num_colours = len(mpl.rcParams["axes.prop_cycle"])
        for name, runs in errors.items():
            # Zero has no logarithm: it lies at the lower edge.
            stack = np.maximum(np.stack(runs) if runs else np.empty((1, 0)), least / 2)
            epochs = np.arange(1, stack.shape[1] + 1)
            # The first, KLN in most, is seen under those that coincide with it.
            width = 1.2 if axes.lines else 3.0
            style = "-" if len(axes.lines) < num_colours else "--"
            (line,) = axes.plot(
                epochs, stack.mean(axis=0), style, label=name, linewidth=width
            )
            if len(epochs) == 1:  # Which no line shows.
                line.set_marker("o")
            if has_ranges:
                axes.fill_between(
                    epochs,
                    stack.min(axis=0),
                    stack.max(axis=0),
                    color=line.get_color(),
                    alpha=0.15,
                    linewidth=0,
                )
        axes.set(
            yscale="log",
            xlabel="epoch",
            ylabel=f"test error, %: mean{', range' * has_ranges}",
            title=title,
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        label_plainly(axes.yaxis)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def label_plainly(axis: Axis) -> None:
    """Labels a logarithmic axis, on which all is drawn, by numbers, not by powers."""
    least, largest = axis.get_view_interval()
    if largest > 1000 * least:
        axis.set_major_locator(LogLocator())
    elif largest > 5 * least:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:  # There may be but one of 1, 2, 5, 10, ...
        axis.set_major_locator(AutoLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def sweep(errors: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Shows test errors against the values of a weight, with their standard deviation.

    Args:
      errors: Of each value the errors of its runs in percent.
      title: What is shown.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 3.0), layout="constrained")
        axes = figure.subplots()
        means = [float(np.mean(made)) if made else np.nan for made in errors.values()]
        spreads = [
            float(np.std(made, ddof=1)) if len(made) > 1 else 0.0
            for made in errors.values()
        ]
        # One step a value: they are in equal ratios, but for zero.
        axes.errorbar(range(len(errors)), means, spreads, marker="o", capsize=3)
        axes.set_xticks(range(len(errors)), list(errors))
        axes.set(
            xlabel="weight",
            ylabel="test error, %: mean ± sd",
            title=title,
            ylim=(0, None),
        )
    return figure


def kernel_histogram(axes: Axes, same: np.ndarray, different: np.ndarray) -> None:
    """Draws the values of a kernel between images of the same and other classes.

    Args:
      axes: Where to draw.
      same: Values of pairs of the same class.
      different: Values of pairs of different classes.
    """
    bins = _bins(same, different)
    for values, colour, name in (
        (same, SAME, "same class"),
        (different, DIFFERENT, "different classes"),
    ):
        shares = 100.0 * np.histogram(values, bins)[0] / len(values)
        axes.stairs(shares, bins, fill=True, color=colour, alpha=0.7, label=name)
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


def separation(same: np.ndarray, different: np.ndarray) -> tuple[float, float]:
    """How well kernel values tell pairs of the same class from others.

    Args:
      same: Values of pairs of the same class.
      different: Values of pairs of different classes.

    Returns:
      The area that their histograms of 40 bins share, and the AUC: the probability
      that one of the first is larger than one of the second, ties counted half.

    Examples:
      >>> separation(np.array([0.2, 0.6]), np.array([0.2, 0.4]))
      (0.5, 0.625)
    """
    bins = _bins(same, different)
    shares = [
        np.histogram(values, bins)[0] / values.size for values in (same, different)
    ]
    smaller = np.sort(different)
    below = np.searchsorted(smaller, same, side="left")
    not_above = np.searchsorted(smaller, same, side="right")
    auc = (below + not_above).mean() / (2 * len(smaller))
    return float(np.minimum(*shares).sum()), float(auc)


def _bins(*values: np.ndarray) -> list[float]:
    if not all(array.size for array in values):
        raise ValueError("the images have no pair of one class, or none of two.")
    largest = max(1.0, *(float(array.max()) for array in values))
    return list(np.linspace(0.0, largest, 41).tolist())


def _draw_reconstructions(axes: Axes, learned: Learned, *, columns: int = 5) -> None:
    """Draws the examples, each above what comes back from its Z."""
    originals = learned.images[learned.examples] / 255.0
    pairs = [
        np.concatenate([_framed(original), _framed(reconstruction)])
        for original, reconstruction in zip(
            originals, learned.reconstructions, strict=True
        )
    ]
    axes.imshow(_tiled(pairs, columns), cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()
    axes.set_title(f"{learned.config['evaluate_on']} images, and from Z")


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
