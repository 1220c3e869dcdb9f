"""Runs, on the embedded digits and a network of a twentieth of the width."""

import contextlib
import functools
import json
import logging
import os
import pathlib
import pickle
import shutil
import signal
import sys

import chex
import jax
import numpy as np
import pytest

from kln_jax import datasets
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import (
    compiled,
    configuration,
    experiment,
    fixed_embeddings,
    loop,
    steps,
)
from kln_jax.training.interruption import Interrupted, Interruption
from tests.small_run import config_of_digits as _config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, experiment.train_and_evaluate(_config(), str(workdir))


def test_a_run_leaves_its_config_metrics_and_result(finished):
    workdir, result = finished
    assert result == json.loads((workdir / "result.json").read_text())
    assert result.keys() >= {
        "test_error_percent",
        "num_test_images",
        "epochs",
        "steps",
        "wall_seconds",
        "seed",
        "variant",
        "versions",
        "device",
    }
    assert (result["num_test_images"], result["epochs"], result["steps"]) == (
        360,
        2,
        70,
    )
    assert result["test_error_percent"] < 60
    config = json.loads((workdir / "config.json").read_text())
    assert config == json.loads(_config().to_json())
    about = json.loads((workdir / "data.json").read_text())
    assert about == {
        "class_names": list("0123456789"),
        "image_shape": [28, 28, 1],
        "version": experiment.load_run(workdir).data.version,
        "partial": False,
        "num_train_images": 1437,
        "num_eval_images": 360,
    }
    lines = epoch_metrics.read_metrics(workdir)
    assert [line["step"] for line in lines] == [35, 70]
    assert lines[-1].keys() >= {
        "loss",
        "cmmd",
        "reconstruction",
        "confidence",
        "accuracy",
        "gradient_norm",
        "kernel_same",
        "kernel_different",
        "gradient_norm_encoder",
        "pivot_smallest",
        "pivot_largest",
        "median_squared_distance",
        "test_error_percent",
    }
    # The ridge, and a unit diagonal with it, in float32.
    assert 0.0999 < lines[-1]["pivot_smallest"] < lines[-1]["pivot_largest"] < 1.1001
    assert lines[-1]["test_error_percent"] == result["test_error_percent"]
    assert lines[-1]["kernel_same"] > lines[-1]["kernel_different"]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert any((workdir / "tensorboard").iterdir())


def test_a_finished_run_says_so(finished, capsys):
    workdir, result = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    assert experiment.train_and_evaluate(_config(), str(workdir)) == result
    assert "finished" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_test_images": None}, "unsupported operand"),
        ({"wall_seconds": "long"}, "Unknown format code"),
        (None, "it has no 'num_validation_images'"),
    ],
)
def test_a_result_that_is_none_is_named(changes, why, finished, tmp_path):
    workdir, result = finished
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    content = {} if changes is None else result | changes
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(
        whole_files.DamagedError, match=rf"result\.json is damaged: {why}"
    ):
        experiment.train_and_evaluate(_config(), str(tmp_path))


