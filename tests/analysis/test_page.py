"""The page of a run: all that a person looks at, in a file that loads nothing."""

import json
import re
import shutil

import numpy as np

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import page

NAMES = ("<b>cat</b>", r"$\foo$", "_hidden")
LABELS = np.array([0, 0, 1, 1, 2, 2])
IMAGES = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4, 1)


def _collapse(path):
    """Makes the kernel of the last epoch one that tells nothing apart."""
    *lines, last = path.read_text().splitlines()
    last = json.loads(last) | {"kernel_same": 0.995, "kernel_different": 0.994}
    path.write_text("\n".join([*lines, json.dumps(last)]) + "\n")


def test_the_page_of_a_run_has_all_sections_and_loads_nothing(
    out, tmp_path, monkeypatch, capsys
):
    (run,) = out.glob("digits/supervised,*width=0.05,epochs=3/0")
    shutil.copytree(run, tmp_path / "run")
    _collapse(tmp_path / "run" / "metrics.jsonl")
    monkeypatch.setattr("sys.argv", ["analysis", "page", str(tmp_path / "run")])
    command.main()
    path = tmp_path / "run" / "page.html"
    assert capsys.readouterr().out == f"Wrote {path}.\n"
    text = path.read_text()
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Curves",
        "Confusion matrix",
        "Most confident errors",
        "Reconstructions",
        "Kernel values",
        "Configuration",
    ]
    assert text.count('src="data:image/png;base64,') == 5
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    metrics = (run / "metrics.jsonl").read_text().splitlines()[-1]
    error = float(re.search(r'"test_error_percent": ([\d.]+)', metrics)[1])
    assert f"<h1>digits, supervised: {error:.2f} % error</h1>" in text
    assert re.search(
        r"\d+ of 360 test images are wrong .*; finished\. "
        r"epoch 3: the kernel has collapsed: its mean is 0.995",
        text,
    )
    assert "<tr><td>width<td>0.05\n" in text


def test_text_stays_text_and_what_is_not_there_is_said():
    hostile = "<script>alert(1)</script>"
    text = page._page(hostile, hostile, {"A": None}, {hostile: hostile})
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 5
    assert "<script" not in text
    assert "<h2>A</h2><p>There are none.</p>" in text


def test_an_unfinished_and_a_diverged_run_say_so(tmp_path):
    assert page._state(tmp_path) == "not finished"
    (tmp_path / "diverged.json").write_text('"cmmd is 1e9"')
    assert page._state(tmp_path) == "diverged, cmmd is 1e9"


def test_curves_are_of_the_metrics_that_there_are():
    lines = [
        {"epoch": i, "loss": 9.0 / i, "test_error_percent": 40.0 / i} for i in (1, 2)
    ]
    figure = page._curves([*lines, {"epoch": 3, "loss": float("nan")}])
    error, loss, *others = figure.axes
    np.testing.assert_array_equal(error.lines[0].get_ydata(), [40, 20, np.nan])
    np.testing.assert_array_equal(loss.lines[0].get_ydata(), [9, 4.5, np.nan])
    assert loss.get_yscale() == "log"
    assert not any(axes.lines for axes in others)
    figure.draw_without_rendering()


def test_the_confusion_matrix_counts_images_of_each_class():
    expected = np.array([[1, 1, 0], [0, 2, 0], [2, 0, 0]])
    figure = page._confusion(expected, NAMES)
    (axes,) = figure.axes
    counts = {text.get_position(): text.get_text() for text in axes.texts}
    for (i, j), count in np.ndenumerate(expected):
        assert counts[j, i] == str(count)
    shares = np.square(axes.images[0].get_array())
    np.testing.assert_allclose(shares, [[0.5, 0.5, 0], [0, 1, 0], [1, 0, 0]])
    figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_xticklabels()] == [*NAMES]
    many = page._confusion(np.eye(30, dtype=int), [str(i) for i in range(30)])
    assert not many.axes[0].texts


def test_errors_are_shown_in_their_order_with_what_they_were_taken_for():
    probabilities = np.eye(3)[[0, 1, 1, 1, 0, 0]] * 0.5 + 0.1
    rows = np.array([4, 1, 5, 4, 1, 5])
    figure = page._errors(IMAGES, LABELS, probabilities, rows, NAMES)
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles[:2] == [
        "_hidden as <b>cat</b>\n60.0 %",
        "<b>cat</b> as $\\foo$\n60.0 %",
    ]
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    np.testing.assert_array_equal(shown, IMAGES[rows].squeeze())
    figure.draw_without_rendering()
    assert page._errors(IMAGES, LABELS, probabilities, rows[:0], NAMES) is None
