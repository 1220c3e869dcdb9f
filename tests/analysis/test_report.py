"""Reports say what was run, what was reduced and what is missing."""

import functools
import re
import shutil

import pytest
from matplotlib.figure import Figure

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import figures, packed, report
from kln_jax.analysis.suites import SUITES, Entry
from kln_jax.storage import epoch_metrics
from tests.analysis import made_up
from tests.analysis.small_suite import DIVERGES, KLN, SMALL, SUITE

_record = functools.partial(made_up.record, 1.0, name="digits")


def test_a_run_of_no_suite_is_reported_by_its_keys(copied):
    list(report.write(copied.parent))
    (text,) = re.findall(
        "## Runs of no suite.*\\Z", (copied.parent / "report.md").read_text(), re.DOTALL
    )
    keys = "batch_size=120, latent_dim=8, network=mlp, width=0.05"
    assert f"| digits | supervised, {keys} |  | " in text


def test_a_data_set_need_not_have_every_variant_of_a_suite(copied):
    written = (copied / "config.json").read_text()
    on_cifar10 = written.replace('"dataset": "digits"', '"dataset": "cifar10"')
    assert on_cifar10 != written
    (copied / "config.json").write_text(
        on_cifar10
    )  # Which has no multilayer perceptron.
    list(report.write(copied.parent))
    text = (copied.parent / "report.md").read_text()
    assert "| cifar10 | supervised, batch_size=120, " in text


def test_errors_on_validation_images_are_said_to_be(copied):
    for name in ("metrics.jsonl", "result.json"):
        written = (copied / name).read_text()
        (copied / name).write_text(written.replace("test_", "validation_"))
    written = (copied / "config.json").read_text()
    on_validation = written.replace(
        '"evaluate_on": "test"', '"evaluate_on": "validation"'
    )
    assert on_validation != written
    (copied / "config.json").write_text(on_validation)
    (record,) = packed.read_all(copied)
    assert (
        record.error
        == epoch_metrics.read_metrics(copied)[-1]["validation_error_percent"]
    )
    list(report.write(copied.parent))
    assert re.search(
        r"\| digits \| supervised, batch_size=120, .*, width=0.05 \| .* "
        "3 of 12 epochs; error on validation images; ",
        (copied.parent / "report.md").read_text(),
    )
    assert record.errors[-1] == record.error


def test_a_report_says_what_was_reduced_and_what_was_not_measured(
    out, monkeypatch, capsys, quick_map
):
    again = KLN._replace(name="KLN once more")
    suite = SUITE._replace(entries=(KLN, again, DIVERGES))
    monkeypatch.setitem(SUITES, "small", suite)
    monkeypatch.setattr(packed, "KLN", KLN)  # The run of which figures are drawn.
    monkeypatch.setattr("sys.argv", ["analysis", "report", str(out)])
    command.main()
    written = capsys.readouterr().out
    drawn = ("small", "histograms", "heatmaps", "reconstructions", "map")
    names = [f"figures/digits-{name}.png" for name in drawn]
    for name in ("report.md", *names):
        assert f"Wrote {out / name}." in written
        assert (out / name).stat().st_size > 500
    text = (out / "report.md").read_text()
    (row,) = re.findall(r"^\| digits \| KLN \| .* ± .*", text, re.MULTILINE)
    assert "| 2 | 3 | 3 of 12 epochs; " in row
    (row,) = re.findall(r"^\| digits \| diverges \| .*", text, re.MULTILINE)
    assert "| 1 | 3 | 3 of 12 epochs; 1 diverged |" in row
    assert "| mnist | KLN | 0.39 | not measured |" in text
    assert "\n\n## A small one\n\n`small`: test error, %.\n\n| data |" in text
    for name in names:
        assert f"({name})" in text
    assert "Runs of no suite" not in text
    draw = dict(report._figures(packed.read_all(out)))
    (axes,) = draw["digits-small"]().axes
    assert axes.get_title() == "digits: A small one\n3 of 12 epochs, 1 seed"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "KLN",
        "KLN once more",
        "diverges\n1 diverged",
    ]
    assert draw["digits-map"]().get_suptitle() == "digits\n3 of 12 epochs"


def test_what_a_run_is_fits_above_the_narrowest_figure():
    record = made_up.record(1.0, partial=True, num_train_images=6667, epochs=20)

    def draw(shown):
        return Figure(figsize=(4.2, 3.2), layout="constrained")

    figure = report._of_a_run(draw, None, record)
    figure.draw_without_rendering()
    (title,) = figure.texts
    edges = title.get_window_extent().extents
    assert (edges >= 0).all()
    assert (edges[2:] <= figure.bbox.extents[2:]).all()


