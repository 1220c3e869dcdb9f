"""A look at a run: one HTML page that holds all it shows and loads nothing."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import MaxNLocator
from PIL import Image

from kln_jax import augment, files, inference
from kln_jax.analysis import figures, runs
from kln_jax.datasets import Dataset
from kln_jax.kernels import gaussian_mixture
from kln_jax.metrics import read_metrics
from kln_jax.training import load_run

# How much is shown of what may be much.
_KERNEL_IMAGES = 1000
_ERRORS_SHOWN = 24
_RECONSTRUCTIONS_SHOWN = 20
_CONFUSIONS_SHOWN = 10
_NAMES_LISTED = 10
# With more classes, the confusion matrix is set small.
_CLASSES_AT_FULL_SIZE = 20


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
      workdir: Working directory of `kln_jax.training.train_and_evaluate`.

    Returns:
      The path of the page.

    Raises:
      ValueError: If there is no run, or none with a checkpoint.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    run = load_run(directory)
    result, failure = directory / "result.json", directory / "diverged.json"
    prediction = inference.predict_in_batches(
        run.model, run.state, run.data.eval_images, reconstruction_reduction="mean"
    )
    # The first image of each class.
    _, first = np.unique(run.data.eval_labels, return_index=True)
    examples = first[:_RECONSTRUCTIONS_SHOWN]
    outputs = figures.embed(run, run.data.eval_images[examples])
    look = Look(
        workdir=str(directory),
        config=json.loads(run.config.to_json()),
        result=files.read_json(result) if result.exists() else None,
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
    files.write_whole(path, page(look).encode())
    return path


def page(look: Look) -> str:
    """Returns the page as HTML.

    Args:
      look: What it shows.

    Returns:
      A whole document. Its Content-Security-Policy forbids scripts and every request.
    """
    classes = len(look.data.class_names)
    confusion = np.zeros((classes, classes), int)
    predicted = look.probabilities.argmax(axis=1)
    np.add.at(confusion, (look.data.eval_labels, predicted), 1)
    sections = {
        "Curves": _curves(look.metrics),
        "Confusion matrix": _confusion(confusion, look.data.class_names),
        "Most confident errors": _errors(look),
        "Reconstructions": _reconstructions(look),
        "Kernel": _kernel(look),
        "Configuration": _configuration(look.config),
    }
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    return _html(
        _PAGE,
        title=f"{look.data.name}: {_percent(_error(confusion))} error",
        style=_Markup(_CSS),
        header=_header(look, confusion),
        links=[
            _html('<a href="#{}">{}</a>', anchor, title)
            for title, anchor in anchors.items()
        ],
        sections=[
            _html(
                '<section id="{}"><h2>{}</h2>{}</section>',
                anchors[title],
                title,
                content,
            )
            for title, content in sections.items()
        ],
    )


# --- Sections ---


def _header(look: Look, confusion: np.ndarray) -> _Markup:
    """Returns the title, what a reader must know, and the figures that matter."""
    data, result, last = look.data, look.result or {}, _last_epoch(look)
    count, correct = int(confusion.sum()), int(np.trace(confusion))
    height, width, channels = data.eval_images.shape[1:]
    facts = [
        (
            f"{data.evaluate_on} error",
            _percent(_error(confusion)),
            f"{count - correct:,} of {count:,} images",
        ),
        (
            "epochs",
            f"{last['epoch']}",
            f"of {look.config['num_epochs']}, {look.step:,} steps",
        ),
        (
            "labels",
            f"{look.num_labelled:,}",
            f"of {len(data.train_images):,} training images",
        ),
        (
            "classes",
            f"{len(data.class_names)}",
            f"images of {height}x{width}x{channels}",
        ),
    ]
    if "wall_seconds" in last:
        time = _duration(last["wall_seconds"])
        facts.insert(2, ("wall time", time, result.get("device", "")))
    versions = {data.name: data.version, **result.get("versions", {})}
    return _html(
        """<header>
