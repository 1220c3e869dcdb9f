"""The training loop: steps, epochs, checkpoints, metrics, and stops."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kln_jax.datasets import Dataset
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import diagnosis, parallel, parts, steps
from kln_jax.training.compiled import DIVERGENCE_BOUND, Compiled
from kln_jax.training.configuration import Config
from kln_jax.training.interruption import Interrupted, Interruption
from kln_jax.training.objectives import DIAGNOSTICS
from kln_jax.training.progress import ProgressReport
from kln_jax.training.steps import TrainingData, TrainState

logger = logging.getLogger("kln_jax")

# What a stop says before anything is trained.
NOTHING_NEW = (
    "nothing was trained by this start; the same command on this workdir resumes it."
)

# A signal is answered between two calls of compiled code, so these may not be long.
_SECONDS_A_CALL = 2.0


class DivergenceError(RuntimeError):
    """A loss, gradient or parameter is not finite or too large; the message says it."""


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
      state: Its last state.
      scalars: The metrics of its last epoch.
    """

    state: TrainState
    scalars: dict[str, Any]


class TrainingLoop:
    """A run under way.

    Args:
      config: The configuration.
      compiled: Its compiled functions.
      data: The data set.
      labelled: Rows of the labelled images.
      interruption: Signals to listen to.
      embedding: Arrays of the embedding that the kernel acts on, () for none.
      weights: Weights of the labelled images, shape ``(L,)``; None for equal ones.
    """

    def __init__(
        self,
        config: Config,
        compiled: Compiled,
        data: Dataset,
        labelled: np.ndarray,
        interruption: Interruption,
        embedding: Any = (),
        weights: np.ndarray | None = None,
    ) -> None:
        self._config, self._compiled = config, compiled
        self._steps_per_epoch = compiled.steps_per_epoch
        self._interruption = interruption
        self._class_names, self._part = data.class_names, data.evaluate_on
        self._key = jax.random.key(config.seed)
        num_classes = len(data.class_names)
        replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
        self._train_data = TrainingData(
            *replicate(
                (
                    data.train_images,
                    data.train_labels,
                    labelled,
                    embedding,
                    parts.class_prior(config, data.train_labels[labelled], num_classes),
                    weights,
                )
            )
        )
        self._eval_data = replicate((data.eval_images, data.eval_labels))
        self._seconds_a_step = _SECONDS_A_CALL  # Until it is known: one step a call.
        self._checkpoints: Checkpoints | None = None
        self._writer: epoch_metrics.MetricWriter | None = None
        self._state: TrainState
        # Metrics of each step of the epoch under way; zero for those to be made.
        self._history: dict[str, np.ndarray]
        self._scalars: dict[str, Any] = {}  # Of the last epoch that is over.

    def run(self, directory: pathlib.Path | None, *, show: bool) -> Ended:
        """Trains from the newest checkpoint, or from the start, to the last epoch.

        Args:
          directory: The working directory; None to keep nothing.
          show: Whether to show the progress, on a bar or in the log.

        Returns:
          How the run `Ended`.

        Raises:
          DivergenceError: If training diverges; the last healthy state is saved.
          ValueError: If a checkpoint holds the metrics of other steps.
          CheckpointError: If all checkpoints are damaged, or none can be written.
          Interrupted: If a signal came; the state is saved.
        """
        begun = time.perf_counter()
        # Parameters and steps are float32, whatever this process uses elsewhere.
        with jax.enable_x64(False), contextlib.ExitStack() as stack:
            if directory:
                self._checkpoints = stack.enter_context(
                    Checkpoints(
                        directory / "checkpoints", process=parallel.process_index()
                    )
                )
            # Restoring and compiling take long, and give nothing to save.
            with self._interruption.may_leave(lambda: NOTHING_NEW):
                self._restore(directory)
            if directory:
                done = self._step // self._steps_per_epoch
                self._writer = stack.enter_context(
                    epoch_metrics.MetricWriter(directory, last_epoch=done)
                )
                self._scalars = self._writer.last
            # An epoch is over once its line is written; a stop may come just before.
            over = np.int32(self._scalars.get("epoch", 0))
            self._epochs_over = int(parallel.from_main(over))
            earlier_seconds = self._scalars.get("wall_seconds", 0.0)
            progress = None
            if show:
                progress = stack.enter_context(
                    ProgressReport(
                        logger,
                        num_epochs=self._config.num_epochs,
                        steps_per_epoch=self._steps_per_epoch,
                        step=self._step,
                    )
                )
            while True:
                epoch, position = divmod(self._step, self._steps_per_epoch)
                if position == 0 and self._epochs_over < epoch:
                    self._evaluate(epoch)
                    seconds = earlier_seconds + time.perf_counter() - begun
                    self._end_epoch(epoch, round(seconds, 2))
                    if progress:
                        progress.epoch_ended(self._scalars)
                if epoch == self._config.num_epochs:
                    return Ended(self._state, self._scalars)
                self._make_steps(epoch, position)
                if progress:
                    progress.steps_made(self._step)

    def _restore(self, directory: pathlib.Path | None) -> None:
        """Restores or initialises the state, and compiles the steps."""
        restored = None
        init, arguments = self._compiled.init, (self._key, *self._compiled.channels)
        if self._checkpoints:
            restored = self._checkpoints.restore(jax.eval_shape(init, *arguments))
        state = restored.state if restored else init(*arguments)
        if restored:
            logger.info("resuming after step %d", restored.step)
        state = parallel.from_main(jax.device_get(state))
        self._step = self._saved_step = int(state.step)
        self._state = parallel.replicate(state, axis_name=steps.AXIS)
        self._draw_rows(self._step // self._steps_per_epoch)
        empty = jax.device_get(self._call(0))  # Of no step.
        if restored:
            _check_history(restored.history, empty, directory)
        # A copy, to be written to.
        history = parallel.from_main(restored.history if restored else empty)
        self._history = {name: np.array(values) for name, values in history.items()}

    def _draw_rows(self, epoch: int) -> None:
        self._rows_epoch = epoch
        self._rows = self._compiled.draw_rows(
            self._train_data, self._key, np.int32(epoch)
        )

    def _call(self, num_steps: int) -> dict[str, jax.Array]:
        """Makes steps of the epoch whose rows are drawn; returns their metrics."""
        self._state, history = self._compiled.train(
            self._state, self._train_data, self._rows, self._key, np.int32(num_steps)
        )
        return history

    def _make_steps(self, epoch: int, position: int) -> None:
        """Makes as many steps as take some seconds, within the epoch."""
        wanted = max(1, int(_SECONDS_A_CALL / self._seconds_a_step))
        votes = parallel.gather([self._interruption.received is not None, wanted])
        if votes[:, 0].any():
            raise Interrupted(f"{self._interruption.name}: {self._save_and_say()}")
        if epoch != self._rows_epoch:
            self._draw_rows(epoch)
        every = self._config.checkpoint_every_steps
        num_steps = min(self._steps_per_epoch - position, int(votes[0, 1]))
        if every:
            num_steps = min(num_steps, every - self._step % every)

        start = time.perf_counter()
        history = jax.device_get(self._call(num_steps))
        self._seconds_a_step = (time.perf_counter() - start) / num_steps

        made = int(self._state.step) - self._step
        # The step that stopped it is among the metrics, but not among those made.
        tried = slice(position, position + min(num_steps, made + 1))
        if position == 0:
            self._history = {n: np.zeros_like(values) for n, values in history.items()}
        for name, values in history.items():
            self._history[name][tried] = values[tried]
        self._step += made
        if not _are_finite((self._state.params, self._state.batch_stats)):
            raise DivergenceError(
                f"Parameters are not finite after step {self._step}; the last "
                "checkpoint before it is kept. Turn learning_rate (lower it) or "
                "clip_norm (set it) in a new run."
            )
        if made < num_steps:
            last = {name: float(v[position + made]) for name, v in history.items()}
            trouble = diagnosis.explain_divergence(
                self._config, last, step=self._step, bound=DIVERGENCE_BOUND
            )
            raise DivergenceError(f"{trouble}; before it, {self._save_and_wait()}.")
        # At the end of an epoch its evaluation comes first.
        if every and self._step % every == 0 and self._step % self._steps_per_epoch:
            self._save()

    def _evaluate(self, epoch: int) -> None:
        """Takes over the metrics of an epoch whose steps are made."""
        with contextlib.ExitStack() as stack:
            # Several processes agree on a stop after it: none may leave alone.
            if parallel.is_alone():
                stack.enter_context(self._interruption.may_leave(self._save_and_say))
            sums = jax.device_get(
                self._compiled.evaluate(self._state, *self._eval_data)
            )
        if sums["nonfinite"]:
            raise DivergenceError(
                f"The outputs for {sums['nonfinite']} of {len(self._eval_data[1])} "
                f"images are not finite after step {self._step}; the last checkpoint "
                "before it is kept. Turn learning_rate (lower it) or clip_norm (set "
                "it) in a new run."
            )
        confusion = sums["confusion"]
        count, correct = int(confusion.sum()), int(np.trace(confusion))
        part = self._part
        history = {k: v for k, v in self._history.items() if k != "healthy"}
        # Diagnostics are of the last step of an epoch alone.
        history |= {name: history[name][-1:] for name in DIAGNOSTICS}
        self._scalars = {
            "epoch": epoch,
            **epoch_metrics.epoch_means(history),
            f"{part}_error_percent": 100.0 * (count - correct) / count,
            f"{part}_reconstruction": float(sums["reconstruction"]) / count,
        }
        if warning := diagnosis.find_collapse(
            self._config, self._scalars, confusion, self._class_names
        ):
            logger.warning("%s", warning)

    def _end_epoch(self, epoch: int, wall_seconds: float) -> None:
        """Writes the metrics of an epoch, and saves what is due."""
        self._scalars["wall_seconds"] = wall_seconds
        self._epochs_over = epoch
        if self._writer:
            self._writer.write(self._step, self._scalars)
        every = self._config.checkpoint_every_steps
        if (
            epoch == self._config.num_epochs
            or epoch % self._config.checkpoint_every == 0
            or (every and self._step % every == 0)
        ):
            self._save()

    def _save(self) -> None:
        """Saves the state in the background, unless it is saved."""
        if self._checkpoints and self._step != self._saved_step:
            self._checkpoints.save(self._step, self._state, self._history)
        self._saved_step = self._step

    def _save_and_wait(self) -> str:
        """Saves the state, and says of which step."""
        self._save()
        if self._checkpoints:
            self._checkpoints.wait()
        if self._step == 0:
            return "nothing is trained yet"
        return f"the state after step {self._step} is saved"

    def _save_and_say(self) -> str:
        """Saves the state, and says from where the run is resumed."""
        return f"{self._save_and_wait()}; the same command on this workdir resumes it."


def _check_history(
    history: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    directory: pathlib.Path | None,
) -> None:
    """Refuses the metrics of a checkpoint if they are not those of an epoch here."""
    there, here = (
        {name: values.shape for name, values in metrics.items()}
        for metrics in (history, expected)
    )
    if different := whole_files.differences(there, here):
        raise ValueError(
            f"The newest checkpoint of {directory} holds the metrics of other steps: "
            f"{different}. Use the data and the version of kln_jax that it is of, or "
            "start anew in another directory."
        )


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _are_finite(tree: Any) -> bool:
    """Whether all arrays of a tree are finite."""
    return bool(_all_finite(jax.tree.leaves(tree)))
