"""The loop: what it keeps, and what it says of steps that are not healthy."""

import logging
import re
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

from kln_jax.training import experiment, loop
from tests.small_run import config_of_digits


def _config(**changes):
    return config_of_digits(**{"num_epochs": 1, **changes})


def test_the_best_by_validation_is_kept_and_read_back(tmp_path, monkeypatch):
    config = _config(
        evaluate_on="validation",
        validation_fraction=0.2,
        keep_last=1,
        keep_best=1,
        checkpoint_every=1,
        num_epochs=3,
    )
    errors = iter([30.0, 10.0, 20.0])
    monkeypatch.setattr(
        loop, "_evaluate", lambda *_: [{"validation_error_percent": next(errors)}]
    )
    experiment.train_and_evaluate(config, str(tmp_path))
    newest, best = (
        experiment.load_run(tmp_path, best=best).state for best in (False, True)
    )
    assert int(best.step) * 3 == int(newest.step) * 2


def test_a_diverging_run_stops_and_keeps_the_last_healthy_state(tmp_path):
    config = _config(learning_rate=1e12, clip_norm=0.0)
    message = (
        r"^\w+ is \S+ at step (\d+) \(pivots of the Gram matrices .*condition number "
        r"is at least .*\)\. Turn .* it\), for a run of its own; before it, the state "
        r"after step \1 is saved"
    )
    with pytest.raises(experiment.DivergenceError, match=message) as caught:
        experiment.train_and_evaluate(config, str(tmp_path))
    assert not (tmp_path / "result.json").exists()
    state = experiment.load_run(tmp_path).state
    chex.assert_tree_all_finite((state.params, state.batch_stats))
    assert f"step {state.step} is saved" in str(caught.value)
    # The same configuration goes the same way.
    with pytest.raises(experiment.DivergenceError, match=message):
        experiment.train_and_evaluate(config, str(tmp_path))
    # One that looks away does not.
    config.update(on_nonfinite="skip", max_skipped_steps=2)
    with pytest.raises(experiment.DivergenceError, match=message):
        experiment.train_and_evaluate(config, str(tmp_path))
    assert int(experiment.load_run(tmp_path).state.skipped) == 2


def test_parameters_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    call = loop.Training._call

    def spoiled(self, counts):
        state, history = call(self, counts)
        if any(counts):
            params = jax.tree.map(lambda leaf: leaf * np.float32("inf"), state.params)
            state = state.replace(params=params)
        return state, history

    monkeypatch.setattr(loop.Training, "_call", spoiled)
    with pytest.raises(
        experiment.DivergenceError, match=r"Parameters are not finite after step 1; "
    ):
        experiment.train_and_evaluate(_config(), str(tmp_path))
    assert not list((tmp_path / "checkpoints").iterdir())


def _stopped(config, **history):
    """What `Training` needs to speak of the steps of an epoch, and what these gave."""
    run = SimpleNamespace(
        _config=config,
        _class_names=("cat", "dog"),
        _program=SimpleNamespace(steps_per_epoch=3),
    )
    history = {name: np.array(values) for name, values in history.items()}
    return run, SimpleNamespace(history=history, name="")


DIAGNOSTICS = dict(
    pivot_smallest=[0.0, 0.0, 0.1],
    pivot_largest=[0.0, 0.0, 1.1],
    median_squared_distance=[0.0, 0.0, 7.0],
)


@pytest.mark.parametrize(
    ("objective", "advice"),
    [
        (
            "cmmd",
            r" \(pivots .* 0\.1 to 1\.1, .*\)\. Turn ridge \(raise it\) or learni.*",
        ),
        (
            "cross_entropy",
            r"\. Turn learning_rate \(lower it\) or clip_norm \(set it\)",
        ),
    ],
)
def test_the_ridge_is_blamed_only_where_there_is_one(objective, advice):
    run, progress = _stopped(
        _config(objective=objective),
        loss=[1.0, 1.0, 1.0],
        gradient_norm=[1.0, 1.0, np.inf],
        **DIAGNOSTICS,
    )
    said = loop.Training._trouble(run, progress, 2, 2)
    assert re.fullmatch(f"gradient_norm is inf at step 8{advice}", said)


@pytest.mark.parametrize("healthy", [True, False])
def test_an_epoch_that_ends_with_a_skipped_step_logs_no_nan(healthy):
    last = 1.0 if healthy else np.nan
    run, progress = _stopped(
        _config(),
        loss=[1.0, 3.0, last],
        healthy=[True, True, healthy],
        predicted=[[1, 1]] * 3,
        **{name: [0.0, 0.0, last] for name in DIAGNOSTICS},
    )
    logged = loop.Training._of_steps(run, 4, progress)
    expected = {"epoch": 4, "loss": 5 / 3 if healthy else 2.0}
    if healthy:
        expected |= dict.fromkeys(DIAGNOSTICS, 1.0)
    assert logged == pytest.approx(expected)


def test_a_gradient_beyond_the_bound_is_not_blamed_on_a_term():
    run, progress = _stopped(
        _config(divergence_bound=100.0),
        loss=[1.0, 1.0, 50.0],
        cmmd=[1.0, 1.0, 40.0],
        # Beyond the bound, but with hardly a weight in the loss.
        reconstruction=[1.0, 1.0, 1000.0],
        gradient_norm=[1.0, 1.0, 120.0],
        **DIAGNOSTICS,
    )
    said = loop.Training._trouble(run, progress, 0, 2)
    assert said.startswith("gradient_norm is 120 at step 2 ")


def test_a_cholesky_that_failed_is_blamed_on_the_ridge():
    nan = [1.0, 1.0, np.nan]
    run, progress = _stopped(
        _config(), cmmd=nan, loss=nan, gradient_norm=nan, **DIAGNOSTICS
    )
    said = loop.Training._trouble(run, progress, 2, 2)
    assert re.fullmatch(r"cmmd is nan at step 8 \(.*\)\. Turn ridge \(raise it\)", said)


def test_unhealthy_steps_are_skipped_said_and_counted(tmp_path, caplog):
    # No gradient is within this bound but the first ones.
    config = _config(on_nonfinite="skip", max_skipped_steps=3, divergence_bound=1.0)
    with (
        caplog.at_level(logging.WARNING, "kln_jax"),
        pytest.raises(experiment.DivergenceError, match="at step 3 "),
    ):
        experiment.train_and_evaluate(config, str(tmp_path))
    skipped = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert len(skipped) == 3
    assert "at step 0 (pivots" in skipped[0]
    assert skipped[2].endswith("the step is skipped, 3 of at most 3.")
    assert int(experiment.load_run(tmp_path).state.skipped) == 3


def test_a_class_that_is_never_predicted_is_named(caplog):
    predicted = np.array([[3, 0, 1], [2, 0, 0]])
    loop._warn_of_collapse(predicted, ("cat", "dog", "owl"), 4, advice="do it")
    assert "epoch 4: never predicted: class dog." in caplog.text
    assert caplog.text.endswith("have collapsed: do it.\n")
    caplog.clear()
    loop._warn_of_collapse(predicted + 1, ("cat", "dog", "owl"), 5, advice="do it")
    assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (dict(clip_norm=0.0), "set clip_norm"),
        (dict(ridge=1.0), "lower ridge to 0.1"),
        (dict(ridge=1.0, objective="cross_entropy"), "lower learning_rate"),
        (dict(ridge=0.01), "lower learning_rate"),
        (dict(), "lower learning_rate"),
    ],
)
def test_what_is_advised_against_a_collapse_is_not_done_already(changes, advice):
    assert loop._against_collapse(_config(**changes)).startswith(advice)
