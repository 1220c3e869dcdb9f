"""What the commands of this package share: their errors, their printing, their log."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from kln_jax.storage.whole_files import one_line


class Parser(argparse.ArgumentParser):
    """A parser of a command, whose errors are one line.

    Parsers of subcommands, which ``add_subparsers`` makes, are of this class too.

    Args:
      **options: As of `argparse.ArgumentParser`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with a line and status 2.

        Args:
          message: What is wrong with the arguments.

        Raises:
          SystemExit: Always.
        """
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")

    def stop(self, error: Exception) -> NoReturn:
        """Ends the process with a line and status 1.

        Args:
          error: What went wrong, whose text becomes the line.

        Raises:
          SystemExit: Always.
        """
        self.exit(1, f"{self.prog}: error: {one_line(error)}\n")

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Makes the standard output take any text, and names what cannot be written.

        Inside, the bytes of a file's name are printed as they are, and characters that
        the encoding lacks are escaped.

        Raises:
          SystemExit: If the output cannot be written. Whoever reads it may stop: then
            the block ends early, without an error.
        """
        if not sys.stdout:
            self.stop(OSError("The standard output is closed."))
        if isinstance(sys.stdout, io.TextIOWrapper):
            codecs.register_error(_ESCAPE, _escape)
            sys.stdout.reconfigure(errors=_ESCAPE)
        try:
            yield
            sys.stdout.flush()
        except OSError as error:
            # Or Python's exit would write what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                place = error.filename or "standard input or output"
                self.stop(OSError(f"{place}: {error.strerror}"))


def path(text: str) -> pathlib.Path:
    """The type of an argument that is a path: ``~`` in it is the home directory.

    A shell leaves it as it is after an equals sign, as in ``--workdir=~/runs/a``.

    Args:
      text: The argument.

    Returns:
      The path.

    Raises:
      ArgumentTypeError: If there is no such home directory.
    """
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: there is no such home directory; give a path without ~"
        ) from error


def set_up(level: int = logging.WARNING) -> None:
    """Sets up standard error and log of a process that is a command.

    Where the standard error is closed, what is written there goes nowhere. Else a file
    that is opened later would get its descriptor, and with it what libraries write.

    Args:
      level: The lowest level of the package's log that is written.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it stays open
    logger = logging.getLogger("kln_jax")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(level)
    logger.propagate = False  # A library may have set up logging of its own.


_ESCAPE = "kln_jax.escape"


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Keeps a byte of a file's name, or escapes a character that the encoding lacks."""
    if isinstance(error, UnicodeEncodeError):
        error.end = error.start + 1  # Those that follow may be of the other kind.
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)
