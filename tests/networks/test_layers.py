"""Layers: parameters are linen's; pooling; dropout that ignores sharding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from kln_jax.networks import layers

GEOMETRIES = {
    "Conv": {"kernel_size": (4, 4), "strides": (2, 2), "padding": ((1, 1), (1, 1))},
    "ConvTranspose": {
        "kernel_size": (4, 4),
        "strides": (2, 2),
        "padding": ((2, 2), (2, 2)),
    },
}


@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize("use_bias", [True, False])
def test_same_parameters_as_linen(kind, use_bias):
    def network(module):
        class Network(nn.Module):
            @nn.compact
            def __call__(self, x):
                layer = partial(getattr(module, kind), **GEOMETRIES[kind])
                return layer(2)(layer(3, use_bias=use_bias)(x))

        return Network()

    x = jnp.ones((2, 8, 8, 5))
    # Jitted, so that only the parameters are computed.
    ours, linens = (
        jax.jit(network(module).init)(jax.random.key(3), x) for module in (layers, nn)
    )
    assert ours["params"].keys() == {f"{kind}_0", f"{kind}_1"}
    jax.tree.map(np.testing.assert_array_equal, ours, linens)


def test_bias_gradient_in_bfloat16_is_a_float32_sum():
    x = np.zeros((50, 8, 8, 1), np.float32)
    layer = layers.ConvTranspose(2, **GEOMETRIES["ConvTranspose"], dtype=jnp.bfloat16)
    variables = {
        "params": {
            "kernel": np.zeros((4, 4, 1, 2), np.float32),
            "bias": np.zeros(2, np.float32),
        }
    }

    def loss(variables):
        return jnp.sum(layer.apply(variables, x).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))(variables)["params"]["bias"]
    np.testing.assert_array_equal(gradient, np.full(2, 50 * 16 * 16))


def test_max_pool_equals_linen():
    x = jax.random.normal(jax.random.key(0), (2, 4, 6, 3))

    def loss(pool, x):
        return jnp.sum(jnp.sin(pool(x)))

    def linens(x):
        return nn.max_pool(x, (2, 2), (2, 2))

    np.testing.assert_array_equal(layers.max_pool(x), linens(x))
    np.testing.assert_allclose(
        jax.grad(lambda x: loss(layers.max_pool, x))(x),
        jax.grad(lambda x: loss(linens, x))(x),
        rtol=1e-5,
    )


def test_max_pool_gives_the_gradient_of_ties_to_the_first():
    x = jnp.asarray([[3.0, 3.0], [1.0, 3.0]]).reshape(1, 2, 2, 1)
    gradient = jax.grad(lambda x: jnp.sum(layers.max_pool(x)))(x)
    expected = np.array([[1.0, 0.0], [0.0, 0.0]]).reshape(1, 2, 2, 1)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("place", range(4))
def test_max_pool_keeps_what_is_not_a_number(place):
    window = np.array([3.0, 1.0, 0.0, 2.0], np.float32)
    window[place] = np.nan
    assert np.isnan(layers.max_pool(jnp.asarray(window).reshape(1, 2, 2, 1))).all()


def test_max_pool_refuses_odd_sides():
    with pytest.raises(ValueError, match="5 x 4"):
        layers.max_pool(jnp.ones((1, 5, 4, 1)))


def drop(x, positions, *, seed=0, rate=0.5, deterministic=False):
    return layers.Dropout(rate).apply(
        {},
        x,
        positions,
        deterministic=deterministic,
        rngs={"dropout": jax.random.key(seed)},
    )


def test_dropout_mask_belongs_to_the_position():
    x, positions = jnp.ones((8, 4, 4, 2)), jnp.arange(8)
    whole = np.asarray(drop(x, positions))
    assert len({example.tobytes() for example in whole}) == 8
    order = jnp.asarray([5, 2, 7, 0, 1, 6, 3, 4])
    np.testing.assert_array_equal(drop(x, order), whole[order])
    shards = jax.pmap(drop, devices=jax.devices()[:4])(
        x.reshape(4, 2, 4, 4, 2), positions.reshape(4, 2)
    )
    np.testing.assert_array_equal(shards.reshape(whole.shape), whole)
    assert not np.array_equal(drop(x, positions, seed=1), whole)


def test_dropout_layers_have_masks_of_their_own():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            positions = jnp.arange(len(x))
            return [
                layers.Dropout(0.5)(x, positions, deterministic=False) for _ in range(2)
            ]

    first, second = Two().apply(
        {}, jnp.ones((4, 16)), rngs={"dropout": jax.random.key(0)}
    )
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_dropout_keeps_the_mean(rate):
    dropped = np.asarray(drop(jnp.ones((100, 400)), jnp.arange(100), rate=rate))
    np.testing.assert_allclose(
        np.unique(dropped), [0, np.float32(1 / (1 - rate))], rtol=1e-6
    )
    # Five standard deviations of the mean of 40,000 values.
    bound = 5 * np.sqrt(rate / (1 - rate) / dropped.size)
    np.testing.assert_allclose(dropped.mean(), 1, rtol=0, atol=bound)


def test_dropout_is_the_identity_without_a_reason():
    x = jax.random.normal(jax.random.key(0), (3, 5))
    np.testing.assert_array_equal(drop(x, jnp.arange(3), deterministic=True), x)
    np.testing.assert_array_equal(drop(x, jnp.arange(3), rate=0.0), x)
    # Evaluation has no key for dropout.
    layer = layers.Dropout(0.5)
    np.testing.assert_array_equal(
        layer.apply({}, x, jnp.arange(3), deterministic=True), x
    )


def test_dropout_keeps_the_dtype():
    x = jnp.ones((3, 5), jnp.bfloat16)
    assert drop(x, jnp.arange(3)).dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_rate_is_checked(rate):
    with pytest.raises(ValueError, match=f"rate={rate} must"):
        layers.Dropout(rate)