<h1>{} <small>{}</small></h1>
<p class="path">{}</p>
{}
<dl>{}</dl>
<p class="soft">{}</p>
</header>""",
        data.name,
        look.config.get("variant", ""),
        look.workdir,
        [_html('<p class="notice">{}</p>', text) for text in _notices(look, confusion)],
        [
            _html('<div><dt>{}</dt><dd>{}</dd><dd class="soft">{}</dd></div>', *fact)
            for fact in facts
        ],
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    )


def _notices(look: Look, confusion: np.ndarray) -> Iterator[str]:
    """Yields what a reader must know before the figures."""
    result, part = look.result or {}, look.data.evaluate_on
    if look.result is None:
        state = f"diverged: {look.failure}" if look.failure else "is not finished"
        yield (
            f"This run {state}. The page shows its checkpoint of step "
            f"{look.step:,}: {_last_epoch(look)['epoch']} of "
            f"{look.config['num_epochs']} epochs."
        )
    if look.data.partial:
        yield (
            "The data are only a part of the set of this name: errors are not those "
            "on the whole set."
        )
    if skipped := result.get("skipped_steps"):
        yield (
            f"{skipped:,} steps were skipped: their loss or gradient was not finite or "
            "too large."
        )
    missing = [look.data.class_names[i] for i in np.flatnonzero(~confusion.any(axis=0))]
    if missing:
        more = len(missing) - _NAMES_LISTED
        yield (
            f"Never predicted: {', '.join(missing[:_NAMES_LISTED])}"
            f"{f' and {more} more' if more > 0 else ''}."
        )
    stated = result.get(f"{part}_error_percent")
    error = _percent(_error(confusion))
    if stated is not None and _percent(stated) != error:
        yield (
            f"The run reported {_percent(stated)} {part} error; computed again for "
            f"this page it is {error}: data, versions or device differ."
        )


def _last_epoch(look: Look) -> Mapping[str, Any]:
    """Returns the metrics of the last epoch behind the state shown, if there is one."""
    made = [line for line in look.metrics if line["step"] <= look.step]
    return made[-1] if made else {"epoch": 0}


class _Chart(NamedTuple):
    """A chart of metrics: its title, what each is called, whether its axis is a log."""

    title: str
    names: Mapping[str, str]
    log: bool = False


_CHARTS = (
    _Chart(
        "Error, %",
        {
            "test_error_percent": "test",
            "validation_error_percent": "validation",
            "training_error_percent": "training, labelled",
        },
    ),
    _Chart("Loss", {"loss": "loss", "cmmd": "CMMD"}, log=True),
    _Chart(
        "Reconstruction error",
        {
            "test_reconstruction": "test",
            "validation_reconstruction": "validation",
            "reconstruction": "training",
        },
    ),
    _Chart("Confidence loss", {"confidence": "training"}),
    _Chart(
        "Mean of the kernel",
        {"kernel_same": "same class", "kernel_different": "different classes"},
    ),
    _Chart(
        "Gradient norm",
        {
            "gradient_norm": "all",
            "gradient_norm_encoder": "encoder",
            "gradient_norm_decoder": "decoder",
            "gradient_norm_classifier": "classifier",
        },
        log=True,
    ),
    _Chart(
        "Pivots of the Gram matrices",
        {"pivot_largest": "largest", "pivot_smallest": "smallest"},
        log=True,
    ),
    _Chart(
        "Median squared distance under the kernel",
        {"median_squared_distance": "last batch"},
    ),
)


def _curves(metrics: Sequence[Mapping[str, Any]]) -> _Markup:
    """Returns the charts of those metrics that were logged."""
    if not metrics:
        return _html("<p>No epoch has ended yet.</p>")
    epochs = np.array([line["epoch"] for line in metrics], float)

    def column(name: str) -> np.ndarray:
        if name == "training_error_percent":
            return 100.0 * (1.0 - column("accuracy"))
        return np.array([line.get(name, np.nan) for line in metrics], float)

    charts = []
    for chart in _CHARTS:
        series = {label: column(name) for name, label in chart.names.items()}
        series = {label: y for label, y in series.items() if np.isfinite(y).any()}
        if series:
            # A last epoch of skipped steps has no number of some.
            last = {
                label: _number(y[np.isfinite(y)][-1]) for label, y in series.items()
            }
            drawn = _line_chart(chart, epochs, series)
            charts.append(_figure(chart.title, last, drawn))
    return _html('<div class="charts">{}</div>', charts)


def _confusion(confusion: np.ndarray, names: Sequence[str]) -> _Markup:
    """Returns the confusion matrix and the pairs that are confused most."""
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)

    def cell(i: int, j: int) -> _Markup:
        if not confusion[i, j]:
            return _html("<td></td>")
        # By the square root, so that a few errors are seen beside many hits.
        shade = round(100.0 * float(np.sqrt(shares[i, j])))
        return _html(
            '<td class="{}{}" style="--shade:{}%" title="{}">{}</td>',
            "hit" if i == j else "miss",
            # From where on the other ink is read better, in the dark and light look.
            " full" * (shade > 60) + " fullest" * (i == j and shade > 90),
            shade,
            f"{names[j]} predicted for {names[i]}: {confusion[i, j]}",
            confusion[i, j],
        )

    def row(i: int) -> _Markup:
        return _html(
            '<tr><th scope="row">{}</th>{}<td class="rate">{}</td></tr>',
            names[i],
            [cell(i, j) for j in range(len(names))],
            f"{100.0 * (1.0 - shares[i, i]):.1f}" if confusion[i].any() else "",
        )

    errors = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-errors, axis=None, kind="stable")[:_CONFUSIONS_SHOWN]
    pairs = [divmod(int(k), len(names)) for k in order if errors.flat[k]]
    header = ("true", "predicted", "images", "of the class")
    rows = [
        (names[i], names[j], f"{errors[i, j]:,}", _percent(100.0 * shares[i, j]))
        for i, j in pairs
    ]
    return _html(
        """<p class="soft">A row is a true class, a column a predicted one. The colour
