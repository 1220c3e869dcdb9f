"""A look at a run: one HTML page that holds all it shows and loads nothing."""

from __future__ import annotations

import base64
import functools
import io
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from ml_collections import ConfigDict
from PIL import Image
from sklearn.metrics import confusion_matrix

from kln_jax.analysis import figures, runs
from kln_jax.datasets import Dataset
from kln_jax.inference import trained_network
from kln_jax.storage import whole_files
from kln_jax.storage.epoch_metrics import read_metrics
from kln_jax.training import augmentation, configuration
from kln_jax.training.experiment import load_run

# How much is shown of what may be much.
_KERNEL_IMAGES = 1000
_ERRORS_SHOWN = 24
_RECONSTRUCTIONS_SHOWN = 20
_CONFUSIONS_SHOWN = 10


class Look(NamedTuple):
    """What the page of a run shows.

    Attributes:
      workdir: Name of its working directory.
      config: Its configuration.
      result: What ``result.json`` says; None if it is not finished.
      failure: How it diverged; "" if it did not.
      metrics: Its ``metrics.jsonl``, one mapping an epoch.
      data: Its data set.
      num_labelled: Number of labelled training images.
      step: Number of steps of the state shown.
      z: Embeddings of the evaluation images, shape ``(n, latent_dim)``.
      probabilities: Their class probabilities, shape ``(n, C)``.
      examples: Rows of the images whose reconstructions are shown.
      reconstructions: These, in [0, 1], shape ``(len(examples), h, w, c)``.
    """

    workdir: str
    config: Mapping[str, Any]
    result: Mapping[str, Any] | None
    failure: str
    metrics: Sequence[Mapping[str, Any]]
    data: Dataset
    num_labelled: int
    step: int
    z: np.ndarray
    probabilities: np.ndarray
    examples: np.ndarray
    reconstructions: np.ndarray


