"""The page of a run: read by a parser, and opened in a browser where there is one."""

import base64
import functools
import html
import html.parser
import io
import itertools
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from PIL import Image

from configs import digits
from kln_jax.analysis import __main__ as command
from kln_jax.analysis import view
from kln_jax.datasets import Dataset
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import experiment

SECTIONS = [
    "Curves",
    "Confusion matrix",
    "Most confident errors",
    "Reconstructions",
    "Kernel",
    "Configuration",
]
HOSTILE = ("<b>cat</b>", '" onload="alert(1)', "<script>alert(1)</script>", "a & {b}")
VOID = {"img", "meta"}


class Page(html.parser.HTMLParser):
    """A page read back; it fails where elements are not nested."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open, self._texts = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs), []))
        self._texts.append(self.elements[-1][2])
        self._open.append(tag)
        if tag in VOID:
            self.handle_endtag(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._texts.pop()

    def handle_data(self, data):
        for text in self._texts:
            text.append(data)

    def texts(self, tag, **attributes):
        """What elements of a tag, with certain attributes, say."""
        return [
            " ".join(" ".join(text).split())
            for name, found, text in self.elements
            if name == tag and attributes.items() <= found.items()
        ]

    def attributes(self, tag, name):
        return [found[name] for kind, found, _ in self.elements if kind == tag]

    def chart(self, title):
        """What is drawn in the chart with a title: tags with their attributes."""
        after = itertools.dropwhile(
            lambda element: not element[1].get("aria-label", "").startswith(title),
            self.elements,
        )
        assert next(after)[0] == "svg"
        return [
            (tag, attributes)
            for tag, attributes, _ in itertools.takewhile(
                lambda element: element[0] not in ("figure", "section", "table"), after
            )
        ]

    def table(self, after):
        """The rows of the table with a text in its head."""
        (table,) = [i for i in range(len(self.elements)) if self._is_table(i, after)]
        rows = []
        for tag, _, text in self.elements[table + 1 :]:
            if tag == "table":
                break
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append("".join(text))
        return rows

    def _is_table(self, i, after):
        tag, _, text = self.elements[i]
        return tag == "table" and "".join(text).strip().startswith(after)


def _metrics(num_epochs=3, part="test"):
    return [
        {
            "step": 10 * epoch,
            "epoch": epoch,
            "accuracy": 1.0 - 0.5 / epoch,
            "loss": 9.0 / epoch,
            "cmmd": 8.0 / epoch,
            "reconstruction": 70.0 / epoch,
            "confidence": 3.0,
            "kernel_same": 0.2 * epoch,
            "kernel_different": 0.01,
            "gradient_norm": 20.0 / epoch,
            "gradient_norm_encoder": 19.0 / epoch,
            "pivot_smallest": 0.2,
            "pivot_largest": 1.1,
            "median_squared_distance": 60.0,
            f"{part}_error_percent": 40.0 / epoch,
            f"{part}_reconstruction": 60.0 / epoch,
            "wall_seconds": 80.0 * epoch,
        }
        for epoch in range(1, num_epochs + 1)
    ]


def _look(*, names=("cat", "dog", "owl", "fox"), channels=1, each=3, **changes):
    """A look at a run that took every last image of a class for one of the next."""
    rng = np.random.default_rng(0)
    classes = len(names)
    labels = np.tile(np.arange(classes, dtype=np.int32), each)
    images = rng.integers(0, 256, (len(labels), 6, 5, channels)).astype(np.uint8)
    predicted = labels.copy()
    predicted[-classes:] = (labels[-classes:] + 1) % classes
    # The later a wrong image comes, the more probable is its wrong class.
    top = np.linspace(0.5, 0.99, len(labels))[:, None]
    probabilities = (1.0 - top) / (classes - 1) * np.ones(classes)
    np.put_along_axis(probabilities, predicted[:, None], top, axis=1)
    data = Dataset("pets", "1.2", images, labels, images, labels, names)
    fields = {
        "workdir": "runs/a",
        "config": json.loads(digits.get_config().to_json()) | {"num_epochs": 3},
        "result": {
            "test_error_percent": 100.0 / each,
            "versions": {"jax": "0.10.2"},
            "device": "2 x cpu",
        },
        "failure": "",
        "metrics": _metrics(),
        "data": data,
        "num_labelled": len(labels) // 2,
        "step": 30,
        "z": (2.0 * np.eye(classes)[labels] + rng.normal(size=(len(labels), 1))).astype(
            np.float32
        ),
        "probabilities": probabilities,
        "examples": np.arange(min(classes, 4)),
        "reconstructions": images[: min(classes, 4)] / 255.0,
    }
    return view.Look(**{**fields, **changes})


def _with_data(look, **changes):
    data = Dataset(**{**vars(look.data), **changes})
    return look._replace(data=data)


def _older(lines):
    """Metrics as they were before gradient norms and diagnostics were logged."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("gradient", "pivot", "median"))
        }
        for line in lines
    ]