def test_an_interrupted_run_goes_on_to_the_same_end(
    finished, tmp_path, monkeypatch, caplog
):
    workdir, result = finished

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(epoch_metrics, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            experiment.train_and_evaluate(_config(checkpoint_every=1), str(tmp_path))
    assert not (tmp_path / "result.json").exists()
    assert [line["epoch"] for line in epoch_metrics.read_metrics(tmp_path)] == [1]
    # It may go on from data elsewhere, and with other checkpoints.
    with caplog.at_level(logging.INFO):
        again = experiment.train_and_evaluate(
            _config(data_dir="elsewhere", checkpoint_every_steps=8), str(tmp_path)
        )
    assert "continuing after step 35" in caplog.text
    _assert_same_run(tmp_path, again, workdir, result)


def test_a_run_goes_on_with_its_time(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    config = _config(network="mlp", checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(epoch_metrics, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            experiment.train_and_evaluate(config, str(tmp_path))
    (line,) = epoch_metrics.read_metrics(tmp_path)
    line["wall_seconds"] = 1000.0
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    result = experiment.train_and_evaluate(config, str(tmp_path))
    assert 1000.0 < result["wall_seconds"] < 2000.0


@jax.numpy_dtype_promotion("standard")  # Which linen's BatchNorm needs for bfloat16.
def test_a_network_in_bfloat16_is_trained_with_an_objective_in_float32(tmp_path):
    config = _config(network="mlp", dtype="bfloat16")
    experiment.train_and_evaluate(config, str(tmp_path))
    first, last = epoch_metrics.read_metrics(tmp_path)
    assert last["loss"] < first["loss"]
    assert 0.0999 < last["pivot_smallest"] < last["pivot_largest"] < 1.1001
    state = experiment.load_run(tmp_path).state
    leaves = jax.tree.leaves((state.params, state.batch_stats))
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


@pytest.mark.parametrize("calls", [1, 4])
def test_a_run_that_stops_inside_an_epoch_goes_on_bit_for_bit(
    calls, finished, tmp_path, monkeypatch
):
    workdir, result = finished
    interruption = Interruption()
    count = 0

    def signal_comes(*_):
        nonlocal count
        count += 1
        interruption.received = signal.SIGTERM if count == calls else None

    with monkeypatch.context() as patch:
        # A signal comes as some call of compiled code ends.
        patch.setattr(loop.Progress, "advance", _after("advance", signal_comes))
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)  # One step a call.
        with pytest.raises(
            Interrupted, match=rf"SIGTERM: the state after step {calls} is saved"
        ):
            experiment.train_and_evaluate(
                _config(), str(tmp_path), interruption=interruption
            )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(calls)]
    again = experiment.train_and_evaluate(_config(), str(tmp_path))
    _assert_same_run(tmp_path, again, workdir, result)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda history: {**history, "loss": history["loss"][:-1]}, r"\(34,\) there"),
        (lambda history: {**history, "speed": history["loss"]}, "absent here"),
    ],
)
def test_a_checkpoint_with_the_metrics_of_other_steps_is_refused(
    change, named, finished, tmp_path
):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "result.json").unlink()
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(experiment.load_run(tmp_path).state)
    shutil.rmtree(directory / "70")
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(70, restored.state, change(restored.history))
    message = rf"The newest checkpoint of .* of other steps: \w+ .*{named}"
    with pytest.raises(ValueError, match=message):
        experiment.train_and_evaluate(_config(), str(tmp_path))


def test_a_run_that_stops_while_it_evaluates_goes_on_with_that(
    finished, tmp_path, monkeypatch
):
    workdir, result = finished
    leave = []

    class LeftError(Exception):
        pass

    class Stop(Interruption):
        @contextlib.contextmanager
        def may_leave(self, function):
            leave.append(function)
            yield

    def evaluate(*_):
        print(leave[-1]())  # What the listening thread does before it ends it all.
        raise LeftError

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_evaluate", evaluate)
        with pytest.raises(LeftError):
            experiment.train_and_evaluate(_config(), str(tmp_path), interruption=Stop())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["35"]
    assert not epoch_metrics.read_metrics(tmp_path)
    again = experiment.train_and_evaluate(_config(), str(tmp_path))
    _assert_same_run(tmp_path, again, workdir, result)


@pytest.mark.parametrize(
    ("variant", "terms"),
    [
        ("ce", {"cross_entropy", "reconstruction", "confidence"}),
        ("cgmmn", {"cmmd", "reconstruction", "confidence"}),
        ("pca", {"cmmd", "reconstruction", "confidence"}),
    ],
)
def test_the_baselines_train_by_the_same_loop(variant, terms, tmp_path):
    config = _config(variant, num_epochs=1)
    result = experiment.train_and_evaluate(config, str(tmp_path))
    assert result["variant"] == variant
    assert result["test_error_percent"] < 85
    (line,) = epoch_metrics.read_metrics(tmp_path)
    every = {"cmmd", "cross_entropy", "reconstruction", "confidence"}
    assert line.keys() & every == terms
    # Of CGMMN the five kernels are summed, and the images lie far apart.
    low, high = {"ce": (0.1, 1), "cgmmn": (1e-2, 5), "pca": (1e-3, 0.5)}[variant]
    assert low < line["kernel_same"] < high
    assert experiment.load_run(tmp_path).config.variant == variant


@pytest.mark.slow
def test_the_first_steps_are_traced_if_asked_for(finished, tmp_path):
    workdir, result = finished
    again = experiment.train_and_evaluate(_config(profile=3), str(tmp_path))
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    _assert_same_run(tmp_path, again, workdir, result)


