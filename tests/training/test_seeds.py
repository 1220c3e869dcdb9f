"""Several seeds trained at once, beside the same seeds one by one, on one device."""

import contextlib
import json
import logging
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import digits
from kln_jax.analysis import runs
from kln_jax.storage import epoch_metrics
from kln_jax.training import experiment, loop, steps
from kln_jax.training.interruption import Interrupted, Interruption
from tests.processes import SMALL, end, environment, start

SEEDS = (3, 4, 5)


@contextlib.contextmanager
def _one_device(monkeypatch):
    """Leaves the first device, and the promotion that optax's Adam needs."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    with _one_device(monkeypatch):
        yield


def _config(variant="semi", **changes):
    config = digits.get_config(variant)
    # What compiles fastest; the supervised one has the convolutions.
    config.network = "mlp" if variant == "semi" else "mnist"
    config.update(width=0.05, latent_dim=8, batch_size=100, num_epochs=2)
    # In so small steps that what rounding makes of a run stays below the tolerance.
    config.update(lr_milestones=(), checkpoint_every=1)
    config.update(learning_rate=2e-4, warmup_steps=100)
    config.update(num_seeds=len(SEEDS), seed=SEEDS[0], split_seed=SEEDS[0])
    config.update(changes)
    return config


def _train(config, workdir, **options):
    return experiment.train_and_evaluate(config, str(workdir), **options)


def _assert_close(workdir, expected, *, rtol=1e-4):
    """Asserts that two runs have the same metrics and parameters, up to rounding."""
    assert {path.name for path in workdir.iterdir()} == {
        path.name for path in expected.iterdir()
    }
    for name in ("config.json", "data.json", "labelled.npy"):
        assert (workdir / name).read_bytes() == (expected / name).read_bytes()
    lines, expected_lines = (
        [{**line, "wall_seconds": 0} for line in epoch_metrics.read_metrics(directory)]
        for directory in (workdir, expected)
    )
    assert len(lines) == len(expected_lines)
    for line, other in zip(lines, expected_lines, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_allclose(line[name], value, rtol, err_msg=name)
    state, other = (experiment.load_run(path).state for path in (workdir, expected))
    for name in ("params", "batch_stats"):
        whole, expected_whole = (
            np.concatenate([x.ravel() for x in jax.tree.leaves(getattr(tree, name))])
            for tree in (state, other)
        )
        distance = np.linalg.norm(whole - expected_whole)
        assert distance <= rtol * np.linalg.norm(expected_whole), name
    assert int(state.step) == int(other.step)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("seeds")
    with pytest.MonkeyPatch.context() as patch, _one_device(patch):
        return workdir, _train(_config(), workdir)


def _assert_runs_of_each(workdir, results, variant, place):
    """Asserts that each seed has what a run of its own leaves."""
    assert {path.name for path in workdir.iterdir()} == {"3", "4", "5"}
    assert list(results) == ["3", "4", "5"]
    for seed in SEEDS:
        single = _config(variant, num_seeds=1, seed=seed, split_seed=seed)
        result = _train(single, place / str(seed))
        together = json.loads((workdir / str(seed) / "result.json").read_text())
        assert together == results[str(seed)]
        assert (together["seeds_at_once"], result["seeds_at_once"]) == (3, 1)
        same = result.keys() - {"wall_seconds", "seeds_at_once"}
        assert all(together[name] == result[name] for name in same)
        _assert_close(workdir / str(seed), place / str(seed))


def test_seeds_at_once_are_the_runs_of_each(finished, tmp_path):
    _assert_runs_of_each(*finished, "semi", tmp_path)
    splits = {(finished[0] / str(i) / "labelled.npy").read_bytes() for i in SEEDS}
    assert len(splits) == 3


def test_seeds_as_one_batch_are_the_same(finished, tmp_path, monkeypatch):
    workdir, results = finished
    monkeypatch.setattr(steps, "over_seeds", jax.vmap)  # As where it is no CPU.
    assert _train(_config(), tmp_path).keys() == results.keys()
    for seed in SEEDS:
        _assert_close(tmp_path / str(seed), workdir / str(seed))


@pytest.mark.slow
def test_supervised_seeds_at_once_are_the_runs_of_each(tmp_path):
    workdir = tmp_path / "at once"
    results = _train(_config("supervised"), workdir)
    _assert_runs_of_each(workdir, results, "supervised", tmp_path / "alone")


def test_finished_seeds_say_so(finished, capsys):
    workdir, results = finished
    assert _train(_config(), workdir) == results
    said = capsys.readouterr().out
    assert "finished; nothing is left to do" in said
    assert "(mean ± standard deviation of 3 seeds)" in said


def test_an_interrupted_run_goes_on_with_seeds_at_different_steps(
    finished, tmp_path, monkeypatch
):
    workdir, _ = finished
    interruption = Interruption()
    call = loop.Training._call

    def signal_comes(self, counts):
        interruption.received = signal.SIGTERM if any(counts) else None
        return call(self, counts)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_call", signal_comes)
        with pytest.raises(
            Interrupted, match="SIGTERM: the state of 3 seeds after step 1 is saved"
        ):
            _train(_config(), tmp_path, interruption=interruption)
    for seed in SEEDS:
        (checkpoint,) = (tmp_path / str(seed) / "checkpoints").iterdir()
        assert checkpoint.name == "1"
    # As if the process had been killed before the second was saved, and after the
    # third one was finished.
    shutil.rmtree(tmp_path / "4" / "checkpoints")
    shutil.rmtree(tmp_path / "5")
    shutil.copytree(workdir / "5", tmp_path / "5")
    results = _train(_config(), tmp_path)
    assert list(results) == ["3", "4", "5"]
    for seed in SEEDS:
        _assert_close(tmp_path / str(seed), workdir / str(seed))


def test_a_seed_that_diverges_leaves_the_others_alone(
    finished, tmp_path, monkeypatch, caplog
):
    workdir, _ = finished
    call = loop.Training._call
    calls = []

    def spoil_the_second(self, counts):
        states, history = call(self, counts)
        calls.append(counts)
        if len(calls) == 2:  # The first makes no step.
            params = jax.tree.map(lambda leaf: leaf.at[1].multiply(1e9), states.params)
            states = states.replace(params=params)
        return states, history

    monkeypatch.setattr(loop.Training, "_call", spoil_the_second)
    message = (
        r"^1 of 3 seeds diverged, as said above: seed 4\. .* others are finished\."
    )
    with (
        caplog.at_level(logging.ERROR, "kln_jax"),
        pytest.raises(experiment.DivergenceError, match=message),
    ):
        _train(_config(), tmp_path)
    assert re.search(
        r"seed 4: \w+ is .* the state after step 1 is saved\.", caplog.text
    )
    assert {len(counts) for counts in calls} == {3}
    assert all(counts[1] == 0 for counts in calls[3:])
    for seed in (3, 5):
        _assert_close(tmp_path / str(seed), workdir / str(seed))
    assert not (tmp_path / "4" / "result.json").exists()
    records = {record.seed: record for record in runs.read(tmp_path)}
    assert records.keys() == {3, 4, 5}
    assert records[4].error is None
    assert records[3].error is not None
    assert records[3].epoch_seconds is None  # It would be that of all three.
    assert int(experiment.load_run(tmp_path / "4").state.step) == 1


def test_a_place_of_several_seeds_is_no_run(finished):
    workdir, _ = finished
    before = sorted(workdir.iterdir())
    message = r"holds the runs of several seeds \(3, 4, 5\); that of one is .*/3\."
    with pytest.raises(ValueError, match=message):
        _train(_config(num_seeds=1), workdir)
    with pytest.raises(ValueError, match=message):
        experiment.load_run(workdir)
    assert sorted(workdir.iterdir()) == before


def test_fewer_and_more_seeds_go_on_in_the_same_place(finished, tmp_path, capsys):
    workdir, results = finished
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    assert list(_train(_config(num_seeds=2), tmp_path)) == ["3", "4"]
    assert "finished; nothing is left to do" in capsys.readouterr().out
    more = _train(_config(num_seeds=4), tmp_path)
    assert list(more) == ["3", "4", "5", "6"]
    assert {name: more[name] for name in results} == results


def test_a_place_with_a_run_of_its_own_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a run, but num_seeds=3 makes a dir"):
        _train(_config(), tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is a file, but num_seeds=3"):
        _train(_config(), tmp_path / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["supervised", "semi"])
def test_whole_runs_of_seeds_at_once_are_those_of_each(variant, tmp_path):
    # XLA without optimisation, as tests have it, rounds otherwise in another program.
    def run(place, seed, **changes):
        changes |= dict(width=0.05, seed=seed, split_seed=seed)
        options = (f"--config.{name}={value}" for name, value in changes.items())
        config = f"--config=configs/digits.py:{variant}"
        process = start(config, f"--workdir={place}", *options, XLA_FLAGS="")
        code, output = end(process, timeout=200)
        assert code == 0, output

    run(tmp_path / "at once", SEEDS[0], num_seeds=len(SEEDS))
    for seed in SEEDS:
        run(tmp_path / str(seed), seed)
        single = tmp_path / "at once" / str(seed)
        _assert_close(single, tmp_path / str(seed))


# Batches of factorisations that do not wait for each other lock up XLA's CPU runtime.
_DIAGNOSTICS = """
import jax
from kln_jax.discrepancies import kernels
from kln_jax.training import objectives

kernel = kernels.gaussian_mixture()
of_seeds = jax.jit(jax.vmap(
    lambda s, t: objectives.gram_diagnostics(s, t, kernel=kernel, ridge=0.1)
))
z = jax.random.normal(jax.random.key(0), (2, 16, 100, 8))
for _ in range(20):
    jax.block_until_ready(of_seeds(*z))
"""


def test_diagnostics_of_many_seeds_do_not_lock_up():
    command = [sys.executable, "-c", _DIAGNOSTICS]
    subprocess.run(command, env=environment(), check=True, timeout=60)


@pytest.mark.slow
def test_a_real_run_of_many_seeds_does_not_lock_up(tmp_path):
    process = start(
        *SMALL,
        "--config.num_seeds=16",
        f"--workdir={tmp_path}",
        "--config.batch_size=100",
    )
    code, output = end(process, timeout=200)
    assert code == 0, output
    assert "(mean ± standard deviation of 16 seeds)" in output
    assert len(list(tmp_path.glob("*/result.json"))) == 16
