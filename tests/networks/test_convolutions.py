"""Convolutions: equal to linen's and to loops written out, in the forms meant."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec

from kln_jax.networks import convolutions, layers

CONVOLUTION = "conv_general_dilated"

HALVE = {"kernel_size": (4, 4), "strides": (2, 2), "padding": ((1, 1), (1, 1))}
DOUBLE = {"kernel_size": (4, 4), "strides": (2, 2), "padding": ((2, 2), (2, 2))}


def stride_1(kh, kw, padding="SAME"):
    return {"kernel_size": (kh, kw), "padding": padding}


def stride(s, kh, kw, padding="SAME"):
    return {"kernel_size": (kh, kw), "strides": (s, s), "padding": padding}


UNEVEN = ((0, 2), (1, 3))
# Layer, shape of an image, arguments: the networks' geometries, narrow; then some
# that only the general form takes.
GEOMETRIES = {
    "halve-1-channel": ("Conv", (8, 6, 1), HALVE),
    "halve": ("Conv", (6, 8, 5), HALVE),
    "full-extent": ("Conv", (7, 7, 5), stride_1(7, 7, "VALID")),
    "1x1-on-1x1": ("Conv", (1, 1, 5), stride_1(1, 1)),
    "1x1": ("Conv", (3, 4, 5), stride_1(1, 1)),
    "3x3-same": ("Conv", (6, 5, 5), stride_1(3, 3)),
    "3x3-valid": ("Conv", (6, 5, 5), stride_1(3, 3, "VALID")),
    "uneven-pads": ("Conv", (6, 5, 5), stride_1(3, 2, UNEVEN)),
    "3x3-larger": ("Conv", (9, 8, 5), stride_1(3, 3)),
    "3x3-valid-larger": ("Conv", (11, 10, 5), stride_1(3, 3, "VALID")),
    "uneven-pads-larger": ("Conv", (9, 8, 5), stride_1(3, 2, UNEVEN)),
    "3x3-uneven": ("Conv", (6, 5, 5), stride_1(3, 3, UNEVEN)),
    "3x3-cut": ("Conv", (6, 7, 5), stride_1(3, 3, ((-1, 3), (4, 0)))),
    "odd-height": ("Conv", (7, 6, 5), HALVE),
    "odd-width": ("Conv", (6, 7, 5), HALVE),
    "stride-3": ("Conv", (7, 6, 5), stride(3, 2, 3)),
    "transposed-1x1": ("ConvTranspose", (1, 1, 5), stride_1(1, 1, "VALID")),
    "grow-7": ("ConvTranspose", (1, 1, 5), stride_1(7, 7, "VALID")),
    "grow-4": ("ConvTranspose", (1, 1, 5), stride_1(4, 4, "VALID")),
    "double": ("ConvTranspose", (3, 5, 5), DOUBLE),
    "double-one-row": ("ConvTranspose", (1, 2, 5), DOUBLE),
    "double-same": ("ConvTranspose", (3, 5, 5), stride(2, 4, 4)),
    "transposed-5x3-same": ("ConvTranspose", (3, 5, 5), stride(2, 5, 3)),
    "transposed-2x1-stride-3": ("ConvTranspose", (3, 5, 5), stride(3, 2, 1)),
    "transposed-valid-stride-3": ("ConvTranspose", (3, 5, 5), stride(3, 2, 5, "VALID")),
}


def assert_close(actual, expected, tolerance=1e-5):
    """Compares trees of arrays, each to the scale of its largest value."""

    def check(a, e):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * np.abs(e).max())

    jax.tree.map(check, actual, expected)


def pair(name, *, features=4, **options):
    """The layer here and linen's, a batch of images and common parameters."""
    kind, shape, geometry = GEOMETRIES[name]
    ours = getattr(layers, kind)(features, **geometry, **options)
    linens = getattr(nn, kind)(features, **geometry, **options)
    rng = np.random.default_rng(0)

    def normal(shape):
        return rng.normal(size=shape).astype(np.float32)

    kernel = np.float32(0.1) * normal((*geometry["kernel_size"], shape[-1], features))
    variables = {"params": {"kernel": kernel, "bias": normal(features)}}
    return ours, linens, normal((4, *shape)), variables


def value_and_gradients(layer, variables, x):
    def loss(variables, x):
        y = layer.apply(variables, x).astype(jnp.float32)
        return jnp.sum(jnp.sin(y)), y

    gradients, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables, x)
    return y, gradients


def derivatives(layer, variables, x):
    """Value and gradients; a derivative of each, along some direction."""

    def run(variables, x):
        return value_and_gradients(layer, variables, x)

    directions = jax.tree.map(np.cos, (variables, x))
    return jax.jit(lambda *at: jax.jvp(run, at, directions))(variables, x)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_equal_to_linen(name):
    ours, linens, x, variables = pair(name)
    assert_close(derivatives(ours, variables, x), derivatives(linens, variables, x))


