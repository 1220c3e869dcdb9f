"""Suites of real runs, of a network of a twentieth of the width."""

import json
import re
import shutil
import signal
import sys

import jax
import pytest
from matplotlib.figure import Figure

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import report, runs
from kln_jax.analysis.suites import SUITES, Entry, Suite
from kln_jax.storage import epoch_metrics
from kln_jax.training import experiment, loop
from kln_jax.training.interruption import EXIT_CODE

SMALL = (("batch_size", 120), ("latent_dim", 8), ("width", 0.05))
KLN = Entry("KLN", "supervised", SMALL)
NO_AUTOENCODER = Entry("beta 0", "supervised", (*SMALL, ("reconstruction_weight", 0.0)))
DIVERGES = Entry("diverges", "supervised", (*SMALL, ("divergence_bound", 1.5)))
SUITE = Suite("A small one", "error", ("digits",), (Entry("others"), KLN))
EPOCHS = 3


@pytest.fixture(scope="module", autouse=True)
def _standard_promotion():
    """The milestones of optax need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Two seeds of a method, and one that diverged."""
    directory = tmp_path_factory.mktemp("runs")
    client = jax.devices()[0].client
    made = runs.make(SUITE, directory, seeds=2, epochs=EPOCHS)
    first, second = (len(client.live_executables()) for _ in made)
    assert first == second  # Programs of some hundred runs would be too many.
    failing = SUITE._replace(entries=(DIVERGES,))
    (line,) = runs.make(failing, directory, epochs=EPOCHS)
    assert "diverges" not in line  # It is named by its keys, which say what it is.
    assert f"divergence_bound=1.5,epochs={EPOCHS}/0: diverged, " in line
    return directory


def test_a_value_that_is_the_default_is_the_run_without_it():
    config = runs.configuration("digits", "supervised")
    names = [
        runs._slug(Entry("", "supervised", (("reconstruction_weight", beta),)), config)
        for beta in (0.1, 1.0)
    ]
    assert names == ["supervised", "supervised,reconstruction_weight=1"]


def test_no_milestone_of_a_short_run_is_at_its_first_step():
    config = runs.configuration("digits", "supervised")
    runs.set_epochs(config, 1)
    assert config.lr_milestones == (1, 1, 1)


def test_each_run_has_a_directory_a_seed_and_a_subset_of_its_own(out):
    configs = sorted(out.glob("digits/supervised,*/*/config.json"))
    seeds = [json.loads(path.read_text()) for path in configs]
    assert [(c["seed"], c["split_seed"]) for c in seeds] == [(0, 0), (0, 0), (1, 1)]
    # The milestones of 12 epochs, 4, 8 and 10, at the same parts of 3.
    assert seeds[0]["lr_milestones"] == [1, 2, 2]
    assert seeds[0]["num_epochs"] == EPOCHS


@pytest.fixture
def planned(monkeypatch):
    """The directories of the runs that would have been made."""
    directories = []
    monkeypatch.setattr(
        runs,
        "_make",
        lambda config, directory, *given, keep: directories.append(directory),
    )
    return directories


def test_a_directory_names_the_epochs_where_they_are_not_all(out, planned):
    methods = [path.name for path in out.glob("*/*")]
    assert methods == [name for name in methods if name.endswith(f",epochs={EPOCHS}")]
    list(runs.make(SUITE, out, seeds=1))
    list(runs.make(SUITE, out, seeds=1, epochs=12))
    list(runs.make(SUITE, out, seeds=1, epochs=EPOCHS))
    whole = out / "digits" / "supervised,batch_size=120,latent_dim=8,width=0.05" / "0"
    assert planned[:2] == [whole, whole]
    assert planned[2].parent.name in methods


@pytest.mark.parametrize(
    ("pattern", "count"), [("KLN", 1), ("KLN*", 2), ("*printed", 1)]
)
def test_methods_may_be_patterns(pattern, count, tmp_path, planned):
    entries = (KLN, KLN._replace(name="KLN again"), KLN._replace(name="as printed"))
    suite = SUITE._replace(entries=entries)
    list(runs.make(suite, tmp_path, seeds=1, methods=[pattern]))
    assert len(planned) == count


