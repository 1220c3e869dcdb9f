"""Training and evaluation, written for one device of a named axis.

Randomness is a function of the seed and the step alone: keys are
``fold_in(fold_in(key, purpose), step)``, and nothing of it is carried in the state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array, lax
from jax.typing import ArrayLike

from kln_jax import backend
from kln_jax.discrepancies.kernels import Kernel
from kln_jax.networks.models import KLN, Outputs
from kln_jax.training import augmentation
from kln_jax.training.objectives import Batch

T = TypeVar("T")

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
      skipped: Number of steps that were not healthy and made no update, int32.
    """

    step: Array
    params: Any
    batch_stats: Any
    opt_state: optax.OptState
    mean: Array
    std: Array
    skipped: Array


class TrainingData(NamedTuple):
    """The training set, which lies on each device.

    Attributes:
      images: All images, shape ``(N, h, w, c)``, uint8.
      labels: Their class numbers, shape ``(N,)``, int32; only those of the labelled
        rows are used.
      labelled: Rows of the labelled images, shape ``(L,)``, int32.
      embedding: Arrays of the fixed embedding that the kernel acts on, () for none.
    """

    images: Array
    labels: Array
    labelled: Array
    embedding: Any = ()


class Rows(NamedTuple):
    """Which images the steps of an epoch take.

    Attributes:
      s: Rows of the labelled batches, shape ``(steps, batch size)``, int32.
      t: Rows of the batches whose labels are predicted, of the same shape.
    """

    s: Array
    t: Array


# To the loss, and its terms by name.
Objective = Callable[[Batch], tuple[Array, dict[str, Array]]]


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
        skipped=jnp.zeros((), jnp.int32),
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


def make_epoch_rows(
    *, batch_size: int, steps_per_epoch: int, shared_batch: bool = False
) -> Callable[[TrainingData, Array, Array], Rows]:
    """Makes the function that draws the batches of an epoch.

    Args:
      batch_size: Images of s, and of t, in a step, over all devices.
      steps_per_epoch: Steps in an epoch.
      shared_batch: Whether t has the images of s rather than its own.

    Returns:
      A function ``(data, key, epoch) -> rows``.
    """
    shape = (steps_per_epoch, batch_size)

    def epoch_rows(data: TrainingData, key: Array, epoch: Array) -> Rows:
        def draw(purpose: Purpose, size: int) -> Array:
            order = epoch_order(_fold(key, purpose, epoch), size, shape[0] * shape[1])
            return order.reshape(shape)

        s = data.labelled[draw(Purpose.ORDER_S, len(data.labelled))]
        t = s if shared_batch else draw(Purpose.ORDER_T, len(data.images))
        return Rows(s, t)

    return epoch_rows


# (state, data, rows of one step, key) -> state, metrics; `healthy` is one of them.
TrainStep = Callable[
    [TrainState, TrainingData, Rows, Array], tuple[TrainState, dict[str, Array]]
]


