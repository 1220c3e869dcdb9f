"""Runs, on the embedded digits and a network of a twentieth of the width."""

import contextlib
import json
import logging
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest

from configs import own_images
from kln_jax import datasets
from kln_jax.storage import epoch_metrics, whole_files, working_directory
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import (
    compiled,
    experiment,
    fixed_embeddings,
    loop,
    parts,
    steps,
)
from kln_jax.training.configuration import Config
from kln_jax.training.interruption import Interrupted, Interruption
from tests.small_run import config_of_digits, restored


def _config(variant="supervised", **changes):
    small = {"network": "mlp", "batch_size": 160}  # Which makes 8 steps an epoch.
    return config_of_digits(variant, **small | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, experiment.train_and_evaluate(_config(), workdir)


class Stop(Interruption):
    """Leaves nothing by itself, and knows from where it may."""

    def __init__(self):
        super().__init__()
        self.leave = None

    @contextlib.contextmanager
    def may_leave(self, function):
        self.leave = function
        yield
        self.leave = None


@contextlib.contextmanager
def _after(name, function):
    """Calls a function when a method of the progress report is done."""
    method = getattr(loop.ProgressReport, name)

    def wrapped(*arguments):
        method(*arguments)
        function()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.ProgressReport, name, wrapped)
        yield patch


def _interrupt():
    raise KeyboardInterrupt


def _saved(workdir):
    return [path.name for path in (workdir / "checkpoints").iterdir()]


def _assert_same_run(workdir, result, expected_workdir, expected_result, config):
    """Asserts the same result, metrics and parameters, but for the time it took."""
    assert {**result, "wall_seconds": 0} == {**expected_result, "wall_seconds": 0}
    lines, expected = (
        [{**line, "wall_seconds": 0} for line in epoch_metrics.read_metrics(directory)]
        for directory in (workdir, expected_workdir)
    )
    assert lines == expected
    states = [restored(path, config).state for path in (workdir, expected_workdir)]
    chex.assert_trees_all_equal(*states)


def test_a_run_leaves_its_config_metrics_and_result(finished):
    workdir, result = finished
    assert result == json.loads((workdir / "result.json").read_text())
    keys = "test_error_percent num_test_images epochs steps wall_seconds seed variant"
    assert result.keys() >= {*keys.split(), "versions", "device"}
    numbers = result["num_test_images"], result["epochs"], result["steps"]
    assert numbers == (360, 2, 16)
    assert result["test_error_percent"] < 60
    config = json.loads((workdir / "config.json").read_text())
    assert config == _config().to_dict()
    about = json.loads((workdir / "data.json").read_text())
    assert about == {
        "class_names": list("0123456789"),
        "image_shape": [28, 28, 1],
        "version": datasets.load("digits").version,
        "partial": False,
        "num_train_images": 1437,
        "num_eval_images": 360,
    }
    lines = epoch_metrics.read_metrics(workdir)
    assert [line["step"] for line in lines] == [8, 16]
    names = "loss cmmd reconstruction confidence accuracy gradient_norm kernel_same"
    names += " kernel_different gradient_norm_encoder pivot_smallest pivot_largest"
    names += " median_squared_distance test_error_percent"
    assert lines[-1].keys() >= set(names.split())
    assert "healthy" not in lines[-1]
    # Diagnostics are of the last step of an epoch.
    history = restored(workdir, _config()).history
    for name in "kernel_same", "kernel_different":
        mean = history[f"{name}_sum"][-1] / history[f"{name}_count"][-1]
        assert lines[-1][name] == pytest.approx(mean)
    # The ridge, and a unit diagonal with it, in float32.
    assert 0.0999 < lines[-1]["pivot_smallest"] < lines[-1]["pivot_largest"] < 1.1001
    assert lines[-1]["test_error_percent"] == result["test_error_percent"]
    assert lines[-1]["kernel_same"] > lines[-1]["kernel_different"]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert any((workdir / "tensorboard").iterdir())


def test_a_finished_run_says_so(finished, caplog):
    workdir, result = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("[!.]*")}
    with caplog.at_level(logging.INFO):
        assert experiment.train_and_evaluate(_config(), workdir) == result
    said = f"this run is finished; nothing is left to do. {experiment.summary(result)}"
    assert said in caplog.messages
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("[!.]*")}