def test_checkpoints_are_kept_of_the_first_seed(out):
    kept = sorted(path.parent.name for path in out.glob("digits/*/*/checkpoints"))
    assert kept.count("1") == 0
    assert kept.count("0") >= 1


def test_what_is_finished_or_diverged_is_not_made_again(out, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    monkeypatch.setattr(loop.Training, "run", None)  # It would fail.
    suite = SUITE._replace(entries=(KLN, DIVERGES))
    lines = list(runs.make(suite, out, seeds=1, epochs=EPOCHS))
    assert "test error" in lines[0]
    assert "diverged" in lines[1]
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_record_has_what_the_run_wrote(out):
    records = runs.matching(runs.read(out), "digits", KLN)
    assert [record.seed for record in records] == [0, 1]
    for record in records:
        lines = epoch_metrics.read_metrics(record.directory)
        errors = [line["test_error_percent"] for line in lines]
        assert record.error == errors[-1]
        assert record.late_error is None  # There are no ten.
        steps = [
            b - a
            for a, b in zip(
                [t["wall_seconds"] for t in lines],
                [t["wall_seconds"] for t in lines][1:],
                strict=False,
            )
        ]
        assert record.epoch_seconds == pytest.approx(sum(steps) / 2)
        assert (record.epochs, record.all_epochs) == (EPOCHS, 12)
        assert not record.partial_data
        assert (record.data, record.evaluate_on) == ("", "test")
        assert dict(record.changes) == dict(SMALL)


def test_a_record_of_a_diverged_run_has_no_numbers(out):
    (record,) = runs.matching(runs.read(out), "digits", DIVERGES)
    assert (record.error, record.late_error, record.epoch_seconds) == (None,) * 3


@pytest.fixture
def copied(out, tmp_path):
    """The run of one seed by itself."""
    (run,) = out.glob("digits/supervised,*latent_dim=8,*width=0.05,epochs=3/1")
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def _change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_late_error_is_the_median_of_the_last_ten_epochs(copied):
    lines = epoch_metrics.read_metrics(copied)
    errors = [50.0, 40.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    (copied / "metrics.jsonl").write_text(
        "".join(
            json.dumps(lines[0] | {"epoch": i + 1, "test_error_percent": error}) + "\n"
            for i, error in enumerate(errors)
        )
    )
    (record,) = runs.read(copied)
    assert record.late_error == 5.5


def test_a_run_with_two_ends_is_one(copied):
    (copied / "diverged.json").write_text('"an earlier start"')
    (record,) = runs.read(copied)
    assert record.error is not None


def test_other_milestones_are_another_method(copied):
    (as_planned,) = runs.read(copied)
    assert "lr_milestones" not in dict(as_planned.changes)
    _change(copied / "config.json", lr_milestones=[1])
    (other,) = runs.read(copied)
    assert dict(other.changes)["lr_milestones"] == [1]


def test_which_data_a_run_had_is_known_even_if_it_diverged(copied):
    assert json.loads((copied / "data.json").read_text())["partial"] is False
    _change(copied / "data.json", partial=True, num_train_images=7)
    (copied / "result.json").unlink()
    (copied / "diverged.json").write_text('"cmmd is 1e9"')
    _change(copied / "config.json", dataset="mnist", network="mnist")
    (record,) = runs.read(copied)
    assert (record.partial_data, record.data) == (True, "7 images to train")
    _change(copied / "config.json", dataset="own_images")
    _change(copied / "data.json", partial=False, version="crc32 1")
    (record,) = runs.read(copied)
    assert (record.partial_data, record.data) == (False, "images of crc32 1")


def test_a_configuration_may_evaluate_on_validation_images(
    copied, monkeypatch, tmp_path
):
    """Its own errors are no changes, and marked all the same."""
    config = runs.configuration("digits", "supervised")
    config.evaluate_on = "validation"
    monkeypatch.setattr(
        experiment,
        "train_and_evaluate",
        lambda *given, **named: {"validation_error_percent": 12.5},
    )
    line = runs._make(config, tmp_path / "new", None, keep=False)
    assert line.endswith("new: validation error 12.50 %")


def test_a_run_of_no_suite_is_reported_by_its_keys(copied):
    list(report.write(copied.parent))
    (text,) = re.findall(
        "## Runs of no suite.*\\Z", (copied.parent / "report.md").read_text(), re.DOTALL
    )
    keys = "batch_size=120, latent_dim=8, width=0.05"
    assert f"| digits | supervised, {keys} |  | " in text
    assert (
        f'others,digits,"supervised, {keys}",'
        in (copied.parent / "report.csv").read_text()
    )


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
    (record,) = runs.read(copied)
    assert (
        record.error
        == epoch_metrics.read_metrics(copied)[-1]["validation_error_percent"]
    )
    list(report.write(copied.parent))
    assert re.search(
        r"\| digits \| supervised, batch_size=120, latent_dim=8, width=0.05 \| .* "
        "3 of 12 epochs; error on validation images; ",
        (copied.parent / "report.md").read_text(),
    )
    assert report._curves([record])[0][-1] == record.error


@pytest.mark.parametrize("content", [b'{"epoch":\n', b"null\n", b"\xff\n"])
@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "result.json", "metrics.jsonl"]
)
def test_a_damaged_run_is_named_in_one_line(name, content, copied, monkeypatch):
    (copied / name).write_bytes(content)
    monkeypatch.setattr("sys.argv", ["analysis", "report", str(copied.parent)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    message = rf"kln_jax\.analysis: error: {copied / name} is damaged: .*\."
    assert re.fullmatch(message, stopped.value.code)
    assert stopped.value.code.count("Restore it, ") == 1


def test_a_run_of_an_unknown_variant_is_named(copied):
    _change(copied / "config.json", variant="mine")
    with pytest.raises(ValueError, match=rf"{copied} is damaged: variant='mine' must"):
        runs.read(copied)


def test_a_damaged_account_of_a_divergence_is_named(copied):
    (copied / "diverged.json").write_bytes(b'"cmmd')
    config = runs.configuration("digits", "supervised")
    with pytest.raises(ValueError, match=r"diverged\.json is damaged: "):
        runs._make(config, copied, None, keep=True)


@pytest.mark.parametrize("name", ["config.json", "data.json", "metrics.jsonl"])
def test_a_run_without_one_of_its_files_is_named(name, copied):
    (copied / name).unlink()
    with pytest.raises(ValueError, match=rf"{copied} is damaged: it has no {name}\. "):
        runs.read(copied)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("config.json", "dataset"), ("result.json", "partial_data")],
)
def test_a_run_without_one_of_its_values_is_named(name, missing, copied):
    (copied / name).write_text("{}\n")
    with pytest.raises(
        ValueError, match=rf"{copied} is damaged: it has no '{missing}'"
    ):
        runs.read(copied)