def write(workdir: str | pathlib.Path) -> pathlib.Path:
    """Writes ``view.html`` into a working directory.

    The page shows the newest state: that of a finished run, or the last checkpoint of
    one that is not.

    Args:
      workdir: Working directory of `kln_jax.training.experiment.train_and_evaluate`.

    Returns:
      The path of the page.

    Raises:
      ValueError: If there is no run, or none with a checkpoint.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    run = load_run(directory)
    result, failure = directory / "result.json", directory / "diverged.json"
    prediction = trained_network.predict_in_batches(
        run.model, run.state, run.data.eval_images, reconstruction_reduction="mean"
    )
    # The first image of each class.
    _, first = np.unique(run.data.eval_labels, return_index=True)
    examples = first[:_RECONSTRUCTIONS_SHOWN]
    outputs = figures.embed(run, run.data.eval_images[examples])
    look = Look(
        workdir=str(directory),
        config=json.loads(run.config.to_json()),
        result=whole_files.read_json(result) if result.exists() else None,
        failure=runs.read_failure(failure) if failure.exists() else "",
        metrics=read_metrics(directory),
        data=run.data,
        num_labelled=len(run.labelled),
        step=int(run.state.step),
        z=prediction.z,
        probabilities=prediction.probabilities,
        examples=examples,
        reconstructions=np.asarray(outputs.reconstruction),
    )
    path = directory / "view.html"
    whole_files.write_whole(path, page(look).encode())
    return path


def page(look: Look) -> str:
    """Returns the page as HTML.

    Args:
      look: What it shows.

    Returns:
      A whole document. Its Content-Security-Policy forbids scripts and every request.
    """
    labels, names = look.data.eval_labels, look.data.class_names
    predicted = look.probabilities.argmax(axis=1)
    confusion = confusion_matrix(labels, predicted, labels=range(len(names)))
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    wrong = np.flatnonzero(predicted != labels)
    surest = np.argsort(-look.probabilities.max(axis=1)[wrong], kind="stable")
    made = [line for line in look.metrics if line["step"] <= look.step]
    return _TEMPLATES.get_template("view.html.jinja").render(
        look=look,
        # The last epoch behind the state shown, if there is one.
        last=made[-1] if made else {"epoch": 0},
        error=100.0 * (1.0 - np.trace(confusion) / confusion.sum()),
        never_predicted=[names[i] for i in np.flatnonzero(~confusion.any(axis=0))],
        curves=_curves(look.metrics),
        confusion=confusion,
        shares=shares,
        # By the square root, so that a few errors are seen beside many hits.
        shades=np.rint(100.0 * np.sqrt(shares)).astype(int),
        confused=_confused(confusion, shares, names),
        wrong=wrong[surest][:_ERRORS_SHOWN].tolist(),
        reconstructions=np.rint(255.0 * look.reconstructions).astype(np.uint8),
        kernels=_kernels(look),
        kernel_images=min(len(look.z), _KERNEL_IMAGES),
        settings=[
            (name, json.dumps(value, ensure_ascii=False))
            for name, value in sorted(look.config.items())
        ],
    )


class _Curves(NamedTuple):
    """A chart of metrics: its title, what each is called, whether its axis is a log."""

    title: str
    names: Mapping[str, str]
    log: bool = False


_CHARTS = (
    _Curves(
        "Error, %",
        {
            "test_error_percent": "test",
            "validation_error_percent": "validation",
            "training_error_percent": "training, labelled",
        },
    ),
    _Curves("Loss", {"loss": "loss", "cmmd": "CMMD"}, log=True),
    _Curves(
        "Reconstruction error",
        {
            "test_reconstruction": "test",
            "validation_reconstruction": "validation",
            "reconstruction": "training",
        },
    ),
    _Curves("Confidence loss", {"confidence": "training"}),
    _Curves(
        "Mean of the kernel",
        {"kernel_same": "same class", "kernel_different": "different classes"},
    ),
    _Curves(
        "Gradient norm",
        {
            "gradient_norm": "all",
            "gradient_norm_encoder": "encoder",
            "gradient_norm_decoder": "decoder",
            "gradient_norm_classifier": "classifier",
        },
        log=True,
    ),
    _Curves(
        "Pivots of the Gram matrices",
        {"pivot_largest": "largest", "pivot_smallest": "smallest"},
        log=True,
    ),
    _Curves(
        "Median squared distance under the kernel",
        {"median_squared_distance": "last batch"},
    ),
)


class _Chart(NamedTuple):
    """A chart that is drawn.

    Attributes:
      title: What stands above it.
      legend: What each colour is, and its last value.
      text: What it shows, for those who do not see it.
      view_box: The size of the drawing.
      drawing: What stands inside its ``<svg>``.
    """

    title: str
    legend: Mapping[str, str]
    text: str
    view_box: str
    drawing: str


def _curves(metrics: Sequence[Mapping[str, Any]]) -> list[_Chart]:
    """Returns the charts of those metrics that were logged."""
    epochs = np.array([line["epoch"] for line in metrics])

    def column(name: str) -> np.ndarray:
        if name == "training_error_percent":
            return 100.0 * (1.0 - column("accuracy"))
        return np.array([line.get(name, np.nan) for line in metrics], float)

    charts = []
    for title, names, log in _CHARTS:
        series = {label: column(name) for name, label in names.items()}
        series = {label: y for label, y in series.items() if np.isfinite(y).any()}
        if series:
            # A last epoch of skipped steps has no number of some.
            legend = {
                label: _number(y[np.isfinite(y)][-1]) for label, y in series.items()
            }
            ends = ", ".join(f"{label} {value}" for label, value in legend.items())
            text = f"{title}, by epoch to {epochs[-1]}; last values: {ends}"
            lines = functools.partial(
                _lines, epochs=epochs, series=list(series.values()), log=log
            )
            charts.append(_chart(title, legend, text, lines))
    return charts


def _lines(
    axes: Axes, *, epochs: np.ndarray, series: Sequence[np.ndarray], log: bool
) -> None:
    """Draws metrics over epochs; a line breaks where there is no number."""
    for y in series:
        last = np.flatnonzero(np.isfinite(y))[-1]
        axes.plot(epochs, y, marker="o", markevery=[last], clip_on=False)
    axes.set(xlabel="epoch", xlim=(epochs[0], max(epochs[-1], epochs[0] + 1)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    low = np.nanmin(series)
    if log and low > 0.0:
        axes.set_yscale("log")
        figures.label_plainly(axes.yaxis)
    elif low >= 0.0:
        axes.set_ylim(bottom=0.0)


def _confused(
    confusion: np.ndarray, shares: np.ndarray, names: Sequence[str]
) -> list[tuple[str, ...]]:
    """Returns the pairs of classes that are confused most: the rows of a table."""
    errors = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-errors, axis=None, kind="stable")[:_CONFUSIONS_SHOWN]
    pairs = [divmod(int(k), len(names)) for k in order if errors.flat[k]]
    return [
        (names[i], names[j], f"{errors[i, j]:,}", _percent(100.0 * shares[i, j]))
        for i, j in pairs
    ]


def _kernels(look: Look) -> list[tuple[_Chart, tuple[str, ...]]]:
    """Returns how well the kernel tells pairs of a class from others, on Z and pixels.

    Returns:
      Of each a chart and the row of a table; nothing if the images have no pair of a
      class, or none of two.
    """
    rows = figures.some_rows(len(look.z), _KERNEL_IMAGES)
    labels = look.data.eval_labels[rows]
    pixels = np.asarray(augmentation.to_unit(look.data.eval_images[rows]))
    kernel, _ = configuration.kernels(ConfigDict(look.config))
    found = []
    for name, features in (
        ("on Z", look.z[rows]),
        ("on raw pixels", pixels.reshape(len(rows), -1)),
    ):
        gram = np.asarray(kernel(features, features))
        same, different = figures.pair_values(gram, labels)
        if not (same.size and different.size):
            return []
        chart = _chart(
            f"Kernel {name}",
            {"same class": "", "different classes": ""},
            f"Histograms of the kernel {name}",
            functools.partial(figures.kernel_histogram, same=same, different=different),
        )
        overlap, auc = figures.separation(same, different)
        values = (same.mean(), different.mean(), auc, overlap)
        found.append((chart, (name, *(f"{value:.3f}" for value in values))))
    return found


# Charts are drawn in the colours of the light look. In the page, its variables, which
# know the dark look as well, take their place.
_SERIES = (figures.SAME, figures.DIFFERENT, "#008c68", "#a0468c")
_SOFT, _LINE = "#5f6872", "#e2e4e6"
_VARIABLES = {
    **{colour: f"rgb(var(--s{i}))" for i, colour in enumerate(_SERIES)},
    _SOFT: "var(--soft)",
    _LINE: "var(--line)",
}
_STYLE = {
    **figures.STYLE,
    "axes.prop_cycle": cycler(color=_SERIES),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.edgecolor": _LINE,
    "grid.color": _LINE,
    "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "xtick.bottom": False,
    "ytick.left": False,
    "lines.markersize": 3.5,
    "font.sans-serif": ["DejaVu Sans"],  # The page's own takes its place.
    "svg.fonttype": "none",
}


def _chart(
    title: str, legend: Mapping[str, str], text: str, draw: Callable[[Axes], None]
) -> _Chart:
    """Returns a chart that a function draws."""
    file = io.StringIO()
    # What the drawing refers to is named by hashes: a salt of its own keeps them apart
    # from those of the other charts, and the same in each writing of the page.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(3.3, 1.9), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True)
    # Left out are the metadata, the style, which would be that of the whole page, and
    # the names of groups, which are the same in all charts.
    ((view_box, drawing),) = re.findall(
        r'viewBox="(.*?)".*?</defs>(.*)</svg>', file.getvalue(), re.DOTALL
    )
    drawing = re.sub(r'<g id=".*?"', "<g", drawing)
    for colour, variable in _VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    return _Chart(title, legend, text, view_box, drawing)


# --- What the template calls ---


def _data_uri(image: np.ndarray) -> str:
    """Returns a uint8 image ``(h, w, c)``, grey or RGB, as a PNG inside the page."""
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _percent(value: float) -> str:
    return f"{value:.2f}\u00a0%"


def _duration(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f}\u00a0s"
    minutes = round(seconds / 60.0)
    if minutes < 120:
        return f"{minutes}\u00a0min"
    return f"{minutes // 60}\u00a0h {minutes % 60:02}\u00a0min"


def _number(value: float) -> str:
    """Returns a number of three digits that is short enough for a legend.

    Examples:
      >>> [_number(value) for value in (0.0, 1e-5, 0.123456, 12345.6, 3e6)]
      ['0', '1e-5', '0.123', '12,346', '3e6']
    """
    if 1e3 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    digits, _, exponent = f"{value:.3g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("kln_jax.analysis", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(
    anchor=lambda title: title.lower().replace(" ", "-"),
    data_uri=_data_uri,
    duration=_duration,
    percent=_percent,
    thousands="{:,}".format,
)
