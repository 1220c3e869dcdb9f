"""Paths that users name."""

import os
import pathlib

from kln_jax.datasets._dataset import DatasetError


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path with the home directory that it names."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise DatasetError(
            f"{path}: there is no such home directory; give a path without ~"
        ) from error


def is_writable(directory: pathlib.Path) -> bool:
    """Whether files may be made in a directory that may not exist yet."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    # For root, access() says yes to a directory whose write bits were taken off.
    return os.access(directory, os.W_OK) and bool(directory.stat().st_mode & 0o222)
