"""Real runs of train.py in processes of their own, quick to compile."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
DIGITS = f"--config={ROOT / 'configs' / 'digits.py'}"
# 28 steps of a network of a twentieth of the width.
SMALL = (
    DIGITS,
    "--config.width=0.05",
    "--config.latent_dim=8",
    "--config.num_epochs=2",
)


def environment(devices=1, **more):
    """Variables of a process on CPU that compiles as fast as the tests do."""
    flags = re.sub(r"--xla_force_host\S*", "", os.environ["XLA_FLAGS"])
    if devices > 1:
        flags += f" --xla_force_host_platform_device_count={devices}"
    # Threads are for the process to find out.
    own = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return {**own, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **more}


# Has the libraries loaded, runs train.py in copies of itself, and tells their ends.
_LOADED = """
import json, os, runpy, sys
import kln_jax._cli, kln_jax.training.experiment
script, folder = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
for line in sys.stdin:
    arguments, cwd = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(cwd)
        for name, descriptor in ("out", 1), ("err", 2):
            with open(folder + "/" + name, "w") as file:
                os.dup2(file.fileno(), descriptor)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class LoadedTrain:
    """Runs train.py as often as wanted, and imports what it needs once."""

    def __init__(self, folder):
        self._folder = folder
        command = [sys.executable, "-c", _LOADED, str(ROOT / "train.py"), str(folder)]
        self._process = subprocess.Popen(
            command,
            env=environment(PYTHONPATH=str(ROOT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments, cwd):
        print(json.dumps([arguments, str(cwd)]), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        texts = [(self._folder / name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self):
        self._process.communicate()


def start(*arguments, devices=1, python=(), **variables):
    """Starts train.py."""
    return subprocess.Popen(
        [sys.executable, *python, str(ROOT / "train.py"), *arguments],
        env=environment(devices, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_several(count, *arguments, **options):
    """Starts so many processes of one run."""
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    return [
        start(
            *arguments,
            address,
            f"--num_processes={count}",
            f"--process_id={i}",
            **options,
        )
        for i in range(count)
    ]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_line(process, text):
    """Reads the output of a process up to a line with a text, and returns it all."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} is not in:\n{''.join(lines)}")


def end(process, timeout=300):
    """Waits for a process and returns its exit status and the rest of its output."""
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output
