"""A run on one page: an HTML file that holds all it shows and loads nothing."""

from __future__ import annotations

import base64
import html
import io
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

_ERRORS_SHOWN = 20
# Of more classes the numbers in the cells of the confusion matrix cannot be read.
_CLASSES_NUMBERED = 20
# The charts of the curves: title, metrics, and whether their axis is logarithmic.
_CURVES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("error, %", ("test_error_percent", "validation_error_percent"), False),
    ("loss", ("loss", "cmmd", "cross_entropy", "confidence"), True),
    (
        "reconstruction error",
        ("test_reconstruction", "validation_reconstruction", "reconstruction"),
        False,
    ),
    ("mean of the kernel", ("kernel_same", "kernel_different"), False),
    ("gradient norm", ("gradient_norm", "gradient_norm_classifier"), True),
    ("pivots of the Gram matrices", ("pivot_largest", "pivot_smallest"), True),
)
_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
body { max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 1rem sans-serif; }
h2 { margin-top: 2rem; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: .85rem; }
td { padding: .1rem .75rem .1rem 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$summary</p>
$sections
<h2>Configuration</h2>
<table>
$settings
</table>
</body>
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
    predicted = probabilities.argmax(axis=1)
    wrong = np.flatnonzero(predicted != data.eval_labels)
    surest = wrong[np.argsort(-probabilities[wrong].max(axis=1), kind="stable")]
    shown = learned.look_at(network, data)
    drawn = {"Curves": curves(metrics) if metrics else None}
    drawn["Confusion matrix"] = confusion(data.eval_labels, predicted, data.class_names)
    drawn["Most confident errors"] = errors(
        data.eval_images, data.eval_labels, probabilities, surest, data.class_names
    )
    drawn["Reconstructions"] = figures.reconstruction_grid(shown)
    try:
        drawn["Kernel values"] = figures.histograms(shown)
    except ValueError:  # A few images have no pair of one class.
        drawn["Kernel values"] = None
    percent = 100.0 * len(wrong) / len(predicted)
    path = directory / "page.html"
    text = page(
        f"{data.name}, {network.config.variant}: {percent:.2f} % error",
        f"{directory}: {len(wrong)} of {len(predicted)} {data.evaluate_on} images are "
        f"wrong after step {int(network.state.step)}; {_state(directory)}.",
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


def page(
    title: str,
    summary: str,
    drawn: Mapping[str, Figure | None],
    settings: Mapping[str, Any],
) -> str:
    """Returns a page as HTML, in which text stays text.

    Args:
      title: Its title.
      summary: What stands below that.
      drawn: Figures by their headings; None is said to be nothing.
      settings: What stands in the table at the end.
    """
    sections = (
        f"<h2>{html.escape(name)}</h2>\n{_image(name, figure)}"
        for name, figure in drawn.items()
    )
    rows = (
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(json.dumps(value))}</td></tr>"
        for key, value in sorted(settings.items())
    )
    return _PAGE.substitute(
        title=html.escape(title),
        summary=html.escape(summary),
        sections="\n".join(sections),
        settings="\n".join(rows),
    )


def _image(name: str, figure: Figure | None) -> str:
    if figure is None:
        return "<p>There are none.</p>"
    content = io.BytesIO()
    with mpl.rc_context(figures.STYLE):
        figure.savefig(content, format="png")
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def curves(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Shows the metrics of a run by epoch, those that it has.

    Args:
      metrics: The metrics of each epoch, of one at least.
    """
    epochs = [line["epoch"] for line in metrics]
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        for axes, (title, names, log) in zip(
            figure.subplots(2, 3).flat, _CURVES, strict=True
        ):
            for name in names:
                values = np.array([line.get(name, np.nan) for line in metrics], float)
                if np.isfinite(values).any():
                    label = name.removesuffix("_percent").replace("_", " ")
                    axes.plot(epochs, values, ".-", label=label)
            if log and axes.lines and axes.dataLim.minposy > 0:
                axes.set_yscale("log")
            axes.set(title=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if axes.lines:
                axes.legend(frameon=False, fontsize=7)
    return figure


def confusion(
    labels: np.ndarray, predicted: np.ndarray, class_names: Sequence[str]
) -> Figure:
    """Shows how many images of each class are taken for each.

    Args:
      labels: Class numbers, shape ``(n,)``.
      predicted: Those that were predicted, shape ``(n,)``.
      class_names: Names of the C classes.
    """
    counts = confusion_matrix(labels, predicted, labels=range(len(class_names)))
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


def errors(
    images: np.ndarray,
    labels: np.ndarray,
    probabilities: np.ndarray,
    rows: np.ndarray,
    class_names: Sequence[str],
) -> Figure | None:
    """Shows images that are taken for other classes; None if there are none.

    Args:
      images: Images, shape ``(n, h, w, c)``, uint8.
      labels: Their class numbers, shape ``(n,)``.
      probabilities: Of each class, shape ``(n, C)``.
      rows: Which images to show, of which the first 20 are.
      class_names: Names of the C classes.
    """
    rows = rows[:_ERRORS_SHOWN]
    if not len(rows):
        return None
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(8.4, 1.7 * -(-len(rows) // 5)), layout="constrained")
        places = figure.subplots(-(-len(rows) // 5), 5, squeeze=False).ravel()
        for axes in places:
            axes.set_axis_off()
        for axes, row in zip(places, rows, strict=False):
            taken = probabilities[row].argmax()
            axes.imshow(images[row].squeeze(), cmap="gray", vmin=0, vmax=255)
            names = f"{class_names[labels[row]]} as {class_names[taken]}"
            share = f"{100 * probabilities[row, taken]:.1f} %"
            # A name is no formula.
            axes.set_title(f"{names}\n{share}", fontsize=7, parse_math=False)
    return figure
