"""Training and evaluation, written for one device of a named axis.

Randomness is a function of the seed and the step alone: keys are
``fold_in(fold_in(key, purpose), step)``, and nothing of it is carried in the state.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array, lax
from jax.typing import ArrayLike

from kln_jax.discrepancies.kernels import Kernel
from kln_jax.networks.models import KLN, Outputs
from kln_jax.training import augmentation
from kln_jax.training.objectives import Batch, Objective, gram_diagnostics

# The axis of devices over which a batch is sharded.
AXIS = "batch"


class Purpose(enum.IntEnum):
    """What a random key is for."""

    INIT = 0
    ORDER_S = 1
    ORDER_T = 2
    AUGMENT = 3
    DROPOUT = 4


class TrainState(struct.PyTreeNode):
    """All that changes in training, and what predicting needs.

    Attributes:
      step: Number of steps made, int32.
      params: Parameters of the network.
      batch_stats: Running statistics of batch normalisation.
      opt_state: State of the optimiser.
      mean: Mean of each channel, subtracted from images in [0, 1], shape ``(c,)``.
      std: What they are divided by then, shape ``(c,)``.
    """

    step: Array
    params: Any
    batch_stats: Any
    opt_state: optax.OptState
    mean: Array
    std: Array


class TrainingData(NamedTuple):
    """The training set, which lies on each device.

    Attributes:
      images: All images, shape ``(N, h, w, c)``, uint8.
      labels: Their class numbers, shape ``(N,)``, int32; only those of the labelled
        rows are used.
      labelled: Rows of the labelled images, shape ``(L,)``, int32.
      embedding: Arrays of the fixed embedding that the kernel acts on, () for none.
      class_prior: The prior of the confidence term, shape ``(C,)``; uniform if None.
      weights: How often a labelled row is in batches s, in proportion, shape ``(L,)``;
        all as often if None.
    """

    images: Array
    labels: Array
    labelled: Array
    embedding: Any = ()
    class_prior: Array | None = None
    weights: Array | None = None


class Rows(NamedTuple):
    """Which images the steps of an epoch take.

    Attributes:
      s: Rows of the labelled batches, shape ``(steps, batch size)``, int32.
      t: Rows of the batches whose labels are predicted, of the same shape.
    """

    s: Array
    t: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """What a configuration decides of a step; the functions here take it first.

    Attributes:
      model: The network, with `AXIS` as its axis of devices.
      optimizer: The optimiser.
      objective: From a `Batch` to the loss and its terms.
      reconstruction_error: From images and reconstructions to a mean over images.
      kernel: Kernel on features.
      ridge: The regularisation of the CMMD.
      embed: From the data's ``embedding`` and images in [0, 1] to the features that
        the kernel acts on; None for Z.
      batch_size: Images of s, and of t, in a step, over all devices.
      steps_per_epoch: Steps in an epoch.
      shared_batch: Whether t is s, which then goes through the network once.
      crop_padding: Pixels of the random crop; 0 for none.
      flip: Whether images are mirrored at random.
      bound: Largest loss and largest norm of a gradient, before clipping, of a step
        that is healthy.
    """

    model: KLN
    optimizer: optax.GradientTransformation
    objective: Objective
    reconstruction_error: Callable[[Array, Array], Array]
    kernel: Kernel
    ridge: float
    embed: Callable[[Any, Array], Array] | None = None
    batch_size: int
    steps_per_epoch: int
    shared_batch: bool = False
    crop_padding: int = 0
    flip: bool = False
    bound: float = float("inf")


def init_state(
    model: KLN,
    optimizer: optax.GradientTransformation,
    key: Array,
    *,
    mean: ArrayLike,
    std: ArrayLike,
    image_shape: tuple[int, int, int],
) -> TrainState:
    """Initialises the network and the optimiser.

    Args:
      model: The network.
      optimizer: The optimiser.
      key: The key of the run.
      mean: Mean of each channel of images in [0, 1].
      std: Standard deviation of each channel.
      image_shape: Height, width and channels.

    Returns:
      The state of step 0.
    """
    variables = model.init(
        jax.random.fold_in(key, Purpose.INIT), jnp.zeros((1, *image_shape))
    )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        opt_state=optimizer.init(variables["params"]),
        mean=jnp.asarray(mean, jnp.float32),
        std=jnp.asarray(std, jnp.float32),
    )


def epoch_order(key: Array, size: int, length: int) -> Array:
    """Rows in random order: each once, and in a new order each time they run out.

    Args:
      key: The key of the epoch.
      size: Number of rows.
      length: How many to draw.

    Returns:
      Row numbers in ``[0, size)``, shape ``(length,)``, int32.
    """
    keys = jax.random.split(key, -(-length // size))
    order = jax.vmap(jax.random.permutation, in_axes=(0, None))(keys, size)
    return order.reshape(-1)[:length].astype(jnp.int32)


def weighted_order(key: Array, weights: Array, length: int) -> Array:
    """Rows in random order, each as often as its weight says.

    That is its share of all weights times the length, rounded up or down.

    Args:
      key: The key of the epoch.
      weights: Weights of the rows, at least 0, shape ``(size,)``.
      length: How many to draw.

    Returns:
      Row numbers in ``[0, size)``, shape ``(length,)``, int32.
    """
    key_order, key_start = jax.random.split(key)
    ends = jnp.cumsum(weights)
    positions = jnp.arange(length, dtype=ends.dtype)
    places = (jax.random.uniform(key_start) + positions) / length * ends[-1]
    # Rounding may put a place at the last end: it is of the last row with a weight.
    last = jnp.searchsorted(ends, ends[-1])
    rows = jnp.minimum(jnp.searchsorted(ends, places, side="right"), last)
    return jax.random.permutation(key_order, rows).astype(jnp.int32)


def draw_rows(method: Method, data: TrainingData, key: Array, epoch: Array) -> Rows:
    """Draws the batches of an epoch.

    Args:
      method: The `Method`.
      data: The training set.
      key: The key of the run.
      epoch: Number of the epoch, from 0 on.

    Returns:
      The `Rows` of its steps.
    """
    shape = method.steps_per_epoch, method.batch_size

    def draw(purpose: Purpose, size: int, weights: Array | None = None) -> Array:
        key_now, length = _fold(key, purpose, epoch), shape[0] * shape[1]
        order = (
            epoch_order(key_now, size, length)
            if weights is None
            else weighted_order(key_now, weights, length)
        )
        return order.reshape(shape)

    s = data.labelled[draw(Purpose.ORDER_S, len(data.labelled), data.weights)]
    return Rows(
        s, s if method.shared_batch else draw(Purpose.ORDER_T, len(data.images))
    )


def train_step(
    method: Method, state: TrainState, data: TrainingData, rows: Rows, key: Array
) -> tuple[TrainState, dict[str, Array]]:
    """Makes one update, on one device of `AXIS`.

    It takes a labelled batch s and a batch t whose labels are predicted, and does its
    device's share of both. The objective is that of the whole batch: embeddings and
    class scores are gathered over the devices, batch statistics are shared, and
    gradients are averaged.

    Args:
      method: The `Method`.
      state: The state before the step.
      data: The training set.
      rows: The `Rows` of this step, each of shape ``(batch size,)``.
      key: The key of the run.

    Returns:
      The state after the step, and its metrics. ``healthy`` is one of them: whether
      loss and gradient are finite and within the bound. A step that is not healthy
      makes no update, and the state keeps its number of steps.
    """
    images, positions = _own_share(method, state, data, rows, key)
    labels_s = data.labels[rows.s]
    y_s = jax.nn.one_hot(labels_s, method.model.num_classes)
    gather = _gather_as_both if method.shared_batch else _gather_halves

    def loss_fn(params: Any) -> tuple[Array, tuple[dict[str, Array], Batch, Any]]:
        outputs, updated = method.model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            augmentation.normalise(images, state.mean, state.std),
            positions,
            train=True,
            rngs={"dropout": _fold(key, Purpose.DROPOUT, state.step)},
            mutable=["batch_stats"],
        )
        chex.assert_equal_shape([images, outputs.reconstruction])
        features_s, features_t = gather(
            method.embed(data.embedding, images) if method.embed else outputs.z
        )
        logits_s, logits_t = gather(outputs.logits)
        error = method.reconstruction_error(images, outputs.reconstruction)
        batch = Batch(
            features_s,
            y_s,
            logits_s,
            features_t,
            logits_t,
            lax.pmean(error, AXIS),
            data.class_prior,
            jax.nn.one_hot(data.labels[rows.t], method.model.num_classes),
        )
        loss, terms = method.objective(batch)
        return loss, (terms, batch, updated["batch_stats"])

    (loss, (terms, batch, batch_stats)), gradients = jax.value_and_grad(
        loss_fn, has_aux=True
    )(state.params)
    # Each device has the gradient of the same global loss by its own images, times the
    # number of devices: the transpose of a gather adds them up.
    gradients = lax.pmean(gradients, AXIS)
    norms = {part: optax.tree.norm(tree) for part, tree in gradients.items()}
    norm = optax.tree.norm(norms)
    healthy = _is_healthy(loss, norm, method.bound)

    def update(state: TrainState) -> TrainState:
        updates, opt_state = method.optimizer.update(
            gradients, state.opt_state, state.params
        )
        return state.replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            batch_stats=batch_stats,
            opt_state=opt_state,
        )

    def diagnose() -> dict[str, Array]:
        features = batch.features_s, batch.features_t
        return gram_diagnostics(
            *features, labels_s, kernel=method.kernel, ridge=method.ridge
        )

    def skip_diagnosis() -> dict[str, Array]:
        zeros: dict[str, Array] = jax.tree.map(jnp.zeros_like, jax.eval_shape(diagnose))
        return zeros

    is_last = (state.step + 1) % method.steps_per_epoch == 0
    metrics = {
        "loss": loss,
        **terms,
        "accuracy": jnp.mean(jnp.argmax(batch.logits_s, 1) == labels_s),
        **{f"gradient_norm_{part}": value for part, value in norms.items()},
        "gradient_norm": norm,
        "healthy": healthy,
        **lax.cond(is_last | ~healthy, diagnose, skip_diagnosis),
    }
    # Not where(healthy, ...), for which XLA:CPU copies the parameters every step.
    return lax.cond(healthy, update, lambda state: state, state), metrics


def train_steps(
    method: Method,
    state: TrainState,
    data: TrainingData,
    rows: Rows,
    key: Array,
    num_steps: Array,
) -> tuple[TrainState, dict[str, Array]]:
    """Trains for an epoch or a part of it, in one loop, on one device of `AXIS`.

    It is one program for any number of steps, so that an epoch in parts is, bit for
    bit, the epoch in one.

    Args:
      method: The `Method`.
      state: The state before the steps.
      data: The training set.
      rows: The `Rows` of the epoch.
      key: The key of the run.
      num_steps: How many steps to make, within the epoch.

    Returns:
      The state after the steps, and the metrics of each step of the epoch, zero where
      none was made. The loop ends early at a step that is not healthy: that one is
      among the metrics, and the state is the one before it.
    """

    # Compiled, so that it is traced once for its shapes and for the loop.
    @jax.jit
    def step(state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        position = state.step % method.steps_per_epoch
        rows_now = jax.tree.map(lambda array: array[position], rows)
        return train_step(method, state, data, rows_now, key)

    def goes_on(carry: tuple[TrainState, Any, Array]) -> Array:
        state, _, healthy = carry
        return healthy & (state.step < last)

    def body(carry: tuple[TrainState, Any, Array]) -> tuple[TrainState, Any, Array]:
        state, history, _ = carry
        updated, metrics = step(state)
        position = state.step % method.steps_per_epoch
        history = jax.tree.map(
            lambda all_, one: all_.at[position].set(one), history, metrics
        )
        return updated, history, updated.step > state.step

    last = state.step + num_steps
    history = jax.tree.map(
        lambda metric: jnp.zeros((method.steps_per_epoch, *metric.shape), metric.dtype),
        jax.eval_shape(step, state)[1],
    )
    state, history, _ = lax.while_loop(goes_on, body, (state, history, jnp.array(True)))
    return state, history


def evaluate(
    method: Method, state: TrainState, images: Array, labels: Array
) -> dict[str, Array]:
    """Evaluates a data set, each image exactly once, on one device of `AXIS`.

    Args:
      method: The `Method`.
      state: The state.
      images: All images, shape ``(N, h, w, c)``, uint8.
      labels: Their class numbers, shape ``(N,)``, int32.

    Returns:
      ``confusion``, the number of images by class and prediction, shape ``(C, C)``;
      ``reconstruction``, the sum of the errors; and ``nonfinite``, the number of images
      with an output that is not finite.
    """
    devices = lax.axis_size(AXIS)
    shard = -(-2 * method.batch_size // devices)
    size, num_classes = len(images), method.model.num_classes

    def body(sums: dict[str, Array], i: Array) -> tuple[dict[str, Array], None]:
        rows = (i * devices + lax.axis_index(AXIS)) * shard + jnp.arange(shard)
        # The last batch is filled up with a repeated image that does not count.
        counts = rows < size
        rows = jnp.minimum(rows, size - 1)
        unit = augmentation.to_unit(images[rows])
        outputs = apply_trained(method.model, state, unit)
        errors = jax.vmap(lambda x, y: method.reconstruction_error(x[None], y[None]))(
            unit, outputs.reconstruction
        )
        finite = jnp.isfinite(outputs.logits).all(1) & jnp.isfinite(errors)
        return {
            "confusion": sums["confusion"]
            .at[labels[rows], jnp.argmax(outputs.logits, 1)]
            .add(counts.astype(jnp.int32)),
            "reconstruction": sums["reconstruction"]
            + jnp.sum(jnp.where(counts, errors, 0.0)),
            "nonfinite": sums["nonfinite"] + jnp.sum(counts & ~finite),
        }, None

    zeros = {
        "confusion": jnp.zeros((num_classes, num_classes), jnp.int32),
        "reconstruction": jnp.zeros(()),
        "nonfinite": jnp.zeros((), jnp.int32),
    }
    batches = -(-size // (shard * devices))
    sums, _ = lax.scan(body, zeros, jnp.arange(batches))
    total: dict[str, Array] = lax.psum(sums, AXIS)
    return total


def apply_trained(model: KLN, state: TrainState, images: Array) -> Outputs:
    """Applies a trained network.

    Args:
      model: The network.
      state: Its state.
      images: Images in [0, 1], shape ``(n, h, w, c)``.

    Returns:
      Its `Outputs`.
    """
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    normalised = augmentation.normalise(images, state.mean, state.std)
    # Without mutable variables it is not a pair.
    return cast(Outputs, model.apply(variables, normalised))


def without_optimizer(state: TrainState) -> TrainState:
    """Returns a state as NumPy arrays, without what only training needs."""
    kept: TrainState = jax.device_get(state.replace(opt_state=()))
    return kept


def _own_share(
    method: Method, state: TrainState, data: TrainingData, rows: Rows, key: Array
) -> tuple[Array, Array]:
    """Returns this device's images of a step, augmented, and their positions."""
    batch_size = len(rows.s)
    shard = batch_size // lax.axis_size(AXIS)
    own = lax.axis_index(AXIS) * shard + jnp.arange(shard, dtype=jnp.int32)
    # Augmentation and dropout belong to positions.
    if method.shared_batch:
        positions, own_rows = own, rows.s[own]
    else:
        positions = jnp.concatenate([own, batch_size + own])
        own_rows = jnp.concatenate([rows.s[own], rows.t[own]])
    images = augmentation.to_unit(data.images[own_rows])
    keys = augmentation.example_keys(_fold(key, Purpose.AUGMENT, state.step), positions)
    if method.crop_padding:
        images = augmentation.random_crop(keys, images, padding=method.crop_padding)
    if method.flip:
        images = augmentation.random_flip(keys, images)
    return images, positions


def _is_healthy(loss: Array, norm: Array, bound: float) -> Array:
    """Whether a step may be made, the same on all devices."""
    # Of NaN both comparisons are false.
    healthy = (jnp.abs(loss) <= bound) & (norm <= bound)
    healthy &= jnp.isfinite(loss) & jnp.isfinite(norm)
    # Devices may round otherwise, but must stop together: they wait for each other.
    agreed: Array = lax.pmin(healthy.astype(jnp.int32), AXIS)
    return agreed > 0


def _fold(key: Array, purpose: Purpose, step: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, purpose), step)


def _gather_halves(local: Array) -> tuple[Array, Array]:
    """Returns the global batches s and t from the halves of the local rows."""
    s, t = jnp.split(local, 2)
    return lax.all_gather(s, AXIS, tiled=True), lax.all_gather(t, AXIS, tiled=True)


def _gather_as_both(local: Array) -> tuple[Array, Array]:
    """Gathers what is s and t at once."""
    both = lax.all_gather(local, AXIS, tiled=True)
    return both, both
