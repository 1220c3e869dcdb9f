"""Errors and printing of commands, in processes of their own."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = """
import sys
from kln_jax import _cli
_cli.set_up()
parser = _cli.Parser(prog="command")
parser.add_argument("--number", type=int)
command = parser.add_subparsers().add_parser("print")
command.add_argument("text")
arguments = parser.parse_args()
with command.printing():
    print(arguments.text)
"""


def _run(*arguments, redirection="", stdout=subprocess.PIPE, code=COMMAND, **variables):
    """Runs a command that prints its argument, in a shell that redirects."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *command],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nummer=1"], "command: error: unrecognized arguments: --nummer=1"),
        (["--num=1"], "command: error: unrecognized arguments: --num=1"),
        (["--number=a\nb"], "command: error: argument --number: invalid int value: "),
        (["print"], "command print: error: the following arguments are required: text"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(arguments, message):
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(message.encode())
    assert done.stderr.count(b"\n") == 1


def test_an_error_is_one_line_and_status_1():
    done = _run(
        code="""
from kln_jax import _cli
_cli.Parser(prog="command").stop(ValueError("of two\\n  lines"))
"""
    )
    assert (done.returncode, done.stderr) == (1, b"command: error: of two lines\n")


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        (">/dev/full", b"standard input or output: No space left on device"),
        (">&-", b"The standard output is closed."),
    ],
)
def test_output_that_cannot_be_written_is_one_line(redirection, message):
    done = _run("print", "text", redirection=redirection)
    assert done.returncode == 1
    assert done.stderr == b"command print: error: " + message + b"\n"


def test_a_closed_standard_error_stays_closed_for_what_is_opened_later(tmp_path):
    done = _run(
        str(tmp_path / "file"),
        redirection="2>&-",
        code="""
import logging, os, sys
from kln_jax import _cli
_cli.set_up()
with open(sys.argv[1], "w") as file:
    os.write(2, b"of a library")
    print("an error", file=sys.stderr)
    logging.getLogger("kln_jax").warning("a warning")
print("done")
""",
    )
    assert (done.returncode, done.stdout) == (0, b"done\n")
    assert (tmp_path / "file").read_bytes() == b""


def test_whoever_reads_the_output_may_stop():
    # As in `command print text | head -0`.
    read, write = os.pipe()
    os.close(read)
    done = _run("print", "text", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_an_encoding_lacks_is_escaped_but_no_byte_of_a_file_name():
    name = os.fsdecode("ö".encode() + b"\xff")
    done = _run("print", name, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert done.stdout == b"\\xf6\xff\n", done.stderr