def test_a_summary_counts_the_errors_of_the_part_that_was_evaluated():
    result = dict(validation_error_percent=12.5, num_validation_images=287)
    said = experiment.summary(result | dict(epochs=3, wall_seconds=9.6))
    assert said == "Validation error 12.50 % (36 of 287 images) after 3 epochs, 10 s."


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
        experiment.train_and_evaluate(_config(), tmp_path)


def test_an_interrupted_run_goes_on_to_the_same_end(finished, tmp_path, caplog):
    workdir, result = finished
    with _after("epoch_ended", _interrupt), pytest.raises(KeyboardInterrupt):
        experiment.train_and_evaluate(_config(checkpoint_every=1), tmp_path)
    assert not (tmp_path / "result.json").exists()
    (line,) = epoch_metrics.read_metrics(tmp_path)
    line["wall_seconds"] += 1000.0
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    # It may go on from data elsewhere, and with other checkpoints.
    with caplog.at_level(logging.INFO):
        again = experiment.train_and_evaluate(
            _config(data_dir="elsewhere", checkpoint_every_steps=3), tmp_path
        )
    assert "resuming after step 8" in caplog.text
    assert 1000.0 < again["wall_seconds"] < 2000.0  # It goes on with its time.
    _assert_same_run(tmp_path, again, workdir, result, _config())


@jax.numpy_dtype_promotion("standard")  # Which linen's BatchNorm needs for bfloat16.
def test_a_network_in_bfloat16_is_trained_with_an_objective_in_float32(tmp_path):
    config = _config(dtype="bfloat16")
    experiment.train_and_evaluate(config, tmp_path)
    first, last = epoch_metrics.read_metrics(tmp_path)
    assert last["loss"] < first["loss"]
    assert 0.0999 < last["pivot_smallest"] < last["pivot_largest"] < 1.1001
    state = restored(tmp_path, config).state
    leaves = jax.tree.leaves((state.params, state.batch_stats))
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


@pytest.mark.parametrize("calls", [1, 4])
def test_a_run_that_stops_inside_an_epoch_goes_on_bit_for_bit(
    calls, finished, tmp_path
):
    workdir, result = finished
    interruption, seen = Interruption(), []

    def signal_comes():
        seen.append("a call")
        interruption.received = signal.SIGTERM if len(seen) == calls else None

    message = rf"SIGTERM: the state after step {calls} is saved"
    # A signal comes as some call of compiled code ends.
    with _after("steps_made", signal_comes) as patch:
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)  # One step a call.
        with pytest.raises(Interrupted, match=message):
            experiment.train_and_evaluate(
                _config(), tmp_path, interruption=interruption
            )
    assert _saved(tmp_path) == [str(calls)]
    again = experiment.train_and_evaluate(_config(), tmp_path)
    _assert_same_run(tmp_path, again, workdir, result, _config())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda history: {**history, "loss": history["loss"][:-1]}, r"\(7,\) there"),
        (lambda history: {**history, "speed": history["loss"]}, "absent here"),
    ],
)
def test_a_checkpoint_with_the_metrics_of_other_steps_is_refused(
    change, named, finished, tmp_path
):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "result.json").unlink()
    directory = tmp_path / "checkpoints"
    whole = restored(tmp_path, _config())
    shutil.rmtree(directory / "16")
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(16, whole.state, change(whole.history))
    message = rf"The newest checkpoint of .* of other steps: \w+ .*{named}"
    with pytest.raises(ValueError, match=message):
        experiment.train_and_evaluate(_config(), tmp_path)