def test_runs_of_other_keys_are_other_methods(out):
    records = runs.read(out)
    assert runs.matching(records, "digits", NO_AUTOENCODER) == []
    assert runs.matching(records, "mnist", KLN) == []
    # A key of its default value is no change.
    same = Entry("beta 0.1", "supervised", (*SMALL, ("reconstruction_weight", 0.1)))
    assert len(runs.matching(records, "digits", same)) == 2


@pytest.mark.slow
def test_an_interrupted_suite_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "small", SUITE._replace(seeds=1))
    arguments = ["analysis", "run", "small", f"--out={tmp_path}", "--epochs=1"]
    monkeypatch.setattr("sys.argv", arguments)
    advance, signals = loop.Progress.advance, [signal.SIGTERM]

    def interrupted(*given):
        advance(*given)
        if signals:  # A second one would end this process.
            signal.raise_signal(signals.pop())

    with monkeypatch.context() as patch:
        patch.setattr(loop.Progress, "advance", interrupted)
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)
        with pytest.raises(SystemExit) as stopped:
            command.main()
    assert stopped.value.code == EXIT_CODE
    # A later step than the first, if the listening thread is slow to hear of it.
    message = r"SIGTERM: the state after step \d+ is saved"
    assert re.search(message, capsys.readouterr().err)
    command.main()
    assert "0: test error" in capsys.readouterr().out
    assert len(runs.read(tmp_path)) == 1


