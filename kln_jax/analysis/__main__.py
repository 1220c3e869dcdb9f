"""Command line: python -m kln_jax.analysis figures WORKDIR."""

import argparse
import pathlib
import sys

from kln_jax import training
from kln_jax.analysis import figures


def main() -> None:
    """Writes the figures of a run into its working directory."""
    parser = argparse.ArgumentParser(prog="python -m kln_jax.analysis")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("figures", help="draw what a run learned")
    command.add_argument("workdir", type=pathlib.Path, help="its working directory")
    workdir = parser.parse_args().workdir
    try:
        run = training.load_run(workdir)
    except (ValueError, OSError) as error:
        sys.exit(f"kln_jax.analysis: error: {error}")
    path = workdir / "overview.png"
    figures.overview(run).savefig(path)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    main()