def make_train_step(
    model: KLN,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    reconstruction_error: Callable[[Array, Array], Array],
    *,
    kernel: Kernel,
    embed: Callable[[Any, Array], Array] | None = None,
    shared_batch: bool = False,
    diagnostics: Callable[[Array, Array], dict[str, Array]],
    diagnose_every: int,
    bound: float = float("inf"),
    max_skipped: int = 0,
    crop_padding: int = 0,
    flip: bool = False,
) -> TrainStep:
    """Makes the function that makes one update.

    It takes a labelled batch s and a batch t whose labels are predicted, and does its
    device's share of both. The objective is that of the whole batch: embeddings and
    class scores are gathered over the devices, batch statistics are shared, and
    gradients averaged.

    A step is healthy if its loss and its gradient are finite and within a bound. One
    that is not makes no update. It counts as skipped as long as skips are left, and
    else as not made: the step of the state stays.

    Args:
      model: The network, with `AXIS` as its axis.
      optimizer: The optimiser.
      objective: From a `Batch` to the loss and its terms.
      reconstruction_error: From images and reconstructions to a mean over images.
      kernel: Kernel on features, for the means that are logged.
      embed: From the data's ``embedding`` and images in [0, 1] to the features that
        the kernel acts on; None for Z.
      shared_batch: Whether t is s, which then goes through the network once.
      diagnostics: From the features of s and t to numbers that are logged at the last
        step of an epoch, and at each that is not healthy; zero elsewhere.
      diagnose_every: Steps in an epoch.
      bound: Largest loss and largest norm of a gradient, before clipping.
      max_skipped: How many steps of a run may be skipped.
      crop_padding: Pixels of the random crop; 0 for none.
      flip: Whether images are mirrored at random.

    Returns:
      A `TrainStep` of one device of `AXIS`.
    """
    gather = _gather_as_both if shared_batch else _gather_halves

    def prepare(data: TrainingData, rows: Array, positions: Array, key: Array) -> Array:
        images = augmentation.to_unit(data.images[rows])
        keys = augmentation.example_keys(key, positions)
        if crop_padding:
            images = augmentation.random_crop(keys, images, padding=crop_padding)
        return augmentation.random_flip(keys, images) if flip else images

    def train_step(
        state: TrainState, data: TrainingData, rows: Rows, key: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        batch_size = len(rows.s)
        shard = batch_size // lax.axis_size(AXIS)
        own = lax.axis_index(AXIS) * shard + jnp.arange(shard, dtype=jnp.int32)
        # Augmentation and dropout belong to positions.
        if shared_batch:
            positions, own_rows = own, rows.s[own]
        else:
            positions = jnp.concatenate([own, batch_size + own])
            own_rows = jnp.concatenate([rows.s[own], rows.t[own]])
        augment_key = _fold(key, Purpose.AUGMENT, state.step)
        images = prepare(data, own_rows, positions, augment_key)
        labels_s = data.labels[rows.s]
        y_s = jax.nn.one_hot(labels_s, model.num_classes)

        def loss_fn(params: Any) -> tuple[Array, tuple[dict[str, Array], Any, Any]]:
            outputs, updated = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                augmentation.normalise(images, state.mean, state.std),
                positions,
                train=True,
                rngs={"dropout": _fold(key, Purpose.DROPOUT, state.step)},
                mutable=["batch_stats"],
            )
            chex.assert_equal_shape([images, outputs.reconstruction])
            features_s, features_t = gather(
                embed(data.embedding, images) if embed else outputs.z
            )
            logits_s, logits_t = gather(outputs.logits)
            error = reconstruction_error(images, outputs.reconstruction)
            error = lax.pmean(error, AXIS)
            loss, terms = objective(
                Batch(features_s, y_s, logits_s, features_t, logits_t, error)
            )
            metrics = {
                "loss": loss,
                **terms,
                **_kernel_sums(kernel(features_s, features_s), labels_s),
                "accuracy": jnp.mean(jnp.argmax(logits_s, 1) == labels_s),
                "predicted": jnp.bincount(
                    jnp.argmax(logits_t, 1), length=model.num_classes
                ),
            }
            features = features_s, features_t
            return loss, (metrics, updated["batch_stats"], features)

        (loss, (metrics, batch_stats, features)), gradients = jax.value_and_grad(
            loss_fn, has_aux=True
        )(state.params)
        # Each device has the gradient of the same global loss by its own images,
        # times the number of devices: the transpose of a gather adds them up.
        gradients = lax.pmean(gradients, AXIS)
        norms = {part: optax.tree.norm(tree) for part, tree in gradients.items()}
        norm = optax.tree.norm(norms)
        # Of NaN both comparisons are false.
        healthy = (jnp.abs(loss) <= bound) & (norm <= bound)
        healthy &= jnp.isfinite(loss) & jnp.isfinite(norm)
        # Devices may round otherwise, but must stop together: they wait for each other.
        healthy = lax.pmin(healthy.astype(jnp.int32), AXIS) > 0
        metrics |= {f"gradient_norm_{part}": value for part, value in norms.items()}
        metrics |= {"gradient_norm": norm, "healthy": healthy}
        metrics |= lax.cond(
            _any_seed(((state.step + 1) % diagnose_every == 0) | ~healthy),
            diagnostics,
            lambda *x: jax.tree.map(jnp.zeros_like, jax.eval_shape(diagnostics, *x)),
            *features,
        )

        def update(state: TrainState, gradients: Any, batch_stats: Any) -> TrainState:
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, state.params
            )
            return state.replace(
                step=state.step + 1,
                params=optax.apply_updates(state.params, updates),
                batch_stats=batch_stats,
                opt_state=opt_state,
            )

        def keep(state: TrainState, *_: Any) -> TrainState:
            skip = (state.skipped < max_skipped).astype(jnp.int32)
            return state.replace(step=state.step + skip, skipped=state.skipped + skip)

        # Not where(healthy, ...), for which XLA:CPU copies the parameters every step.
        state = lax.cond(healthy, update, keep, state, gradients, batch_stats)
        return state, metrics

    return train_step