@pytest.mark.slow
def test_a_kernel_on_an_autoencoder_trains_that_first_and_goes_on_from_there(
    tmp_path, caplog
):
    config = _config("autoencoder", num_epochs=1)
    interruption = Interruption()

    def stop(*_):
        interruption.received = signal.SIGTERM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Progress, "advance", _after("advance", stop))
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)
        with pytest.raises(Interrupted, match="the state after step 1 is saved"):
            experiment.train_and_evaluate(
                config, str(tmp_path), interruption=interruption
            )
    alone = tmp_path / "autoencoder"
    assert [path.name for path in (alone / "checkpoints").iterdir()] == ["1"]
    assert not (tmp_path / "checkpoints").exists()
    with caplog.at_level(logging.INFO):
        result = experiment.train_and_evaluate(config, str(tmp_path))
    assert "continuing after step 1" in caplog.text
    (line,) = epoch_metrics.read_metrics(alone)
    assert "cmmd" not in line
    assert line["loss"] == line["reconstruction"]
    whole = experiment.train_and_evaluate(config, str(tmp_path / "whole"))
    _assert_same_run(tmp_path, result, tmp_path / "whole", whole)


def test_the_kernel_on_an_autoencoder_is_that_of_the_trained_one_to_the_end(
    tmp_path, monkeypatch, caplog
):
    # A batch s has all labelled images, so only the features may change its kernel.
    config = _config("autoencoder", network="mlp", num_labels=40, checkpoint_every=1)
    show, shown = epoch_metrics.show, []

    def stop(*arguments):
        show(*arguments)
        shown.append("an epoch")
        if len(shown) == 3:  # Two of the autoencoder, and one with its kernel.
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(epoch_metrics, "show", stop)
        with pytest.raises(KeyboardInterrupt):
            experiment.train_and_evaluate(config, str(tmp_path))
    alone = tmp_path / "autoencoder"
    saved = alone / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    with caplog.at_level(logging.INFO):
        experiment.train_and_evaluate(config, str(tmp_path))
    assert "continuing after step 35" in caplog.text
    # It is neither trained again nor trained on.
    assert before == {path: path.stat().st_mtime_ns for path in saved.rglob("*")}

    # It is trained by its reconstruction alone.
    lines = epoch_metrics.read_metrics(alone)
    assert [line["step"] for line in lines] == [35, 70]
    for line in lines:
        assert line["loss"] == line["reconstruction"]
        assert line["gradient_norm_classifier"] == 0
        assert not line.keys() & {"cmmd", "cross_entropy", "confidence"}
    assert lines[1]["loss"] < lines[0]["loss"]

    run = experiment.load_run(tmp_path)
    with Checkpoints(saved, read_only=True) as checkpoints:
        restored = checkpoints.restore(run.state)
    assert restored.step == 70
    images = run.data.train_images[run.labelled].astype(np.float32) / 255
    labels = run.data.train_labels[run.labelled]
    same = labels[:, None] == labels[None, :]
    kernel, _ = configuration.kernels(config)

    @jax.jit
    def gram_of_z(state):
        z = fixed_embeddings.encode(state, images, model=run.model)
        return kernel(z, z)

    def kernel_means(state):
        gram = np.asarray(gram_of_z(state.replace(opt_state=())))
        return gram[same & ~np.eye(40, dtype=bool)].mean(), gram[~same].mean()

    seen = [
        (line["kernel_same"], line["kernel_different"])
        for line in epoch_metrics.read_metrics(tmp_path)
    ]
    of_trained = kernel_means(restored.state)
    np.testing.assert_allclose(seen, [of_trained, of_trained], rtol=1e-4)
    # Another network would be noticed: the untrained one, and that with this kernel.
    untrained = compiled.make_program(config, run.data).init(
        jax.random.key(config.seed)
    )
    for other in (untrained, run.state):
        assert np.abs(np.subtract(kernel_means(other), of_trained)).max() > 0.01


def test_a_diverging_autoencoder_is_the_end_of_its_run(tmp_path, monkeypatch):
    ended = loop.Ended(None, {}, "loss is nan at step 1")
    monkeypatch.setattr(loop.Training, "run", lambda *_, **__: [ended])
    message = "of the autoencoder, loss is nan at step 1"
    with pytest.raises(experiment.DivergenceError, match=message):
        experiment.train_and_evaluate(_config("autoencoder"), str(tmp_path))
    assert json.loads((tmp_path / "diverged.json").read_text()) == message


def test_a_signal_may_end_it_while_anything_is_compiled(tmp_path, monkeypatch):
    first_calls = {}

    class Stop(Interruption):
        inside = False

        @contextlib.contextmanager
        def may_leave(self, function):
            self.inside = True
            yield
            self.inside = False

    stop, compile_ = Stop(), experiment.make_program

    def watched(name, function):
        def call(*arguments):
            first_calls.setdefault(name, stop.inside)
            if isinstance(arguments[0], jax.core.Tracer):  # Its shapes are asked for.
                return function.__wrapped__(*arguments)
            return function(*arguments)

        return call

    def compile_watched(*arguments, **options):
        program = compile_(*arguments, **options)
        names = ("init", "rows", "train", "evaluate")
        return compiled._replace(
            **{name: watched(name, getattr(program, name)) for name in names}
        )

    monkeypatch.setattr(experiment, "make_program", compile_watched)
    config = _config(num_epochs=1)
    experiment.train_and_evaluate(config, str(tmp_path), interruption=stop)
    assert first_calls == dict(init=True, rows=True, train=True, evaluate=True)


