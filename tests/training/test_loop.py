"""The loop: what it keeps, and how it ends where training diverges or collapses."""

import dataclasses
import json
import logging

import chex
import jax
import numpy as np
import pytest

from kln_jax import datasets
from kln_jax.storage import epoch_metrics
from kln_jax.training import compiled, experiment, loop
from tests.small_run import config_of_digits, restored


def _config(**changes):
    return config_of_digits(
        **{"num_epochs": 1, "network": "mlp", "batch_size": 160, **changes}
    )


def test_a_diverging_run_stops_and_keeps_the_last_healthy_state(tmp_path):
    config = _config(learning_rate=1e12, clip_norm=0.0)
    message = (
        r"^\w+ is \S+ at step (\d+) \(.*\)\. Turn .* it\) in a new run; before it, the "
        r"state after step \1 is saved\.$"
    )
    # The same command goes the same way.
    for _ in range(2):
        with pytest.raises(experiment.DivergenceError, match=message) as caught:
            experiment.train_and_evaluate(config, tmp_path)
        state = restored(tmp_path, config).state
        chex.assert_tree_all_finite((state.params, state.batch_stats))
        assert f"step {state.step} is saved" in str(caught.value)
        said = json.loads((tmp_path / "diverged.json").read_text())
        assert said == str(caught.value)
        assert not (tmp_path / "result.json").exists()


def test_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    call = loop.TrainingLoop._call

    def spoiled(self, num_steps):
        history = call(self, num_steps)
        if num_steps:
            params = jax.tree.map(
                lambda leaf: leaf * np.float32("inf"), self._state.params
            )
            self._state = self._state.replace(params=params)
        return history

    monkeypatch.setattr(loop.TrainingLoop, "_call", spoiled)
    with pytest.raises(
        experiment.DivergenceError, match=r"Parameters are not finite after step 1; "
    ):
        experiment.train_and_evaluate(_config(), tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_outputs_that_are_not_finite_end_the_run_before_they_are_counted(
    tmp_path, monkeypatch
):
    data = datasets.load("digits")
    few = dataclasses.replace(
        data, train_images=data.train_images[:80], train_labels=data.train_labels[:80]
    )
    monkeypatch.setattr(experiment, "load_data", lambda config: few)
    # The one step of the epoch is healthy, and so are the parameters after it.
    config = _config(learning_rate=1e30, batch_size=80)
    message = r"The outputs for \d+ of 360 images are not finite after step 1; "
    with pytest.raises(experiment.DivergenceError, match=message):
        experiment.train_and_evaluate(config, tmp_path)
    assert not epoch_metrics.read_metrics(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_collapse_is_said_from_the_evaluation(monkeypatch, caplog):
    confusion = np.zeros((10, 10), int)
    confusion[:, 3] = 36
    sums = dict(confusion=confusion, reconstruction=720.0, nonfinite=0)
    evaluated = []

    def evaluate(*_):
        evaluated.append("once")
        return sums

    monkeypatch.setattr(
        experiment,
        "compile_functions",
        lambda *given: compiled.compile_functions(*given)._replace(evaluate=evaluate),
    )
    data = datasets.load("digits")
    rows = np.arange(len(data.train_labels), dtype=np.int32)
    with caplog.at_level(logging.INFO):
        state = experiment.train_in_memory(_config(), data, rows)
    assert (int(state.step), evaluated) == (8, ["once"])
    # Nothing else is said where nothing is shown.
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "epoch 1: all evaluated images are predicted as class 3." in warning.message
    assert not [r for r in caplog.records if "epoch 1/1" in r.getMessage()]
