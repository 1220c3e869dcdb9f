"""The training loop, of one seed or of several."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tqdm.contrib.logging import logging_redirect_tqdm

from kln_jax import datasets
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import parallel, steps
from kln_jax.training.compiled import Program, seed_at
from kln_jax.training.interruption import Interrupted, Interruption
from kln_jax.training.steps import TrainingData, TrainState

logger = logging.getLogger("kln_jax")

# The keys to turn first when a metric of a step is not healthy.
_STEP_SIZE = "learning_rate (lower it) or clip_norm (set it)"
_KNOBS = {
    "cmmd": "ridge (raise it)",
    "cross_entropy": _STEP_SIZE,
    "reconstruction": _STEP_SIZE,
    "confidence": _STEP_SIZE,
    "loss": _STEP_SIZE,
    "gradient_norm": "ridge (raise it) or learning_rate (lower it)",
}

# What `gram_diagnostics` gives: logged as of the last step of an epoch.
_DIAGNOSTICS = ("pivot_smallest", "pivot_largest", "median_squared_distance")

# What a stop says before anything is trained.
NOTHING_NEW = (
    "nothing was trained by this start; the same command goes on, on this workdir."
)

# A signal is answered between two calls of compiled code, so these may not be long.
_SECONDS_A_CALL = 2.0


class Ended(NamedTuple):
    """How the run of a seed ended.

    Attributes:
      state: Its last state.
      scalars: The metrics of its last epoch.
      failure: How it diverged; "" if it did not.
    """

    state: TrainState
    scalars: dict[str, Any]
    failure: str


class Progress:
    """Where the run of a seed stands: what its checkpoints and metrics hold.

    Args:
      name: What messages about it begin with.
      step: The number of steps made.
      history: The metrics of the epoch's steps.
      checkpoints: Where it is saved; None for nowhere.
      writer: Where the metrics of its epochs go; None for nowhere.

    Attributes:
      name: What messages about it begin with.
      step: The number of steps made.
      history: The metrics of each step of the epoch under way, by name; zero for
        steps that are still to be made.
      scalars: The metrics of the last epoch that is over; empty if none is.
      epochs: The number of epochs that are over.
      seconds: How long earlier starts took for them.
      failure: How it diverged; "" if it did not.
    """

    def __init__(
        self,
        name: str,
        step: int,
        history: dict[str, np.ndarray],
        checkpoints: Checkpoints | None,
        writer: epoch_metrics.MetricWriter | None,
    ) -> None:
        self.name, self.step, self.history = name, step, history
        self.scalars: dict[str, Any] = writer.last if writer else {}
        # An epoch is over once its line is written; a stop may come just before.
        self.epochs = int(parallel.from_main(np.int32(self.scalars.get("epoch", 0))))
        self.seconds: float = self.scalars.get("wall_seconds", 0.0)
        self.failure = ""
        self._saved_step = step
        self._checkpoints, self._writer = checkpoints, writer

    def advance(
        self, step: int, history: Mapping[str, np.ndarray], made: slice
    ) -> None:
        """Takes over a new step, and of an epoch's metrics those of some steps."""
        if made.start == 0:
            self.history = {name: np.zeros_like(all_) for name, all_ in history.items()}
        for name, all_ in history.items():
            self.history[name][made] = all_[made]
        self.step = step

    def end_epoch(self, scalars: dict[str, Any]) -> None:
        """Takes over the metrics of an epoch that is over, and writes them."""
        self.scalars, self.epochs = scalars, scalars["epoch"]
        if self._writer:
            self._writer.write(self.step, scalars)

    def save(self, state: TrainState, *, error: float | None = None) -> None:
        """Saves it with its state in the background, unless it is saved."""
        # One that a signal saved before its evaluation has no error yet.
        is_new = self.step != self._saved_step or error is not None
        if self._checkpoints and is_new:
            self._checkpoints.save(self.step, state, self.history, error=error)
        self._saved_step = self.step

    def wait(self) -> None:
        """Waits until it is saved."""
        if self._checkpoints:
            self._checkpoints.wait()