def test_a_report_says_what_was_reduced_and_what_was_not_measured(
    out, monkeypatch, capsys
):
    again = KLN._replace(name="KLN once more")
    suite = SUITE._replace(entries=(KLN, again, DIVERGES))
    monkeypatch.setitem(SUITES, "small", suite)
    monkeypatch.setattr(report, "KLN", KLN)  # The run of which figures are drawn.
    monkeypatch.setattr("sys.argv", ["analysis", "report", str(out)])
    command.main()
    written = capsys.readouterr().out
    figures = ("small", "histograms", "heatmaps", "reconstructions", "map")
    names = [f"figures/digits-{name}.png" for name in figures]
    for name in ("report.md", "report.csv", "report.tex", *names):
        assert f"Wrote {out / name}." in written
        assert (out / name).stat().st_size > 500
    text = (out / "report.md").read_text()
    (row,) = re.findall(r"^\| digits \| KLN \| .* ± .*", text, re.MULTILINE)
    assert "| 2 | 3 | 3 of 12 epochs; " in row
    (row,) = re.findall(r"^\| digits \| diverges \| .*", text, re.MULTILINE)
    assert "| 1 | 3 | 3 of 12 epochs; 1 diverged |" in row
    assert "| mnist | KLN | 0.39 | not measured |" in text
    run = "python -m kln_jax.analysis run"
    of_small = f"{run} small --out=DIR --epochs=3"
    commands = [
        f"{of_small} --seeds=2 --methods KLN 'KLN once more'",
        f"{of_small} --methods diverges",
    ]
    listed = "\n".join(["```sh", *commands, "```", "", "test error, %."])
    assert listed in text
    assert f"```sh\n{run} table5 --out=DIR\n```" in text
    for name in names:
        assert f"({name})" in text
    assert "Runs of no suite" not in text
    draw = dict(report._figures(runs.read(out)))
    (axes,) = draw["digits-small"]().axes
    assert axes.get_title() == "digits: A small one\n3 of 12 epochs, 1 seed"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "KLN",
        "KLN once more",
        "diverges\n1 diverged",
    ]
    assert draw["digits-map"]().get_suptitle() == "digits\n3 of 12 epochs"


def test_what_a_run_is_fits_above_the_narrowest_figure(copied):
    (record,) = runs.read(copied)
    record = record._replace(partial_data=True, data="6667 images to train")
    record = record._replace(config_name="mnist", all_epochs=150)

    def draw(run):
        return Figure(figsize=(4.2, 3.2), layout="constrained")

    figure = report._of_a_run(draw, None, record)
    figure.draw_without_rendering()
    (title,) = figure.texts
    edges = title.get_window_extent().extents
    assert (edges >= 0).all()
    assert (edges[2:] <= figure.bbox.extents[2:]).all()


@pytest.mark.parametrize("figure", ["curves", "sweep"])
def test_a_figure_has_runs_that_are_alike_and_says_which(figure, copied):
    (record,) = runs.read(copied)
    name, changes = record.config_name, record.changes
    full = record._replace(epochs=12)
    part = record._replace(partial_data=True)
    suite = SUITE._replace(figure=figure, entries=(KLN,))
    groups = report._groups(suite, [part, full, record], name)
    assert groups == {"KLN": [full]}
    other = record._replace(changes=(*changes, ("ridge", 1.0)), error=None)
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


def test_a_grid_or_a_sweep_has_runs_that_are_alike_alone(copied):
    (record,) = runs.read(copied)
    changes = [(*SMALL, ("ridge", ridge)) for ridge in (1.0, 2.0, 3.0)]
    names = [f"ridge {i}, none, mean" for i in (1, 2, 3)]
    entries = [
        Entry(name, "supervised", of_entry)
        for name, of_entry in zip(names, changes, strict=True)
    ]
    suite = SUITE._replace(figure="grid", entries=tuple(entries))
    first, second, third = (
        record._replace(changes=tuple(sorted(of_entry))) for of_entry in changes
    )
    other = second._replace(seed=0)
    longer = [run._replace(epochs=6, error=80.0) for run in (first, third)]
    part = [run._replace(partial_data=True) for run in (second, third)]
    shown = {names[0]: [first], names[1]: [second, other], names[2]: []}
    records = [*longer, first, second, other, *part]
    groups = report._groups(suite, records, record.config_name)
    assert groups == shown
    # So has a sweep, without what is missing.
    sweep = suite._replace(figure="sweep")
    del shown[names[2]]
    assert report._groups(sweep, records, record.config_name) == shown
    figure = report._of_a_suite(suite, groups, "title")
    assert figure.get_suptitle() == "title\n3 of 12 epochs, 1 to 2 seeds"
    assert len(figure.axes[0].texts) == 2
    assert not any("80" in text.get_text() for text in figure.axes[0].texts)
    # Of as many, the fullest.
    groups = report._groups(suite, [first, *part, *longer], record.config_name)
    assert groups == {names[0]: longer[:1], names[1]: [], names[2]: longer[1:]}


