"""The runs of a suite are made once, each in a directory of its own."""

import json
import re
import signal

import pytest

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import packed, runs
from kln_jax.analysis.suites import SUITES, Entry
from kln_jax.training import experiment, loop, variants
from kln_jax.training.interruption import EXIT_CODE
from tests.analysis.small_suite import DIVERGES, EPOCHS, KLN, SUITE


def test_a_value_that_is_the_default_is_the_run_without_it():
    config = variants.named_config("digits", "supervised")
    names = [
        runs._directory_of(
            Entry("", "supervised", (("reconstruction_weight", beta),)), config
        )
        for beta in (0.1, 1.0)
    ]
    assert names == ["supervised", "supervised,reconstruction_weight=1"]


def test_no_milestone_of_a_short_run_is_at_its_first_step():
    config = variants.named_config("digits", "supervised")
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
    methods = [path.name for path in out.glob("digits/*")]
    assert methods == [name for name in methods if name.endswith(f",epochs={EPOCHS}")]
    list(runs.make(SUITE, out, seeds=1))
    list(runs.make(SUITE, out, seeds=1, epochs=12))
    list(runs.make(SUITE, out, seeds=1, epochs=EPOCHS))
    whole = (
        out
        / "digits"
        / "supervised,batch_size=120,latent_dim=8,network=mlp,width=0.05"
        / "0"
    )
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
    monkeypatch.setattr(loop.TrainingLoop, "run", None)  # It would fail.
    suite = SUITE._replace(entries=(KLN, DIVERGES))
    lines = list(runs.make(suite, out, seeds=1, epochs=EPOCHS))
    assert "test error" in lines[0]
    assert "diverged" in lines[1]
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_configuration_may_evaluate_on_validation_images(monkeypatch, tmp_path):
    config = variants.named_config("digits", "supervised")
    config.evaluate_on = "validation"
    monkeypatch.setattr(
        experiment,
        "train_and_evaluate",
        lambda *given, **named: {"validation_error_percent": 12.5},
    )
    line = runs._make(config, tmp_path / "new", None, keep=False)
    assert line.endswith("new: validation error 12.50 %")


def test_a_damaged_account_of_a_divergence_is_named(copied):
    (copied / "diverged.json").write_bytes(b'"cmmd')
    config = variants.named_config("digits", "supervised")
    with pytest.raises(ValueError, match=r"diverged\.json is damaged: "):
        runs._make(config, copied, None, keep=True)


@pytest.mark.slow
def test_an_interrupted_suite_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "small", SUITE._replace(seeds=1))
    arguments = ["analysis", "run", "small", f"--out={tmp_path}", "--epochs=1"]
    monkeypatch.setattr("sys.argv", arguments)
    make_steps, signals = loop.TrainingLoop._make_steps, [signal.SIGTERM]

    def interrupted(*given):
        make_steps(*given)
        if signals:  # A second one would end this process.
            signal.raise_signal(signals.pop())

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "_make_steps", interrupted)
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)
        with pytest.raises(SystemExit) as stopped:
            command.main()
    assert stopped.value.code == EXIT_CODE
    # A later step than the first, if the listening thread is slow to hear of it.
    message = r"SIGTERM: the state after step \d+ is saved"
    assert re.search(message, capsys.readouterr().err)
    command.main()
    assert "0: test error" in capsys.readouterr().out
    assert len(packed.read_all(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ([name, "{out}", *more], r"{out} holds no run that is finished")
            for name, more in (("report", ()), ("pack", ("{out}/packed",)))
        ),
        (
            ["run", "table1", "--out={out}", "--methods", "GAN"],
            r"methods \['GAN'\] must be among \['KLN', 'CGMMN-CNN', 'CGMMN-MLP', ",
        ),
        *(
            (
                ["run", "table1", "--out={out}", "--datasets", name],
                rf"error: '{name}' must be one of the configurations \['cifar10', ",
            )
            for name in ("imagenet", "default", "digits.py", "")
        ),
        (
            ["run", "ablations", "--out={out}", "--datasets", "cifar10"],
            r"variant='cgmmn_mlp' must be one of",
        ),
        *(([name, "{out}"], r"{out} holds no run: ") for name in ("figures", "page")),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    filled = [argument.format(out=tmp_path) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["analysis", *filled])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 1
    (text,) = capsys.readouterr().err.splitlines()
    assert text.startswith("python -m kln_jax.analysis: error: ")
    assert re.search(message.format(out=tmp_path), text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_a_number_that_counts_nothing_is_refused(value, monkeypatch, capsys):
    arguments = ["analysis", "run", "table1", "--out=absent", f"--seeds={value}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        command.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"--seeds: '{value}' must be a whole number from 1 on")
