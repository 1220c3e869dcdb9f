"""Metrics of an epoch, and where they go: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from tensorboardX import SummaryWriter

from kln_jax.storage import whole_files

Scalars = dict[str, float]


def epoch_means(metrics: Mapping[str, np.ndarray]) -> Scalars:
    """Means over the steps of an epoch; ``*_sum`` is divided by ``*_count``.

    Args:
      metrics: Values by name, each stacked over steps.

    Returns:
      One number a name; a mean over no pairs, or over no steps, is left out.

    Examples:
      >>> epoch_means({"k_sum": np.array([1.0, 2.0]), "k_count": np.array([2, 4])})
      {'k': 0.5}
    """
    means = {}
    for name, values in metrics.items():
        if name.endswith("_sum"):
            name = name.removesuffix("_sum")
            count = metrics[f"{name}_count"].sum()
            if count:
                means[name] = float(values.sum(dtype=np.float64) / count)
        elif not name.endswith("_count") and values.size:
            means[name] = float(values.mean(dtype=np.float64))
    return means


class MetricWriter:
    """Appends the metrics of each epoch to ``metrics.jsonl`` and to TensorBoard.

    Args:
      workdir: Where both lie.
      last_epoch: The last epoch to keep of an earlier, interrupted run.

    Attributes:
      last: The metrics of the last epoch that was kept; empty if none was.
    """

    def __init__(self, workdir: pathlib.Path, *, last_epoch: int) -> None:
        self._path = workdir / "metrics.jsonl"
        kept = [line for line in read_metrics(workdir) if line["epoch"] <= last_epoch]
        self.last: dict[str, Any] = kept[-1] if kept else {}
        lines = "".join(json.dumps(line) + "\n" for line in kept)
        whole_files.write_whole(self._path, lines.encode())
        self._tensorboard = SummaryWriter(
            str(workdir / "tensorboard"),
            filename_suffix=f".{last_epoch}",
            purge_step=self.last.get("step", -1) + 1,
            write_to_disk=True,
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
        """Closes TensorBoard's file."""
        self._tensorboard.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one epoch.

        Args:
          step: Number of updates made.
          scalars: Its metrics; ``epoch`` and ``wall_seconds`` are among them.
        """
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **scalars}) + "\n")
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Reads ``metrics.jsonl``; a last line that was cut off in writing is left out.

    Args:
      workdir: Working directory of a run.

    Returns:
      The metrics of each epoch, in their order; none if there is no such file. Where
      two processes wrote into it, an epoch's last line counts.

    Raises:
      whole_files.DamagedError: If another line is damaged.
    """
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    epochs: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            continue
        try:
            epoch = json.loads(line)
            if not isinstance(epoch, dict) or type(epoch.get("epoch")) is not int:
                raise ValueError("it is no JSON object with a whole number as epoch")
        except ValueError as error:
            raise whole_files.DamagedError(path, f"line {number}: {error}") from error
        epochs[epoch["epoch"]] = epoch
    return [epochs[epoch] for epoch in sorted(epochs)]