is the square root of the share of the true class.</p>
<div class="beside">
<div class="scroll" tabindex="0" role="region" aria-label="Confusion matrix">
<table class="confusion{}">
<thead><tr><th></th>{}<th scope="col"><span>error, %</span></th></tr></thead>
<tbody>{}</tbody>
</table></div>
<div><h3>Confused most often</h3>{}</div>
</div>""",
        " small" if len(names) > _CLASSES_AT_FULL_SIZE else "",
        [_html('<th scope="col"><span>{}</span></th>', name) for name in names],
        [row(i) for i in range(len(names))],
        _table(header, rows),
    )


def _errors(look: Look) -> _Markup:
    """Returns the images that are wrong with the highest probability."""
    data, probabilities = look.data, look.probabilities
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = np.flatnonzero(predicted != data.eval_labels)
    if not wrong.size:
        return _html("<p>Every image is classified correctly.</p>")
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")][:_ERRORS_SHOWN]
    cards = []
    for i in worst:
        label = data.eval_labels[i]
        name = data.class_names[label]
        cards.append(
            _html(
                """<figure>{}<figcaption>
<span class="wrong">{} <b>{}</b></span> <span class="true">{} <b>{}</b></span>
</figcaption></figure>""",
                _picture(
                    data.eval_images[i], f"{data.evaluate_on} image {i}, class {name}"
                ),
                data.class_names[predicted[i]],
                _percent(100.0 * confidence[i]),
                name,
                _percent(100.0 * probabilities[i, label]),
            )
        )
    return _html(
        """<p class="soft">{} of {} errors, the most probable first:
the <span class="wrong">predicted</span> and the <span class="true">true</span> class,
each with its probability.</p>
<div class="gallery">{}</div>""",
        f"{len(worst):,}",
        f"{len(wrong):,}",
        cards,
    )


def _reconstructions(look: Look) -> _Markup:
    """Returns images beside what the decoder makes of their Z."""
    data = look.data
    cards = []
    for i, reconstruction in zip(look.examples, look.reconstructions, strict=True):
        name = data.class_names[data.eval_labels[i]]
        text = f"{data.evaluate_on} image {i}, class {name}"
        output = np.round(255.0 * reconstruction).astype(np.uint8)
        cards.append(
            _html(
                "<figure>{}{}<figcaption>{}</figcaption></figure>",
                _picture(data.eval_images[i], text),
                _picture(output, f"reconstruction of {text}"),
                name,
            )
        )
    return _html(
        """<p class="soft">The first {} image of each class{}, and beside it what the
