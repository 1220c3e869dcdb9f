"""The training loop."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import pathlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from tqdm.contrib.logging import logging_redirect_tqdm

from kln_jax import (
    configuration,
    datasets,
    embeddings,
    metrics,
    networks,
    objectives,
    parallel,
    rundir,
    steps,
)
from kln_jax.augment import channel_statistics
from kln_jax.checkpoint import Checkpoints
from kln_jax.interruption import Interrupted, Interruption
from kln_jax.steps import TrainingData, TrainState

logger = logging.getLogger("kln_jax")

T = TypeVar("T")

# The key to turn first when a metric of a step is not healthy.
_KNOBS = {
    "cmmd": "ridge (raise it)",
    "cross_entropy": "learning_rate (lower it) or clip_norm (set it)",
    "reconstruction": "learning_rate (lower it) or clip_norm (set it)",
    "confidence": "learning_rate (lower it) or clip_norm (set it)",
    "loss": "learning_rate (lower it) or clip_norm (set it)",
    "gradient_norm": "ridge (raise it) or learning_rate (lower it)",
}

# What `gram_diagnostics` gives: logged as of the last step of an epoch.
_DIAGNOSTICS = ("pivot_smallest", "pivot_largest", "median_squared_distance")

_NOTHING_NEW = "nothing was trained by this start; the same command goes on."

# A signal is answered between two calls of compiled code, so these may not be long.
_SECONDS_A_CALL = 2.0


class DivergenceError(RuntimeError):
    """A loss, gradient or parameter is not finite or too large; the message says it."""


class Run(NamedTuple):
    """A run read back from its working directory.

    Attributes:
      config: Its configuration.
      data: Its data set.
      labelled: Rows of the labelled images.
      model: Its network.
      state: Its newest state.
    """

    config: ConfigDict
    data: datasets.Dataset
    labelled: np.ndarray
    model: networks.KLN
    state: TrainState


class _Ended(NamedTuple):
    """How the run of a seed ended.

    Attributes:
      state: Its last state.
      scalars: The metrics of its last epoch.
      failure: How it diverged; "" if it did not.
    """

    state: TrainState
    scalars: dict[str, Any]
    failure: str


class _Program(NamedTuple):
    """The compiled functions of a run, each but the first over all devices.

    Of several seeds, each but the first takes and gives arrays with a leading axis of
    seeds, except for the images, the labels, the embedding and the epoch.
    """

    init: Callable[[jax.Array], TrainState]
    rows: Callable[..., steps.Rows]
    train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., dict[str, jax.Array]]
    steps_per_epoch: int
    several: bool

    def pack(self, trees: Sequence[T]) -> T:
        """Returns what the functions take, from the NumPy arrays of each seed."""
        if not self.several:
            return trees[0]
        stacked: T = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
        return stacked

    def unpack(self, tree: T, index: int) -> T:
        """Returns the arrays of one seed, by its place, from what they give."""
        return _at(tree, index) if self.several else tree


def train_and_evaluate(
    config: ConfigDict,
    workdir: str | None = None,
    *,
    interruption: Interruption | None = None,
) -> dict[str, Any]:
    """Trains and evaluates as a configuration says, or goes on with it.

    The working directory gets ``config.json``, ``data.json`` (names of the classes,
    shape of an image), ``labelled.npy`` (rows of the labelled images),
    ``metrics.jsonl`` (a line an epoch), ``tensorboard/``, ``checkpoints/`` and, at the
    end, ``result.json``. Of several processes only the first reads and writes it.
    With ``num_seeds`` above 1 it gets such a directory for each seed instead, named
    by it. Its end clears JAX's caches of compiled functions, of all that the process
    has compiled.

    Args:
      config: All keys of ``configs/default.py``.
      workdir: Working directory; None makes a fresh one below ``runs/``.
      interruption: Signals to listen to; none by default.

    Returns:
      The content of ``result.json``; with ``num_seeds`` above 1 that of each seed, by
      the name of its directory.

    Raises:
      ValueError: If the configuration, the data, the device or the working directory
        will not do.
      DivergenceError: If training diverges; the last healthy state is saved. Of
        several seeds the others are trained to their end before.
      CheckpointError: If no checkpoint can be written, or none of those read.
      Interrupted: If a signal came; the state is saved.
    """
    configuration.validate(config)
    parallel.choose_platform(config.platform)
    configuration.check_devices(config)
    parallel.cache_compilations(config.compilation_cache)
    logger.info(parallel.describe())
    is_main = parallel.is_main()
    if not is_main:
        logger.setLevel(logging.ERROR)  # The first one says the rest.
    interruption = interruption or Interruption()
    place = pathlib.Path(workdir) if workdir and is_main else None
    # By the name of its directory in that place: "" is the place itself.
    configs = configuration.of_each_seed(config)
    with interruption.may_leave(lambda: _NOTHING_NEW):
        if place:
            rundir.check_place(place, config)
            for name, own in configs.items():
                rundir.check(place / name, own)
        finished = [
            bool(place and (place / name / "result.json").exists()) for name in configs
        ]
        finished = parallel.from_main(np.asarray(finished)).tolist()
        if all(finished):
            return _finished(place, list(configs))
        left = [name for name, done in zip(configs, finished, strict=True) if not done]
        with parallel.main_first():  # It prepares and caches what the others read.
            data = _load(config)
        _warn_of_shared_images(data)
        labelled = []
        for name in left:
            directory = place / name if place else None
            rows = rundir.labelled_rows(directory, configs[name], data.train_labels)
            labelled.append(parallel.from_main(rows))
        program = _compile(config, data, several=config.num_seeds > 1)

    directories: list[pathlib.Path | None] = [None] * len(left)
    if is_main:
        place = place or rundir.fresh(config)
        directories = [place / name for name in left]
        print(f"Working directory: {place}", flush=True)
        for name, rows in zip(left, labelled, strict=True):
            rundir.prepare(place / name, configs[name], data, rows)
    with parallel.lost_processes_said(), parallel.programs_forgotten():
        embedding = _embedding(config, data, labelled[0], directories[0], interruption)
        training = _Training(
            [configs[name] for name in left],
            data,
            labelled,
            program,
            interruption,
            embedding,
        )
        ended = training.run(directories, show=is_main)
        results = {
            name: _result(configs[name], data, one, seeds_at_once=len(left))
            for name, one in zip(left, ended, strict=True)
            if not one.failure
        }
    failures = {
        name: one.failure for name, one in zip(left, ended, strict=True) if one.failure
    }
    if place:
        for name, failure in failures.items():
            metrics.write_json(place / name / "diverged.json", failure)
        for name, result in results.items():
            metrics.write_json(place / name / "result.json", result)
            (place / name / "diverged.json").unlink(missing_ok=True)
        paths = {name: place / name / "result.json" for name in configs}
        results = {name: rundir.read_json(p) for name, p in paths.items() if p.exists()}
        if results:
            print(f"{_closing(list(results.values()))}\nEverything lies in {place}.")
    if failures:
        raise DivergenceError(_failure(failures, len(configs)))
    return results.get("", results)


def train_in_memory(
    config: ConfigDict,
    data: datasets.Dataset,
    labelled: np.ndarray,
    *,
    show: bool = False,
) -> Run:
    """Trains on a data set that is at hand, and writes nothing.

    Args:
      config: All keys of ``configs/default.py`` but those of data and of the run.
      data: The data set.
      labelled: Rows of its labelled images.
      show: Whether to show each epoch, on a bar or in the log.

    Returns:
      The trained `Run`.

    Raises:
      ValueError: If the configuration or the data will not do.
      DivergenceError: If training diverges.
    """
    configuration.validate(config)
    configuration.check_devices(config)
    program, interruption = _compile(config, data), Interruption()
    with parallel.programs_forgotten():
        embedding = _embedding(config, data, labelled, None, interruption)
        training = _Training(
            [config], data, [labelled], program, interruption, embedding
        )
        state = training.run_alone(None, show=show)
    return Run(config, data, labelled, _model(config, data), state)


def load_run(workdir: str | pathlib.Path, *, best: bool = False) -> Run:
    """Reads a run back from its working directory.

    Args:
      workdir: Working directory of `train_and_evaluate`.
      best: Whether to take the state with the smallest validation error, of a run
        with ``keep_best``, instead of the newest.

    Returns:
      The `Run`.

    Raises:
      ValueError: If there is no run, or none with such a checkpoint.
      CheckpointError: If its checkpoints are damaged.
    """
    directory = pathlib.Path(workdir)
    config = rundir.read_config(directory)
    data = _load(config)
    labelled = rundir.labelled_rows(directory, config, data.train_labels)
    model = _model(config, data)
    state = restore(directory, config, model, data.train_images.shape[1:], best=best)
    return Run(config, data, labelled, model, state)


def restore(
    directory: pathlib.Path,
    config: ConfigDict,
    model: networks.KLN,
    image_shape: tuple[int, int, int],
    *,
    best: bool,
) -> TrainState:
    """Reads the state of a run, of NumPy arrays.

    Args:
      directory: Its working directory.
      config: Its configuration.
      model: Its network.
      image_shape: Height, width and channels of its images.
      best: Whether to take the one with the smallest validation error.

    Raises:
      ValueError: If there is no such checkpoint, or it is of another layout.
      CheckpointError: If the checkpoints are damaged.
    """
    channels = image_shape[-1]
    like = jax.eval_shape(
        lambda key: steps.init_state(
            model,
            # How long an epoch is changes nothing of the layout.
            configuration.optimizer(config, steps_per_epoch=1),
            key,
            mean=np.zeros(channels),
            std=np.ones(channels),
            image_shape=image_shape,
        ),
        _key(config),
    )
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(like, best=best)
    if restored is None:
        raise ValueError(f"{directory} holds no checkpoint.")
    return restored.state


def _finished(place: pathlib.Path | None, names: Sequence[str]) -> dict[str, Any]:
    if place is None:
        return {}
    results = {name: rundir.read_json(place / name / "result.json") for name in names}
    whole = "This run is" if len(names) == 1 else "These runs are"
    print(f"{whole} finished; nothing is left to do.")
    print(f"{_closing(list(results.values()))}\nEverything lies in {place}.")
    return results.get("", results)


class _Progress:
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
        writer: metrics.MetricWriter | None,
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


class _Training:
    """A run under way, or one of several seeds, whose programs are one."""

    def __init__(
        self,
        configs: Sequence[ConfigDict],
        data: datasets.Dataset,
        labelled: Sequence[np.ndarray],
        program: _Program,
        interruption: Interruption,
        embedding: Any = (),
    ) -> None:
        self._config = configs[0]  # The others differ in their seeds alone.
        self._class_names = data.class_names
        self._program = program
        self._interruption = interruption
        self._names = [
            f"seed {config.seed}: " if program.several else "" for config in configs
        ]
        self._keys = [_key(config) for config in configs]
        self._packed_keys = jnp.stack(self._keys) if program.several else self._keys[0]
        replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
        rows = program.pack(labelled)
        self._train_data = TrainingData(
            *replicate((data.train_images, data.train_labels, rows, embedding))
        )
        self._eval_data = replicate((data.eval_images, data.eval_labels))
        self._states: TrainState
        self._seeds: list[_Progress]
        self._seconds_a_step = _SECONDS_A_CALL  # Until it is known: one step a call.
        self._trace: pathlib.Path | None = None  # Where the next call is traced to.

    def run(
        self, directories: Sequence[pathlib.Path | None], *, show: bool
    ) -> list[_Ended]:
        """Trains from the newest checkpoints, or from the start, to the last epoch.

        Args:
          directories: The working directory of each seed; None to keep nothing.
          show: Whether to show each epoch, on a bar or in the log.

        Returns:
          How each seed ended.
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
            with self._interruption.may_leave(lambda: _NOTHING_NEW):
                made, histories = self._restore(checkpoints)
                self._draw_rows(min(made) // spe)
                self._states, _ = self._call([0] * len(made))  # No step.
            writers = [
                stack.enter_context(
                    metrics.MetricWriter(directory, last_epoch=step // spe)
                )
                if directory
                else None
                for directory, step in zip(directories, made, strict=True)
            ]
            self._seeds = [
                _Progress(*one)
                for one in zip(
                    self._names, made, histories, checkpoints, writers, strict=True
                )
            ]
            if directories[0] and config.profile:
                self._trace = directories[0] / "profile"
            bar = None
            if show:
                done = min(progress.epochs for progress in self._seeds)
                bar = metrics.progress_bar(config.num_epochs, done=done)
                stack.enter_context(bar)
                stack.enter_context(logging_redirect_tqdm([logger]))
            while self._going:
                epoch, position = divmod(self._step, spe)
                if position == 0 and (ended := self._at_end_of(epoch)):
                    self._end_epoch(epoch, ended)
                    if bar is not None:
                        scalars = [progress.scalars for progress in ended.values()]
                        metrics.show(bar, scalars, logger)
                if epoch == config.num_epochs:
                    break
                if epoch != self._rows_epoch:
                    self._draw_rows(epoch)
                self._make_steps(epoch, position)
            return [
                _Ended(self._state(i), progress.scalars, progress.failure)
                for i, progress in enumerate(self._seeds)
            ]

    def run_alone(self, directory: pathlib.Path | None, *, show: bool) -> TrainState:
        """Does so for one seed, and returns its last state.

        Args:
          directory: Its working directory; None to keep nothing.
          show: Whether to show each epoch, on a bar or in the log.

        Raises:
          DivergenceError: If it diverges.
        """
        (ended,) = self.run([directory], show=show)
        if ended.failure:
            raise DivergenceError(ended.failure)
        return ended.state

    def _restore(
        self, checkpoints: Sequence[Checkpoints | None]
    ) -> tuple[list[int], list[dict[str, np.ndarray]]]:
        """Restores or initialises all seeds, and returns their steps and histories."""
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
    def _going(self) -> dict[int, _Progress]:
        """The seeds that did not diverge, by their place on the axis of seeds."""
        return {i: one for i, one in enumerate(self._seeds) if not one.failure}

    @property
    def _step(self) -> int:
        """The steps that all of these made; what is restored may be of several."""
        return min(progress.step for progress in self._going.values())

    def _at_end_of(self, epoch: int) -> dict[int, _Progress]:
        """The seeds that made an epoch's last step, and for which it is not over."""
        return {
            i: progress
            for i, progress in self._going.items()
            if progress.step == self._step and progress.epochs < epoch
        }

    def _state(self, place: int) -> TrainState:
        # Compiled as one: there are many small arrays.
        return (
            _compiled_at(self._states, place) if self._program.several else self._states
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
            failure = f"{trouble}; before it, {self._save({place: progress})}."
        if failure:
            progress.failure = f"{progress.name}{failure}"
            if self._program.several:
                logger.error("%s", progress.failure)

    def _save_and_say(self) -> str:
        """Saves all seeds, and says where the run goes on from."""
        return f"{self._save(self._going)}; the same command goes on."

    def _save(self, seeds: Mapping[int, _Progress]) -> str:
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

    def _trouble(self, progress: _Progress, epoch: int, position: int) -> str:
        """Says which metric of a step is not healthy, and what to turn."""
        history, bound = progress.history, self._config.divergence_bound
        values = {
            name: float(history[name][position]) for name in _KNOBS if name in history
        }
        name = metrics.first_unhealthy(values, bound=bound)
        low, high = (float(history[name][position]) for name in _DIAGNOSTICS[:2])
        return (
            f"{name} is {values[name]:.4g} at step "
            f"{epoch * self._program.steps_per_epoch + position} (pivots of the Gram "
            f"matrices {low:.2g} to {high:.2g}, so their condition number is at least "
            f"{high / low:.2g}). Turn {_KNOBS[name]}"
        )

    def _end_epoch(self, epoch: int, ended: Mapping[int, _Progress]) -> None:
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

    def _of_steps(self, epoch: int, progress: _Progress) -> dict[str, Any]:
        """Returns what is logged of an epoch's steps."""
        history = dict(progress.history)
        predicted = history.pop("predicted")
        if self._config.objective != "reconstruction":  # Which knows of no classes.
            _warn_of_collapse(predicted, self._class_names, epoch, seed=progress.name)
        healthy = history.pop("healthy")
        last = {name: history.pop(name)[-1:] for name in _DIAGNOSTICS}
        made = {name: values[healthy] for name, values in history.items()}
        return {"epoch": epoch, **metrics.epoch_means({**made, **last})}


def _at(tree: T, index: int | jax.Array) -> T:
    own: T = jax.tree.map(lambda leaf: leaf[index], tree)
    return own


_compiled_at = jax.jit(_at)


@functools.partial(jax.jit, static_argnames="count")
def _are_finite(leaves: list[jax.Array], *, count: int) -> jax.Array:
    """Says of each of so many seeds whether all of its arrays are finite."""
    finite = [jnp.isfinite(leaf).reshape(count, -1).all(axis=1) for leaf in leaves]
    return jnp.stack(finite).all(axis=0)


def _result(
    config: ConfigDict, data: datasets.Dataset, ended: _Ended, *, seeds_at_once: int
) -> dict[str, Any]:
    part, state, scalars = config.evaluate_on, ended.state, ended.scalars
    return {
        f"{part}_error_percent": scalars[f"{part}_error_percent"],
        f"num_{part}_images": len(data.eval_labels),
        "epochs": config.num_epochs,
        "steps": int(state.step),
        "skipped_steps": int(state.skipped),
        "wall_seconds": scalars["wall_seconds"],
        "seeds_at_once": seeds_at_once,
        "seed": config.seed,
        "dataset": config.dataset,
        "variant": config.variant,
        "partial_data": data.partial,
        "versions": _versions(),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _model(config: ConfigDict, data: datasets.Dataset) -> networks.KLN:
    return configuration.model(
        config,
        image_shape=data.train_images.shape[1:],
        num_classes=len(data.class_names),
    )


def _key(config: ConfigDict) -> jax.Array:
    return jax.random.key(config.seed)


def _compile(
    config: ConfigDict, data: datasets.Dataset, *, several: bool = False
) -> _Program:
    """Makes the functions of a run, or of several seeds, from its configuration."""
    image_shape = data.train_images.shape[1:]
    side = min(image_shape[:2])
    if config.crop_padding >= side:
        raise ValueError(
            f"crop_padding={config.crop_padding} must be below {side}, the side of the "
            "images in pixels."
        )
    count = len(data.train_images)
    if config.batch_size > count:
        logger.warning(
            "batch_size=%d is more than the %d training images: a batch has some of "
            "them more than once.",
            config.batch_size,
            count,
        )
    steps_per_epoch = max(1, count // config.batch_size)
    model = _model(config, data)
    optimizer = configuration.optimizer(config, steps_per_epoch=steps_per_epoch)
    kernel, _ = configuration.kernels(config)
    reconstruction_error = functools.partial(
        objectives.reconstruction_error, reduction=config.reconstruction_reduction
    )
    train_step = steps.make_train_step(
        model,
        optimizer,
        configuration.objective(config),
        reconstruction_error,
        kernel=kernel,
        embed=configuration.embed(config, model),
        shared_batch=config.pairing == "shared",
        diagnostics=functools.partial(
            objectives.gram_diagnostics, kernel=kernel, ridge=config.ridge
        ),
        diagnose_every=steps_per_epoch,
        bound=config.divergence_bound,
        max_skipped=config.max_skipped_steps if config.on_nonfinite == "skip" else 0,
        crop_padding=config.crop_padding,
        flip=config.flip,
    )
    channels = image_shape[-1]
    mean, std = (
        channel_statistics(data.train_images)
        if config.normalise
        else (np.zeros(channels), np.ones(channels))
    )

    def over_devices(
        function: Callable[..., T], *in_axes: Any, donate: bool = False
    ) -> Callable[..., T]:
        function = steps.over_seeds(function, in_axes) if several else function
        return parallel.data_parallel(function, axis_name=steps.AXIS, donate=donate)

    # Seeds share all of the data but the choice of those that are labelled.
    data_axes = TrainingData(None, None, 0, None)  # type: ignore[arg-type]
    return _Program(
        init=jax.jit(
            lambda key: steps.init_state(
                model, optimizer, key, mean=mean, std=std, image_shape=image_shape
            )
        ),
        rows=over_devices(
            steps.make_epoch_rows(
                batch_size=config.batch_size,
                steps_per_epoch=steps_per_epoch,
                shared_batch=config.pairing == "shared",
            ),
            *(data_axes, 0, None),
        ),
        train=over_devices(
            steps.make_train_steps(train_step, steps_per_epoch=steps_per_epoch),
            *(0, data_axes, 0, 0, 0),
            donate=True,
        ),
        evaluate=over_devices(
            steps.make_evaluate(
                model, reconstruction_error, batch_size=2 * config.batch_size
            ),
            *(0, None, None),
        ),
        steps_per_epoch=steps_per_epoch,
        several=several,
    )


def _embedding(
    config: ConfigDict,
    data: datasets.Dataset,
    labelled: np.ndarray,
    directory: pathlib.Path | None,
    interruption: Interruption,
) -> Any:
    """Returns the arrays of the embedding that the kernel acts on, () for none.

    An autoencoder is trained first: on all images, as the configuration trains.
    """
    if config.kernel_on == "pca":
        return embeddings.principal_components(data.train_images, config.latent_dim)
    if config.kernel_on != "autoencoder":
        return ()
    logger.info("training the autoencoder on which the kernel acts")
    alone = config.copy_and_resolve_references()
    alone.update(objective="reconstruction", kernel_on="z")
    program = _compile(alone, data)
    training = _Training([alone], data, [labelled], program, interruption)
    state = training.run_alone(
        directory / "autoencoder" if directory else None, show=parallel.is_main()
    )
    return steps.without_optimiser(state)


def _load(config: ConfigDict) -> datasets.Dataset:
    data = datasets.load(
        config.dataset,
        data_dir=config.data_dir or None,
        evaluate_on=config.evaluate_on,
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
        use_extra=config.use_extra,
        allow_partial_data=config.allow_partial_data,
        image_size=config.image_size,
    )
    for line in data.summary():
        logger.info(line)
    return data


def _warn_of_shared_images(data: datasets.Dataset) -> None:
    # Hashing 600,000 images of 32x32x3 takes some 7 s: little beside their epochs.
    shared = datasets.shared_images(data.train_images, data.eval_images)
    if shared:
        logger.warning(
            "%d of %d %s images are, pixel for pixel, also among the training images.",
            shared,
            len(data.eval_images),
            data.evaluate_on,
        )


def _warn_of_collapse(
    predicted: np.ndarray, class_names: tuple[str, ...], epoch: int, *, seed: str = ""
) -> None:
    """Warns of classes that were never predicted, of predictions (steps, C)."""
    missing = np.flatnonzero(predicted.sum(axis=0) == 0)
    if missing.size:
        logger.warning(
            "%sepoch %d: never predicted: %s. If this lasts, the classes have "
            "collapsed: set clip_norm, or raise ridge to 0.1.",
            seed,
            epoch,
            ", ".join(f"class {class_names[i]}" for i in missing),
        )


def _evaluate(
    program: _Program, states: TrainState, eval_data: Any, part: str
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


def _failure(failures: Mapping[str, str], count: int) -> str:
    """Says which of so many seeds diverged; each has said before how it did."""
    if count == 1:
        return failures[""]
    which = f"seed{'s' * (len(failures) > 1)} {', '.join(failures)}"
    others = " The others are finished." if len(failures) < count else ""
    return (
        f"{len(failures)} of {count} seeds diverged, as said above: {which}. What they "
        f"made before is saved.{others}"
    )


def _closing(results: Sequence[Mapping[str, Any]]) -> str:
    """Says how runs of one or of several seeds ended."""
    part = "test" if "test_error_percent" in results[0] else "validation"
    count, epochs = results[0][f"num_{part}_images"], results[0]["epochs"]
    errors = [result[f"{part}_error_percent"] for result in results]
    of = f"{round(errors[0] * count / 100)} of {count} images"
    if len(results) > 1:
        of = f"mean ± standard deviation of {len(results)} seeds"
    seconds = max(result["wall_seconds"] for result in results)
    return (
        f"{part.capitalize()} error {metrics.mean_and_spread(errors)} % ({of}) after "
        f"{epochs} epochs, {seconds:.0f} s."
    )


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **versions}
