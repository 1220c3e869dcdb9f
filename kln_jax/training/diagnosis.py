"""What is said of a run that diverges or collapses, and which key to turn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kln_jax.training.configuration import Config

_STEP_SIZE = "learning_rate (lower it) or clip_norm (set it) in a new run"
# The keys to turn first when a metric of a step is not healthy, the terms of the loss
# before what is computed from them.
_KEYS = {
    "cmmd": "ridge (raise it) in a new run",
    "cross_entropy": _STEP_SIZE,
    "reconstruction": _STEP_SIZE,
    "confidence": _STEP_SIZE,
    "loss": _STEP_SIZE,
    "gradient_norm": "ridge (raise it) or learning_rate (lower it) in a new run",
}

# Parts of the run after which a collapse and a missing class are said: the first
# epochs of a good run may look like either.
_COLLAPSE_AFTER, _MISSING_AFTER = 0.1, 1 / 3
# A kernel that is above this between different classes, and hardly larger within a
# class, has collapsed: then CMMD is small whatever is predicted.
_COLLAPSED_KERNEL, _SEPARATION = 0.5, 0.05


def explain_divergence(
    config: Config, metrics: Mapping[str, float], *, step: int, bound: float
) -> str:
    """Says which metric of a step is not healthy, and which key to turn.

    Args:
      config: The configuration.
      metrics: The metrics of the step by name.
      step: Number of the step.
      bound: Largest loss and gradient of a healthy step.
    """
    if abs(metrics["loss"]) <= bound:  # Then no term is at fault, however large.
        name = "gradient_norm"
    else:
        terms = [name for name in _KEYS if name in metrics]
        name = next(term for term in terms if not abs(metrics[term]) <= bound)
    trouble = f"{name} is {metrics[name]:.4g} at step {step}"
    if config.objective != "cmmd":  # Which no Gram matrix enters.
        return f"{trouble}. Turn {_STEP_SIZE}"
    low, high = metrics["pivot_smallest"], metrics["pivot_largest"]
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{trouble} (the features are not finite). Turn {_STEP_SIZE}"
    return (
        f"{trouble} (pivots of the Gram matrices {low:.2g} to {high:.2g}, so their "
        f"condition number is at least {high / low:.2g}). Turn {_KEYS[name]}"
    )


def kernel_has_collapsed(same: float, different: float) -> bool:
    """Says whether a kernel no longer tells images apart.

    Args:
      same: Its mean for images of the same class.
      different: Its mean for images of different classes.
    """
    return different > _COLLAPSED_KERNEL and same - different < _SEPARATION


def find_collapse(
    config: Config,
    scalars: Mapping[str, float],
    confusion: np.ndarray,
    class_names: Sequence[str],
) -> str:
    """Says whether the kernel or the predictions have collapsed, and what to turn.

    Args:
      config: The configuration.
      scalars: The metrics of an epoch, with ``epoch``.
      confusion: Number of evaluated images by class and prediction, shape ``(C, C)``.
      class_names: Names of the classes.

    Returns:
      One line; "" if there is nothing to say.
    """
    if config.objective == "reconstruction":  # Which knows of no classes.
        return ""
    part = scalars["epoch"] / config.num_epochs
    epoch = f"epoch {scalars['epoch']:.0f}"
    same, different = scalars.get("kernel_same"), scalars.get("kernel_different")
    if (
        part >= _COLLAPSE_AFTER
        and config.objective == "cmmd"
        and same is not None
        and different is not None
        and kernel_has_collapsed(same, different)
    ):
        return (
            f"{epoch}: the kernel has collapsed: its mean is {same:.3f} for images of "
            f"the same class and {different:.3f} for others. {_advice(config)}"
        )
    predicted = np.flatnonzero(confusion.sum(axis=0))
    present = np.flatnonzero(confusion.sum(axis=1))
    if part >= _COLLAPSE_AFTER and len(predicted) == 1 < len(present):
        return (
            f"{epoch}: all evaluated images are predicted as class "
            f"{class_names[predicted[0]]}. {_advice(config)}"
        )
    missing = np.setdiff1d(present, predicted)
    if part >= _MISSING_AFTER and len(missing):
        names = ", ".join(f"class {class_names[i]}" for i in missing)
        return (
            f"{epoch}: never predicted: {names}. If this lasts, the classes have "
            f"collapsed. {_advice(config)}"
        )
    return ""


def _advice(config: Config) -> str:
    """Returns the key to turn where classes or kernel have collapsed."""
    if not config.clip_norm:
        return "Try clip_norm=10 in a new run."
    if config.objective == "cmmd" and not config.z_distance:
        return "Try z_distance=25 or a smaller ridge in a new run."
    if config.objective == "cmmd" and config.ridge >= 0.1:
        return "Try a smaller ridge in a new run."
    return "Try a smaller learning_rate in a new run."