def _correct(look):
    probabilities = np.eye(len(look.data.class_names))[look.data.eval_labels]
    return look._replace(probabilities=probabilities)


LOOKS = {
    "grey": _look(),
    "hostile": _look(
        names=HOSTILE,
        workdir="runs/<img src=http://example.org/a.png>",
        config={**_look().config, "data_dir": "</table><script>", "variant": "<i>"},
        result={"device": "<u>", "versions": {"<jax>": "<1>"}},
    ),
    "hundred": _look(names=tuple(f"class {i}" for i in range(100)), channels=3),
    "unfinished": _look(result=None, step=25),
    "older": _look(metrics=_older(_metrics())),
    "nothing yet": _look(metrics=[], result=None, step=0),
    "diverged": _look(result=None, failure="cmmd is <1e9>", step=25),
    "one epoch": _look(metrics=_metrics(1)),
    "no errors": _correct(_look()),
    "one of each": _look(each=1),
    "not finite": _look(z=np.full((12, 4), np.nan, np.float32)),
}


def _page(look):
    return Page(view.page(look))


@functools.cache
def _text_of(name):
    return view.page(LOOKS[name])


@functools.cache
def _page_of(name):
    return Page(_text_of(name))


@pytest.mark.parametrize("name", LOOKS)
def test_the_page_has_all_sections_and_needs_nothing_else(name):
    page = _page_of(name)
    assert page.texts("h2") == SECTIONS
    anchors = [link.removeprefix("#") for link in page.attributes("a", "href")]
    assert anchors == page.attributes("section", "id")
    assert {tag for tag, _, _ in page.elements}.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "form", "base"}
    )
    ids = [found["id"] for _, found, _ in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    for _, attributes, _ in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "data", "action"):
                assert value.startswith("data:"), (name, value)
            links = re.findall(r"url\((.*?)\)", value)
            if name in ("href", "xlink:href"):
                links.append(value)
            assert {link[0] for link in links} <= {"#"}
            assert {link[1:] for link in links} <= set(ids)
    (style,) = page.texts("style")
    assert "url(" not in style
    assert "@import" not in style
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert ("meta", policy) in [(t, a.get("content")) for t, a, _ in page.elements]


def test_text_stays_text():
    page = _page_of("hostile")
    rows = page.table(HOSTILE[0])
    assert [row[0] for row in rows[1:]] == list(HOSTILE)
    assert page.texts("p", **{"class": "path"}) == [LOOKS["hostile"].workdir]
    assert ["data_dir", '"</table><script>"'] in page.table("key")
    assert page.texts("small") == ["<i>"]
    assert "<jax> <1>" in page.texts("header")[0]
    assert not {"script", "i", "u"} & {tag for tag, _, _ in page.elements}
    alternative = page.attributes("img", "alt")
    assert f"test image 1, class {HOSTILE[1]}" in alternative


def _facts(page):
    values = page.texts("dd")
    pairs = zip(values[::2], values[1::2], strict=True)
    return dict(zip(page.texts("dt"), pairs, strict=True))