@pytest.mark.parametrize("figure", ["curves", "sweep"])
def test_a_figure_has_runs_that_are_alike_and_says_which(figure):
    full, few = (_record(changes=SMALL, epochs=epochs) for epochs in (12, 3))
    part = _record(changes=SMALL, epochs=3, partial=True)
    suite = SUITE._replace(figure=figure, entries=(KLN,))
    assert report._groups(suite, [part, full, few], "digits") == {"KLN": [full]}
    other = made_up.record(None, name="digits", epochs=3, changes=(("ridge", 1.0),))
    groups = {"KLN": [full, full], "ridge 1": [other]}
    (axes,) = report._of_a_suite(suite, groups, "title").axes
    texts = (
        axes.get_legend().get_texts() if figure == "curves" else axes.get_xticklabels()
    )
    assert [text.get_text() for text in texts] == [
        "KLN",
        "ridge 1\n3 of 12 epochs\n1 diverged",
    ]
    assert axes.get_title() == "title\n1 to 2 seeds"


def test_a_sweep_has_runs_that_are_alike_alone():
    changes = [(("ridge", ridge),) for ridge in (1.0, 2.0, 3.0)]
    entries = [Entry(str(i), "supervised", changes[i]) for i in range(3)]
    suite = SUITE._replace(figure="sweep", entries=tuple(entries))
    first, second = (_record(changes=of, epochs=3) for of in changes[:2])
    other = _record(changes=changes[1], epochs=3, seed=1)
    longer = [_record(changes=of, epochs=6) for of in changes[::2]]
    part = [_record(changes=of, epochs=3, partial=True) for of in changes[1:]]
    records = [*longer, first, second, other, *part]
    expected = {"0": [first], "1": [second, other]}
    assert report._groups(suite, records, "digits") == expected
    # Of as many, the fullest.
    groups = report._groups(suite, [first, *part, *longer], "digits")
    assert groups == {"0": longer[:1], "2": longer[1:]}


def test_a_sweep_compares_methods_by_the_seeds_that_all_have():
    suite = SUITE._replace(figure="sweep")

    def of_seeds(errors):
        return [made_up.record(e, name="digits", seed=i) for i, e in errors.items()]

    groups = {"a": of_seeds({0: 1.0, 1: 3.0, 2: 80.0}), "b": of_seeds({1: 5.0, 0: 7.0})}
    (axes,) = report._of_a_suite(suite, groups, "").axes
    assert axes.containers[0].lines[0].get_ydata().tolist() == [2.0, 6.0]
    groups["b"] = of_seeds({3: 5.0})
    (axes,) = report._of_a_suite(suite, groups, "").axes
    assert axes.containers[0].lines[0].get_ydata().tolist() == [28.0, 5.0]


def test_a_run_that_cannot_be_drawn_leaves_the_tables(
    out, tmp_path, monkeypatch, caplog
):
    shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(packed, "KLN", KLN)
    for path in tmp_path.glob("out/digits/*/0/checkpoints/*/*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    with caplog.at_level("WARNING", "kln_jax"):
        written = [path.name for path in report.write(tmp_path / "out")]
    assert written == ["report.md"]
    assert re.search(r"No figures of \S+/0: .*damaged", caplog.text)


@pytest.mark.parametrize("name", ["report.md", "figures/digits-map.png"])
def test_what_cannot_be_written_leaves_the_old_report(name, copied, monkeypatch):
    monkeypatch.setattr(report, "_figures", lambda _: [("digits-map", Figure)])
    path = copied / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("old")
    (path.parent / f".{path.name}.tmp").mkdir()  # So that nothing new can be written.
    with pytest.raises(OSError, match=f"'{path}'$"):
        list(report.write(copied))
    assert path.read_text() == "old"


def test_a_figure_that_cannot_be_drawn_leaves_the_others(
    out, tmp_path, monkeypatch, caplog
):
    def draws(*given):
        return Figure()

    def fails(*given):
        raise ValueError("too few images")

    pictures = {"first": draws, "second": fails, "third": draws}
    shutil.copytree(out, tmp_path / "out")
    monkeypatch.setattr(packed, "KLN", KLN)
    monkeypatch.setattr(report, "_OF_A_RUN", pictures)
    monkeypatch.setattr(figures, "curves", fails)
    monkeypatch.setitem(
        SUITES, "small", SUITE._replace(entries=(KLN, KLN._replace(name="again")))
    )
    with caplog.at_level("WARNING", "kln_jax"):
        written = [path.name for path in report.write(tmp_path / "out")]
    assert [name for name in written if name.endswith("png")] == [
        "digits-first.png",
        "digits-third.png",
    ]
    assert (tmp_path / "out" / "report.md").exists()
    assert re.search(r"No \S+/digits-second.png: too few images", caplog.text)


def test_figures_are_of_the_most_complete_run_that_can_be_drawn():
    best = _record(seed=1, epochs=12, learned_at="a")
    others = [
        _record(changes=(("ridge", 0.5),), learned_at="a"),
        _record(partial=True, epochs=12, learned_at="a"),
        _record(epochs=3, learned_at="a"),
        _record(seed=2, epochs=12, learned_at="a"),
        _record(epochs=12),
    ]
    assert packed.most_complete([*others, best]) == [best]
    assert packed.most_complete(others) == [others[3]]