decoder makes of its Z.</p>
<div class="gallery pairs">{}</div>""",
        data.evaluate_on,
        f", of {len(cards)} classes" if len(cards) < len(data.class_names) else "",
        cards,
    )


def _kernel(look: Look) -> _Markup:
    """Returns how well the kernel tells pairs of a class from others."""
    rows = figures.some_rows(len(look.z), _KERNEL_IMAGES)
    pixels = np.asarray(augment.to_unit(look.data.eval_images[rows]))
    kernel = gaussian_mixture(
        look.config["bandwidths"], reduction=look.config["kernel_reduction"]
    )
    charts, table = [], []
    for name, features in (
        ("on Z", look.z[rows]),
        ("on raw pixels", pixels.reshape(len(rows), -1)),
    ):
        gram = np.asarray(kernel(features, features))
        same, different = figures.pair_values(gram, look.data.eval_labels[rows])
        if not (same.size and different.size):
            return _html("<p>Too few images: no pair of a class, or of two.</p>")
        bins = np.linspace(0.0, max(1.0, same.max(), different.max()), 41)
        shares = {
            "same class": np.histogram(same, bins)[0] / same.size,
            "different classes": np.histogram(different, bins)[0] / different.size,
        }
        means = {"same class": same.mean(), "different classes": different.mean()}
        overlap, auc = figures.separation(same, different)
        charts.append(
            _figure(
                f"Kernel {name}, % of pairs",
                dict.fromkeys(shares, ""),
                _histogram_chart(f"Histograms of the kernel {name}", bins, shares),
            )
        )
        values = (*means.values(), auc, overlap)
        table.append((name, *(f"{value:.3f}" for value in values)))
    return _html(
        """<p class="soft">Values of the kernel between {} {} images. AUC is the
probability that of two pairs, one of the same class and one of different classes, the
first has the larger value; overlap is the area that the two histograms share.</p>
<div class="charts wide">{}{}</div>""",
        f"{len(rows):,}",
        look.data.evaluate_on,
        charts,
        _table(("kernel", "mean, same", "mean, different", "AUC", "overlap"), table),
    )


def _configuration(config: Mapping[str, Any]) -> _Markup:
    rows = [
        (name, json.dumps(value, ensure_ascii=False))
        for name, value in sorted(config.items())
    ]
    return _html(
        '<details><summary>{} keys</summary><div class="path">{}</div></details>',
        len(rows),
        _table(("key", "value"), rows),
    )


# --- Charts, as SVG ---


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The frame of a chart, and where in the picture a value lies."""

    x_ticks: np.ndarray
    y_ticks: np.ndarray
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    x_name: str
    log: bool = False

    def x(self, value: np.ndarray | float) -> np.ndarray:
        low, high = self.x_limits
        return _LEFT + (_RIGHT - _LEFT) * (np.asarray(value) - low) / (high - low)

    def y(self, value: np.ndarray | float) -> np.ndarray:
        scale = np.log if self.log else np.asarray
        low, high = scale(self.y_limits)
        return _BOTTOM - (_BOTTOM - _TOP) * (scale(value) - low) / (high - low)

    def path(self, x: np.ndarray, y: np.ndarray) -> str:
        """Returns the line through points; it breaks where one is not finite."""
        points, command = [], "M"
        for left, top in zip(self.x(x), self.y(y), strict=True):
            if np.isfinite(top):
                points.append(f"{command}{left:.1f} {top:.1f}")
            command = "L" if np.isfinite(top) else "M"
        return "".join(points)

    def picture(self, text: str, content: Sequence[_Markup]) -> _Markup:
        """Returns the picture: grid, ticks and what is drawn on them."""
        grid = [
            _html(
                '<path d="M{} {y}H{}"/><text class="y" x="{}" y="{y}">{}</text>',
                _LEFT,
                _RIGHT,
                _LEFT - 5,
                _number(tick),
                y=f"{self.y(tick):.1f}",
            )
            for tick in self.y_ticks
        ]
        grid += [
            _html(
                '<text x="{:.1f}" y="{}">{}</text>',
                float(self.x(tick)),
                _BOTTOM + 17,
                _number(tick),
            )
            for tick in self.x_ticks
        ]
        return _html(
            """<svg viewBox="0 0 {} {}" role="img" aria-label="{}">
<g class="grid">{}<text x="{}" y="{}">{}</text></g>{}</svg>""",
            _WIDTH,
            _HEIGHT,
            text,
            grid,
            (_LEFT + _RIGHT) / 2,
            _BOTTOM + 34,
            self.x_name,
            content,
        )


# The picture of a chart and its frame, in units of a pixel or a little more.
_WIDTH, _HEIGHT = 300, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 292, 8, 130