def test_a_run_that_stops_while_it_evaluates_goes_on_with_that(
    finished, tmp_path, monkeypatch
):
    workdir, result = finished
    stop = Stop()

    class LeftError(Exception):
        pass

    def evaluate(*_):
        stop.leave()  # What the listening thread does before it ends it all.
        raise LeftError

    with monkeypatch.context() as patch:
        patch.setattr(
            experiment,
            "compile_functions",
            lambda *given: compiled.compile_functions(*given)._replace(
                evaluate=evaluate
            ),
        )
        with pytest.raises(LeftError):
            experiment.train_and_evaluate(_config(), tmp_path, interruption=stop)
    assert _saved(tmp_path) == ["8"]
    assert not epoch_metrics.read_metrics(tmp_path)
    again = experiment.train_and_evaluate(_config(), tmp_path)
    _assert_same_run(tmp_path, again, workdir, result, _config())


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
    result = experiment.train_and_evaluate(config, tmp_path)
    assert result["variant"] == variant
    assert result["test_error_percent"] < 85
    (line,) = epoch_metrics.read_metrics(tmp_path)
    every = {"cmmd", "cross_entropy", "reconstruction", "confidence"}
    assert line.keys() & every == terms
    # Of CGMMN the five kernels are summed, and the images lie far apart.
    low, high = {"ce": (0.1, 1), "cgmmn": (1e-2, 5), "pca": (1e-3, 0.5)}[variant]
    assert low < line["kernel_same"] < high


def test_the_kernel_on_an_autoencoder_is_that_of_the_trained_one_to_the_end(
    tmp_path, caplog
):
    # A batch s has all labelled images, so only the features may change its kernel.
    config = _config("autoencoder", num_labels=160, checkpoint_every=1)
    alone = tmp_path / "autoencoder"
    interruption, shown = Interruption(), []

    def signal_comes():
        interruption.received = signal.SIGTERM

    with _after("steps_made", signal_comes) as patch:
        patch.setattr(loop, "_SECONDS_A_CALL", 1e-9)
        with pytest.raises(Interrupted, match="the state after step 1 is saved"):
            experiment.train_and_evaluate(config, tmp_path, interruption=interruption)
    assert _saved(alone) == ["1"]
    assert not (tmp_path / "checkpoints").exists()

    def stop():
        shown.append("an epoch")
        if len(shown) == 3:  # Two of the autoencoder, and one with its kernel.
            raise KeyboardInterrupt

    with (
        _after("epoch_ended", stop),
        caplog.at_level(logging.INFO),
        pytest.raises(KeyboardInterrupt),
    ):
        experiment.train_and_evaluate(config, tmp_path)
    assert "resuming after step 1" in caplog.messages
    saved = alone / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    with caplog.at_level(logging.INFO):
        experiment.train_and_evaluate(config, tmp_path)
    assert "resuming after step 8" in caplog.messages
    # It is neither trained again nor trained on.
    assert before == {path: path.stat().st_mtime_ns for path in saved.rglob("*")}

    # It is trained by its reconstruction alone.
    lines = epoch_metrics.read_metrics(alone)
    assert [line["step"] for line in lines] == [8, 16]
    for line in lines:
        assert line["loss"] == line["reconstruction"]
        assert line["gradient_norm_classifier"] == 0
        assert not line.keys() & {"cmmd", "cross_entropy", "confidence"}
    assert lines[1]["loss"] < lines[0]["loss"]

    of_autoencoder, with_kernel = (restored(path, config) for path in (alone, tmp_path))
    assert of_autoencoder.step == 16
    data, labelled = datasets.load("digits"), np.load(tmp_path / "labelled.npy")
    images = data.train_images[labelled].astype(np.float32) / 255
    labels = data.train_labels[labelled]
    model = parts.model(config, image_shape=(28, 28, 1), num_classes=10)
    same = labels[:, None] == labels[None, :]
    kernel, _ = parts.kernels(config)

    @jax.jit
    def gram_of_z(state):
        z = fixed_embeddings.encode(state, images, model=model)
        return kernel(z, z)

    def kernel_means(state):
        gram = np.asarray(gram_of_z(state.replace(opt_state=())))
        return gram[same & ~np.eye(160, dtype=bool)].mean(), gram[~same].mean()

    seen = [
        (line["kernel_same"], line["kernel_different"])
        for line in epoch_metrics.read_metrics(tmp_path)
    ]
    of_trained = kernel_means(of_autoencoder.state)
    np.testing.assert_allclose(seen, [of_trained, of_trained], rtol=1e-4)
    # Another network would be noticed: the untrained one, and that with this kernel.
    made = compiled.compile_functions(config, data)
    untrained = made.init(jax.random.key(config.seed), *made.channels)
    for other in (untrained, with_kernel.state):
        assert np.abs(np.subtract(kernel_means(other), of_trained)).max() > 0.01


