"""Several processes, signals, sudden deaths: what happens to jobs on a cluster."""

import json
import pathlib
import random
import resource
import shutil
import signal
import time

import chex
import numpy as np
import pytest

from kln_jax.storage import epoch_metrics
from kln_jax.training import parallel
from tests.processes import (
    DIGITS,
    SMALL,
    end,
    free_port,
    start,
    start_several,
    wait_for_line,
)
from tests.small_run import config_of_digits, restored


def _lines(workdir):
    return [{**line, "wall_seconds": 0} for line in epoch_metrics.read_metrics(workdir)]


def _assert_equal(workdir, expected):
    """Asserts equal metrics and parameters of two runs."""
    assert _lines(workdir) == _lines(expected)
    states = [restored(path, config_of_digits()).state for path in (workdir, expected)]
    chex.assert_trees_all_equal(*states)


def test_two_processes_of_two_devices_train_as_one_of_one(tmp_path):
    # 14 small steps, for what differs by rounding grows with what is learned.
    rate = "--config.learning_rate=2e-4", "--config.warmup_steps=100"
    run = (*SMALL, "--config.batch_size=200", *rate)
    processes = [
        *start_several(2, *run, f"--workdir={tmp_path / 'two'}", devices=2),
        start(*run, f"--workdir={tmp_path / 'one'}"),
    ]
    for i, process in enumerate(processes):
        status, output = end(process)
        assert status == 0, output
        counts = f"process {i} of 2, 2 local and 4 global devices, platform cpu"
        assert (counts if i < 2 else "process 0 of 1, 1 local and 1 global") in output
        # Only the first process says and writes what the run gives.
        assert ("Test error" in output) == (i != 1)
    one, two = _lines(tmp_path / "one"), _lines(tmp_path / "two")
    assert len(one) == len(two) == 2
    for line, expected in zip(two, one, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(line[name], value, rtol=1e-4, err_msg=name)
    states = [
        restored(tmp_path / name, config_of_digits()).state for name in ("one", "two")
    ]
    chex.assert_trees_all_close(
        states[0].params, states[1].params, rtol=1e-3, atol=1e-5
    )


def test_several_processes_go_on_inside_an_epoch_and_after_the_last(tmp_path):
    arguments = (
        *SMALL,
        "--config.num_epochs=1",
        "--config.checkpoint_every_steps=5",
        f"--workdir={tmp_path}",
    )

    def run():
        for process in start_several(2, *arguments):
            status, output = end(process)
            assert status == 0, output
        return _lines(tmp_path), json.loads((tmp_path / "result.json").read_text())

    lines, result = run()
    # Only that after 10 steps of 14 is left.
    shutil.rmtree(tmp_path / "checkpoints" / "14")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "result.json").unlink()
    again, _ = run()
    assert again == lines
    (tmp_path / "result.json").unlink()
    _, ended = run()
    assert ended["test_error_percent"] == result["test_error_percent"]


@pytest.mark.parametrize("force", [{"devices": 8}, {"JAX_NUM_CPU_DEVICES": "8"}])
def test_eight_forced_devices_on_few_cores_come_to_an_end(force, tmp_path):
    # LAPACK divides batches of matrices of such a size among XLA's threads.
    run = (*SMALL, "--config.batch_size=400", "--config.num_epochs=1")
    status, output = end(start(*run, f"--workdir={tmp_path}", **force))
    assert status == 0, output
    assert "8 local and 8 global devices" in output


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path):
    arguments = (*SMALL, "--config.num_epochs=400", f"--workdir={tmp_path / 'run'}")
    process = start(*arguments)
    wait_for_line(process, "epoch 1/400")
    process.send_signal(signal.SIGTERM)
    status, output = end(process)
    assert status == 75
    said = output.splitlines()[-1]
    assert said.startswith("SIGTERM: the state after step ")
    (step,) = (int(word) for word in said.split() if word.isdigit())
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()

    process = start(*arguments)
    wait_for_line(process, f"resuming after step {step}")
    process.send_signal(signal.SIGINT)  # While it compiles: nothing is lost either.
    status, output = end(process)
    assert status == 75
    assert output.splitlines()[-1].startswith("SIGINT: ")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, None),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}, "SLURM"),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, None),  # The batch script itself.
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "h"}, None),  # A pod of its own.
    ],
)
def test_the_environment_says_who_started_the_process(environment, name):
    assert parallel.cluster(environment) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", None, None), "num_processes and process_id missing"),
        ((None, 2, 0), "coordinator_address missing"),
        (("h", 1, 0), "coordinator_address='h' has no port; give HOST:PORT"),
        (("h:1", 2, 2), "cannot be joined"),
        (("h:1", 0, 0), "cannot be joined"),
    ],
)
def test_processes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parallel.join_processes(*arguments)