def test_a_signal_may_end_it_while_components_are_fitted(monkeypatch):
    inside = []

    class Stop(Interruption):
        @contextlib.contextmanager
        def may_leave(self, function):
            inside.append("entered")
            yield
            inside.append("left")

    def fit(images, count):
        assert images is data.train_images
        inside.append("fitted")
        return np.zeros(4), np.zeros((4, count))

    monkeypatch.setattr(experiment.embeddings, "principal_components", fit)
    train, other = ((np.zeros((2, 2, 2, 1)), np.zeros(2)) for _ in range(2))
    data = datasets.Dataset("a", "", *train, *other, ("0",))
    config = _config(kernel_on="pca")
    experiment._embedding(config, data, np.arange(2), None, Stop())
    assert inside == ["entered", "fitted", "left"]


def test_a_run_is_read_back_with_the_data_that_it_had(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps({**about, "version": "crc32 1"}))
    with pytest.raises(ValueError, match=r"a run on other data: version \(crc32 1 the"):
        experiment.load_run(tmp_path)


def _after(name, function):
    """Returns a method of `Progress` that calls a function when it is done."""
    method = getattr(loop.Progress, name)

    def wrapped(*arguments):
        method(*arguments)
        function()

    return wrapped


def _assert_same_run(workdir, result, expected_workdir, expected_result):
    """Asserts the same result, metrics and parameters, but for the time it took."""
    assert {**result, "wall_seconds": 0} == {**expected_result, "wall_seconds": 0}
    lines, expected = (
        [{**line, "wall_seconds": 0} for line in epoch_metrics.read_metrics(directory)]
        for directory in (workdir, expected_workdir)
    )
    assert lines == expected
    states = [experiment.load_run(path).state for path in (workdir, expected_workdir)]
    chex.assert_trees_all_equal(*states)


@jax.numpy_dtype_promotion("standard")  # Which optax's Adam needs.
def test_semi_supervised_labels_are_stored_and_used_again(tmp_path, monkeypatch):
    config = _config("semi", num_labels=20, num_epochs=1)
    seen = []
    init = loop.Training.__init__

    def spy(self, configs, data, labelled, *rest):
        seen.extend(labelled)
        return init(self, configs, data, labelled, *rest)

    monkeypatch.setattr(loop.Training, "__init__", spy)
    experiment.train_and_evaluate(config, str(tmp_path))
    stored = np.load(tmp_path / "labelled.npy", allow_pickle=False)
    assert len(stored) == 20
    (tmp_path / "result.json").unlink()
    np.save(tmp_path / "labelled.npy", stored[::-1])
    experiment.train_and_evaluate(config, str(tmp_path))
    np.testing.assert_array_equal(seen[0], stored)
    np.testing.assert_array_equal(seen[1], stored[::-1])


def test_a_run_is_read_back(finished):
    workdir, result = finished
    run = experiment.load_run(workdir)
    assert run.config.to_json() == _config().to_json()
    assert int(run.state.step) == result["steps"]
    images = run.data.eval_images.astype(np.float32) / 255
    logits = jax.jit(functools.partial(steps.predict, run.model))(run.state, images)[2]
    errors = int((np.argmax(logits, axis=1) != run.data.eval_labels).sum())
    assert errors == round(result["test_error_percent"] * 3.6)


def test_reading_a_run_unpickles_nothing(finished):
    """The interpreter reports whatever pickle looks up, also from compiled code."""
    seen, listening = [], True
    sys.addaudithook(
        lambda event, _: (
            listening and event == "pickle.find_class" and seen.append(event)
        )
    )
    pickle.loads(pickle.dumps(pathlib.Path()))
    assert seen  # So it would be noticed.
    seen.clear()
    experiment.load_run(finished[0])
    epoch_metrics.read_metrics(finished[0])
    listening = False
    assert not seen


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: config\.json is missing"):
        experiment.load_run(tmp_path)


def test_forced_devices_have_threads_wherever_training_starts(monkeypatch):
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    config = _config()
    config.batch_size = 41
    with pytest.raises(ValueError, match="does not divide over 8 devices"):
        experiment.train_in_memory(config, datasets.load("digits"), np.arange(100))
    assert os.environ["NPROC"] == "32"
