"""A run on one page: an HTML file that holds all it shows and loads nothing."""

from __future__ import annotations

import base64
import html
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.metrics import confusion_matrix

from kln_jax.analysis import figures, learned, runs
from kln_jax.inference import trained_network
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.training import diagnosis

_ERRORS_SHOWN = 20
# Of more classes the numbers in the cells of the confusion matrix cannot be read.
_CLASSES_NUMBERED = 20
# The charts of the curves: title, beginnings of metrics' names, whether logarithmic.
_CURVES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("error, %", ("test_error", "validation_error"), False),
    ("loss", ("loss", "cmmd", "cross_entropy", "confidence"), True),
    ("reconstruction error", ("test_rec", "validation_rec", "reconstruction"), False),
    ("mean of the kernel", ("kernel",), False),
    ("gradient norm", ("gradient_norm",), True),
    ("pivots of the Gram matrices", ("pivot",), True),
)
_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 1rem sans-serif; }
img { max-width: 100%; }
td { padding-right: .75rem; overflow-wrap: anywhere; }
</style>
<h1>$title</h1>
<p>$summary</p>
$sections
<h2>Configuration</h2>
<table>
$settings
</table>
</html>
""")


def write(workdir: str | pathlib.Path) -> pathlib.Path:
    """Writes ``page.html`` into a working directory.

    The page shows the newest state: that of a finished run, or the last checkpoint of
    one that is not.

    Args:
      workdir: Working directory of a run.

    Returns:
      The path of the page.

    Raises:
      ValueError: If there is no run, or none with a checkpoint, or its data are others.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    network, data = learned.load_run(directory)
    metrics = epoch_metrics.read_metrics(directory)
    probabilities = trained_network.predict_in_batches(
        network.model,
        network.state,
        data.eval_images,
        reconstruction_reduction="mean",
    ).probabilities
    labels, names = data.eval_labels, data.class_names
    predicted = probabilities.argmax(axis=1)
    wrong = np.flatnonzero(predicted != labels)
    surest = wrong[np.argsort(-probabilities[wrong].max(axis=1), kind="stable")]
    confusion = confusion_matrix(labels, predicted, labels=range(len(names)))
    collapse = (
        diagnosis.find_collapse(network.config, metrics[-1], confusion, names)
        if metrics
        else ""
    )
    shown = learned.look_at(network, data)
    drawn = {
        "Curves": _curves(metrics) if metrics else None,
        "Confusion matrix": _confusion(confusion, names),
        "Most confident errors": _errors(
            data.eval_images, labels, probabilities, surest[:_ERRORS_SHOWN], names
        ),
        "Reconstructions": figures.reconstruction_grid(shown),
        "Kernel values": None,
    }
    # A few images may have no pair of one class.
    if len(set(shown.labels.tolist())) in range(2, len(shown.labels)):
        drawn["Kernel values"] = figures.histograms(shown)
    percent = 100.0 * len(wrong) / len(predicted)
    path = directory / "page.html"
    text = _page(
        f"{data.name}, {network.config.variant}: {percent:.2f} % error",
        f"{directory}: {len(wrong)} of {len(predicted)} {data.evaluate_on} images are "
        f"wrong after step {int(network.state.step)}; {_state(directory)}. {collapse}",
        drawn,
        network.config.to_dict(),
    )
    whole_files.write_whole(path, text.encode())
    return path


def _state(directory: pathlib.Path) -> str:
    if (directory / "result.json").exists():
        return "finished"
    if (failure := directory / "diverged.json").exists():
        return f"diverged, {runs.read_failure(failure)}"
    return "not finished"


def _page(
    title: str,
    summary: str,
    drawn: Mapping[str, Figure | None],
    settings: Mapping[str, Any],
) -> str:
    """Returns a page as HTML, in which text stays text."""
    rows = (
        f"<tr><td>{html.escape(key)}<td>{html.escape(json.dumps(value))}"
        for key, value in sorted(settings.items())
    )
    return _PAGE.substitute(
        title=html.escape(title),
        summary=html.escape(summary),
        sections="\n".join(f"<h2>{name}</h2>{_image(drawn[name])}" for name in drawn),
        settings="\n".join(rows),
    )


def _image(figure: Figure | None) -> str:
    if figure is None:
        return "<p>There are none.</p>"
    data = base64.b64encode(figures.png(figure)).decode()
    return f'<img alt="" src="data:image/png;base64,{data}">'


def _curves(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Shows the metrics of a run by epoch, those that it has."""
    names = sorted({name for line in metrics for name in line})
    epochs = [line["epoch"] for line in metrics]
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        places = figure.subplots(2, 3).flat
        for axes, (title, beginnings, log) in zip(places, _CURVES, strict=True):
            for name in (name for name in names if name.startswith(beginnings)):
                values = np.array([line.get(name, np.nan) for line in metrics], float)
                if np.isfinite(values).any():
                    axes.plot(epochs, values, ".-", label=name.replace("_", " "))
            if log and axes.lines and axes.dataLim.minposy > 0:
                axes.set_yscale("log")
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if axes.lines:
                axes.legend(frameon=False, fontsize=7)
    return figure


def _confusion(counts: np.ndarray, class_names: Sequence[str]) -> Figure:
    """Shows how many images of each class are taken for each."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(5.6, 5.2), layout="constrained")
        axes = figure.subplots()
        # By the square root, so that a few errors are seen beside many hits.
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1)
        if len(class_names) <= _CLASSES_NUMBERED:
            places = range(len(class_names))
            axes.set_xticks(places, class_names, rotation=90, parse_math=False)
            axes.set_yticks(places, class_names, parse_math=False)
            for (i, j), count in np.ndenumerate(counts):
                colour = "white" if shares[i, j] > 0.3 else "black"
                axes.text(
                    j, i, str(count), ha="center", va="center", color=colour, size=7
                )
        axes.set(xlabel="predicted", ylabel="true")
    return figure


def _errors(
    images: np.ndarray,
    labels: np.ndarray,
    probabilities: np.ndarray,
    rows: np.ndarray,
    class_names: Sequence[str],
) -> Figure | None:
    """Shows the images of some rows, that are taken for other classes, if any."""
    if not len(rows):
        return None
    with mpl.rc_context(figures.STYLE):
        high = -(-len(rows) // 5)
        figure = Figure(figsize=(8.4, 1.7 * high), layout="constrained")
        for i, row in enumerate(rows):
            axes = figure.add_subplot(high, 5, i + 1)
            axes.set_axis_off()
            axes.imshow(images[row].squeeze(), cmap="gray", vmin=0, vmax=255)
            taken = probabilities[row].argmax()
            text = f"{class_names[labels[row]]} as {class_names[taken]}"
            text += f"\n{100 * probabilities[row, taken]:.1f} %"
            # A name is no formula.
            axes.set_title(text, fontsize=7, parse_math=False)
    return figure