def test_a_diverging_autoencoder_is_the_end_of_its_run(tmp_path, monkeypatch):
    def run(*_, **__):
        raise loop.DivergenceError("loss is nan at step 1")

    monkeypatch.setattr(loop.TrainingLoop, "run", run)
    message = "of the autoencoder, loss is nan at step 1"
    with pytest.raises(experiment.DivergenceError, match=message):
        experiment.train_and_evaluate(_config("autoencoder"), tmp_path)
    assert json.loads((tmp_path / "diverged.json").read_text()) == message


def test_a_signal_may_end_it_while_anything_is_compiled(tmp_path, monkeypatch):
    first_calls, stop = {}, Stop()

    def watched(name, function):
        def call(*arguments):
            first_calls.setdefault(name, stop.leave is not None)
            if isinstance(arguments[0], jax.core.Tracer):  # Its shapes are asked for.
                return function.__wrapped__(*arguments)
            return function(*arguments)

        return call

    def compile_watched(*given):
        made = compiled.compile_functions(*given)
        names = ("init", "draw_rows", "train", "evaluate")
        return made._replace(
            **{name: watched(name, getattr(made, name)) for name in names}
        )

    monkeypatch.setattr(experiment, "compile_functions", compile_watched)
    config = _config(num_epochs=1)
    experiment.train_and_evaluate(config, tmp_path, interruption=stop)
    assert first_calls == dict(init=True, draw_rows=True, train=True, evaluate=True)


def test_a_signal_may_end_it_while_components_are_fitted(monkeypatch):
    stop = Stop()

    def fit(images, count):
        assert images is data.train_images
        assert stop.leave is not None
        return np.zeros(4), np.zeros((4, count))

    monkeypatch.setattr(experiment.fixed_embeddings, "principal_components", fit)
    train, other = ((np.zeros((2, 2, 2, 1)), np.zeros(2)) for _ in range(2))
    data = datasets.Dataset("a", "", *train, *other, ("0",))
    config = _config(kernel_on="pca")
    fitted = experiment._fit_embedding(config, data, np.arange(2), None, stop)
    assert [array.shape for array in fitted] == [(4,), (4, config.latent_dim)]
    assert stop.leave is None


@jax.numpy_dtype_promotion("standard")  # Which optax's Adam needs.
def test_semi_supervised_labels_are_stored_and_used_again(tmp_path, monkeypatch):
    config = _config("semi", num_labels=20, num_epochs=1)
    seen = []
    init = loop.TrainingLoop.__init__

    def spy(self, config, compiled, data, labelled, *rest):
        seen.append(labelled)
        return init(self, config, compiled, data, labelled, *rest)

    monkeypatch.setattr(loop.TrainingLoop, "__init__", spy)
    experiment.train_and_evaluate(config, tmp_path)
    stored = np.load(tmp_path / "labelled.npy", allow_pickle=False)
    assert len(stored) == 20
    (tmp_path / "result.json").unlink()
    np.save(tmp_path / "labelled.npy", stored[::-1])
    experiment.train_and_evaluate(config, tmp_path)
    np.testing.assert_array_equal(seen[0], stored)
    np.testing.assert_array_equal(seen[1], stored[::-1])


def test_the_labelled_images_do_not_depend_on_the_seed_of_the_model():
    data = datasets.load("digits")

    def rows(**changes):
        return experiment._labelled_rows(None, _config(num_labels=20, **changes), data)

    np.testing.assert_array_equal(rows(seed=1), rows(seed=2))
    assert (rows(split_seed=1) != rows(split_seed=2)).any()
    np.testing.assert_array_equal(
        experiment._labelled_rows(None, _config(), data), np.arange(1437)
    )


def test_the_state_that_is_saved_makes_the_errors_of_the_result(finished):
    workdir, result = finished
    data, state = datasets.load("digits"), restored(workdir, _config()).state
    assert int(state.step) == result["steps"]
    model = parts.model(_config(), image_shape=(28, 28, 1), num_classes=10)
    images = data.eval_images.astype(np.float32) / 255
    apply = jax.jit(steps.apply_trained, static_argnums=0)
    predicted = np.argmax(apply(model, state, images).logits, axis=1)
    errors = int((predicted != data.eval_labels).sum())
    assert errors == round(result["test_error_percent"] * 3.6)