def test_a_sweep_compares_methods_by_the_seeds_that_all_have(copied):
    (record,) = runs.read(copied)
    suite = SUITE._replace(figure="sweep")

    def of_seeds(errors):
        return [record._replace(seed=i, error=e) for i, e in errors.items()]

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
    monkeypatch.setattr(report, "KLN", KLN)
    for path in tmp_path.glob("out/digits/*/0/checkpoints/*/*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    with caplog.at_level("WARNING", "kln_jax"):
        written = [path.name for path in report.write(tmp_path / "out")]
    assert written == ["report.md", "report.csv", "report.tex"]
    assert re.search(r"No figures of \S+/0: .*damaged", caplog.text)


@pytest.mark.parametrize("name", ["report.csv", "figures/digits-map.png"])
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
    monkeypatch.setattr(report, "KLN", KLN)
    monkeypatch.setattr(report, "_OF_A_RUN", pictures)
    monkeypatch.setitem(report._OF_A_SUITE, "curves", (fails, report._curves))
    monkeypatch.setitem(
        SUITES, "small", SUITE._replace(entries=(KLN, KLN._replace(name="again")))
    )
    with caplog.at_level("WARNING", "kln_jax"):
        written = [path.name for path in report.write(tmp_path / "out")]
    assert [name for name in written if name.endswith("png")] == [
        "digits-first.png",
        "digits-third.png",
    ]
    assert (tmp_path / "out" / "report.tex").exists()
    assert re.search(r"No \S+/digits-second.png: too few images", caplog.text)


def test_figures_are_of_the_most_complete_run_with_checkpoints(tmp_path, monkeypatch):
    def record(name, *, partial=False, epochs=12, seed=0, changes=()):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        none = dict(error=1.0, late_error=1.0, epoch_seconds=1.0, device="")
        return runs.Record(
            tmp_path / name,
            "digits",
            "supervised",
            changes,
            seed,
            epochs,
            12,
            partial,
            data="",
            evaluate_on="test",
            **none,
        )

    best = record("seed 1", seed=1)
    others = [
        record("another method", changes=(("ridge", 0.5),)),
        record("a part", partial=True),
        record("a few epochs", epochs=3),
        record("seed 2", seed=2),
    ]
    assert report._most_complete([*others, best]) == [best]
    shutil.rmtree(best.directory)
    assert report._most_complete([*others, best]) == [others[-1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{out}"], r"{out} holds no run that is finished"),
        (
            ["run", "table1", "--out={out}", "--methods", "GAN"],
            r"methods \['GAN'\] must be among \['KLN', 'CGMMN-CNN', 'CGMMN-MLP', ",
        ),
        *(
            (
                ["run", "table1", "--out={out}", "--datasets", name],
                rf"error: '{name}' must be one of .* here, \['cifar10', 'cifar100', ",
            )
            for name in ("imagenet", "default", "digits.py", "")
        ),
        (
            ["run", "ablations", "--out={out}", "--datasets", "cifar10"],
            r"variant='cgmmn_mlp' must be one of",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch):
    filled = [argument.format(out=tmp_path) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["analysis", *filled])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    text = str(stopped.value.code)
    assert text.startswith("kln_jax.analysis: error: ")
    assert "\n" not in text
    assert re.search(message.format(out=tmp_path), text)


def test_configurations_are_those_of_a_checkout(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "configs", raising=False)
    with pytest.raises(ValueError, match=r"'digits' must be .* here, \[\]\. Start "):
        runs.configuration("digits", "supervised")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_number_that_counts_nothing_is_refused(value, monkeypatch, capsys):
    arguments = ["analysis", "run", "table1", "--out=absent", f"--seeds={value}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        command.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"--seeds: '{value}' must be a whole number from 1 on")