@pytest.mark.slow
def test_slurms_variables_are_enough(tmp_path):
    """A dry run of two tasks, under the variables that srun sets."""
    processes = [
        start(
            *SMALL,
            f"--workdir={tmp_path}",
            SLURM_JOB_ID="1",
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="2",
            SLURM_PROCID=str(i),
            SLURM_LOCALID=str(i),
            JAX_COORDINATOR_PORT=port,
        )
        for port in [str(free_port())]
        for i in range(2)
    ]
    for i, process in enumerate(processes):
        status, output = end(process)
        assert status == 0, output
        assert f"process {i} of 2, 1 local and 2 global devices" in output
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 28


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_others_and_the_job_goes_on(victim, tmp_path):
    arguments = (
        *SMALL,
        "--config.num_epochs=40",
        "--config.checkpoint_every=1",
        f"--workdir={tmp_path}",
    )
    processes = start_several(2, *arguments)
    wait_for_line(processes[0], "epoch 2/40")
    processes[victim].kill()
    began = time.monotonic()
    status, output = end(processes[1 - victim], timeout=60)
    # JAX itself aborts the others if it is the first to notice that process 0 is gone.
    if victim == 1 or status != -signal.SIGABRT:
        assert status == 75, output
        assert "another process has ended, or cannot be reached" in output
    assert time.monotonic() - began < 60
    processes[victim].communicate()

    processes = start_several(2, *arguments)
    wait_for_line(processes[0], "resuming after step ")
    wait_for_line(processes[0], "epoch 4/40")
    processes[1].send_signal(signal.SIGTERM)  # One of them is enough.
    for process in processes:
        status, output = end(process, timeout=60)
        assert status == 75, output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before training", "while it trains"])
def test_an_error_of_the_first_process_alone_ends_all_at_once(moment, tmp_path):
    workdir = tmp_path / "run"
    if moment == "before training":
        workdir.touch()  # Only process 0 looks there.
    options = "--config.num_epochs=400", "--config.checkpoint_every=1"
    processes = start_several(2, *SMALL, *options, f"--workdir={workdir}")
    if moment == "while it trains":
        wait_for_line(processes[0], "epoch 2/400")
        # A limit on the size of files fails a write as a full disk does.
        limits = 20_000, resource.RLIM_INFINITY
        resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, limits)
    status, output = end(processes[0], timeout=60)
    assert status == 1, output
    said = output.splitlines()[-1]
    assert said.startswith("train.py: error: ")
    assert ("is a file" in said) == (moment == "before training")
    status, output = end(processes[1], timeout=15)
    assert status in (75, -signal.SIGABRT), output
    assert "another process has ended" in output or status != 75


@pytest.mark.slow
def test_twenty_sudden_deaths_change_nothing(tmp_path):
    arguments = (*SMALL, "--config.num_epochs=4", "--config.checkpoint_every_steps=3")
    expected = tmp_path / "expected"
    status, output = end(start(*arguments, f"--workdir={expected}"))
    assert status == 0, output
    began = time.monotonic()
    warm = tmp_path / "warm"
    status, output = end(start(*arguments, f"--workdir={warm}"))
    assert status == 0, output
    duration = time.monotonic() - began
    _assert_equal(warm, expected)

    rng = random.Random(0)
    workdir, table = tmp_path / "killed", []
    while len(table) < 20:
        process = start(*arguments, f"--workdir={workdir}")
        moment = rng.uniform(0.0, duration)
        time.sleep(moment)
        process.kill()
        status, _ = end(process)
        if status == 0:  # It was done before: anew.
            _assert_equal(workdir, expected)
            shutil.rmtree(workdir)
            continue
        assert status == -signal.SIGKILL
        names = sorted(path.name for path in workdir.glob("checkpoints/*"))
        table.append((moment, names, len(_lines(workdir))))
    status, output = end(start(*arguments, f"--workdir={workdir}"))
    assert status == 0, output
    _assert_equal(workdir, expected)
    for i, (moment, names, epochs) in enumerate(table, 1):
        print(f"kill {i:2d} after {moment:5.2f} s: {epochs} epochs, {names}")


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path):
    """Several hundred steps on eight devices, and no warning of anything."""
    process = start(
        DIGITS,
        "--config.width=0.05",
        "--config.batch_size=40",
        "--config.num_epochs=20",
        "--config.checkpoint_every=1",
        f"--workdir={tmp_path}",
        devices=8,
        # Of ml_collections, on Python 3.11.
        python=("-W", "error", "-W", "ignore:the load_module():DeprecationWarning"),
    )
    resident = {}
    with process:
        for line in process.stdout:
            if line.startswith("epoch "):
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                (kibibytes,) = (
                    int(row.split()[1])
                    for row in status.splitlines()
                    if row.startswith("VmRSS")
                )
                resident[int(line.split()[1].split("/")[0])] = kibibytes
    assert process.returncode == 0
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 700
    print(
        {epoch: f"{kibibytes / 1024:.0f} MiB" for epoch, kibibytes in resident.items()}
    )
    assert resident[20] < 1.05 * resident[5]