class Training:
    """A run under way, or those of several seeds in one program.

    Args:
      configs: The configuration of each seed; they differ in their seeds alone.
      data: The data set.
      labelled: Rows of the labelled images, for each seed.
      program: The compiled functions.
      interruption: Signals to listen to.
      embedding: Arrays of the embedding that the kernel acts on.
    """

    def __init__(
        self,
        configs: Sequence[ConfigDict],
        data: datasets.Dataset,
        labelled: Sequence[np.ndarray],
        program: Program,
        interruption: Interruption,
        embedding: Any = (),
    ) -> None:
        self._config = configs[0]
        self._class_names = data.class_names
        self._program = program
        self._interruption = interruption
        self._names = [
            f"seed {config.seed}: " if program.several else "" for config in configs
        ]
        self._keys = [jax.random.key(config.seed) for config in configs]
        self._packed_keys = jnp.stack(self._keys) if program.several else self._keys[0]
        replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
        rows = program.pack(labelled)
        self._train_data = TrainingData(
            *replicate((data.train_images, data.train_labels, rows, embedding))
        )
        self._eval_data = replicate((data.eval_images, data.eval_labels))
        self._states: TrainState
        self._seeds: list[Progress]
        self._seconds_a_step = _SECONDS_A_CALL  # Until it is known: one step a call.
        self._trace: pathlib.Path | None = None  # Where the next call is traced to.

    def run(
        self, directories: Sequence[pathlib.Path | None], *, show: bool
    ) -> list[Ended]:
        """Trains from the newest checkpoints, or from the start, to the last epoch.

        Args:
          directories: The working directory of each seed; None to keep nothing.
          show: Whether to show each epoch, on a bar or in the log.

        Returns:
          How each seed ended.

        Raises:
          ValueError: If a checkpoint holds the metrics of other steps.
          CheckpointError: If all checkpoints of a seed are damaged, or none can be
            written.
          Interrupted: If a signal came.
        """
        config, spe = self._config, self._program.steps_per_epoch
        self._begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            checkpoints = [
                stack.enter_context(
                    Checkpoints(
                        directory / "checkpoints",
                        keep_last=config.keep_last,
                        keep_best=config.keep_best,
                    )
                )
                if directory
                else None
                for directory in directories
            ]
            # Restoring and compiling take long, and give nothing to save.
            with self._interruption.may_leave(lambda: NOTHING_NEW):
                made, saved = self._restore(checkpoints)
                self._draw_rows(min(made) // spe)
                self._states, empty = self._call([0] * len(made))  # No step.
                histories = []
                for i, history in enumerate(saved):
                    unpacked = jax.device_get(self._program.unpack(empty, i))
                    if history:
                        _check_history(history, unpacked, directories[i])
                    histories.append(history or unpacked)
                # Copies, to be written to.
                histories = jax.tree.map(np.array, parallel.from_main(histories))
            writers = [
                stack.enter_context(
                    epoch_metrics.MetricWriter(directory, last_epoch=step // spe)
                )
                if directory
                else None
                for directory, step in zip(directories, made, strict=True)
            ]
            self._seeds = [
                Progress(*one)
                for one in zip(
                    self._names, made, histories, checkpoints, writers, strict=True
                )
            ]
            if directories[0] and config.profile:
                self._trace = directories[0] / "profile"
            bar = None
            if show:
                done = min(progress.epochs for progress in self._seeds)
                bar = epoch_metrics.progress_bar(config.num_epochs, done=done)
                stack.enter_context(bar)
                stack.enter_context(logging_redirect_tqdm([logger]))
            while self._going:
                epoch, position = divmod(self._step, spe)
                if position == 0 and (ended := self._at_end_of(epoch)):
                    self._end_epoch(epoch, ended)
                    if bar is not None:
                        scalars = [progress.scalars for progress in ended.values()]
                        epoch_metrics.show(bar, scalars, logger)
                if epoch == config.num_epochs:
                    break
                if epoch != self._rows_epoch:
                    self._draw_rows(epoch)
                self._make_steps(epoch, position)
            return [
                Ended(self._state(i), progress.scalars, progress.failure)
                for i, progress in enumerate(self._seeds)
            ]

    def _restore(
        self, checkpoints: Sequence[Checkpoints | None]
    ) -> tuple[list[int], list[dict[str, np.ndarray]]]:
        """Restores or initialises all seeds, and returns their steps and histories.

        These are empty where nothing is restored, as on all processes but the first.
        """
        states, histories = [], []
        for name, key, saved in zip(self._names, self._keys, checkpoints, strict=True):
            restored = None
            if saved:
                restored = saved.restore(jax.eval_shape(self._program.init, key))
            state = restored.state if restored else self._program.init(key)
            states.append(parallel.from_main(jax.device_get(state)))
            histories.append(restored.history if restored else {})
            if restored:
                logger.info("%scontinuing after step %d", name, restored.step)
        self._states = parallel.replicate(
            self._program.pack(states), axis_name=steps.AXIS
        )
        return [int(state.step) for state in states], histories

    @property
    def _going(self) -> dict[int, Progress]:
        """The seeds that did not diverge, by their place on the axis of seeds."""
        return {i: one for i, one in enumerate(self._seeds) if not one.failure}

    @property
    def _step(self) -> int:
        """The steps that all of these made; what is restored may be of several."""
        return min(progress.step for progress in self._going.values())

    def _at_end_of(self, epoch: int) -> dict[int, Progress]:
        """The seeds that made an epoch's last step, and for which it is not over."""
        return {
            i: progress
            for i, progress in self._going.items()
            if progress.step == self._step and progress.epochs < epoch
        }

    def _state(self, place: int) -> TrainState:
        # Compiled as one: there are many small arrays.
        return (
            _compiled_seed_at(self._states, place)
            if self._program.several
            else self._states
        )

    def _draw_rows(self, epoch: int) -> None:
        self._rows_epoch = epoch
        self._rows = self._program.rows(
            self._train_data, self._packed_keys, np.int32(epoch)
        )

    def _call(self, counts: Sequence[int]) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._program.train(
            self._states,
            self._train_data,
            self._rows,
            self._packed_keys,
            self._program.pack([np.int32(count) for count in counts]),
        )

    def _make_steps(self, epoch: int, position: int) -> None:
        """Makes as many steps as take some seconds, within the epoch."""
        config, step = self._config, self._step
        wanted = max(1, int(_SECONDS_A_CALL / self._seconds_a_step))
        tracing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._trace:
            wanted = config.profile
            tracing, self._trace = jax.profiler.trace(str(self._trace)), None
        votes = parallel.gather([self._interruption.received is not None, wanted])
        if votes[:, 0].any():
            raise Interrupted(f"{self._interruption.name}: {self._save_and_say()}")
        left = self._program.steps_per_epoch - position
        if every := config.checkpoint_every_steps:
            left = min(left, every - step % every)
        num_steps = min(left, int(votes[0, 1]))
        counts = [0] * len(self._seeds)
        for i, progress in self._going.items():
            counts[i] = max(0, step + num_steps - progress.step)

        start = time.perf_counter()
        with tracing:
            self._states, history = self._call(counts)
            history = jax.device_get(history)
        self._seconds_a_step = (time.perf_counter() - start) / num_steps

        made, skipped = jax.device_get((self._states.step, self._states.skipped))
        leaves = jax.tree.leaves((self._states.params, self._states.batch_stats))
        finite = jax.device_get(_are_finite(leaves, count=len(counts)))
        for i, count in enumerate(counts):
            if count:
                own = self._program.unpack((made, skipped, history), i)
                self._take_over(i, count, *own, finite=bool(finite[i]))
        # At the end of an epoch its evaluation comes first.
        is_inside = position + num_steps < self._program.steps_per_epoch
        if self._going and is_inside and self._due():
            for i, progress in self._going.items():
                progress.save(self._state(i))

    def _take_over(
        self,
        place: int,
        count: int,
        step: np.ndarray,
        num_skipped: np.ndarray,
        history: Mapping[str, np.ndarray],
        *,
        finite: bool,
    ) -> None:
        """Takes over what some steps of a seed gave, and whether it diverged."""
        progress = self._seeds[place]
        epoch, position = divmod(progress.step, self._program.steps_per_epoch)
        healthy = history["healthy"][position : position + count]
        made = int(step) - progress.step
        # The step that stopped it is among the metrics, but not among those made.
        tried = slice(position, position + min(count, made + 1))
        progress.advance(int(step), history, tried)
        skipped = np.flatnonzero(~healthy[:made]).tolist()
        for number, i in enumerate(skipped, 1 + int(num_skipped) - len(skipped)):
            logger.warning(
                "%s%s; the step is skipped, %d of at most %d.",
                progress.name,
                self._trouble(progress, epoch, position + i),
                number,
                self._config.max_skipped_steps,
            )
        failure = ""
        if not finite:
            failure = (
                f"Parameters are not finite after step {progress.step}; the last "
                "checkpoint before it is kept. Turn learning_rate (lower it) or "
                "clip_norm (set it)."
            )
        elif made < count:
            trouble = self._trouble(progress, epoch, position + made)
            saved = self._save({place: progress})
            failure = f"{trouble}, for a run of its own; before it, {saved}."
        if failure:
            progress.failure = f"{progress.name}{failure}"
            if self._program.several:
                logger.error("%s", progress.failure)

    def _save_and_say(self) -> str:
        """Saves all seeds, and says where the run goes on from."""
        saved = self._save(self._going)
        return f"{saved}; the same command goes on, on this workdir."

    def _save(self, seeds: Mapping[int, Progress]) -> str:
        """Saves seeds, waits, and says what is saved."""
        for i, progress in seeds.items():
            progress.save(self._state(i))
        for progress in seeds.values():
            progress.wait()
        step = min(progress.step for progress in seeds.values())
        if step == 0:
            return "nothing is trained yet"
        what = "the state" if len(seeds) == 1 else f"the state of {len(seeds)} seeds"
        return f"{what} after step {step} is saved"

    def _due(self) -> bool:
        """Whether a checkpoint is due at this step, whatever the epoch."""
        every = self._config.checkpoint_every_steps
        return bool(every) and self._step % every == 0

    def _trouble(self, progress: Progress, epoch: int, position: int) -> str:
        """Says which metric of a step is not healthy, and what to turn."""
        history, bound = progress.history, self._config.divergence_bound
        values = {
            name: float(history[name][position]) for name in _KNOBS if name in history
        }
        if abs(values["loss"]) <= bound:  # Then no term is at fault, however large.
            values = {"gradient_norm": values["gradient_norm"]}
        name = epoch_metrics.first_unhealthy(values, bound=bound)
        step = epoch * self._program.steps_per_epoch + position
        trouble = f"{name} is {values[name]:.4g} at step {step}"
        if self._config.objective != "cmmd":  # Which no Gram matrix enters.
            return f"{trouble}. Turn {_STEP_SIZE}"
        low, high = (float(history[name][position]) for name in _DIAGNOSTICS[:2])
        return (
            f"{trouble} (pivots of the Gram matrices {low:.2g} to {high:.2g}, so their "
            f"condition number is at least {high / low:.2g}). Turn {_KNOBS[name]}"
        )

    def _end_epoch(self, epoch: int, ended: Mapping[int, Progress]) -> None:
        """Evaluates, writes all that is logged of the epoch, and saves what is due."""
        config = self._config
        logged = {i: self._of_steps(epoch, one) for i, one in ended.items()}
        with contextlib.ExitStack() as stack:
            # Several processes agree on a stop after it: none may leave alone.
            if jax.process_count() == 1:
                stack.enter_context(self._interruption.may_leave(self._save_and_say))
            evaluated = _evaluate(
                self._program, self._states, self._eval_data, config.evaluate_on
            )
        seconds = time.perf_counter() - self._begun
        is_last = epoch == config.num_epochs
        for i, progress in ended.items():
            scalars = logged[i] | evaluated[i]
            scalars["wall_seconds"] = round(progress.seconds + seconds, 2)
            progress.end_epoch(scalars)
            if is_last or epoch % config.checkpoint_every == 0 or self._due():
                error = scalars.get("validation_error_percent")
                progress.save(self._state(i), error=error)

    def _of_steps(self, epoch: int, progress: Progress) -> dict[str, Any]:
        """Returns what is logged of an epoch's steps."""
        history = dict(progress.history)
        predicted = history.pop("predicted")
        if self._config.objective != "reconstruction":  # Which knows of no classes.
            _warn_of_collapse(
                predicted,
                self._class_names,
                epoch,
                seed=progress.name,
                advice=_against_collapse(self._config),
            )
        healthy = history.pop("healthy")
        last = {name: history.pop(name)[-1:][healthy[-1:]] for name in _DIAGNOSTICS}
        made = {name: values[healthy] for name, values in history.items()}
        return {"epoch": epoch, **epoch_metrics.epoch_means({**made, **last})}


def _check_history(
    history: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    directory: pathlib.Path | None,
) -> None:
    """Refuses the metrics of a checkpoint if they are not those of an epoch here."""
    there, here = (
        {name: values.shape for name, values in metrics_.items()}
        for metrics_ in (history, expected)
    )
    if different := whole_files.differences(there, here):
        raise ValueError(
            f"The newest checkpoint of {directory} holds the metrics of other steps: "
            f"{different}. Use the data and the version of kln_jax that it is of, or "
            "start anew in another directory."
        )


_compiled_seed_at = jax.jit(seed_at)


@functools.partial(jax.jit, static_argnames="count")
def _are_finite(leaves: list[jax.Array], *, count: int) -> jax.Array:
    """Says of each of so many seeds whether all of its arrays are finite."""
    finite = [jnp.isfinite(leaf).reshape(count, -1).all(axis=1) for leaf in leaves]
    return jnp.stack(finite).all(axis=0)


def _evaluate(
    program: Program, states: TrainState, eval_data: Any, part: str
) -> list[dict[str, float]]:
    """Returns the error of each seed and what belongs to it."""
    sums = jax.device_get(program.evaluate(states, *eval_data))
    evaluated = []
    for confusion, reconstruction in zip(
        sums["confusion"].reshape(-1, *sums["confusion"].shape[-2:]),
        sums["reconstruction"].reshape(-1),
        strict=True,
    ):
        count, correct = int(confusion.sum()), int(np.trace(confusion))
        errors = {
            f"{part}_error_percent": 100.0 * (count - correct) / count,
            f"{part}_reconstruction": float(reconstruction) / count,
        }
        evaluated.append(errors)
    return evaluated


def _against_collapse(config: ConfigDict) -> str:
    """Says what to turn where classes have collapsed."""
    if not config.clip_norm:
        return "set clip_norm, to 10 say"
    if config.objective == "cmmd" and config.ridge > 0.1:
        return "lower ridge to 0.1"
    return "lower learning_rate"


def _warn_of_collapse(
    predicted: np.ndarray,
    class_names: tuple[str, ...],
    epoch: int,
    *,
    advice: str,
    seed: str = "",
) -> None:
    """Warns of classes that were never predicted, of predictions (steps, C)."""
    missing = np.flatnonzero(predicted.sum(axis=0) == 0)
    if missing.size:
        logger.warning(
            "%sepoch %d: never predicted: %s. If this lasts, the classes have "
            "collapsed: %s.",
            seed,
            epoch,
            ", ".join(f"class {class_names[i]}" for i in missing),
            advice,
        )
