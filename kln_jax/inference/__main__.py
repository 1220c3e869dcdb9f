"""Command line: python -m kln_jax.inference {predict, export}."""

from __future__ import annotations

import argparse
import io
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kln_jax import _cli
from kln_jax.storage.whole_files import one_line, write_whole

# What is heavy is imported where it is used, so that --help and a wrong argument
# answer at once.
if TYPE_CHECKING:
    from kln_jax.inference.classify import Classified
    from kln_jax.inference.trained_network import TrainedNetwork

_PREDICT = """\
Each image gets a line with its class, the probability of that class and the error of
its reconstruction, which is large for images unlike those of training. The data set
of the run need not be there. Of a folder all .png, .jpg and .jpeg files are taken that
are not hidden, those of its subfolders too; - reads paths from the standard input, one
a line:

    find photos -type f -name '*.png' -newer last_time |
        python -m kln_jax.inference predict --workdir=DIR --json -

Images are treated as own images are in training: square ones of any size are resized,
turned grey or into colour, and given a margin, to what the network was trained on.
A file that cannot be used gets a line on the standard error; the others are
classified all the same, and the exit status is 1.
"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """The command line; an error of the user's ends it in one line.

    Args:
      argv: The arguments; None means those of the process.
      prog: What its messages call the command, if not by its module.

    Returns:
      The exit status: 1 if some image could not be used.
    """
    parser = _cli.Parser(
        prog="python -m kln_jax.inference", description="Uses trained networks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    predict = commands.add_parser(
        "predict",
        prog=prog,
        help="print class, probability and reconstruction error of images",
        description=_PREDICT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export = commands.add_parser(
        "export",
        prog=prog,
        help="write a network as one file, which predicts without this package",
        description="Writes a trained network as one file; the documentation of "
        "kln_jax.inference.export says how to use it.",
    )
    for command in (predict, export):
        command.add_argument(
            "--workdir",
            type=_cli.path,
            metavar="DIR",
            required=True,
            help="directory of the run",
        )
    predict.add_argument(
        "--json", action="store_true", help="a JSON object a line instead of a table"
    )
    predict.add_argument(
        "images",
        nargs="+",
        metavar="IMAGE",
        help="a file, a folder, or - for the standard input",
    )
    export.add_argument(
        "--platforms",
        default="cpu,cuda,tpu",
        help="where it is to run, of cpu, cuda, rocm and tpu; default: %(default)s",
    )
    export.add_argument("out", type=_cli.path, metavar="OUT", help="the file")
    arguments = parser.parse_args(argv)
    if arguments.command == "predict":
        return _predict(predict, arguments)
    return _export(export, arguments)


def _predict(parser: _cli.Parser, arguments: argparse.Namespace) -> int:
    from kln_jax.inference import classify

    trained = _load(parser, arguments.workdir)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A name of a file is bytes, which need not be text.
        sys.stdin.reconfigure(errors="surrogateescape")
    unusable = 0

    def report(path: object, reason: object) -> None:
        nonlocal unusable
        unusable += 1
        print(f"{parser.prog}: error: {path}: {one_line(reason)}", file=sys.stderr)

    with parser.printing():
        paths = classify.find_files(arguments.images, report)
        rows = classify.classify_files(trained, paths, report)
        if arguments.json:
            for row in rows:
                print(json.dumps(_as_json(row)))
        else:
            _print_table(rows, trained.class_names)
    return int(unusable > 0)


def _as_json(row: Classified) -> dict[str, object]:
    return {
        "image": row.image,
        "class": row.class_name,
        "probability": row.probability,
        "reconstruction_error": row.reconstruction_error,
    }


def _print_table(rows: Iterable[Classified], class_names: Iterable[str]) -> None:
    width = max(map(len, ("class", *class_names)))
    print(f"{'class':{width}}  probability  reconstruction error  image")
    for row in rows:
        print(
            f"{row.class_name:{width}}  {row.probability:11.4f}  "
            f"{row.reconstruction_error:20.4f}  {row.image}"
        )


def _export(parser: _cli.Parser, arguments: argparse.Namespace) -> int:
    from kln_jax.inference.export import export

    trained = _load(parser, arguments.workdir)
    try:
        exported = export(trained, platforms=arguments.platforms.split(","))
        write_whole(arguments.out, exported.serialize())
    except (ValueError, OSError) as error:
        parser.stop(error)
    height, width, channels = trained.image_shape
    with parser.printing():
        print(
            f"Wrote {arguments.out}: uint8 images (b, {height}, {width}, {channels}) "
            "of classes"
        )
        for number, name in enumerate(trained.class_names):
            print(f"{number:4}  {name}")
    return 0


def _load(parser: _cli.Parser, workdir: pathlib.Path) -> TrainedNetwork:
    """Reads the network of a run, or ends the process with a line."""
    from kln_jax.inference import trained_network
    from kln_jax.storage.checkpoints import CheckpointError
    from kln_jax.training import parallel

    try:
        parallel.choose_platform("")
        return trained_network.load(workdir)
    except (ValueError, OSError, CheckpointError) as error:
        parser.stop(error)


if __name__ == "__main__":
    _cli.set_up()
    sys.exit(main())
