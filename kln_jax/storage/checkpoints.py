"""Checkpoints of the training state; the only module that knows Orbax.

Each checkpoint has the checksums of its files, so that damage is noticed before it is
read, and a state of another layout is named field by field. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from kln_jax.storage import whole_files

logger = logging.getLogger("kln_jax")

State = TypeVar("State")
Arrays = Mapping[str, np.ndarray]

_CHECKSUMS = "checksums.json"
# How many of the newest stay: one to fall back on if the newest is damaged.
_KEPT = 2
# What Orbax names a tree that is given no name.
_ITEM = "default"
_HISTORY = "history"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read; the message says why."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` found.

    Attributes:
      step: The step of the checkpoint.
      state: The state, of NumPy arrays.
      history: The metrics that were saved with it, by name.
    """

    step: int
    state: Any
    history: dict[str, np.ndarray]


class Checkpoints:
    """The two newest checkpoints in a directory, named by their step.

    Saving goes on in the background; leaving the context waits for it. A checkpoint
    that is not whole when the process dies is not there for the next one.

    Args:
      directory: Where they lie; made if it is absent.
      process: The number of this process; no other one saves.
      read_only: Whether to change nothing, as another process may be writing there.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        process: int = 0,
        read_only: bool = False,
    ) -> None:
        self._directory = directory
        self._damaged: list[int] = []
        if not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            directory.resolve(),
            # Without it Orbax takes all for damaged if the newest is empty.
            item_names=(_ITEM,),
            options=ocp.CheckpointManagerOptions(
                create=False,
                cleanup_tmp_directories=not read_only,
                preservation_policy=preservation_policy.LatestN(_KEPT),
                # Called once all is written, before the directory gets its name.
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._write_checksums
                ),
                # Of several processes only this one comes here.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=process,
                    active_processes={process},
                ),
            ),
        )

    def __enter__(self) -> Self:
        """Returns itself."""
        logging.getLogger("absl").addFilter(_is_no_traceback_of_orbax)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until everything is on disk."""
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # Beside the error that ended the run.
        else:
            self._manager.close()
        finally:
            logging.getLogger("absl").removeFilter(_is_no_traceback_of_orbax)

    def save(self, step: int, state: State, history: Arrays | None = None) -> None:
        """Saves a state, unless that step is there already.

        Args:
          step: Its number.
          state: A tree of arrays.
          history: Metrics to save with it, by name.

        Raises:
          CheckpointError: If this or the previous one could not be written.
        """
        for damaged in self._damaged:  # Whose steps are about to come again.
            self._manager.delete(damaged)
        self._damaged = []
        if step in self._manager.all_steps():
            return
        # A copy: on CPU these are the very arrays that the next step overwrites.
        tree = jax.tree.map(
            lambda leaf: np.array(leaf, copy=True),
            {**_as_dict(state), _HISTORY: dict(history or {})},
        )
        try:
            self._manager.save(
                step, args=ocp.args.Composite(**{_ITEM: ocp.args.StandardSave(tree)})
            )
        except Exception as failure:
            raise self._not_written(failure) from failure

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
          CheckpointError: If it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as failure:
            raise self._not_written(failure) from failure

    def restore(self, like: State) -> Restored | None:
        """Restores the newest checkpoint that is whole.

        Args:
          like: A state whose structure, shapes and dtypes the result has.

        Returns:
          The state with its step and history, or None if there is no checkpoint at all.

        Raises:
          CheckpointError: If there are checkpoints, but none is whole.
          ValueError: If the checkpoint is of another layout.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        reasons = []
        for i, step in enumerate(steps):
            try:
                arrays = self._read(step)
            # What a damaged file raises depends on its damage.
            except Exception as failure:
                reason = f"The checkpoint {self._directory / str(step)} is damaged"
                reason += f" ({_cause(failure)})"
                reasons.append(reason)
                self._damaged.append(step)
                if i + 1 < len(steps):
                    logger.warning("%s; trying that of step %d.", reason, steps[i + 1])
                continue
            history = {
                name.removeprefix(f"{_HISTORY}."): arrays.pop(name)
                for name in list(arrays)
                if name.startswith(f"{_HISTORY}.")
            }
            self._check_layout(step, like, arrays)
            leaves = [arrays[name] for name in _named_arrays(like)]
            state = jax.tree.unflatten(jax.tree.structure(like), leaves)
            return Restored(step, state, history)
        if reasons:
            raise CheckpointError(
                f"No checkpoint can be used: {'; '.join(reasons)}. Put back a copy of "
                f"one, or remove {self._directory} to start anew."
            )
        return None

    def _read(self, step: int) -> dict[str, np.ndarray]:
        """Reads all arrays of a checkpoint by name, once its files are checked."""
        directory = self._directory / str(step)
        if not (directory / _CHECKSUMS).exists():
            raise ValueError(f"{_CHECKSUMS} is missing")
        expected = json.loads((directory / _CHECKSUMS).read_text())
        actual = dict(_checksums(directory))
        for name in sorted(expected.keys() | actual.keys()):
            if name not in actual:
                raise ValueError(f"{name} is missing")
            if actual[name] != expected.get(name):
                raise ValueError(f"{name} has another checksum")
        items = self._manager.restore(
            step, args=ocp.args.Composite(**{_ITEM: ocp.args.StandardRestore()})
        )
        arrays = _named_arrays(items[_ITEM])
        return {name: np.asarray(leaf) for name, leaf in arrays.items()}

    def _write_checksums(self) -> None:
        for item in self._directory.glob(f"*/{_ITEM}"):
            path = item.parent / _CHECKSUMS
            if not path.exists():
                path.write_text(json.dumps(dict(_checksums(item.parent))))

    def _check_layout(self, step: int, like: Any, arrays: Arrays) -> None:
        """Refuses a checkpoint that is whole but not of this state's layout."""
        there, here = (
            {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named.items()}
            for named in (arrays, _named_arrays(like))
        )
        if different := whole_files.differences(there, here):
            raise ValueError(
                f"The checkpoint {self._directory / str(step)} is of another layout: "
                f"{different}. Use the version of kln_jax that wrote it, or start anew "
                "in another directory."
            )

    def _not_written(self, failure: Exception) -> CheckpointError:
        self._manager.reload()
        whole = self._manager.latest_step()
        newest = (
            "None is whole." if whole is None else f"That of step {whole} is whole."
        )
        return CheckpointError(
            f"A checkpoint could not be written to {self._directory} "
            f"({_cause(failure)}). {newest} Once there is space again, start the "
            "same command: it goes on from there."
        )


def _is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs of failures in its threads: it raises them as well."""
    return not (record.exc_info and "orbax" in record.pathname)


def _named_arrays(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their dotted names, in order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _as_dict(tree: Any) -> dict[str, Any]:
    """Returns the fields of a state as a dictionary."""
    return dict(tree) if isinstance(tree, dict) else dict(vars(tree))


def _checksums(directory: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields name and checksum of each file of a checkpoint's arrays."""
    for path in sorted((directory / _ITEM).rglob("*")):
        # Orbax adds this one when all is done.
        if path.is_file() and path.name != "commit_success.txt":
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield str(path.relative_to(directory)), digest


def _cause(failure: Exception) -> str:
    """Returns the message in one line; of a long one the end, where the cause is."""
    text = whole_files.one_line(failure)
    return text if len(text) <= 160 else f"...{text[-160:]}"