def test_the_header_says_what_matters_most():
    page = _page_of("grey")
    assert page.texts("h1") == ["pets supervised"]
    assert page.texts("title")[0] == "pets: 33.33 % error"
    assert _facts(page) == {
        "test error": ("33.33 %", "4 of 12 images"),
        "epochs": ("3", "of 3, 30 steps"),
        "wall time": ("4 min", "2 x cpu"),
        "labels": ("6", "of 12 training images"),
        "classes": ("4", "images of 6x5x1"),
    }
    assert "pets 1.2, jax 0.10.2" in page.texts("header")[0]
    assert not page.texts("p", **{"class": "notice"})


@pytest.mark.parametrize(
    ("look", "notice"),
    [
        (LOOKS["unfinished"], "checkpoint of step 25: 2 of 3 epochs"),
        (
            LOOKS["diverged"],
            "This run diverged: cmmd is <1e9>. The page shows its checkpoint of step",
        ),
        (LOOKS["nothing yet"], "checkpoint of step 0: 0 of 3 epochs"),
        (_with_data(_look(), partial=True), "only a part of the set"),
        (_look(result={"skipped_steps": 7}), "7 steps were skipped"),
        (
            # Foxes are taken for owls.
            _look(result={}, probabilities=np.eye(4)[np.tile([0, 1, 2, 2], 3)]),
            "Never predicted: fox.",
        ),
        (
            _with_data(_look(), class_names=tuple("abcd") + tuple(map(str, range(12)))),
            "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more.",
        ),
        (_look(result={"test_error_percent": 12.5}), "reported 12.50 % test error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_reader_must_know_comes_first(look, notice):
    (found,) = _page(look).texts("p", **{"class": "notice"})
    assert notice in found


def test_a_run_that_is_not_finished_shows_the_time_of_its_state():
    facts = _facts(_page_of("unfinished"))
    assert facts["epochs"] == ("2", "of 3, 25 steps")
    assert facts["wall time"][0] == "3 min"


def test_a_run_evaluated_on_validation_images_says_so():
    look = _look(
        result={"validation_error_percent": 12.5}, metrics=_metrics(part="validation")
    )
    page = _page(_with_data(look, evaluate_on="validation"))
    assert "validation error" in _facts(page)
    (notice,) = page.texts("p", **{"class": "notice"})
    assert "validation error" in notice
    charts = page.texts("figcaption")
    assert charts[0] == "Error, % validation 13.3 training, labelled 16.7"
    assert charts[2] == "Reconstruction error validation 20 training 23.3"


def test_metrics_that_were_not_logged_have_no_chart():
    page = _page_of("grey")
    assert page.texts("h3")[4:8] == [
        "Mean of the kernel",
        "Gradient norm",
        "Pivots of the Gram matrices",
        "Median squared distance under the kernel",
    ]
    # Of the norms by part, only the encoder's was logged.
    assert page.texts("figcaption")[5] == "Gradient norm all 6.67 encoder 6.33"
    older = _page_of("older")
    assert older.texts("h3")[4:6] == ["Mean of the kernel", "Confused most often"]


def test_a_legend_has_the_last_number_there_is():
    lines = _metrics()
    lines[-1]["pivot_largest"] = float("nan")
    lines[-1]["pivot_smallest"] = 0.5
    page = _page(_look(metrics=lines))
    start = "Pivots of the Gram matrices"
    assert f"{start} largest 1.1 smallest 0.5" in page.texts("figcaption")
    labels = [found.get("aria-label") for _, found, _ in page.elements]
    assert f"{start}, by epoch to 3; last values: largest 1.1, smallest 0.5" in labels


def test_only_some_of_many_classes_are_reconstructed_and_it_says_so():
    few = [_page_of(name).texts("p") for name in ("grey", "hundred")]
    start = "The first test image of each class"
    assert any(text.startswith(f"{start}, and beside") for text in few[0])
    assert any(text.startswith(f"{start}, of 4 classes, and") for text in few[1])


def test_charts_say_what_they_show():
    page = _page_of("grey")
    charts = [found for tag, found, _ in page.elements if tag == "svg"]
    assert {chart["role"] for chart in charts} == {"img"}
    texts = [chart["aria-label"] for chart in charts]
    assert texts[1] == "Loss, by epoch to 3; last values: loss 3, CMMD 2.67"
    assert texts[8:] == [
        "Histograms of the kernel on Z",
        "Histograms of the kernel on raw pixels",
    ]
    titles = page.texts("h3")
    assert [text.split(", by epoch")[0] for text in texts[:8]] == titles[:8]


def _metrics_of(name, values):
    """Metrics of epochs of which one was logged, where its value is not None."""
    return [
        {"epoch": epoch} | ({} if value is None else {name: value})
        for epoch, value in enumerate(values, start=1)
    ]


def _drawn(name, values):
    """The chart of a metric that alone was logged."""
    (chart,) = view._curves(_metrics_of(name, values))
    return Page(f'<svg aria-label="{name}">{chart.drawing}</svg>').chart(name)


def _lines(chart):
    """The lines of a chart, each as a path and its colour."""
    found = []
    for tag, attributes in chart:
        style = re.fullmatch(
            "fill: none; stroke: (rgb[^;]*);.*", attributes.get("style", "")
        )
        if tag == "path" and style:
            found.append((attributes["d"], style[1]))
    return found


def _points(path):
    return [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]


def _labels(chart, anchor):
    """The attributes of the labels of an axis."""
    return [
        attributes
        for tag, attributes in chart
        if tag == "text" and f"text-anchor: {anchor}" in attributes["style"]
    ]


def test_a_line_has_the_colour_of_its_legend_in_the_light_and_dark_look():
    lines = _metrics()
    for line in lines:
        line |= {"gradient_norm_decoder": 2.0, "gradient_norm_classifier": 1.0}
    text = view.page(_look(metrics=lines))
    page = Page(text)
    expected = [f"rgb(var(--s{i}))" for i in range(4)]
    chart = page.chart("Gradient norm")
    assert [colour for _, colour in _lines(chart)] == expected
    ends = [found["style"] for tag, found in chart if tag == "use"]
    assert ends == [f"fill: {colour}; stroke: {colour}" for colour in expected]
    histograms = [
        found["style"]
        for tag, found in page.chart("Histograms")
        if tag == "path" and "opacity" in found["style"]
    ]
    assert histograms == [f"fill: {colour}; opacity: 0.7" for colour in expected[:2]]
    # In the order in which they are drawn.
    caption = "Kernel on Z same class different classes"
    assert caption in page.texts("figcaption")
    legends = [found["class"] for tag, found, _ in page.elements if tag == "li"]
    assert [f"rgb(var(--{name}))" for name in legends][9:13] == expected
    # No colour is the same in both looks.
    assert not re.search(
        "#[0-9a-f]{6}", " ".join(re.findall("<svg.*?</svg>", text, re.S))
    )


@pytest.mark.parametrize("name", ["confidence", "loss"])  # The second on a log axis.
def test_a_curve_breaks_where_a_value_is_missing_or_not_finite(name):
    values = [3.0, 2.0, None, float("nan"), float("inf"), 2.0, 1.0, 1.5]
    ((path, _),) = _lines(_drawn(name, values))
    assert [len(_points(f"M{part}")) for part in path.split("M")[1:]] == [2, 3]


@pytest.mark.parametrize("value", [0.0, -2.0, 1.1, 3e-30, 4e9])
@pytest.mark.parametrize("name", ["confidence", "loss"])  # The second on a log axis.
def test_a_line_lies_in_its_frame_between_labels(name, value):
    for ratio in (1.0, 1.3, 2.0, 90.0, 700.0, 1e4, 1e9):
        chart = _drawn(name, [value, ratio * value])
        (frame,) = [
            {side: float(found[side]) for side in ("x", "y", "width", "height")}
            for tag, found in chart
            if tag == "rect"
        ]
        top, bottom = frame["y"], frame["y"] + frame["height"]
        ((path, _),) = _lines(chart)
        (left, start), (right, end) = _points(path)
        assert top - 0.1 <= min(start, end) <= max(start, end) <= bottom + 0.1
        # The larger value stands higher.
        assert np.sign(start - end) == np.sign(ratio * value - value)
        edges = frame["x"], frame["x"] + frame["width"]
        assert (left, right) == pytest.approx(edges, abs=0.1)
        heights = sorted(float(found["y"]) for found in _labels(chart, "end"))
        assert 2 <= len(heights) <= 10
        assert np.diff(heights).min() >= 9.0  # The height of their letters.


@pytest.mark.parametrize("count", [1, 2, 7, 200, 12_000])
def test_epochs_are_labelled_by_whole_numbers(count):
    (chart,) = view._curves(_metrics_of("confidence", np.linspace(3.0, 1.0, count)))
    texts = re.findall(r"text-anchor: middle.*?>(.*?)<", chart.drawing)
    assert texts.pop() == "epoch"
    assert 2 <= len(texts) <= 6
    assert all(text.isdecimal() for text in texts)


def test_the_end_of_a_line_is_marked():
    chart = _drawn("confidence", [3.0, 1.0, float("nan")])
    ((path, _),) = _lines(chart)
    (end,) = [found for tag, found in chart if tag == "use"]
    assert (float(end["x"]), float(end["y"])) == _points(path)[-1]


def test_the_same_look_makes_the_same_charts():
    metrics = _metrics()
    assert view._curves(metrics) == view._curves(metrics)


def test_the_confusion_matrix_counts_rows_of_true_classes():
    page = _page_of("grey")
    header, *rows = page.table("cat")
    assert header == ["", "cat", "dog", "owl", "fox", "error, %"]
    assert rows == [
        ["cat", "2", "1", "", "", "33.3"],
        ["dog", "", "2", "1", "", "33.3"],
        ["owl", "", "", "2", "1", "33.3"],
        ["fox", "1", "", "", "2", "33.3"],
    ]


def test_the_pairs_confused_most_come_first():
    look = _look(names=("cat", "dog", "owl"), each=4)
    predicted = look.data.eval_labels.copy()
    predicted[[1, 4, 7]] = 0  # Three dogs taken for cats,
    predicted[[2, 5]] = 1  # and two owls for dogs.
    look = look._replace(probabilities=np.eye(3)[predicted])
    assert _page(look).table("true")[1:] == [
        ["dog", "cat", "3", "75.00\u00a0%"],
        ["owl", "dog", "2", "50.00\u00a0%"],
    ]


def test_a_matrix_of_many_classes_is_set_small_but_has_all_of_them():
    page = _page_of("hundred")
    assert page.attributes("table", "class").count("confusion small") == 1
    assert len(page.table("class 0")) == 101
    assert len(page.table("true")) == 1 + view._CONFUSIONS_SHOWN
    assert _page_of("grey").attributes("table", "class").count("confusion") == 1


def _captions(page):
    """Those of the errors: two classes with their probabilities."""
    return [text for text in page.texts("figcaption") if text.count("%") == 2]


def test_errors_are_those_with_the_highest_probability_first():
    look = LOOKS["grey"]
    # The wrong images are the last four, each surer than the one before.
    assert _captions(_page_of("grey")) == [
        f"{wrong} {100 * top:.2f} % {true} {100 * (1 - top) / 3:.2f} %"
        for true, wrong, top in zip(
            ("fox", "owl", "dog", "cat"),
            ("cat", "fox", "owl", "dog"),
            look.probabilities.max(axis=1)[:-5:-1],
            strict=True,
        )
    ]
    assert "Every image is classified" not in _text_of("grey")
    assert "Every image is classified" in _text_of("no errors")


def test_of_many_errors_the_first_are_shown():
    page = _page_of("hundred")
    assert len(_captions(page)) == view._ERRORS_SHOWN
    assert f"{view._ERRORS_SHOWN} of 100 errors" in page.texts("section")[2]


def _pixels(page):
    """The pixels of all pictures, by what they show."""
    sources = page.attributes("img", "src")
    return {
        text: np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))
        for text, source in zip(page.attributes("img", "alt"), sources, strict=True)
    }


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_the_images_and_reconstructions_themselves(channels):
    look = _look(channels=channels)
    look = look._replace(reconstructions=1.0 - look.reconstructions)
    pixels = _pixels(_page(look))
    for row, name in enumerate(look.data.class_names):
        image = look.data.eval_images[row].squeeze()
        text = f"test image {row}, class {name}"
        np.testing.assert_array_equal(pixels[text], image)
        np.testing.assert_array_equal(pixels[f"reconstruction of {text}"], 255 - image)
    assert "test image 11, class fox" in pixels  # An error.


def test_the_kernel_is_told_apart_by_auc_and_overlap():
    look = LOOKS["grey"]
    rows = _page_of("grey").table("kernel")
    assert [row[0] for row in rows] == ["kernel", "on Z", "on raw pixels"]

    def expected(features):
        same, different = [], []
        for i in range(len(features)):
            for j in range(i):
                distance = np.sum((features[i] - features[j]) ** 2)
                value = np.mean(
                    [np.exp(-distance / (2 * b)) for b in look.config["bandwidths"]]
                )
                equal = look.data.eval_labels[i] == look.data.eval_labels[j]
                (same if equal else different).append(value)
        auc = np.mean([(a > b) + 0.5 * (a == b) for a in same for b in different])
        edges = np.arange(41) / 40
        shares = [np.histogram(v, edges)[0] / len(v) for v in (same, different)]
        values = (np.mean(same), np.mean(different), auc, np.minimum(*shares).sum())
        return [f"{value:.3f}" for value in values]

    pixels = look.data.eval_images.reshape(len(look.z), -1) / 255.0
    assert rows[1][1:] == expected(look.z.astype(float))
    assert rows[2][1:] == expected(pixels)
    assert "between 12 test images" in _page_of("grey").texts("section")[4]
    assert "Too few images" in _text_of("one of each")


def test_the_kernel_takes_some_images_of_all_classes(monkeypatch):
    monkeypatch.setattr(view, "_KERNEL_IMAGES", 6)
    look = _look(names=("cat", "dog"), each=6)
    # Sorted by class: the first six are all of one.
    look = _with_data(look, eval_labels=np.sort(look.data.eval_labels))
    assert "between 6 test images" in _page(look).texts("section")[4]


# --- A run ---


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of a small network that was interrupted before its first step."""
    workdir = tmp_path_factory.mktemp("run")
    config = digits.get_config()
    config.update(width=0.05, latent_dim=4)
    program = experiment.make_program(config, experiment._load(config))
    (workdir / "config.json").write_text(config.to_json())
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(0, program.init(jax.random.key(config.seed)))
    return workdir


def test_the_command_writes_the_page_of_a_run(workdir, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["analysis", "view", str(workdir)])
    command.main()
    assert capsys.readouterr().out == f"Wrote {workdir / 'view.html'}.\n"
    page = Page((workdir / "view.html").read_text(encoding="utf-8"))
    notice = page.texts("p", **{"class": "notice"})[0]
    assert notice.endswith("checkpoint of step 0: 0 of 12 epochs.")
    assert _facts(page)["labels"] == ("1,437", "of 1,437 training images")
    pictures = [text for text in page.attributes("img", "alt") if "recons" in text]
    assert len(pictures) == 10

    (workdir / "result.json").write_text('{"test_error_percent": 0.0}')
    finished = Page(view.write(workdir).read_text(encoding="utf-8"))
    assert "reported 0.00 %" in finished.texts("p", **{"class": "notice"})[-1]
    assert "not finished" not in finished.texts("header")[0]


def test_a_directory_without_a_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["analysis", "view", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"error: .* holds no run"):
        command.main()


@pytest.mark.parametrize(
    ("name", "file"), [("figures", "overview.png"), ("view", "view.html")]
)
def test_what_cannot_be_written_leaves_the_old_file(
    name, file, workdir, tmp_path, monkeypatch
):
    shutil.copytree(workdir, tmp_path / "run")
    path = tmp_path / "run" / file
    path.write_text("old")
    (path.parent / f".{file}.tmp").mkdir()  # So that nothing new can be written.
    monkeypatch.setattr("sys.argv", ["analysis", name, str(path.parent)])
    with pytest.raises(SystemExit, match=f"error: .*'{path}'$"):
        command.main()
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["figures", "report", "view"])
def test_a_device_that_is_not_there_is_one_line(name, workdir, monkeypatch):
    def no_device():
        raise RuntimeError("Unable to initialize backend 'foo'")

    monkeypatch.setattr(jax, "default_backend", no_device)
    monkeypatch.setattr("sys.argv", ["analysis", name, str(workdir)])
    with pytest.raises(SystemExit, match=r"error: platform='cpu' .* backend 'foo'$"):
        command.main()


# --- In a browser ---

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason="no chromium, chromium-browser or google-chrome on PATH; "
    "on Debian: apt-get install chromium",
)


def _open(text, directory):
    """Opens a page in a browser; returns the page it makes of it, and its console."""
    path = directory / "opened.html"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            f"--user-data-dir={directory / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console


@needs_browser
@pytest.mark.parametrize("name", ["grey", "hostile"])
def test_a_browser_has_nothing_to_complain_of(name, tmp_path):
    text = _text_of(name)
    opened, console = _open(text, tmp_path)
    assert not console
    # It reads the page as the parser does: nothing was moved or closed for it.
    kinds = [tag for tag, _, _ in Page(opened).elements]
    assert kinds == [tag for tag, _, _ in Page(text).elements]


@needs_browser
def test_a_browser_says_it_when_a_page_asks_for_more(tmp_path):
    image = '<img src="http://127.0.0.1:9/a.png" alt="">'
    text = _text_of("grey").replace("<main>", f"<main>{image}")
    _, console = _open(text, tmp_path)
    assert "http://127.0.0.1:9/a.png" in " ".join(console)


MEASURE = """
<script>
onload = () => {
  const seen = [...document.querySelectorAll("iframe")].map(frame => {
    const {documentElement: root, images} = frame.contentDocument;
    const labels = [...frame.contentDocument.querySelectorAll("svg text")];
    return {
      width: frame.width,
      content: root.scrollWidth,
      images: images.length,
      broken: [...images].filter(image => !image.naturalWidth).length,
      labels: labels.length,
      cut: labels.filter(label => {
        const inner = label.getBoundingClientRect();
        const outer = label.ownerSVGElement.getBoundingClientRect();
        return inner.left < outer.left || inner.right > outer.right
          || inner.top < outer.top || inner.bottom > outer.bottom;
      }).map(label => label.textContent),
      requests: frame.contentWindow.performance.getEntriesByType("resource").length,
    };
  });
  document.title = JSON.stringify(seen);
};
</script>
"""


@needs_browser
def test_a_browser_shows_all_pictures_and_scrolls_down_only(tmp_path):
    frames = [
        f'<iframe width="{width}" height="900" '
        f'srcdoc="{html.escape(_text_of(name))}"></iframe>'
        for name in ("grey", "hostile", "hundred")
        for width in (360, 1400)
    ]
    opened, _ = _open(f"<title></title>{MEASURE}{''.join(frames)}", tmp_path)
    title = re.search("<title>(.*?)</title>", opened)[1]
    seen = json.loads(html.unescape(title))
    assert len(seen) == len(frames)
    for frame in seen:
        assert frame["content"] <= int(frame["width"]), frame
        assert frame["images"] > 0
        assert frame["labels"] > 0
        assert not frame["cut"]
        assert frame["broken"] == frame["requests"] == 0
