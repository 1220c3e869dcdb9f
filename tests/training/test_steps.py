"""The step on 1, 2, 4 and 8 devices, on batches whose shards differ strongly."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from kln_jax.discrepancies import kernels
from kln_jax.networks import models
from kln_jax.training import (
    augmentation,
    fixed_embeddings,
    objectives,
    optimizers,
    parallel,
    steps,
)

KERNEL = kernels.gaussian_mixture()
BATCH, CLASSES, STEPS = 16, 3, 5
SHAPES = {"mnist": (28, 28, 1), "conv_large": (32, 32, 3)}
OBJECTIVE = functools.partial(
    objectives.kln_objective,
    kernel=KERNEL,
    label_kernel=kernels.linear,
    ridge=0.1,
    reconstruction_weight=0.1,
    confidence_weight=1.0,
)


def _model(network="mnist"):
    return models.build(
        network,
        image_shape=SHAPES[network],
        num_classes=CLASSES,
        width=1 / 16,
        latent_dim=8,
        axis_name=steps.AXIS,
    )


SGD = optimizers.optimizer(
    "sgd", optimizers.step_schedule(5e-4), weight_decay=5e-4, clip_norm=10.0
)


@functools.cache
def _state(network="mnist", optimizer=SGD):
    init = functools.partial(
        steps.init_state,
        _model(network),
        optimizer,
        image_shape=SHAPES[network],
        mean=jnp.full(SHAPES[network][-1], 0.4),
        std=jnp.full(SHAPES[network][-1], 0.3),
    )
    return jax.jit(init)(jax.random.key(0))


@functools.cache
def _data(network="mnist", size=40):
    """Images from black to glaring, so that no two shards are alike."""
    rng = np.random.default_rng(0)
    scale = np.linspace(0, 255, size)[:, None, None, None] ** 1.0
    images = rng.uniform(0, 1, (size, *SHAPES[network])) * scale
    return steps.TrainingData(
        jnp.asarray(images, jnp.uint8),
        jnp.asarray(np.arange(size) % CLASSES, jnp.int32),
        jnp.arange(0, size, 2, dtype=jnp.int32),
    )


def _method(network="mnist", optimizer=SGD, objective=OBJECTIVE, **options):
    return steps.Method(
        model=_model(network),
        optimizer=optimizer,
        objective=objective,
        reconstruction_error=objectives.reconstruction_error,
        kernel=KERNEL,
        ridge=0.1,
        batch_size=BATCH,
        steps_per_epoch=STEPS,
        **options,
    )


def _over(devices, function, *arguments):
    return parallel.data_parallel(
        functools.partial(function, *arguments),
        axis_name=steps.AXIS,
        devices=jax.devices()[:devices],
    )


@functools.cache
def _train(network="mnist", devices=1, *, shared_rows=False, **options):
    """Returns a function (state, data, steps to make) -> (state, history)."""
    method = _method(network, **options)
    draws = dataclasses.replace(method, shared_batch=shared_rows or method.shared_batch)
    draw_rows = _over(devices, steps.draw_rows, draws)
    train_steps = _over(devices, steps.train_steps, method)

    def run(state, data, num_steps=STEPS):
        rows = draw_rows(data, KEY, state.step // STEPS)
        return train_steps(state, data, rows, KEY, np.int32(num_steps))

    return run


KEY = jax.random.key(7)


# One network is trained with all that is random, dropout being its own.
RANDOM = {"mnist": {}, "conv_large": dict(crop_padding=2, flip=True)}


@functools.cache
def _trained(network, devices):
    train = _train(network, devices, **RANDOM[network])
    return jax.device_get(train(_state(network), _data(network)))


# The second network differs by its dropout and augmentation; one number will do.
@pytest.mark.parametrize(
    ("network", "devices"), [("mnist", 4), ("mnist", 8), ("conv_large", 4)]
)
def test_any_number_of_devices_is_the_same_training(network, devices):
    state, metrics = _trained(network, devices)
    expected_state, expected_metrics = _trained(network, 1)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        (state.params, state.batch_stats),
        (expected_state.params, expected_state.batch_stats),
        rtol=1e-4,
        atol=1e-6,
    )
    # And it is training: the parameters moved by far more than that.
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), state.params, _state(network).params
    )
    assert max(jax.tree.leaves(moved)) > 1e-4


@functools.cache
def _first_step(objective):
    """The state after one step of plain gradient descent with rate 1, and its rows."""
    sgd = optax.sgd(1.0)
    state = _state(optimizer=sgd)
    train = _train(devices=4, optimizer=sgd, objective=objective)
    after, metrics = train(state, _data(), 1)
    data, length = _data(), STEPS * BATCH

    def rows(purpose, size):
        key = jax.random.fold_in(jax.random.fold_in(KEY, purpose), 0)
        return steps.epoch_order(key, size, length)[:BATCH]

    rows_s = data.labelled[rows(steps.Purpose.ORDER_S, len(data.labelled))]
    rows_t = rows(steps.Purpose.ORDER_T, len(data.images))
    return state, after, metrics, rows_s, rows_t


@pytest.mark.parametrize("objective", [OBJECTIVE, objectives.symmetric(OBJECTIVE)])
def test_the_gradient_is_that_of_the_global_batch(objective):
    state, after, metrics, rows_s, rows_t = _first_step(objective)
    data = _data()
    images = augmentation.to_unit(data.images[jnp.concatenate([rows_s, rows_t])])
    model = models.build(
        "mnist",
        image_shape=SHAPES["mnist"],
        num_classes=CLASSES,
        width=1 / 16,
        latent_dim=8,
    )

    def loss(params):
        outputs, updated = model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            augmentation.normalise(images, state.mean, state.std),
            train=True,
            mutable=["batch_stats"],
        )
        batch = objectives.Batch(
            features_s=outputs.z[:BATCH],
            y_s=jax.nn.one_hot(data.labels[rows_s], CLASSES),
            logits_s=outputs.logits[:BATCH],
            features_t=outputs.z[BATCH:],
            logits_t=outputs.logits[BATCH:],
            reconstruction=objectives.reconstruction_error(
                images, outputs.reconstruction
            ),
            y_t=jax.nn.one_hot(data.labels[rows_t], CLASSES),
        )
        value, _ = objective(batch)
        return value, updated["batch_stats"]

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, batch_stats), gradient = grad(state.params)
    np.testing.assert_allclose(metrics["loss"][0], value, rtol=1e-5)
    actual = jax.tree.map(lambda a, b: a - b, state.params, after.params)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    chex.assert_trees_all_close(actual, gradient, rtol=1e-4, atol=1e-5 * scale)
    chex.assert_trees_all_close(after.batch_stats, batch_stats, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        metrics["gradient_norm"][0], optax.tree.norm(gradient), rtol=1e-4
    )
    for part in ("encoder", "decoder", "classifier"):
        np.testing.assert_allclose(
            metrics[f"gradient_norm_{part}"][0],
            optax.tree.norm(gradient[part]),
            rtol=1e-4,
        )


@functools.cache
def _rows(epoch):
    return _over(1, steps.draw_rows, _method())(_data(), KEY, jnp.int32(epoch))


def test_labelled_batches_take_labelled_rows_only():
    rows, labelled = _rows(0), _data().labelled
    assert np.isin(rows.s, labelled).all()
    assert not np.isin(rows.t, labelled).all()


def test_rows_of_each_epoch_are_drawn_anew():
    first, second = _rows(0), _rows(1)
    assert (first.s != second.s).any()
    assert (first.t != second.t).any()


def test_epoch_order_takes_each_row_once_before_any_twice():
    order = np.asarray(steps.epoch_order(jax.random.key(0), 7, 18))
    assert order.dtype == np.int32
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert len(set(order[14:])) == 4
    assert (order[:7] != order[7:14]).any()
    other = np.asarray(steps.epoch_order(jax.random.key(1), 7, 18))
    assert (order != other).any()


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 3), (0.5, 2, 0), (3, 0.1, 0.1)])
def test_a_row_is_drawn_as_often_as_its_weight_says(weights):
    weights = np.asarray(weights, np.float32)
    orders = [
        np.asarray(steps.weighted_order(jax.random.key(i), weights, 50))
        for i in range(20)
    ]
    counts = np.array([np.bincount(order, minlength=3) for order in orders])
    assert np.abs(counts - 50 * weights / weights.sum()).max() <= 1
    np.testing.assert_allclose(
        counts.mean(axis=0), 50 * weights / weights.sum(), atol=0.4
    )
    assert len({tuple(order) for order in orders}) == 20


@pytest.mark.parametrize(
    ("network", "devices"), [("mnist", 1), ("mnist", 4), ("conv_large", 4)]
)
def test_an_epoch_in_parts_is_bit_for_bit_the_same_epoch(network, devices):
    data, train = _data(network), _train(network, devices, **RANDOM[network])
    expected, metrics = _trained(network, devices)
    state, parts = _state(network), []
    for num_steps in (2, 0, 1, 9):  # At most to the end of what is asked for.
        state, part = train(state, data, min(num_steps, STEPS - int(state.step)))
        parts.append(part)
    chex.assert_trees_all_equal(state, expected)
    # Where one part made a step, the others are zero.
    chex.assert_trees_all_equal(
        jax.tree.map(lambda *part: np.sum(part, axis=0, dtype=part[0].dtype), *parts),
        metrics,
    )


def _with_z(batch):
    loss, terms = OBJECTIVE(batch)
    return loss, {**terms, "z": batch.features_s}


@pytest.mark.parametrize(
    ("network", "options"),
    [("mnist", dict(crop_padding=2, flip=True)), ("conv_large", {})],
    ids=["augmentation", "dropout"],
)
def test_augmentation_and_dropout_are_drawn_anew_in_each_step(network, options):
    # All images are one, and the parameters stay: what is left is the key.
    still, data = optax.sgd(0.0), _data(network)
    data = data._replace(images=jnp.repeat(data.images[-1:], len(data.images), axis=0))
    train = _train(network, optimizer=still, objective=_with_z, **options)
    _, history = train(_state(network, still), data, 2)
    assert history["healthy"][:2].all()
    assert np.abs(history["z"][0] - history["z"][1]).max() > 0.01


@functools.cache
def _objective_that_fails():
    """Returns an objective that is NaN at the third step, and all such steps."""
    data = _data()
    key = jax.random.fold_in(jax.random.fold_in(KEY, steps.Purpose.ORDER_S), 0)
    order = steps.epoch_order(key, len(data.labelled), STEPS * BATCH)
    labels = data.labels[data.labelled[order].reshape(STEPS, BATCH)]
    counts = np.asarray((labels == 0).sum(axis=1))

    def objective(batch):
        loss, terms = OBJECTIVE(batch)
        bad = jnp.sum(batch.y_s[:, 0]).astype(jnp.int32) == counts[2]
        return jnp.where(bad, jnp.nan, loss), terms

    return objective, np.flatnonzero(counts == counts[2])


def test_the_state_stays_as_before_the_first_step_that_is_not_healthy():
    objective, bad = _objective_that_fails()
    stopped, metrics = _train(objective=objective)(_state(), _data())
    first_bad = bad[0]
    assert int(stopped.step) == first_bad
    assert np.isnan(metrics["loss"][first_bad])
    assert not metrics["healthy"][first_bad]
    assert (metrics["loss"][first_bad + 1 :] == 0).all()
    # The failing step is diagnosed, the ones before it are not.
    assert metrics["pivot_smallest"][first_bad] >= 0.1
    assert (metrics["pivot_smallest"][:first_bad] == 0).all()
    expected, _ = _train(objective=objective)(_state(), _data(), first_bad)
    chex.assert_trees_all_equal(stopped, expected)
    chex.assert_tree_all_finite((stopped.params, stopped.batch_stats))


def test_a_gradient_beyond_the_bound_is_not_healthy():
    _, metrics = _trained("mnist", 1)
    loss, norm = (float(metrics[name][0]) for name in ("loss", "gradient_norm"))
    assert norm > 1.5 * loss
    state, _ = _train(bound=0.5 * (loss + norm))(_state(), _data(), 1)
    assert int(state.step) == 0


@pytest.mark.parametrize(
    ("loss", "norm", "healthy"),
    [
        (9.0, 9.0, True),
        (-11.0, 9.0, False),
        (11.0, 9.0, False),
        (9.0, 11.0, False),
        (np.nan, 9.0, False),
        (9.0, np.nan, False),
    ],
)
def test_a_step_is_healthy_if_it_is_on_all_devices(loss, norm, healthy):
    def on_device(state):
        own = lax.axis_index(steps.AXIS) == 1
        loss, norm = (jnp.where(own, value, 1.0) for value in state)
        return steps._is_healthy(loss, norm, 10.0)

    assert _over(4, on_device)(jnp.float32([loss, norm])) == healthy


def test_without_a_bound_what_is_not_finite_is_not_healthy():
    mapped = _over(1, lambda loss: steps._is_healthy(loss, jnp.abs(loss), np.inf))
    for loss, healthy in (1e30, True), (np.inf, False), (-np.inf, False):
        assert mapped(jnp.float32(loss)) == healthy


def test_the_last_step_of_an_epoch_is_diagnosed():
    _, metrics = _train("mnist", 1)(_state(), _data())
    for name in objectives.DIAGNOSTICS:
        assert (metrics[name][:-1] == 0).all()
        assert metrics[name][-1] > 0


def test_a_shared_batch_is_two_equal_ones():
    # This network has no dropout, by which two equal batches would differ.
    once, twice = (
        _train(devices=4, shared_rows=True, shared_batch=is_shared)(_state(), _data())
        for is_shared in (True, False)
    )
    chex.assert_trees_all_close(once, twice, rtol=1e-4, atol=1e-5)


def test_of_cgmmn_there_is_one_gram_matrix_at_the_cost_of_one_batch():
    counts = []

    def embed(arrays, images):
        counts.append(len(images))
        return fixed_embeddings.pixels(arrays, images)

    def objective(batch):
        loss, terms = OBJECTIVE(batch)
        s, t = batch.features_s, batch.features_t
        grams = {"K_s": KERNEL(s, s), "K_t": KERNEL(t, t), "K_ts": KERNEL(t, s)}
        return loss, {**terms, **grams, "features": s}

    train = _train(devices=4, objective=objective, shared_batch=True, embed=embed)
    _, metrics = train(_state(), _data(), 1)
    assert set(counts) == {BATCH // 4}
    K_s, K_t, K_ts = (metrics[name][0] for name in ("K_s", "K_t", "K_ts"))
    np.testing.assert_array_equal(K_t, K_s)
    np.testing.assert_array_equal(K_ts, K_s)
    _, _, _, rows, _ = _first_step(OBJECTIVE)
    pixels = np.float32(_data().images[rows]).reshape(BATCH, -1) / 255
    np.testing.assert_allclose(metrics["features"][0], pixels, rtol=1e-6)


def test_with_a_fixed_embedding_the_kernel_does_not_depend_on_parameters():
    def embed(scale, images):
        return scale * images.reshape(len(images), -1)

    def objective(batch):
        loss, terms = OBJECTIVE(batch)
        features = {"s": batch.features_s, "t": batch.features_t}
        return loss, {**terms, **features}

    data = _data()._replace(embedding=jnp.float32(0.5))
    state, train = _state(), _train(devices=4, objective=objective, embed=embed)
    other = state.replace(params=jax.tree.map(lambda leaf: 1.1 * leaf, state.params))
    features = []
    for start in (state, other):
        _, metrics = train(start, data, 1)
        features.append((metrics["s"][0], metrics["t"][0]))
        # The classifier learns from it all the same, and so does the autoencoder.
        for part in ("encoder", "decoder", "classifier"):
            assert metrics[f"gradient_norm_{part}"][0] > 0
    chex.assert_trees_all_equal(*features)
    _, _, _, rows_s, rows_t = _first_step(OBJECTIVE)
    for found, rows in zip(features[0], (rows_s, rows_t), strict=True):
        pixels = 0.5 * np.float32(data.images[rows]).reshape(BATCH, -1) / 255
        np.testing.assert_allclose(found, pixels, rtol=1e-6)


@pytest.mark.parametrize(("devices", "size"), [(1, 10), (1, 33), (8, 1), (8, 33)])
def test_evaluation_counts_every_image_once(devices, size):
    data, state = _data(size=size), _state()
    method = dataclasses.replace(_method(), batch_size=10)
    evaluate = _over(devices, steps.evaluate, method)
    sums = evaluate(state, data.images, data.labels)
    outputs = jax.jit(functools.partial(steps.apply_trained, _model()))(
        state, augmentation.to_unit(data.images)
    )
    confusion = np.zeros((CLASSES, CLASSES), int)
    np.add.at(confusion, (data.labels, np.argmax(outputs.logits, axis=1)), 1)
    np.testing.assert_array_equal(sums["confusion"], confusion)
    errors = np.square(augmentation.to_unit(data.images) - outputs.reconstruction)
    np.testing.assert_allclose(sums["reconstruction"], errors.sum(), rtol=1e-5)
    assert sums["nonfinite"] == 0
    for part, layer in ("classifier", "bias"), ("decoder", None):
        params = dict(state.params)
        params[part] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, layer=layer: (
                leaf * jnp.nan if layer in (None, path[-1].key) else leaf
            ),
            params[part],
        )
        sums = evaluate(state.replace(params=params), data.images, data.labels)
        assert (sums["nonfinite"], sums["confusion"].sum()) == (size, size)


def test_a_gather_needs_the_mean_of_gradients():
    """What `lax.pmean` of the gradients in the step rests on."""
    x = jnp.arange(8.0)

    def device(_, w, x):
        own = lax.dynamic_slice_in_dim(x, 2 * lax.axis_index("i"), 2)
        loss = lambda w: jnp.sum(lax.all_gather(w * own, "i", tiled=True)) ** 2  # noqa: E731
        return lax.pmean(jax.grad(loss)(w), "i")

    mapped = jax.pmap(
        device, "i", in_axes=(0, None, None), out_axes=None, devices=jax.devices()[:4]
    )
    np.testing.assert_allclose(
        mapped(np.arange(4), jnp.float32(3.0), x), 2 * 3.0 * 28.0**2, rtol=1e-6
    )
