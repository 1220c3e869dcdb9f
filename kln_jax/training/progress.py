"""What a person sees of a run: a bar in a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# Seconds between the lines of a log inside an epoch.
_SECONDS_A_LINE = 60.0


class ProgressReport:
    """Reports the steps and epochs of a run.

    In a terminal it is a bar with the rate of steps and the time left; elsewhere each
    epoch is a line of the log, and so is each minute inside one.

    Args:
      logger: Where lines go.
      num_epochs: Epochs of the run.
      steps_per_epoch: Steps of an epoch.
      step: Steps that earlier starts made.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        num_epochs: int,
        steps_per_epoch: int,
        step: int,
    ) -> None:
        self._logger, self._num_epochs, self._spe = logger, num_epochs, steps_per_epoch
        self._first_step, self._step = step, step
        self._start = self._last_line = time.perf_counter()
        self._context = contextlib.ExitStack()
        self._bar = tqdm(
            total=num_epochs * steps_per_epoch,
            initial=step,
            unit="step",
            # Without a standard error there is nothing to draw on.
            disable=True if sys.stderr is None else None,
            dynamic_ncols=True,
        )

    def __enter__(self) -> Self:
        """Lets the lines of the log go above the bar."""
        self._context.enter_context(self._bar)
        if not self._bar.disable:
            self._context.enter_context(logging_redirect_tqdm([self._logger]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the bar."""
        self._context.close()

    def steps_made(self, step: int) -> None:
        """Reports steps.

        Args:
          step: Steps made by now, over all starts.
        """
        self._bar.update(step - self._step)
        self._step = step
        now = time.perf_counter()
        is_inside = step % self._spe != 0
        if self._bar.disable and is_inside and now - self._last_line > _SECONDS_A_LINE:
            self._last_line = now
            epoch, position = divmod(step, self._spe)
            self._logger.info(
                "epoch %d/%d: step %d of %d, %s",
                epoch + 1,
                self._num_epochs,
                position,
                self._spe,
                self._pace(),
            )

    def epoch_ended(self, scalars: Mapping[str, float]) -> None:
        """Reports an epoch.

        Args:
          scalars: Its metrics by name, with ``epoch``.
        """
        shown = {
            name.removesuffix("_percent").replace("_", " "): f"{scalars[name]:.4g}"
            + (" %" if name.endswith("_percent") else "")
            for name in (
                *("loss", "cmmd", "reconstruction", "confidence"),
                *("test_error_percent", "validation_error_percent"),
            )
            if name in scalars
        }
        self._bar.set_postfix(shown)
        if self._bar.disable:
            self._last_line = time.perf_counter()
            text = ", ".join(f"{name} {value}" for name, value in shown.items())
            epoch, total = int(scalars["epoch"]), self._num_epochs
            self._logger.info("epoch %d/%d: %s, %s", epoch, total, text, self._pace())

    def _pace(self) -> str:
        """Returns the steps a second of this start, and the time left."""
        made = self._step - self._first_step
        if not made:
            return "no step by this start"
        rate = made / (time.perf_counter() - self._start)
        left = (self._num_epochs * self._spe - self._step) / rate
        return f"{rate:.3g} steps/s, {left:.0f} s left"