# With the borders of tiles inside the image, on its border, and outside it.
@pytest.mark.parametrize(
    "name", ["3x3-same", "3x3-valid", "3x3-larger", "3x3-uneven", "3x3-cut"]
)
def test_winograd_is_equal_to_linen(name, monkeypatch):
    monkeypatch.setattr(convolutions, "_WINOGRAD_CHANNELS", 1)
    ours, linens, x, variables = pair(name)
    assert products(ours.apply, variables, x) == {"dot_general"}
    assert_close(derivatives(ours, variables, x), derivatives(linens, variables, x))


def test_winograd_rounds_as_little_as_a_convolution():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 64))
    kernel = rng.normal(size=(3, 3, 64, 32))
    dy = rng.normal(size=(4, 8, 8, 32))

    def run(x, kernel, dy):
        y, gradients = jax.vjp(convolutions.conv, x, kernel)
        return y, *gradients(dy)

    def exact(x, kernel, dy):
        y, gradients = jax.vjp(partial(jax.lax.conv, **plain), x, kernel)
        return y, *gradients(dy)

    plain = dict(window_strides=(1, 1), padding="SAME")
    to_nchw = partial(np.transpose, axes=(0, 3, 1, 2))
    with jax.enable_x64(True):
        y, dx, dkernel = jax.jit(exact)(
            to_nchw(x), kernel.transpose(3, 2, 0, 1), to_nchw(dy)
        )
        to_nhwc = partial(np.transpose, axes=(0, 2, 3, 1))
        expected = to_nhwc(y), to_nhwc(dx), np.transpose(dkernel, (2, 3, 1, 0))
    small = [a.astype(np.float32) for a in (x, kernel, dy)]
    assert products(run, *small) == {"dot_general"}
    # A plain convolution in float32 is within 2e-6.
    assert_close(jax.jit(run)(*small), expected, 2e-6)


@pytest.mark.parametrize("name", ["halve", "3x3-same", "double"])
def test_convolutions_stay_where_they_are_fast(name, monkeypatch):
    monkeypatch.setattr(convolutions, "_products_beat_convolutions", lambda: False)
    ours, linens, x, variables = pair(name)
    actual, expected = (
        jax.make_jaxpr(lambda x, m=m: m.apply(variables, x))(x) for m in (ours, linens)
    )
    found, wanted = (
        [e.params for e in equations(graph.jaxpr) if e.primitive.name == CONVOLUTION]
        for graph in (actual, expected)
    )
    assert found == wanted
    assert len(found) == 1


def products(function, *arguments):
    """Which of the primitives that multiply a function has."""
    graph = jax.make_jaxpr(function)(*arguments)
    found = {equation.primitive.name for equation in equations(graph.jaxpr)}
    return {"dot_general", CONVOLUTION} & found


@pytest.mark.parametrize("name", ["halve", "full-extent", "1x1", "grow-7", "double"])
def test_training_has_no_convolutions(name):
    ours, _, x, variables = pair(name)
    assert products(partial(value_and_gradients, ours), variables, x) == {"dot_general"}


@pytest.mark.parametrize("name", ["3x3-same", "3x3-valid-larger"])
def test_few_channels_have_products_for_the_gradient_by_the_kernel_alone(name):
    ours, _, x, variables = pair(name)
    assert products(ours.apply, variables, x) == {CONVOLUTION}
    run = partial(value_and_gradients, ours)
    graph = jax.make_jaxpr(run)(variables, x)
    convolutions = [
        e for e in equations(graph.jaxpr) if e.primitive.name == CONVOLUTION
    ]
    batches = [e.invars[0].aval.shape[0] for e in convolutions]
    # Of the output, and of the gradient by the images; in that by the kernel the
    # channels would be the batch.
    assert batches == [len(x), len(x)]
    assert products(run, variables, x) == {CONVOLUTION, "dot_general"}


# Of four images: the windows of less than one fit, of one, of three, which makes two
# groups of two, and of all.
@pytest.mark.parametrize(("fit", "groups"), [(0.5, 4), (1, 4), (3, 2), (4, 1)])
def test_images_are_multiplied_in_groups(fit, groups, monkeypatch):
    ours, linens, x, variables = pair("3x3-same", features=5)
    _, h, w, _ = x.shape
    one = h * w * variables["params"]["kernel"][..., 0].nbytes
    monkeypatch.setattr(convolutions, "_CACHE_BYTES", int(fit * one))

    def run(variables, x):
        return value_and_gradients(ours, variables, x)

    graph = jax.make_jaxpr(run)(variables, x)
    scans = [e for e in equations(graph.jaxpr) if e.primitive.name == "scan"]
    # Of the gradient by the kernel; that by the images is a convolution.
    assert {e.params["length"] for e in scans} == {groups}
    assert_close(run(variables, x), value_and_gradients(linens, variables, x))