def make_train_steps(
    train_step: TrainStep, *, steps_per_epoch: int
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Makes the function that trains for an epoch or a part of it, in one loop.

    It is one program for any number of steps, so that an epoch in parts is, bit for
    bit, the epoch in one.

    Args:
      train_step: The step.
      steps_per_epoch: Steps in an epoch.

    Returns:
      A function ``(state, data, rows, key, num_steps) -> (state, history)`` of one
      device of `AXIS`. The history has each metric of the epoch's steps, zero where
      none was made. It ends before the steps are made where one is not healthy and
      may not be skipped: that one is in the history, but the state is from before it.
    """

    def train_steps(
        state: TrainState, data: TrainingData, rows: Rows, key: Array, num_steps: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        # Compiled, so that it is traced once for its shapes and for the loop.
        @jax.jit
        def step(state: TrainState) -> tuple[TrainState, dict[str, Array]]:
            position = state.step % steps_per_epoch
            rows_now = jax.tree.map(lambda array: array[position], rows)
            return train_step(state, data, rows_now, key)

        def goes_on(carry: tuple[TrainState, Any, Array]) -> Array:
            state, _, running = carry
            return running & (state.step < last)

        def body(carry: tuple[TrainState, Any, Array]) -> tuple[TrainState, Any, Array]:
            state, history, _ = carry
            updated, metrics = step(state)
            position = state.step % steps_per_epoch
            history = jax.tree.map(
                lambda all_, one: all_.at[position].set(one), history, metrics
            )
            return updated, history, updated.step > state.step

        last = state.step + num_steps
        history = jax.tree.map(
            lambda metric: jnp.zeros((steps_per_epoch, *metric.shape), metric.dtype),
            jax.eval_shape(step, state)[1],
        )
        state, history, _ = lax.while_loop(
            goes_on, body, (state, history, jnp.array(True))
        )
        return state, history

    return train_steps


def make_evaluate(
    model: KLN,
    reconstruction_error: Callable[[Array, Array], Array],
    *,
    batch_size: int,
) -> Callable[[TrainState, Array, Array], dict[str, Array]]:
    """Makes the function that evaluates a data set, each image exactly once.

    Args:
      model: The network.
      reconstruction_error: From images and reconstructions to a mean over images.
      batch_size: Images on all devices at a time; it need not divide their number.

    Returns:
      A function ``(state, images, labels) -> sums`` of one device of `AXIS`, with
      ``confusion``, the number of images by class and prediction, shape ``(C, C)``,
      and ``reconstruction``, the sum of the errors.
    """

    def evaluate(state: TrainState, images: Array, labels: Array) -> dict[str, Array]:
        devices = lax.axis_size(AXIS)
        shard = -(-batch_size // devices)
        size, num_classes = len(images), model.num_classes

        def body(sums: dict[str, Array], i: Array) -> tuple[dict[str, Array], None]:
            rows = (i * devices + lax.axis_index(AXIS)) * shard + jnp.arange(shard)
            # The last batch is filled up with a repeated image that does not count.
            counts = rows < size
            rows = jnp.minimum(rows, size - 1)
            unit = augmentation.to_unit(images[rows])
            outputs = predict(model, state, unit)
            errors = jax.vmap(lambda x, y: reconstruction_error(x[None], y[None]))(
                unit, outputs.reconstruction
            )
            confusion = (
                sums["confusion"]
                .at[labels[rows], jnp.argmax(outputs.logits, 1)]
                .add(counts.astype(jnp.int32))
            )
            reconstruction = sums["reconstruction"] + jnp.sum(
                jnp.where(counts, errors, 0.0)
            )
            return {"confusion": confusion, "reconstruction": reconstruction}, None

        zeros = {
            "confusion": jnp.zeros((num_classes, num_classes), jnp.int32),
            "reconstruction": jnp.zeros(()),
        }
        batches = -(-size // (shard * devices))
        sums, _ = lax.scan(body, zeros, jnp.arange(batches))
        return lax.psum(sums, AXIS)

    return evaluate


def predict(model: KLN, state: TrainState, images: Array) -> Outputs:
    """Applies a trained network.

    Args:
      model: The network.
      state: Its state.
      images: Images in [0, 1], shape ``(n, h, w, c)``.

    Returns:
      Its `Outputs`.
    """
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    outputs = model.apply(
        variables, augmentation.normalise(images, state.mean, state.std)
    )
    return cast(Outputs, outputs)  # Without mutable variables it is not a pair.


def without_optimizer(state: TrainState) -> TrainState:
    """Returns a state as NumPy arrays, without what only training needs."""
    return jax.device_get(state.replace(opt_state=()))


def over_seeds(function: Callable[..., T], in_axes: Sequence[Any]) -> Callable[..., T]:
    """Maps a function over seeds, in one program: `jax.vmap`, but in turns on CPU.

    XLA:CPU takes longer for a batch of seeds than for each by itself, and rounds sums
    otherwise; in turns every seed gets the numbers of a run of its own.

    Args:
      function: The function of one seed.
      in_axes: For each argument, the axis of seeds: 0, or None if they share it.

    Returns:
      The function of all seeds, whose results have them on axis 0.
    """
    if backend.is_cpu():
        function = jax.custom_batching.sequential_vmap(function)
    return jax.vmap(function, in_axes)


@jax.custom_batching.custom_vmap
def _any_seed(wanted: Array) -> Array:
    """Returns whether it is wanted; under `jax.vmap` over seeds, by any of them.

    A condition of each seed's own would be no branch: both sides would be computed in
    every step, and the factorisations of one beside those of the objective.
    """
    return wanted


@_any_seed.def_vmap
def _(axis_size: int, in_batched: list[bool], wanted: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return jnp.any(wanted), False


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


def _kernel_sums(gram: Array, labels: Array) -> dict[str, Array]:
    """Sums and counts of kernel values over pairs of the same and other classes."""
    same = labels[:, None] == labels[None, :]
    pairs = {"same": same & ~jnp.eye(len(labels), dtype=bool), "different": ~same}
    sums = {}
    for name, mask in pairs.items():
        sums[f"kernel_{name}_sum"] = jnp.sum(jnp.where(mask, gram, 0.0))
        sums[f"kernel_{name}_count"] = jnp.sum(mask)
    return sums
