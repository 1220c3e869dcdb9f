"""Classifies images: python -m kln_jax.inference.predict --workdir=DIR IMAGE...

Each image gets a line with its class, the probability of that class and the error of
its reconstruction, which is large for images unlike those of training. The data set
of the run need not be there. Of a folder all .png, .jpg and .jpeg files are taken that
are not hidden, those of its subfolders too; `-` reads paths from the standard input,
one a line:

    find photos -type f -name '*.png' -newer last_time |
        python -m kln_jax.inference.predict --workdir=DIR --json -

Images are treated as `kln_jax.datasets` treats own images: square ones of any size
are resized, turned grey or into colour, and given a margin, to what the network was
trained on.
A file that cannot be used gets a line on the standard error; the others are
classified all the same, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kln_jax.storage import whole_files

if TYPE_CHECKING:
    from kln_jax.inference.trained_network import Trained

# How many images are read before they are classified.
_CHUNK = 100


class Parser(argparse.ArgumentParser):
    """A parser of a command on a trained network, whose errors are one line.

    Args:
      name: Name of the module that is run.
      usage: Its arguments after ``--workdir=DIR``.
      description: What it does.
    """

    def __init__(self, name: str, usage: str, description: str) -> None:
        super().__init__(
            prog=name,
            usage=f"python -m {name} --workdir=DIR [--best] {usage}",
            description=description,
            allow_abbrev=False,
        )
        self.add_argument(
            "--workdir", metavar="DIR", required=True, help="directory of the run"
        )
        self.add_argument(
            "--best",
            action="store_true",
            help="take the state with the smallest validation error, of a run with "
            "keep_best, instead of the newest",
        )

    def error(self, message: str) -> NoReturn:
        """Ends the process with a line and status 2.

        Args:
          message: What is wrong with the arguments.

        Raises:
          SystemExit: Always.
        """
        self.exit(2, f"{self.prog}: error: {whole_files.one_line(message)}\n")

    def stop(self, error: Exception) -> NoReturn:
        """Ends the process with a line and status 1.

        Args:
          error: What went wrong, whose text becomes the line.

        Raises:
          SystemExit: Always.
        """
        self.exit(1, f"{self.prog}: error: {whole_files.one_line(error)}\n")

    def load(self, arguments: argparse.Namespace) -> Trained:
        """Reads the network, or ends the process with a line.

        Args:
          arguments: The parsed ones, with ``workdir`` and ``best``.

        Returns:
          The trained network.

        Raises:
          SystemExit: If there is none, or no device, or it cannot be read.
        """
        # Only here, so that --help and a wrong argument answer at once.
        from kln_jax.inference import trained_network
        from kln_jax.storage import checkpoints
        from kln_jax.training import parallel

        try:
            parallel.choose_platform("")
            return trained_network.load(arguments.workdir, best=arguments.best)
        except (ValueError, OSError, checkpoints.CheckpointError) as error:
            self.stop(error)

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Ends the process with a line if what is printed inside cannot be written.

        Raises:
          SystemExit: If so, but not where whoever read the output has had enough.
        """
        if not sys.stdout:
            self.stop(OSError("The standard output is closed."))
        if isinstance(sys.stdout, io.TextIOWrapper):
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


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Keeps the bytes of a file's name, and escapes what the encoding lacks."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


_ESCAPE = "kln_jax.escape"
codecs.register_error(_ESCAPE, _escape)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
      argv: The arguments; None means those of the process.

    Returns:
      The exit status: 1 if some file could not be used.
    """
    parser = Parser(
        "kln_jax.inference.predict",
        "[--json] IMAGE...",
        "Prints class, probability and reconstruction error of images.",
    )
    parser.add_argument(
        "--json", action="store_true", help="a JSON object a line instead of a table"
    )
    parser.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="a file; a folder, for all .png, .jpg and .jpeg files in it; or - for "
        "the standard input, with a path on each line",
    )
    arguments = parser.parse_args(argv)
    trained = parser.load(arguments)

    if isinstance(sys.stdin, io.TextIOWrapper):
        # A name of a file is bytes, which need not be text.
        sys.stdin.reconfigure(errors="surrogateescape")
    unusable = 0

    def report(path: object, reason: object) -> None:
        nonlocal unusable
        unusable += 1
        line = f"{parser.prog}: error: {path}: {whole_files.one_line(reason)}"
        print(line, file=sys.stderr)

    with parser.printing():
        paths = _files(arguments.images, report)
        _print(_classified(trained, paths, report), trained.class_names, arguments.json)
    return int(unusable > 0)


def _print(
    rows: Iterable[dict[str, Any]], class_names: Iterable[str], as_json: bool
) -> None:
    width = max(map(len, ("class", *class_names)))
    if not as_json:
        print(f"{'class':{width}}  probability  reconstruction error  image")
    for row in rows:
        if as_json:
            print(json.dumps(row))
        else:
            print(
                f"{row['class']:{width}}  {row['probability']:11.4f}  "
                f"{row['reconstruction_error']:20.4f}  {row['image']}"
            )


def _files(
    arguments: Iterable[str], report: Callable[[object, object], None]
) -> Iterator[pathlib.Path]:
    """Yields the files that the arguments name."""
    from kln_jax import datasets

    for argument in arguments:
        if argument == "-" and not sys.stdin:
            report(argument, "the standard input is closed")
            continue
        if argument == "-":
            lines = (line.rstrip("\n") for line in sys.stdin)
            yield from _files((line for line in lines if line not in ("", "-")), report)
            continue
        path = pathlib.Path(argument)
        if not path.is_dir():
            yield path
            continue
        inside, _ = datasets.image_files(path, "**/*")
        if not inside:
            report(path, "holds no .png, .jpg or .jpeg file")
        yield from inside


def _classified(
    trained: Trained,
    paths: Iterator[pathlib.Path],
    report: Callable[[object, object], None],
) -> Iterator[dict[str, Any]]:
    """Yields what is printed of each image that can be used."""
    from kln_jax import datasets
    from kln_jax.inference import trained_network

    margin = datasets.margin(trained.config.dataset, trained.image_shape[0])
    while chunk := list(itertools.islice(paths, _CHUNK)):
        images, usable = [], []
        for path in chunk:
            try:
                images.append(
                    datasets.read_image(path, trained.image_shape, margin=margin)
                )
            # What a damaged file raises depends on its format and damage.
            except Exception as error:
                report(path, getattr(error, "strerror", None) or error)
            else:
                usable.append(path)
        if not images:
            continue
        prediction = trained_network.predict_in_batches(
            trained.model,
            trained.state,
            np.stack(images),
            reconstruction_reduction=trained.config.reconstruction_reduction,
        )
        for path, probabilities, squares in zip(
            usable,
            prediction.probabilities,
            prediction.reconstruction_error,
            strict=True,
        ):
            if not np.isfinite([*probabilities, squares]).all():
                report(path, "what the network says is not finite: training diverged")
                continue
            best = int(np.argmax(probabilities))
            yield {
                "image": str(path),
                "class": trained.class_names[best],
                "probability": float(probabilities[best]),
                "reconstruction_error": float(squares),
            }


if __name__ == "__main__":
    sys.exit(main())
