"""Checkpoints of the training state; the only module that knows Orbax."""

from __future__ import annotations

import pathlib
from types import TracebackType
from typing import Self, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")


class Checkpoints:
    """The checkpoints in a directory, named by their step.

    Saving goes on in the background; leaving the context waits for it.

    Args:
      directory: Where they lie; made with the first one.
      keep: How many to keep, the newest.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2) -> None:
        self._manager = ocp.CheckpointManager(
            directory.resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

    def save(self, step: int, state: State) -> None:
        """Saves a state, unless that step is there already.

        Args:
          step: Its number.
          state: A tree of arrays.
        """
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore_latest(self, like: State) -> State | None:
        """Restores the newest checkpoint.

        Args:
          like: A state whose structure, shapes, dtypes and places the result takes.

        Returns:
          The state, or None if there is no checkpoint.

        Raises:
          ValueError: If the checkpoint is not of that structure.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(target))