def _line_chart(
    chart: _Chart, epochs: np.ndarray, series: Mapping[str, np.ndarray]
) -> _Markup:
    """Returns the lines of some metrics over epochs."""
    values = np.concatenate(list(series.values()))
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    log = chart.log and low > 0.0
    if log:
        limits = (low / 1.2, high * 1.2)
        y_ticks = _log_ticks(*limits)
    else:
        empty = low == high == 0.0
        y_ticks = _linear_ticks(min(0.0, low), 1.0 if empty else max(0.0, high))
        limits = (y_ticks[0], y_ticks[-1])
    first, last = epochs[0], epochs[-1]
    x_ticks = MaxNLocator(6, integer=True).tick_values(first, last)
    axes = _Axes(
        x_ticks=x_ticks[(x_ticks >= first) & (x_ticks <= last)],
        y_ticks=y_ticks,
        x_limits=(first, last) if last > first else (first - 0.5, first + 0.5),
        y_limits=limits,
        x_name="epoch",
        log=log,
    )
    content = []
    for i, y in enumerate(series.values()):
        end = np.flatnonzero(np.isfinite(y))[-1]
        content.append(
            _html(
                """<g class="s{}"><path class="line" d="{}"/>
<circle cx="{:.1f}" cy="{:.1f}" r="2.5"/></g>""",
                i,
                axes.path(epochs, y),
                float(axes.x(epochs[end])),
                float(axes.y(y[end])),
            )
        )
    # A pointer over an epoch is told its values.
    middles = axes.x((epochs[1:] + epochs[:-1]) / 2)
    edges = [_LEFT, *middles, _RIGHT]
    for i, epoch in enumerate(epochs):
        values_of_epoch = [f"{name}: {_number(y[i])}" for name, y in series.items()]
        content.append(
            _html(
                """<rect class="band" x="{:.1f}" y="{}" width="{:.1f}" height="{}">
<title>{}</title></rect>""",
                edges[i],
                _TOP,
                edges[i + 1] - edges[i],
                _BOTTOM - _TOP,
                "\n".join([f"epoch {epoch:.0f}", *values_of_epoch]),
            )
        )
    ends = ", ".join(f"{name} {_number(y[-1])}" for name, y in series.items())
    text = f"{chart.title}, by epoch; after epoch {last:.0f}: {ends}"
    return axes.picture(text, content)


def _histogram_chart(
    text: str, bins: np.ndarray, shares: Mapping[str, np.ndarray]
) -> _Markup:
    """Returns histograms of the same bins, one over the other."""
    y_ticks = _linear_ticks(0.0, 100.0 * max(share.max() for share in shares.values()))
    axes = _Axes(
        x_ticks=_linear_ticks(0.0, bins[-1]),
        y_ticks=y_ticks,
        x_limits=(0.0, bins[-1]),
        y_limits=(0.0, y_ticks[-1]),
        x_name="kernel value",
    )
    outlines = [
        _html(
            '<path class="area s{}" d="{}V{}H{}Z"/>',
            i,
            axes.path(np.repeat(bins, 2)[1:-1], 100.0 * np.repeat(share, 2)),
            _BOTTOM,
            _LEFT,
        )
        for i, share in enumerate(shares.values())
    ]
    return axes.picture(text, outlines)


def _linear_ticks(low: float, high: float) -> np.ndarray:
    locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    return np.asarray(locator.tick_values(low, high))


