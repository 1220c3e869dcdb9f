"""Command line: python -m kln_jax.datasets prepare NAME --data_dir=DIR."""

import sys
from collections.abc import Sequence

from kln_jax import _cli
from kln_jax.datasets import DatasetError, prepare
from kln_jax.datasets._known import KNOWN


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; an error of the user's ends it in one line.

    Args:
      argv: The arguments; None means those of the process.

    Returns:
      The exit status.
    """
    parser = _cli.Parser(
        prog="python -m kln_jax.datasets", description="Prepares data sets."
    )
    command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "prepare",
        help="download a data set, or convert it from TFRecord, for reading offline",
    )
    command.add_argument("name", choices=tuple(KNOWN), metavar="NAME", help="data set")
    command.add_argument(
        "--data_dir",
        metavar="DIR",
        help="where to; default: TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    arguments = parser.parse_args(argv)
    try:
        done = prepare(arguments.name, data_dir=arguments.data_dir)
    except DatasetError as error:
        command.stop(error)
    with command.printing():
        print(done)
    return 0


if __name__ == "__main__":
    _cli.set_up()
    sys.exit(main())
