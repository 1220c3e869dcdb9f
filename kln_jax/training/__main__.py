"""Trains KLN: kln-train --config=digits [--workdir=DIR].

The same command is python -m kln_jax.training and, in a clone, python train.py.
"""

import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

if sys.stderr is None:  # Closed. absl's logging keeps what it finds when imported.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it stays open

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser


def _config_first(argv: Sequence[str]) -> list[str]:
    """Returns the arguments with --config in front, for its keys follow from it."""
    first, rest = [], list(argv[1:])
    for i, argument in enumerate(rest):
        if re.fullmatch(r"--?config(=.*)?", argument, re.DOTALL):
            size = 1 if "=" in argument else 2
            first = rest[i : i + size]
            del rest[i : i + size]
            break
    return [*argv[:1], *first, *rest]


_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Name or file of the configuration, with its variant after a colon, such as "
    "digits:semi or configs/digits.py:semi. --config.KEY=VALUE sets a single key.",
    sys_argv=_config_first(sys.argv),
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Where everything of the run goes, and from where it goes on if interrupted. "
    "Default: a fresh directory below runs/.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address",
    None,
    "HOST:PORT of process 0. This and the next two are for several processes that do "
    "not find each other, as those of SLURM and of a TPU slice do.",
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "The number of this one.")
flags.mark_flag_as_required("config")


class _ConfigParser(ConfigFileFlagParser):  # type: ignore[misc]
    """Also takes the name of a configuration that comes with the package."""

    def parse(self, path: str) -> ConfigDict:
        """Returns what the file's ``get_config`` returns.

        Args:
          path: The file or the name, with the variant after a colon.
        """
        name, *variant = path.split(":", 1)
        if re.fullmatch(r"\w+", name) and not pathlib.Path(name).is_file():
            from kln_jax.training import variants

            path = ":".join([str(variants.find(name)), *variant])
        return super().parse(path)


flags.FLAGS["config"].parser = _ConfigParser("config")

# Where JAX keeps compiled programs for the next start, unless its own variable
# JAX_COMPILATION_CACHE_DIR names a directory, or "" for none.
_PROGRAMS = "~/.cache/kln_jax/xla"


def main() -> None:
    """Runs training; an error of the user's ends it in one line."""
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        # Or --help would not list it if another file is the main one.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(_train, flags_parser=_parse_flags)


def _train(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        _stop(f"Unexpected arguments: {' '.join(argv[1:])}")
    if "variant" in config_flags.get_override_values(flags.FLAGS["config"]):
        _stop(
            "--config.variant names a run only. Put the variant after a colon, as in "
            "--config=digits:semi"
        )
    # After the flags, so that --help answers at once.
    from kln_jax import _cli, datasets
    from kln_jax.storage import checkpoints
    from kln_jax.training import experiment, interruption, loop, parallel
    from kln_jax.training.configuration import Config

    _cli.set_up(logging.INFO)
    logging.getLogger("kln_jax").addFilter(parallel.is_told_by_this_process)
    try:
        config = Config.from_mapping(_CONFIG.value)
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            parallel.cache_compilations(_PROGRAMS)
        parallel.join_processes(
            _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
        )
        with interruption.Interruption() as stop:
            result = experiment.train_and_evaluate(
                config, _WORKDIR.value, interruption=stop
            )
        if result:
            print(experiment.summary(result))
        return
    except interruption.Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(interruption.EXIT_CODE)
    except parallel.LostProcessError as error:
        _say(error)
        parallel.leave(interruption.EXIT_CODE)
    except datasets.DatasetError as error:
        # A list of files keeps its lines.
        print(f"{_program()}: error: {error}", file=sys.stderr)
    except (
        ValueError,
        OSError,
        checkpoints.CheckpointError,
        loop.DivergenceError,
    ) as error:
        absl_logging.debug("Traceback:", exc_info=True)  # With --verbosity=1.
        _say(error)
    except Exception as error:
        reason = str(error).split("\n", 1)[0]  # Lists of all there is may follow.
        if reason.startswith("RESOURCE_EXHAUSTED"):  # So JAX says it of memory.
            absl_logging.debug("Traceback:", exc_info=True)
            size, width = _CONFIG.value.batch_size, _CONFIG.value.width
            _say(
                f"batch_size={size} and width={width} take more memory than there is; "
                f"lower one of them ({reason})"
            )
        else:
            traceback.print_exc()
    parallel.leave(1)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        remaining = flags.FLAGS(_config_first(argv))
    except (AttributeError, KeyError) as error:
        _stop(_unknown_key(error, argv) or _last_line(error))
    except (flags.Error, TypeError, ValueError, OSError) as error:
        # A wrong value, or a file that is missing or raises: the last line says why.
        _stop(_last_line(error))
    except Exception as error:  # Whatever else the code of the file raises.
        places = [
            f"{frame.f_code.co_filename}, line {line}: "
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals["__name__"] == "config_config"  # So it is imported.
        ]
        # A syntax error, which has no place there, names its own.
        _stop(f"{''.join(places[-1:])}{type(error).__name__}: {error}")
    if flags.FLAGS["verbosity"].using_default_value:
        # Of the libraries' lines only those that warn.
        absl_logging.set_verbosity(absl_logging.WARNING)
    return remaining


def _unknown_key(error: AttributeError | KeyError, argv: Sequence[str]) -> str:
    """Returns what to say of a key that does not exist; "" if all do."""
    from kln_jax.training.configuration import check_names

    keys = [re.match(r"--?(?:no)?config\.([^=]+)", argument) for argument in argv]
    # Of a key in the file ml_collections raises one that may hold a KeyError.
    cause = error.args[0] if isinstance(error.args[0], KeyError) else error
    if isinstance(cause, KeyError):
        keys.append(re.match(r"""(?:Key "|')(\w+)["']""", str(cause.args[0])))
    try:
        check_names(key[1] for key in keys if key)
    except ValueError as unknown:
        return str(unknown)
    return ""


def _last_line(error: Exception) -> str:
    # Not splitlines, to which a carriage return in a value is a line's end.
    return str(error).strip().split("\n")[-1]


def _stop(error: object) -> NoReturn:
    _say(error)
    sys.exit(1)


def _say(error: object) -> None:
    print(f"{_program()}: error: {' '.join(str(error).split())}", file=sys.stderr)


def _program() -> str:
    name = pathlib.Path(sys.argv[0]).name
    return "python -m kln_jax.training" if name == "__main__.py" else name


if __name__ == "__main__":
    main()