def _log_ticks(low: float, high: float) -> np.ndarray:
    """Returns round numbers between two, as few as will do."""
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)))
    for digits in ([1.0], [1.0, 3.0], [1.0, 2.0, 5.0], np.arange(1.0, 10.0)):
        ticks = np.outer(decades, digits).ravel()
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) >= 3:
            return ticks[:: -(-len(ticks) // 6)]
    return _linear_ticks(low, high)[1:-1]


# --- Markup ---


class _Markup(str):
    """HTML that is ready. Any other value is text, and is escaped."""

    __slots__ = ()


def _html(template: str, /, *values: Any, **named: Any) -> _Markup:
    """Fills ``{}`` in a template; lists of markup are joined, all text is escaped.

    Examples:
      >>> _html("<p>{}{}</p>", "a < b", [_html("<br>"), _html("<hr>")])
      '<p>a &lt; b<br><hr></p>'
    """

    def ready(value: Any) -> Any:
        if isinstance(value, list):
            return "".join(map(ready, value))
        if isinstance(value, _Markup) or not isinstance(value, str):
            return value
        return html.escape(value)

    filled = {name: ready(value) for name, value in named.items()}
    return _Markup(template.format(*map(ready, values), **filled))


def _figure(title: str, legend: Mapping[str, str], picture: _Markup) -> _Markup:
    """Returns a chart below its title and the names of its colours."""
    return _html(
        "<figure><figcaption><h3>{}</h3><ul>{}</ul></figcaption>{}</figure>",
        title,
        [
            _html('<li class="s{}">{} <b>{}</b></li>', i, name, value)
            for i, (name, value) in enumerate(legend.items())
        ],
        picture,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> _Markup:
    return _html(
        '<table class="plain"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>',
        [_html('<th scope="col">{}</th>', name) for name in header],
        [
            _html("<tr>{}</tr>", [_html("<td>{}</td>", cell) for cell in row])
            for row in rows
        ],
    )


def _picture(image: np.ndarray, text: str) -> _Markup:
    """Returns a uint8 image ``(h, w, c)``, grey or RGB, as a PNG inside the page."""
    file = io.BytesIO()
    height, width, channels = image.shape
    pixels = image[..., 0] if channels == 1 else image
    Image.fromarray(pixels).save(file, "PNG")
    return _html(
        '<img src="data:image/png;base64,{}" alt="{text}" title="{text}" '
        'width="{}" height="{}">',
        base64.b64encode(file.getvalue()).decode(),
        width,
        height,
        text=text,
    )


def _error(confusion: np.ndarray) -> float:
    return 100.0 * float(1.0 - np.trace(confusion) / confusion.sum())


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
    """Returns a number of three digits that is short enough for an axis.

    Examples:
      >>> [_number(value) for value in (0.0, 1e-5, 0.123456, 12345.6, 3e6)]
      ['0', '1e-5', '0.123', '12,346', '3e6']
    """
    if 1e3 <= abs(value) < 1e5:
        return f"{value:,.0f}"
    digits, _, exponent = f"{value:.3g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{header}
<nav>{links}</nav>
<main>
{sections}
</main>
</body>
</html>
"""

_CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1c2024; --soft: #5f6872; --line: #e2e4e6;
  --s0: 0 114 178; --s1: 213 94 0; --s2: 0 140 104; --s3: 160 70 140;
  --wrong: #b04a00; --on-full: var(--ink); --on-fullest: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --ink: #e8eaec; --soft: #9aa4ae; --line: #31373d;
    --s0: 92 180 236; --s1: 240 144 72; --s2: 64 196 156; --s3: 214 140 200;
    --wrong: rgb(var(--s1)); --on-full: #101214; --on-fullest: #101214;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1320px; padding: 1.5rem clamp(.75rem, 2.5vw, 2rem) 4rem;
  background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums;
}
h1, h2, h3, p, figure, dl, dd, ul { margin: 0; }
h1 { font-size: 2rem; line-height: 1.2; overflow-wrap: anywhere; }
h1 small { font-weight: 400; color: var(--soft); }
h2 { font-size: 1.25rem; margin-bottom: .25rem; }
h3 { font-size: .95rem; }
.soft, .path, dt { color: var(--soft); }
.path { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
header .soft { font-size: .85rem; }
.notice {
  margin-top: .75rem; padding: .5rem .75rem; border-radius: 6px;
  background: rgb(var(--s1) / 14%); border-left: 4px solid rgb(var(--s1));
}
dl {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  gap: .75rem; margin: 1.25rem 0 .75rem;
}
dl div {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .6rem .9rem;
}
dd { font-size: 1.6rem; line-height: 1.3; font-weight: 600; }
dd.soft { font-size: .85rem; font-weight: 400; }
dl div:first-child dd:not(.soft) { color: rgb(var(--s0)); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1rem 0 0; }
a { color: rgb(var(--s0)); text-underline-offset: .2em; }
section { margin-top: 2.5rem; }
section > .soft { max-width: 75ch; }
.charts {
  display: grid; gap: .75rem; margin-top: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(280px, 100%), 1fr));
}
.charts.wide {
  grid-template-columns: repeat(auto-fill, minmax(min(320px, 100%), 1fr));
}
.charts figure {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: .7rem .8rem .3rem; display: flex; flex-direction: column;
  justify-content: space-between;
}
figcaption ul {
  display: flex; flex-wrap: wrap; gap: 0 .9rem; padding: 0; list-style: none;
  font-size: .82rem; color: var(--soft);
}
figcaption li::before {
  content: ""; display: inline-block; width: .9em; height: .2em; margin-right: .4em;
  border-radius: 1px; vertical-align: .25em; background: rgb(var(--colour));
}
figcaption li b { color: var(--ink); font-weight: 600; }
.s0 { --colour: var(--s0); } .s1 { --colour: var(--s1); }
.s2 { --colour: var(--s2); } .s3 { --colour: var(--s3); }
svg { display: block; width: 100%; height: auto; margin-top: .4rem; overflow: visible; }
.grid path { stroke: var(--line); }
.grid text { fill: var(--soft); font-size: 11.5px; text-anchor: middle; }
.grid text.y { text-anchor: end; dominant-baseline: central; }
.line {
  fill: none; stroke: rgb(var(--colour)); stroke-width: 1.8; stroke-linejoin: round;
}
circle { fill: rgb(var(--colour)); }
.area {
  fill: rgb(var(--colour) / 35%); stroke: rgb(var(--colour)); stroke-width: 1.2;
}
.band { fill: transparent; } .band:hover { fill: rgb(var(--s0) / 12%); }
.beside { display: flex; flex-wrap: wrap; gap: 1.5rem 3rem; margin-top: .75rem; }
.beside > * { min-width: 0; max-width: 100%; overflow: auto; }
.scroll { max-height: 92vh; }
table { border-collapse: collapse; font-size: .85rem; }
.plain td, .plain th {
  text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word;
}
.plain { align-self: start; }
.path .plain td { color: var(--ink); overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); }
.confusion td { min-width: 2.6em; height: 2.6em; padding: 0 .2em; text-align: center; }
@media (max-width: 500px) { .confusion td { min-width: 2em; height: 2em; } }
.confusion.small { font-size: 9px; line-height: 11px; }
.confusion.small td.hit { font-size: 0; }
.confusion.small th { padding-top: 0; padding-bottom: 0; }
.confusion.small th + th { padding: 0; }
.confusion.small td { min-width: 11px; height: 11px; padding: 0; font-size: 8px; }
.confusion tr:hover { background: rgb(var(--s0) / 12%); }
.confusion tbody td { border: 1px solid var(--line); }
.confusion.small tbody td { border: 0; }
.confusion.small tr:nth-child(10n) td { border-bottom: 1px solid var(--line); }
.confusion.small td:nth-child(10n + 1) { border-right: 1px solid var(--line); }
.confusion td.hit { background: rgb(var(--s0) / var(--shade)); }
.confusion td.miss { background: rgb(var(--s1) / var(--shade)); }
.confusion td.full { color: var(--on-full); }
.confusion td.fullest { color: var(--on-fullest); }
.confusion td.rate {
  border: 0; color: var(--soft); text-align: right; padding-left: .6em;
}
.confusion th { background: var(--page); }
.confusion thead th { position: sticky; top: 0; z-index: 1; vertical-align: bottom; }
.confusion thead th span { writing-mode: vertical-rl; transform: rotate(180deg); }
.confusion th:first-child {
  position: sticky; left: 0; text-align: right; padding-right: .5em; z-index: 1;
}
.confusion thead th:first-child { z-index: 2; }
.gallery {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(92px, 1fr));
  gap: .75rem; margin-top: .75rem;
}
.gallery.pairs {
  grid-template-columns: repeat(auto-fill, minmax(min(210px, 46%), 1fr));
}
.gallery figcaption { font-size: .82rem; line-height: 1.35; overflow-wrap: anywhere; }
.gallery img {
  width: 100%; height: auto; image-rendering: pixelated; border-radius: 6px;
}
.gallery.pairs img { width: calc(50% - 2px); }
.gallery.pairs img + img { margin-left: 4px; }
.gallery span { display: block; }
.wrong { color: var(--wrong); } .true { color: rgb(var(--s0)); }
details { margin-top: .5rem; }
summary { cursor: pointer; color: rgb(var(--s0)); }
"""
