"""The loop, on the embedded digits and a network of a twentieth of the width."""

import functools
import json
import logging
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from kln_jax import metrics, steps, training


def _config(variant="supervised", **changes):
    config = digits.get_config(variant)
    # 40 divides over the eight devices, and makes 35 steps an epoch.
    config.update(width=0.05, latent_dim=8, batch_size=40, num_epochs=2)
    config.update(lr_milestones=(), warmup_steps=0, **changes)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, training.train_and_evaluate(_config(), str(workdir))


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
    lines = metrics.read_metrics(workdir)
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
        "test_error_percent",
    }
    assert lines[-1]["test_error_percent"] == result["test_error_percent"]
    assert lines[-1]["kernel_same"] > lines[-1]["kernel_different"]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert any((workdir / "tensorboard").iterdir())


def test_a_finished_run_says_so(finished, capsys):
    workdir, result = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    assert training.train_and_evaluate(_config(), str(workdir)) == result
    assert "finished" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


def test_a_workdir_of_another_config_is_refused(finished):
    workdir, _ = finished
    with pytest.raises(ValueError, match=r"ridge \(0.1 there, 0.2 now\)"):
        training.train_and_evaluate(_config(ridge=0.2), str(workdir))


def test_an_interrupted_run_goes_on_to_the_same_end(
    finished, tmp_path, monkeypatch, caplog
):
    workdir, result = finished

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(metrics, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.train_and_evaluate(_config(checkpoint_every=1), str(tmp_path))
    assert not (tmp_path / "result.json").exists()
    assert [line["epoch"] for line in metrics.read_metrics(tmp_path)] == [1]
    # It may go on from data elsewhere, and with checkpoints at other epochs.
    with caplog.at_level(logging.INFO):
        again = training.train_and_evaluate(
            _config(data_dir="elsewhere"), str(tmp_path)
        )
    assert "continuing after step 35" in caplog.text
    varying = ("wall_seconds",)
    assert {k: v for k, v in again.items() if k not in varying} == {
        k: v for k, v in result.items() if k not in varying
    }
    lines, expected = metrics.read_metrics(tmp_path), metrics.read_metrics(workdir)
    for line in (*lines, *expected):
        line.pop("wall_seconds")
    assert lines == expected


@jax.numpy_dtype_promotion("standard")  # Which optax's Adam needs.
def test_semi_supervised_labels_are_stored_and_used_again(tmp_path, monkeypatch):
    config = _config("semi", num_labels=20, num_epochs=1)
    seen = []
    run = training._run

    def spy(config, data, labelled, *rest):
        seen.append(labelled)
        return run(config, data, labelled, *rest)

    monkeypatch.setattr(training, "_run", spy)
    training.train_and_evaluate(config, str(tmp_path))
    stored = np.load(tmp_path / "labelled.npy", allow_pickle=False)
    assert len(stored) == 20
    (tmp_path / "result.json").unlink()
    np.save(tmp_path / "labelled.npy", stored[::-1])
    training.train_and_evaluate(config, str(tmp_path))
    np.testing.assert_array_equal(seen[0], stored)
    np.testing.assert_array_equal(seen[1], stored[::-1])


def test_a_diverging_run_stops_and_keeps_the_last_finite_state(tmp_path):
    config = _config(learning_rate=1e12, clip_norm=0.0)
    with pytest.raises(
        training.NonFiniteError, match=r"(is (nan|inf) at step \d+|Parameters).*Turn"
    ):
        training.train_and_evaluate(config, str(tmp_path))
    assert not (tmp_path / "result.json").exists()
    if any((tmp_path / "checkpoints").iterdir()):
        state = training.load_run(tmp_path).state
        chex.assert_tree_all_finite((state.params, state.batch_stats))


def test_a_run_is_read_back(finished):
    workdir, result = finished
    run = training.load_run(workdir)
    assert run.config.to_json() == _config().to_json()
    assert int(run.state.step) == result["steps"]
    images = run.data.eval_images.astype(np.float32) / 255
    logits = jax.jit(functools.partial(steps.predict, run.model))(run.state, images)[2]
    errors = int((np.argmax(logits, axis=1) != run.data.eval_labels).sum())
    assert errors == round(result["test_error_percent"] * 3.6)


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: config\.json is missing"):
        training.load_run(tmp_path)


class _Recorder:
    def __init__(self):
        self.saved = []

    def save(self, step, state):
        self.saved.append((step, state))


def _state(params):
    scalar = jnp.zeros(())
    return steps.TrainState(jnp.int32(3), params, {}, (), scalar, scalar)


def test_a_term_that_is_not_finite_is_named_with_step_and_knob():
    stacked = {name: np.ones(5) for name in training._KNOBS}
    stacked["cmmd"][3:] = stacked["loss"][3:] = np.nan
    recorder = _Recorder()
    with pytest.raises(
        training.NonFiniteError, match=r"cmmd is nan at step 103; .*Turn ridge"
    ):
        training._check_finite(stacked, _state(jnp.ones(2)), recorder, 100)
    assert [step for step, _ in recorder.saved] == [3]


def test_parameters_that_are_not_finite_are_never_saved():
    stacked = {name: np.ones(5) for name in training._KNOBS}
    recorder = _Recorder()
    with pytest.raises(training.NonFiniteError, match="Parameters are not finite"):
        training._check_finite(stacked, _state(jnp.array([jnp.inf])), recorder, 0)
    assert not recorder.saved
    training._check_finite(stacked, _state(jnp.ones(2)), recorder, 0)


def test_a_class_that_is_never_predicted_is_named(caplog):
    predicted = np.array([[3, 0, 1], [2, 0, 0]])
    training._warn_of_collapse(predicted, ("cat", "dog", "owl"), 4)
    assert "epoch 4: never predicted: class dog." in caplog.text
    caplog.clear()
    training._warn_of_collapse(predicted + 1, ("cat", "dog", "owl"), 5)
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_epochs=0), "num_epochs=0 must be at least 1"),
        (dict(learning_rate=-0.1), "learning_rate=-0.1 must be at least 0"),
        (dict(clip_norm=float("nan")), "clip_norm=nan must be"),
        (dict(ridge=0.0), "ridge=0.0 must be a positive"),
        (dict(ridge=1e-9), "ridge=1e-09 is below"),
        (dict(bandwidths=(1.0, -3.0)), "bandwidths=.* must be"),
        (dict(kernel_reduction="max"), "kernel_reduction='max' must be"),
        (dict(label_kernel="delta"), "label_kernel='delta' must be"),
        (dict(reconstruction_reduction="max"), "reconstruction_reduction='max'"),
        (dict(pairing="same"), "pairing='same' must be"),
        (dict(optimizer="lamb"), "optimizer='lamb' must be"),
        (dict(dtype="float16"), "dtype='float16' must be"),
        (dict(batch_size=41), "batch_size=41 does not divide over 8 devices"),
        (dict(network="vgg"), "network='vgg' must be"),
        (dict(network="conv_large"), "32x32 pixels, but the data set has 28x28"),
        (dict(dataset="imagenet"), "dataset must be one of"),
        (dict(num_labels=5000), "num_labels"),
        (dict(platform="tpu"), "platform='tpu'"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_before_anything_is_made(
    changes, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        training.train_and_evaluate(_config(**changes))
    assert not list(pathlib.Path().iterdir())


def test_without_a_workdir_a_fresh_one_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = set()
    for _ in range(2):
        directory = training._fresh_directory(_config())
        directory.mkdir(parents=True)
        names.add(directory.name)
    assert len(names) == 2
    assert all(name.startswith("digits-supervised-") for name in names)
