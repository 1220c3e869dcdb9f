"""The working directory of a run: which run it holds, and who may write there."""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from kln_jax.storage import whole_files

_LOCK = ".lock"


def make_fresh(name: str) -> pathlib.Path:
    """Makes a new directory below ``runs/``, with a name and the time in it.

    Args:
      name: What the directory's name begins with.

    Returns:
      The directory.
    """
    first = pathlib.Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError  # There is always a next number.


@contextlib.contextmanager
def held(directory: pathlib.Path, *, is_fresh: bool = False) -> Iterator[None]:
    """Keeps a working directory from other processes, where the file system can.

    The directory is made if it is absent. One that was made for this run is removed
    again if nothing was written.

    Args:
      directory: The working directory.
      is_fresh: Whether it is of `make_fresh`.

    Raises:
      ValueError: If it is a file, or another process holds it.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--workdir={directory} is a file. Choose a directory.")
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    if is_fresh:
        made = [directory, directory.parent]
    directory.mkdir(parents=True, exist_ok=True)
    lock = directory / _LOCK
    with lock.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"Another process trains in {directory}. Wait for its end, or choose "
                "another --workdir."
            ) from None
        except (ImportError, OSError):
            pass  # Neither Windows nor every file system has such locks.
        try:
            yield
        finally:
            if made and os.listdir(directory) == [_LOCK]:
                lock.unlink()
                with contextlib.suppress(OSError):  # Another run may lie beside it.
                    for path in made:
                        path.rmdir()


def check_config(
    directory: pathlib.Path, config: Mapping[str, Any], *, may_differ: Iterable[str]
) -> None:
    """Refuses a working directory that holds the run of another configuration.

    Args:
      directory: The working directory.
      config: The configuration of the run, as JSON has it.
      may_differ: Keys whose values a run may change when it is resumed.

    Raises:
      ValueError: If it holds another run or a damaged one.
    """
    path = directory / "config.json"
    if not path.exists():
        if (directory / "result.json").exists() or (directory / "checkpoints").exists():
            raise ValueError(
                f"{directory} holds a run without config.json, which says what it is. "
                "Choose another --workdir."
            )
        return
    skipped = set(may_differ)
    earlier, present = (
        {name: value for name, value in values.items() if name not in skipped}
        for values in (whole_files.read_json(path), config)
    )
    if different := whole_files.differences(earlier, present):
        raise ValueError(
            f"{directory} holds a run of another configuration: {different}. Choose "
            "another --workdir, or the same values."
        )


def reads_elsewhere(directory: pathlib.Path, data_dir: str) -> bool:
    """Whether a run had its data from another place than it is to have now.

    Args:
      directory: Its working directory.
      data_dir: The place now.
    """
    path = directory / "config.json"
    return path.exists() and whole_files.read_json(path).get("data_dir") != data_dir


def check_data(directory: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Refuses to resume a run on other data than it began with.

    Args:
      directory: The working directory.
      about: What ``data.json`` says of the data set.

    Raises:
      ValueError: If its data were others.
    """
    path = directory / "data.json"
    if not path.exists():
        return
    earlier = whole_files.read_json(path)
    # Earlier versions of kln_jax wrote less of it, and later ones may write more.
    known = earlier.keys() & about.keys()
    if different := whole_files.differences(
        {name: earlier[name] for name in known}, {name: about[name] for name in known}
    ):
        raise ValueError(
            f"{directory} holds a run on other data: {different}. Choose another "
            "--workdir, or put the same data back."
        )


def prepare(
    directory: pathlib.Path,
    config: Mapping[str, Any],
    about: Mapping[str, Any],
    labelled: np.ndarray,
) -> None:
    """Writes all that is known of a run before training.

    Args:
      directory: The working directory, held.
      config: The configuration of the run, as JSON has it.
      about: What ``data.json`` says of its data set.
      labelled: Rows of the labelled images.
    """
    whole_files.write_json(directory / "config.json", config)
    whole_files.write_json(directory / "data.json", about)
    path = directory / "labelled.npy"
    if not path.exists():
        content = io.BytesIO()
        np.save(content, labelled)
        whole_files.write_whole(path, content.getvalue())


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Reads the configuration of a run, as JSON has it.

    Args:
      directory: Its working directory.

    Raises:
      ValueError: If there is none, or it is damaged.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no run: config.json is missing.")
    return whole_files.read_json(path)


def stored_rows(directory: pathlib.Path, count: int, size: int) -> np.ndarray | None:
    """Reads the rows of the labelled images of an earlier start.

    Args:
      directory: The working directory.
      count: How many there must be.
      size: Number of training images, of which they are rows.

    Returns:
      The rows, shape ``(count,)``, int32; None if there was no earlier start.

    Raises:
      ValueError: If the file is damaged, or its rows do not fit.
    """
    path = directory / "labelled.npy"
    if not path.exists():
        return None
    fix = "Remove the file to draw them anew, or choose another --workdir."
    try:
        with path.open("rb") as file:
            rows: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    # What a damaged file raises depends on its damage.
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}). {fix}") from error
    if rows.dtype.kind not in "iu" or rows.shape != (count,):
        raise ValueError(
            f"{path} must hold {count} integers, the rows of the labelled images, not "
            f"{rows.dtype} of shape {rows.shape}. {fix}"
        )
    if rows.min() < 0 or rows.max() >= size or len(np.unique(rows)) < count:
        raise ValueError(
            f"{path} must hold {count} different rows of 0..{size - 1}, those of the "
            f"training images, but has {len(np.unique(rows))} from {rows.min()} to "
            f"{rows.max()}. {fix}"
        )
    return rows.astype(np.int32)


def write_failure(directory: pathlib.Path, failure: str) -> None:
    """Writes how a run diverged to ``diverged.json``."""
    whole_files.write_json(directory / "diverged.json", failure)


def write_result(directory: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Writes the result of a finished run, which did not diverge."""
    whole_files.write_json(directory / "result.json", result)
    (directory / "diverged.json").unlink(missing_ok=True)