def equations(jaxpr):
    """All equations of a program and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def zero_insertion(x, kernel):
    """Transposed 4 x 4, stride 2, padding 2: spread, pad, correlate, in loops."""
    n, h, w, _ = x.shape
    spread = np.zeros((n, 2 * h + 3, 2 * w + 3, x.shape[-1]))
    for i in range(h):
        for j in range(w):
            spread[:, 2 + 2 * i, 2 + 2 * j] = x[:, i, j]
    out = np.zeros((n, 2 * h, 2 * w, kernel.shape[-1]))
    for i in range(2 * h):
        for j in range(2 * w):
            window = spread[:, i : i + 4, j : j + 4]
            out[:, i, j] = np.einsum("nhwc,hwco->no", window, kernel)
    return out


def pytorch_formula(x, weight):
    """ConvTranspose2d(4, stride=2, padding=1): out[2 i - 1 + k] += x[i] weight[k]."""
    n, h, w, _ = x.shape
    out = np.zeros((n, 2 * h, 2 * w, weight.shape[-1]))
    for i in range(h):
        for j in range(w):
            for k in range(4):
                for m in range(4):
                    row, column = 2 * i - 1 + k, 2 * j - 1 + m
                    if 0 <= row < 2 * h and 0 <= column < 2 * w:
                        out[:, row, column] += x[:, i, j] @ weight[k, m]
    return out


@pytest.mark.parametrize("features", [1, 3])
def test_doubling_equals_zero_insertion_and_pytorch(features):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    kernel = rng.normal(size=(4, 4, 5, features)).astype(np.float32)
    double = partial(
        convolutions.conv_transpose, strides=(2, 2), padding=((2, 2), (2, 2))
    )
    out = jax.jit(double)(x, kernel)
    assert out.shape == (2, 6, 8, features)
    assert_close(out, zero_insertion(x, kernel))
    assert_close(out, pytorch_formula(x, kernel[::-1, ::-1]))


@pytest.mark.parametrize("name", ["halve", "3x3-same", "double"])
def test_bfloat16(name):
    ours, _, x, variables = pair(name, dtype=jnp.bfloat16)
    _, linens, _, _ = pair(name)
    assert jax.eval_shape(ours.apply, variables, x).dtype == jnp.bfloat16
    actual = value_and_gradients(ours, variables, x)
    # Gradients arrive in the dtypes of the parameters and the input: float32.
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(actual))
    assert_close(actual, value_and_gradients(linens, variables, x), 3e-2)


@pytest.mark.parametrize("name", ["halve", "3x3-same", "double"])
def test_vmap_over_parameters_and_images(name):
    ours, _, x, variables = pair(name)
    xs = np.stack([x, 2 * x])
    many = jax.tree.map(lambda p: np.stack([p, -p]), variables)

    def run(variables, x):
        return value_and_gradients(ours, variables, x)

    singly = [run(variables, x), run(jax.tree.map(np.negative, variables), 2 * x)]
    assert_close(jax.vmap(run)(many, xs), jax.tree.map(lambda *p: np.stack(p), *singly))


@pytest.mark.parametrize("name", ["3x3-same", "double"])
@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
def test_gradient_over_devices(name, mapping):
    ours, _, x, variables = pair(name)
    x[2:] *= 3  # the shards' gradients differ
    devices = jax.devices()[:2]

    def gradient(variables, x):
        def loss(variables):
            return jnp.sum(jnp.sin(ours.apply(variables, x)))

        return jax.grad(loss)(variables)

    if mapping == "pmap":
        mapped = jax.pmap(
            lambda v, x: jax.lax.psum(gradient(v, x), "batch"),
            axis_name="batch",
            in_axes=(None, 0),
            out_axes=None,
            devices=devices,
        )
        actual = mapped(variables, x.reshape(2, 2, *x.shape[1:]))
    else:
        # shard_map itself sums the gradient of a replicated argument.
        actual = jax.jit(
            jax.shard_map(
                gradient,
                mesh=Mesh(np.array(devices), "batch"),
                in_specs=(PartitionSpec(), PartitionSpec("batch")),
                out_specs=PartitionSpec(),
            )
        )(variables, x)
    assert_close(actual, jax.jit(gradient)(variables, x))


def test_kernel_gradient_in_bfloat16_is_a_float32_sum_over_groups(monkeypatch):
    monkeypatch.setattr(convolutions, "_CACHE_BYTES", 1)  # An image is a group.
    x = jnp.ones((1000, 1, 1, 1), jnp.bfloat16)
    kernel = jnp.ones((3, 3, 1, 1), jnp.bfloat16)

    def loss(kernel):
        return convolutions.conv(x, kernel).astype(jnp.float32).sum()

    # One of 1,000 ones that are added up in bfloat16 is lost from 256 on.
    assert float(jax.grad(loss)(kernel)[1, 1, 0, 0]) == 1000.0


@pytest.mark.parametrize("function", [convolutions.conv, convolutions.conv_transpose])
def test_wrong_input_is_refused(function):
    kernel = jnp.ones((3, 3, 5, 2))
    with pytest.raises(ValueError, match=r"\(2, 4, 4, 6\).*\(n, h, w, 5\)"):
        function(jnp.ones((2, 4, 4, 6)), kernel)
    with pytest.raises(ValueError, match=r"\(4, 4, 5\).*\(n, h, w, 5\)"):
        function(jnp.ones((4, 4, 5)), kernel)
    with pytest.raises(ValueError, match=r"'CIRCULAR'.*SAME"):
        function(jnp.ones((2, 4, 4, 5)), kernel, padding="CIRCULAR")
