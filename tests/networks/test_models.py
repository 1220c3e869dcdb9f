import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from kln_jax.networks import layers, models

SHAPES = {"mnist": (28, 28, 1), "mlp": (28, 28, 1), "conv_large": (32, 32, 3)}


def _variables(model, image_shape):
    init = jax.jit(lambda key: model.init(key, jnp.zeros((2, *image_shape))))
    return init(jax.random.key(0))


def _abstract_params(network):
    model = models.build(network, image_shape=SHAPES[network], num_classes=10)
    return jax.eval_shape(lambda: _variables(model, SHAPES[network]))["params"]


def _count(tree):
    return sum(np.prod(leaf.shape, dtype=int) for leaf in jax.tree.leaves(tree))


def test_mnist_network_has_the_papers_layers():
    params = _abstract_params("mnist")
    kernels = [
        params[part][layer]["kernel"].shape
        for part, name in (("encoder", "Conv"), ("decoder", "ConvTranspose"))
        for layer in (f"{name}_{i}" for i in range(4))
    ]
    assert kernels == [
        (4, 4, 1, 64),
        (4, 4, 64, 128),
        (7, 7, 128, 1024),
        (1, 1, 1024, 128),
        (1, 1, 128, 1024),
        (7, 7, 1024, 128),
        (4, 4, 128, 64),
        (4, 4, 64, 1),
    ]
    assert _count(params) == 13_377_739


def test_conv_large_network_has_nine_layers_and_four_deconvolutions():
    params = _abstract_params("conv_large")
    encoder = [params["encoder"][f"Conv_{i}"]["kernel"].shape for i in range(9)]
    assert encoder == [
        (3, 3, 3, 128),
        (3, 3, 128, 128),
        (3, 3, 128, 128),
        (3, 3, 128, 256),
        (3, 3, 256, 256),
        (3, 3, 256, 256),
        (3, 3, 256, 512),
        (1, 1, 512, 256),
        (1, 1, 256, 128),
    ]
    decoder = [
        params["decoder"][f"ConvTranspose_{i}"]["kernel"].shape for i in range(4)
    ]
    assert decoder == [
        (4, 4, 128, 512),
        (4, 4, 512, 256),
        (4, 4, 256, 128),
        (4, 4, 128, 3),
    ]
    assert _count(params["encoder"]) == 3_120_512