def test_a_second_command_touches_nothing_of_the_first(tmp_path, monkeypatch):
    """Although the first has written nothing yet, and the second is another run."""
    workdir, load = tmp_path / "run", experiment.load_data
    found = []

    def load_and_start_another(config):
        message = r"Another process trains in .*run\. Wait .*--workdir"
        with pytest.raises(ValueError, match=message):
            experiment.train_and_evaluate(_config(ridge=0.2), workdir)
        found.extend(path.name for path in workdir.iterdir())
        return load(config)

    class LeftError(Exception):
        pass

    def leave(*_, **__):
        raise LeftError

    monkeypatch.setattr(experiment, "load_data", load_and_start_another)
    monkeypatch.setattr(loop.TrainingLoop, "run", leave)
    with pytest.raises(LeftError):
        experiment.train_and_evaluate(_config(), workdir)
    assert found == [".lock"]
    assert json.loads((workdir / "config.json").read_text()) == _config().to_dict()
    # The first has let go of it; now it is a run of another configuration.
    with pytest.raises(ValueError, match=r"ridge \(0.1 there, 0.2 here\)"):
        experiment.train_and_evaluate(_config(ridge=0.2), workdir)


@pytest.mark.parametrize("was_allowed", [False, True])
def test_what_a_run_was_not_allowed_it_may_be_but_not_the_reverse(
    was_allowed, tmp_path
):
    written, config = (
        _config(allow_partial_data=allowed)
        for allowed in (was_allowed, not was_allowed)
    )
    (tmp_path / "config.json").write_text(json.dumps(written.to_dict()))
    refused = pytest.raises(ValueError, match=r"allow_partial_data \(True there, Fal")
    with refused if was_allowed else contextlib.nullcontext():
        experiment._check_directory(tmp_path, config)


def _own_images(path, *, value=0):
    """Stores images, and returns a configuration of them."""
    images = np.full((40, 28, 28), value, np.uint8)
    np.savez(path, images=images, labels=np.arange(40) % 2)
    of_images = dict(data_dir=str(path), batch_size=8, num_labels=4)
    return Config.from_mapping(own_images.get_config("semi")).replace(**of_images)


def test_a_finished_run_is_not_that_of_other_data(tmp_path, caplog):
    cats = _own_images(tmp_path / "cats.npz")
    planes = _own_images(tmp_path / "planes.npz", value=1)
    (workdir := tmp_path / "run").mkdir()
    about = experiment.about(experiment.load_data(cats))
    rows = np.arange(4, dtype=np.int32)
    working_directory.prepare(workdir, cats.to_dict(), about, rows)
    result = dict(test_error_percent=1.0, num_test_images=8, epochs=1, wall_seconds=1.0)
    working_directory.write_result(workdir, result)
    with pytest.raises(ValueError, match=r"a run on other data: version \(crc32"):
        experiment.train_and_evaluate(planes, workdir)
    (tmp_path / "planes.npz").unlink()
    with pytest.raises(ValueError, match=r"planes\.npz is neither a folder"):
        experiment.train_and_evaluate(planes, workdir)
    # The same images in another place, and none in that which they had.
    moved = _own_images(tmp_path / "moved.npz")
    (tmp_path / "cats.npz").unlink()
    for config in (moved, cats):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert experiment.train_and_evaluate(config, workdir) == result
        assert "this run is finished" in caplog.text


def test_processes_that_read_other_data_than_the_first_are_named(monkeypatch):
    images, labels = np.zeros((2, 28, 28, 1), np.uint8), np.arange(2)
    data = datasets.Dataset("a", "crc32 1", images, labels, images, labels, ("0", "1"))
    experiment._check_everywhere(data)

    def gathered(numbers):
        (own,) = numbers
        assert 0 <= own < 2**31
        return np.array([[own], [own], [own + 1]])

    monkeypatch.setattr(experiment.parallel, "gather", gathered)
    with pytest.raises(ValueError, match=r"^Processes \[2\] read other data than pro"):
        experiment._check_everywhere(data)


def test_forced_devices_have_threads_wherever_training_starts(monkeypatch):
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    config = _config(batch_size=41)
    with pytest.raises(ValueError, match="does not divide over 8 devices"):
        experiment.train_in_memory(config, datasets.load("digits"), np.arange(100))
    assert os.environ["NPROC"] == "32"
