"""Command line: python -m kln_jax.analysis {figures, view} WORKDIR."""

import argparse
import pathlib
import sys

from kln_jax import training
from kln_jax.analysis import figures, view
from kln_jax.checkpoint import CheckpointError


def main() -> None:
    """Writes what a run learned into its working directory."""
    parser = argparse.ArgumentParser(prog="python -m kln_jax.analysis")
    commands = parser.add_subparsers(required=True)
    for name, function, text in (
        ("figures", _figures, "draw what a run learned: overview.png"),
        ("view", view.write, "show a run on one page: view.html"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("workdir", type=pathlib.Path, help="its working directory")
        command.set_defaults(function=function)
    arguments = parser.parse_args()
    try:
        path = arguments.function(arguments.workdir)
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"kln_jax.analysis: error: {error}")
    print(f"Wrote {path}.")


def _figures(workdir: pathlib.Path) -> pathlib.Path:
    path = workdir / "overview.png"
    figures.overview(training.load_run(workdir)).savefig(path)
    return path


if __name__ == "__main__":
    main()