@pytest.mark.parametrize("network", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@jax.numpy_dtype_promotion("standard")  # Which linen's BatchNorm needs for bfloat16.
def test_outputs_are_float32_images_in_the_unit_interval(network, dtype):
    shape = SHAPES[network]
    model = models.build(
        network, image_shape=shape, num_classes=7, width=0.05, dtype=dtype
    )
    variables = _variables(model, shape)
    images = jax.random.uniform(jax.random.key(1), (3, *shape))
    outputs = jax.jit(model.apply)(variables, images)
    assert outputs.z.shape == (3, 128)
    assert outputs.reconstruction.shape == images.shape
    assert outputs.logits.shape == (3, 7)
    assert {output.dtype for output in outputs} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {
        jnp.dtype(jnp.float32)
    }
    assert 0 <= outputs.reconstruction.min() <= outputs.reconstruction.max() <= 1


@pytest.mark.parametrize("network", SHAPES)
def test_a_layer_has_one_channel_at_least(network):
    model = models.build(
        network, image_shape=SHAPES[network], num_classes=7, width=1e-4
    )
    params = jax.eval_shape(lambda: _variables(model, SHAPES[network]))["params"]
    assert all(leaf.size for leaf in jax.tree.leaves(params))


def _normalised(network, **options):
    return models.build(
        network,
        image_shape=list(SHAPES[network]),  # As a configuration may have it.
        num_classes=3,
        width=0.05,
        z_distance=256.0,  # Variance one in each of 128 dimensions.
        **options,
    )


@pytest.mark.parametrize("network", SHAPES)
def test_normalised_z_has_mean_zero_and_variance_one_in_training(network):
    model = _normalised(network)
    variables = _variables(model, SHAPES[network])
    images = jax.random.uniform(jax.random.key(1), (16, *SHAPES[network]))
    apply = jax.jit(model.apply, static_argnames=("train", "mutable"))
    keys = {"dropout": jax.random.key(2)}
    outputs, updated = apply(
        variables, images, train=True, mutable=("batch_stats",), rngs=keys
    )
    np.testing.assert_allclose(outputs.z.mean(0), 0.0, atol=1e-4)
    varying = outputs.z.std(0) > 0.5  # A small ReLU unit may be constant.
    assert varying.mean() > 0.5
    # Kernel, classifier and decoder see the same Z; in evaluation the running one.
    classifier = variables["params"]["classifier"]
    logits = outputs.z @ classifier["kernel"] + classifier["bias"][None, :]
    np.testing.assert_allclose(outputs.logits, logits, rtol=1e-3, atol=1e-4)
    before = apply(variables, images).z
    after = apply({**variables, **updated}, images).z
    assert np.abs(before - after).max() > 1e-3


def _of_the_batch(model, variables, images, positions):
    """The running statistics after a batch."""
    _, updated = model.apply(
        variables,
        images,
        positions,
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": jax.random.key(2)},
    )
    return updated


@pytest.mark.parametrize("network", SHAPES)
def test_running_statistics_keep_nine_tenths(network):
    model = _normalised(network)
    variables = _variables(model, SHAPES[network])
    images = jax.random.uniform(jax.random.key(1), (8, *SHAPES[network]))
    follow = jax.jit(lambda old: _of_the_batch(model, old, images, jnp.arange(8)))
    once = follow(variables)
    twice = follow({**variables, **once})
    # From 0, a tenth of the batch's mean, and then a tenth and nine tenths of that.
    (once, twice), checked = map(jax.tree_util.tree_leaves_with_path, (once, twice)), 0
    for (path, first), (_, second) in zip(once, twice, strict=True):
        if path[-1].key == "mean":
            np.testing.assert_allclose(second, 1.9 * first, rtol=1e-5, atol=1e-6)
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("network", SHAPES)
def test_batch_statistics_are_those_of_all_devices(network):
    alone, shared = _normalised(network), _normalised(network, axis_name="i")
    variables = _variables(alone, SHAPES[network])
    images = jax.random.uniform(jax.random.key(1), (8, *SHAPES[network]))
    images *= jnp.arange(1.0, 9.0).reshape(8, 1, 1, 1) / 8  # No two shards are alike.
    positions = jnp.arange(8)
    expected = jax.jit(functools.partial(_of_the_batch, alone, variables))(
        images, positions
    )
    found = jax.pmap(
        functools.partial(_of_the_batch, shared, variables),
        "i",
        devices=jax.devices()[:2],
    )(images.reshape(2, 4, *SHAPES[network]), positions.reshape(2, 4))
    for device in range(2):
        own = jax.tree.map(lambda leaf, i=device: leaf[i], found)
        chex.assert_trees_all_close(own, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("mnist", ["ReLU 0.2"] * 4 + ["ReLU 0.0"] * 3),
        ("mlp", ["ReLU 0.0"] * 4),
        (
            "conv_large",
            [*["ReLU 0.1"] * 3, "dropout 0.5"] * 2
            + ["ReLU 0.1"] * 3
            + ["ReLU 0.0"] * 3,
        ),
    ],
)
def test_slopes_and_rates_are_as_documented(network, expected, monkeypatch):
    found, leaky_relu = [], nn.leaky_relu

    def relu(x, slope):
        found.append(f"ReLU {slope}")
        return leaky_relu(x, slope)

    def note(call, arguments, keywords, context):
        if isinstance(context.module, layers.Dropout):
            assert context.method_name == "__call__"
            found.append(f"dropout {context.module.rate}")
        return call(*arguments, **keywords)

    monkeypatch.setattr(nn, "leaky_relu", relu)
    model = models.build(network, image_shape=SHAPES[network], num_classes=3)
    with nn.intercept_methods(note):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, *SHAPES[network])))
    assert found == expected


def test_dropout_masks_belong_to_positions():
    model = models.build(
        "conv_large", image_shape=(32, 32, 3), num_classes=3, width=0.05
    )
    variables = _variables(model, (32, 32, 3))
    image = jax.random.uniform(jax.random.key(1), (1, 32, 32, 3))
    images = jnp.tile(image, (4, 1, 1, 1))

    @jax.jit
    def embed(positions):
        outputs, _ = model.apply(
            variables,
            images,
            positions,
            train=True,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats"],
        )
        return outputs.z

    z = embed(jnp.array([5, 6, 7, 5]))
    np.testing.assert_allclose(z[0], z[3], rtol=1e-5, atol=1e-5)
    assert np.abs(z[0] - z[1]).max() > 1e-2


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"28x28 pixels, but the data set has 32x32"):
        models.build("mnist", image_shape=(32, 32, 3), num_classes=10)
    with pytest.raises(ValueError, match=r"network='resnet' must be one of"):
        models.build("resnet", image_shape=(32, 32, 3), num_classes=10)


def test_standardised_z_has_the_distance_that_is_asked_for():
    model = models.build(
        "mlp", image_shape=(28, 28, 1), num_classes=3, width=0.05, z_distance=25.0
    )
    variables = _variables(model, (28, 28, 1))
    assert "standardise_z" not in variables["params"]  # No scale can be learned.
    images = jax.random.uniform(jax.random.key(1), (64, 28, 28, 1))
    outputs, _ = model.apply(variables, images, train=True, mutable=["batch_stats"])
    z = np.asarray(outputs.z, np.float64)
    distances = np.square(z[:, None] - z[None]).sum(-1)
    np.testing.assert_allclose(distances.mean(), 25.0, rtol=1e-2)
    # The kernel is then the paper's value for different classes of CIFAR-10.
    kernel = np.exp(-25.0 / (2 * np.array([1, 3, 5, 7, 9]))).mean()
    np.testing.assert_allclose(kernel, 0.1, atol=5e-3)
