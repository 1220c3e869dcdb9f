"""The learning-rate schedule and the optimisers, from plain arguments."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

# The paper's decay of Adam's first and second moments.
_B1, _B2 = 0.9, 0.99


def step_schedule(
    learning_rate: float,
    *,
    milestones: Sequence[int] = (),
    decay: float = 0.2,
    warmup_steps: int = 0,
) -> optax.Schedule:
    r"""A constant rate, multiplied by ``decay`` at each milestone, after a warm-up.

    .. math:: \eta_i = \eta \cdot \min(1, (i + 1) / w)
        \cdot \mathrm{decay}^{|\{m : m \le i\}|}

    Args:
      learning_rate: The rate :math:`\eta` before the first milestone.
      milestones: Steps at which the rate falls.
      decay: Factor at each milestone.
      warmup_steps: Steps w of linear warm-up; 0 for none.

    Returns:
      A function from the step to the rate.

    Examples:
      >>> schedule = step_schedule(1.0, milestones=(10,), decay=0.2, warmup_steps=4)
      >>> [round(float(schedule(i)), 2) for i in (0, 3, 9, 10)]
      [0.25, 1.0, 1.0, 0.2]
    """
    times = collections.Counter(milestones)
    steps = optax.piecewise_constant_schedule(
        learning_rate, {step: decay**count for step, count in times.items()}
    )
    if not warmup_steps:
        return steps

    def warmed_up(count: ArrayLike) -> ArrayLike:
        # The first step already moves: it takes 1 / w of the rate, not 0.
        rate: ArrayLike = steps(count) * jnp.minimum(
            1.0, (jnp.asarray(count) + 1) / warmup_steps
        )
        return rate

    return warmed_up


def optimizer(
    name: str,
    schedule: optax.Schedule,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """SGD with momentum, or Adam, as the paper's experiments use them.

    Gradients are clipped first; then the weight decay is added to them, for every
    parameter, as PyTorch's optimisers do.

    Args:
      name: ``"sgd"`` or ``"adam"``.
      schedule: From the step to the learning rate.
      momentum: Momentum of SGD.
      weight_decay: The coefficient of the L2 penalty.
      clip_norm: Largest global norm of the gradients; 0 for no clipping.

    Returns:
      An optax transformation.

    Raises:
      ValueError: If the name is unknown.

    Examples:
      >>> sgd = optimizer("sgd", step_schedule(0.02), weight_decay=5e-4)
    """
    match name:
        case "sgd":
            update = optax.sgd(schedule, momentum)
        case "adam":
            update = optax.adam(schedule, b1=_B1, b2=_B2)
        case _:
            raise ValueError(f'optimizer={name!r} must be "sgd" or "adam".')
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(clip, decay if weight_decay else optax.identity(), update)
