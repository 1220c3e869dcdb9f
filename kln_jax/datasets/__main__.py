"""Command line: python -m kln_jax.datasets prepare NAME --data_dir=DIR."""

import argparse
import sys
from collections.abc import Sequence

from kln_jax.datasets import DatasetError, prepare
from kln_jax.datasets._known import KNOWN


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; an error of the user's ends it in one line.

    Args:
      argv: The arguments; None means those of the process.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kln_jax.datasets", description="Prepares data sets."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser(
        "prepare",
        help="download a data set, or convert it from TFRecord, for reading offline",
    )
    sub.add_argument("name", choices=tuple(KNOWN), metavar="NAME", help="data set")
    sub.add_argument(
        "--data_dir",
        help="where to; default: TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    arguments = parser.parse_args(argv)
    try:
        print(prepare(arguments.name, data_dir=arguments.data_dir))
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
