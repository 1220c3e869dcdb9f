"""The commands that an installation brings: kln-train, kln-predict and the others.

What a command needs is imported when it runs, so that a package that is missing is
reported in one line.
"""

import contextlib
import sys
from collections.abc import Iterator

from kln_jax import _cli


def train() -> None:
    """Runs ``kln-train``."""
    with _one_line("kln-train"):
        from kln_jax.training.__main__ import main
    main()


def predict() -> int:
    """Runs ``kln-predict`` and returns its exit status."""
    return _inference("predict")


def export() -> int:
    """Runs ``kln-export`` and returns its exit status."""
    return _inference("export")


def report() -> None:
    """Runs ``kln-report``."""
    _cli.set_up()
    with _one_line("kln-report"):
        from kln_jax.analysis.__main__ import main
    main(["report", *sys.argv[1:]], prog="kln-report")


def _inference(command: str) -> int:
    _cli.set_up()
    prog = f"kln-{command}"
    with _one_line(prog):
        from kln_jax.inference.__main__ import main
    return main([command, *sys.argv[1:]], prog=prog)


@contextlib.contextmanager
def _one_line(prog: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(f"{prog}: error: {error}")
