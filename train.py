"""Trains KLN: python train.py --config=configs/digits.py [--workdir=DIR]."""

import logging
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from configs import default

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "File of the configuration, with its variant after a colon, such as "
    "configs/digits.py:semi. Single keys are set by --config.KEY=VALUE.",
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


def main(argv: Sequence[str]) -> None:
    """Runs training; an error of the user's ends it in one line."""
    if len(argv) > 1:
        _stop(f"Unexpected arguments: {' '.join(argv[1:])}")
    if "variant" in config_flags.get_override_values(flags.FLAGS["config"]):
        _stop(
            "--config.variant names a run only. Put the variant after a colon, as in "
            "--config=configs/digits.py:semi"
        )
    # After the flags, so that --help and a misspelt key answer at once.
    from kln_jax import datasets
    from kln_jax.storage import checkpoints
    from kln_jax.training import experiment, interruption, parallel

    logger = logging.getLogger("kln_jax")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        parallel.join_processes(
            _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
        )
        with interruption.Interruption() as stop:
            result = experiment.train_and_evaluate(
                _CONFIG.value, _WORKDIR.value, interruption=stop
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
        print(f"train.py: error: {error}", file=sys.stderr)
    except (
        ValueError,
        OSError,
        checkpoints.CheckpointError,
        experiment.DivergenceError,
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
        remaining = flags.FLAGS(argv)
        _check_keys(_CONFIG.value)
    except AttributeError as error:
        cause = error.args[0]
        # That of ml_collections for a misspelt key; any other is the file's own.
        if not isinstance(cause, KeyError):
            _stop(cause)
        # In a file it lists all other keys, with their values.
        pattern = r'^Key "(\w+)" does not .* present: .*?}"'
        text = re.sub(pattern, r"'\1'", str(cause.args[0]))
        _stop(f"unknown configuration key {text}")
    except (flags.Error, KeyError, TypeError, ValueError, OSError) as error:
        # A wrong value, or a file that is missing or raises: the last line says why.
        _stop(str(error).strip().splitlines()[-1])
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


def _check_keys(config: ConfigDict) -> None:
    """Ends the process if a file has other keys than the default, or other types."""
    known = default.get_config()
    for name in sorted(set(config) - set(known)):
        _stop(f"unknown configuration key {name!r}")
    for name, like in known.items():
        if name not in config:
            _stop(f"configuration key {name!r} is missing; its default is {like!r}")
        value, kind = config[name], type(like)
        also = {float: int, tuple: list}.get(kind, kind)
        is_no_number = isinstance(value, bool) and kind is not bool
        if is_no_number or not isinstance(value, (kind, also)):
            _stop(
                f"{name}={value!r} must be of type {kind.__name__}, such as its "
                f"default {like!r}"
            )


def _stop(error: object) -> NoReturn:
    _say(error)
    sys.exit(1)


def _say(error: object) -> None:
    print(f"train.py: error: {' '.join(str(error).split())}", file=sys.stderr)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
