"""Command line: python -m kln_jax.analysis COMMAND; --help lists the commands."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from kln_jax import _cli
from kln_jax.analysis import figures, learned, packed, page, protocol, report, runs
from kln_jax.analysis.suites import SUITES
from kln_jax.storage.checkpoints import CheckpointError
from kln_jax.training import parallel
from kln_jax.training.interruption import EXIT_CODE, Interrupted, Interruption


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> None:
    """Runs a command; an error of the user's ends it in one line.

    Args:
      argv: The arguments; None means those of the process.
      prog: What the messages of ``report`` call it, if not by its module.
    """
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    try:
        if arguments.function not in (_run, _compare):  # Its configurations choose.
            parallel.choose_platform("")
        arguments.function(arguments)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except (ValueError, OSError, CheckpointError) as error:
        parser.stop(error)


def _parser(prog: str | None) -> _cli.Parser:
    parser = _cli.Parser(
        prog="python -m kln_jax.analysis", description="Makes and reports runs."
    )
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser(
        "run",
        help="make the runs of a table or figure, or go on with them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:20}{suite.title}" for name, suite in SUITES.items()),
    )
    command.add_argument("suite", choices=SUITES, metavar="SUITE", help="see below")
    command.add_argument(
        "--out", type=_cli.path, required=True, help="where all runs lie"
    )
    command.add_argument("--data_dir", default="", help="where prepared data sets lie")
    command.add_argument(
        "--datasets", nargs="+", default=(), help="configurations, not the suite's"
    )
    command.add_argument(
        "--methods",
        nargs="+",
        default=(),
        help="some rows alone: names, or patterns like 'KLN*'",
    )
    command.add_argument("--seeds", type=_positive, help="how many, not the suite's")
    command.add_argument(
        "--epochs",
        type=_positive,
        help="how many; milestones move in proportion, and the report says so",
    )
    command.add_argument(
        "--allow_partial_data",
        action="store_true",
        help="take data sets of other sizes; the report says so",
    )
    command.set_defaults(function=_run)

    command = commands.add_parser(
        "compare",
        help="choose settings on validation images, then test with several seeds",
    )
    command.add_argument("config", metavar="CONFIG", help="a file of configs/: mnist")
    command.add_argument(
        "--out", type=_cli.path, required=True, help="where all runs lie"
    )
    command.add_argument("--data_dir", default="", help="where prepared data sets lie")
    command.add_argument("--epochs", type=_positive, required=True)
    command.add_argument("--width", type=float, default=1.0, help="of the network")
    command.add_argument("--seeds", type=_positive, default=5)
    command.add_argument(
        "--methods", nargs="+", default=(), help="names, or patterns like 'KLN*'"
    )
    command.set_defaults(function=_compare)

    command = commands.add_parser("pack", help="add finished runs to packed ones")
    command.add_argument("out", type=_cli.path, help="where the runs lie")
    command.add_argument("results", type=_cli.path, help="where the packed ones lie")
    command.set_defaults(function=_pack)

    command = commands.add_parser(
        "report", prog=prog, help="write the tables and figures of runs"
    )
    command.add_argument("out", type=_cli.path, help="where all runs lie, or packed")
    command.set_defaults(function=_report)

    for name, function, text in (
        ("figures", _figures, "draw what a run learned: overview.png"),
        ("page", _page, "show a run on one page: page.html"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("workdir", type=_cli.path, help="its working directory")
        command.set_defaults(function=function)
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def _run(arguments: argparse.Namespace) -> None:
    with Interruption() as stop:
        lines = runs.make(
            SUITES[arguments.suite],
            arguments.out,
            data_dir=arguments.data_dir,
            config_names=arguments.datasets,
            methods=arguments.methods,
            seeds=arguments.seeds,
            epochs=arguments.epochs,
            allow_partial_data=arguments.allow_partial_data,
            interruption=stop,
        )
        _print_each(lines)


def _compare(arguments: argparse.Namespace) -> None:
    setup = protocol.Setup(arguments.config, arguments.epochs, arguments.width)
    with Interruption() as stop:
        lines = protocol.compare(
            setup,
            arguments.out,
            data_dir=arguments.data_dir,
            seeds=arguments.seeds,
            methods=arguments.methods,
            interruption=stop,
        )
        _print_each(lines)


def _pack(arguments: argparse.Namespace) -> None:
    _print_each(packed.pack(arguments.out, arguments.results))


def _print_each(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _report(arguments: argparse.Namespace) -> None:
    for path in report.write(arguments.out):
        print(f"Wrote {path}.")


def _figures(arguments: argparse.Namespace) -> None:
    path = arguments.workdir / "overview.png"
    found = learned.look_at(*learned.load_run(arguments.workdir))
    figures.save(figures.overview(found), path)
    print(f"Wrote {path}.")


def _page(arguments: argparse.Namespace) -> None:
    print(f"Wrote {page.write(arguments.workdir)}.")


if __name__ == "__main__":
    _cli.set_up()
    main()
