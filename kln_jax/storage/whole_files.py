"""Files of a run: written whole or not at all, and named where they are damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


class DamagedError(ValueError):
    """A run, or a file of it, cannot be read."""

    def __init__(self, path: pathlib.Path, why: ValueError | str) -> None:
        """Names it and says why."""
        super().__init__(
            f"{path} is damaged: {why}. Restore it, or take another working directory."
        )


def write_whole(path: pathlib.Path, content: bytes | bytearray) -> None:
    """Writes a file, whole or not at all.

    Args:
      path: Its name. A link to it stays one.
      content: What is to be in it.

    Raises:
      OSError: If it cannot be written; it names the file.
    """
    target = pathlib.Path(os.path.realpath(path))
    # To rename would replace a device by a file; of a directory it is refused anyway.
    if target.exists() and not (target.is_file() or target.is_dir()):
        why = "Not a regular file, give another name"
        raise OSError(errno.EINVAL, why, str(path))
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:  # It names the other one.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # Where it cannot be written, it may not be looked for either.
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that describes a run.

    Args:
      path: The file.

    Raises:
      DamagedError: If it is missing or damaged.
    """
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError as error:
        raise DamagedError(path.parent, f"it has no {path.name}") from error
    except ValueError as error:
        raise DamagedError(path, error) from error
    return content


def one_line(error: object) -> str:
    r"""Returns what an error says in one line; what it is, if it says nothing.

    Args:
      error: An exception, or its text.

    Examples:
      >>> one_line(OSError("disk\n  is full")), one_line(MemoryError())
      ('disk is full', 'MemoryError')
    """
    return " ".join(str(error).split()) or type(error).__name__


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Says which values of a run are not those that it must have here.

    Args:
      there: Values of the run, by name.
      here: Those that it must have.

    Returns:
      What differs, with both values; "" if nothing does.

    Examples:
      >>> differences({"seed": 0, "ridge": 0.1}, {"seed": 1, "ridge": 0.1})
      'seed (0 there, 1 here)'
    """
    return ", ".join(
        f"{name} ({there.get(name, 'absent')} there, {here.get(name, 'absent')} here)"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    )
