"""Signals, in processes of their own."""

import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from kln_jax.training.interruption import Interruption

PREAMBLE = """
import os, signal, sys, threading, time
from interruption import Interruption
def send(number):
    os.kill(os.getpid(), number)
"""


def _run(program):
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        # The module needs nothing of the package, whose import takes a second.
        cwd=pathlib.Path(__file__).parents[2] / "kln_jax" / "training",
    )


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_noticed_and_ends_nothing_by_itself(number):
    done = _run(
        f"""
        with Interruption() as stop:
            send(signal.{number})
            while stop.received is None:
                time.sleep(0.01)
            print(stop.received.name)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{number}\n", "")


def test_a_block_that_may_be_left_is_left_at_once():
    """Although the main thread is in compiled code and runs no Python."""
    done = _run(
        """
        import hashlib
        with Interruption() as stop:
            with stop.may_leave(lambda: "all is saved."):
                threading.Timer(0.2, send, [signal.SIGTERM]).start()
                hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
                print("not reached")
        """
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "SIGTERM: all is saved.\n"


def test_a_signal_from_before_the_block_ends_it_at_its_start():
    done = _run(
        """
        with Interruption() as stop:
            send(signal.SIGTERM)
            while stop.received is None:
                time.sleep(0.01)
            time.sleep(0.1)
            with stop.may_leave(lambda: "saved."):
                print("not reached")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "SIGTERM: saved.\n")


def test_what_fails_on_leaving_is_said_and_has_another_code():
    done = _run(
        """
        def leave():
            raise OSError("the disk is full")
        with Interruption() as stop, stop.may_leave(leave):
            send(signal.SIGTERM)
            time.sleep(30)
        """
    )
    assert done.returncode == 1
    assert done.stderr == "SIGTERM: the disk is full\n"


@pytest.mark.parametrize(("pause", "returncode"), [(1.5, 130), (0.1, 75)])
def test_a_second_signal_ends_at_once_but_a_repeat_is_the_first(pause, returncode):
    # As `timeout` sends it, to a process and to its group.
    done = _run(
        f"""
        with Interruption() as stop, stop.may_leave(lambda: time.sleep(3) or "saved"):
            for number in (signal.SIGTERM, signal.SIGINT):
                send(number)
                time.sleep({pause})
            time.sleep(30)
        """
    )
    assert done.returncode == returncode


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP under nohup."""
    done = _run(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interruption() as stop:
            send(signal.SIGHUP)
            time.sleep(0.3)
            print(stop.received)
        """
    )
    assert (done.returncode, done.stdout) == (0, "None\n")


def test_afterwards_signals_are_what_they_were():
    before = signal.default_int_handler
    # In the background of a shell Python starts with the signal ignored.
    at_first = signal.signal(signal.SIGINT, before)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, at_first)
