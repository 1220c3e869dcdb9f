"""Real runs of train.py in processes of their own, quick to compile."""

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
