"""The kernels against their definitions in `reference`, and at their edges."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core

from kln_jax import (
    cmmd,
    cmmd_nystroem,
    cmmd_test,
    conditional_embedding,
    gaussian_mixture,
    laplacian,
    linear,
    median_bandwidth,
    mmd,
    polynomial,
    rational_quadratic,
    squared_distances,
)
from kln_jax.discrepancies.kernels import ComposableKernel, largest_value

# The same examples in every run, and no clock in the verdict.
settings.register_profile("kernels", derandomize=True, deadline=None, max_examples=20)
KERNELS = settings.get_profile("kernels")


def _points(seed, n, d, scale=1.0, offset=0.0):
    rng = np.random.default_rng(seed)
    return (offset + scale * rng.normal(size=(n, d))).astype(np.float32)


# --- squared_distances -------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "d"), [(5, 7, 3), (7, 5, 1), (1, 1, 4), (40, 30, 9)]
)
def test_squared_distances_equal_the_definition(n, m, d):
    a, b = _points(0, n, d), _points(1, m, d)
    distances = squared_distances(a, b)
    assert distances.shape == (n, m)
    assert distances.dtype == jnp.float32
    np.testing.assert_allclose(
        distances, reference.squared_distances(a, b), rtol=1e-5, atol=1e-5
    )


@KERNELS
@given(
    seed=st.integers(0, 2**16),
    log_scale=st.floats(-4, 8),
    offset=st.sampled_from([0.0, -3.0, 1e4, 1e6]),
)
def test_squared_distances_are_right_on_any_scale_and_anywhere(seed, log_scale, offset):
    a = _points(seed, 12, 5, 10.0**log_scale, offset)
    a[6:9] += np.float32(1e3)
    a[9], a[10] = np.float32(1e9), a[0]
    distances = np.asarray(squared_distances(a, a))
    expected = reference.squared_distances(a, a)
    np.testing.assert_allclose(distances, expected, rtol=1e-6, atol=1e-30)
    np.testing.assert_array_equal(distances, distances.T)
    assert not np.diagonal(distances).any()
    assert distances[0, 10] == 0
    assert (np.diagonal(gaussian_mixture()(a, a)) == 1).all()


def test_gradients_of_distances_have_the_documented_error():
    a = _points(0, 20, 6, offset=1e3)
    a[:10] += np.float32(1e3)
    weights = np.random.default_rng(1).normal(size=(20, 20)).astype(np.float32)
    gradient = jax.grad(lambda z: (weights * squared_distances(z, z)).sum())(a)
    wide = np.float64(a)
    expected = np.einsum("ij,ijk->ik", weights + weights.T, wide[:, None] - wide[None])
    # 500 from the centre, 8 pairs of some size a row.
    error = np.abs(gradient - 2 * expected).max()
    assert error < 100 * 500 * np.finfo(np.float32).eps


def test_gradient_of_distances_is_right_where_points_coincide():
    a = np.repeat(_points(0, 1, 3), 4, axis=0)
    b = np.concatenate([a[:2], a[:2] + 1])
    gradient = jax.grad(lambda z: squared_distances(z, b).sum())(a)
    # d/da_i sum_j |a_i - b_j|^2 = 2 sum_j (a_i - b_j)
    np.testing.assert_allclose(gradient, np.full((4, 3), -4.0), atol=1e-4)

    gradient = jax.grad(lambda z: squared_distances(z, z).sum())(a)
    np.testing.assert_allclose(gradient, np.zeros((4, 3)), atol=1e-4)


@pytest.mark.parametrize(
    ("function", "curvature"),
    [
        (squared_distances, 2.0),
        (gaussian_mixture((2.0,)), -0.5),
        (gaussian_mixture((1.0, 2.0), reduction="sum"), -1.5),
        (rational_quadratic(4.0), -0.25),
    ],
)
def test_second_derivatives_are_right_where_points_coincide(function, curvature):
    def value(a, b):
        return function(a[None, :], b[None, :])[0, 0]

    (x,) = _points(0, 1, 3)
    expected = curvature * np.eye(3)
    np.testing.assert_allclose(jax.hessian(value)(x, x), expected, atol=1e-6)
    mixed = jax.jacfwd(jax.grad(value), argnums=1)(x, x)
    np.testing.assert_allclose(mixed, -expected, atol=1e-6)


# --- gaussian_mixture and linear ---------------------------------------------


def test_bandwidth_is_a_variance():
    # |a - b|^2 = 4, so that variance 2 gives exp(-4 / (2 * 2)) = 1 / e.
    a, b = np.array([[0.0]], np.float32), np.array([[2.0]], np.float32)
    np.testing.assert_allclose(gaussian_mixture((2,))(a, b), [[np.exp(-1)]], rtol=1e-6)


@KERNELS
@given(seed=st.integers(0, 2**16), shift=st.floats(-50, 50))
def test_gaussian_mixture_depends_on_differences_alone(seed, shift):
    a, b = _points(seed, 12, 5), _points(seed + 1, 7, 5)
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))[0]
    kernel = gaussian_mixture()
    gram = kernel(a, b)
    np.testing.assert_allclose(
        kernel(a + np.float32(shift), b + np.float32(shift)), gram, rtol=1e-3, atol=1e-6
    )
    rotation = rotation.astype(np.float32)
    np.testing.assert_allclose(kernel(a @ rotation, b @ rotation), gram, atol=1e-5)


# --- all kernels -------------------------------------------------------------


def _flat(x):
    return x.reshape(len(x), -1)


def _square(x):
    return jnp.concatenate([x, x**2], axis=1)


def _double(x):
    return 2 * x


def _doubles_squared(x):
    return np.hstack([np.float64(x), np.float64(x) ** 2])


def _mixed(k1, k2, k3):
    return lambda a, b: 0.5 * k1(a, b) + k2(a, b) * k3(a, b)


# Ours, the definition, and k(x, x) where it is the same for all x.
ALL = {
    "gaussian_mixture": (gaussian_mixture(), reference.gaussian_mixture(), 1),
    "laplacian": (laplacian(2.0), reference.laplacian(2.0), 1),
    "rational_quadratic": (
        rational_quadratic(3.0, alpha=0.5),
        reference.rational_quadratic(3.0, 0.5),
        1,
    ),
    "polynomial": (
        polynomial(3, offset=0.5, scale=0.2),
        reference.polynomial(3, 0.5, 0.2),
        None,
    ),
    "homogeneous": (polynomial(2, offset=0), reference.polynomial(2, 0.0), None),
    "linear": (linear, reference.linear, None),
    "sum over bandwidths": (
        gaussian_mixture((0.5, 9), reduction="sum"),
        reference.gaussian_mixture((0.5, 9), "sum"),
        2,
    ),
    "mixed": (
        0.5 * gaussian_mixture() + laplacian(2.0) * rational_quadratic(3.0),
        _mixed(
            reference.gaussian_mixture(),
            reference.laplacian(2.0),
            reference.rational_quadratic(3.0),
        ),
        1.5,
    ),
    "on": (
        linear.on(_square),
        lambda a, b: reference.linear(_doubles_squared(a), _doubles_squared(b)),
        None,
    ),
}
EACH = pytest.mark.parametrize("name", ALL)
jitted = functools.partial(jax.jit, static_argnums=0)(lambda k, a, b: k(a, b))


@EACH
def test_kernel_equals_the_definition(name):
    ours, definition, _ = ALL[name]
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    b[2] = a[1]
    for gram in (ours(a, b), jitted(ours, a, b)):
        assert gram.shape == (6, 9)
        assert gram.dtype == jnp.float32
        np.testing.assert_allclose(gram, definition(a, b), rtol=1e-4, atol=1e-5)


@EACH
def test_kernel_under_vmap_and_in_float64(name):
    ours, definition, _ = ALL[name]
    a, b = _points(0, 2 * 4, 3).reshape(2, 4, 3), _points(1, 5, 3)
    for gram, points in zip(jax.vmap(lambda z: ours(z, b))(a), a, strict=True):
        np.testing.assert_allclose(gram, definition(points, b), rtol=1e-4, atol=1e-5)
    with jax.enable_x64(True):
        wide = ours(a[0].astype(np.float64), b.astype(np.float64))
        assert wide.dtype == jnp.float64
    np.testing.assert_allclose(wide, definition(a[0], b), rtol=1e-11, atol=1e-13)


@EACH
@settings(KERNELS, max_examples=8)
@given(seed=st.integers(0, 2**16), log_scale=st.floats(-1, 1))
def test_gram_is_symmetric_and_positive_semidefinite(name, seed, log_scale):
    ours, _, diagonal = ALL[name]
    x = _points(seed, 12, 5, 10.0**log_scale)
    x[3] = x[7]
    gram = np.asarray(jitted(ours, x, x), np.float64)
    size = np.abs(gram).max()
    np.testing.assert_allclose(gram, gram.T, atol=1e-6 * size)
    assert np.linalg.eigvalsh((gram + gram.T) / 2).min() >= -1e-5 * size
    if diagonal is not None:
        np.testing.assert_allclose(np.diagonal(gram), diagonal, atol=1e-4)
    order = np.random.default_rng(seed).permutation(12)
    moved = jitted(ours, x[order], x[order])
    np.testing.assert_allclose(moved, gram[order][:, order], atol=1e-4 * size)


@EACH
def test_gradient_is_finite_and_right_where_points_coincide(name):
    ours, definition, _ = ALL[name]
    a = np.float64(_points(0, 4, 3))
    a[1] = a[0]
    with jax.enable_x64(True):
        gradient = jax.grad(lambda z: ours(z, a).sum() + ours(z, z).sum())(a)
    # A kink has no derivative, but central differences give its middle, 0.
    expected = reference.central_differences(
        lambda z: (definition(z, a) + definition(z, z)).sum(), [a], 0
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    zeros = np.zeros((3, 2), np.float32)
    assert np.isfinite(jax.grad(lambda z: ours(z, z).sum())(zeros)).all()


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"on"}))  # Whose embedding judges.
@pytest.mark.parametrize(
    ("shapes", "shown"),
    [
        (((4, 3), (5, 2)), r"\(4, 3\).*\(5, 2\)"),
        (((3,), (5, 3)), r"\(3,\)"),
        (((2, 4, 3), (5, 3)), r"\(2, 4, 3\)"),
        (((5, 3), ()), r"\(\)"),
    ],
)
def test_shapes_that_are_no_two_sets_of_points_are_refused(name, shapes, shown):
    with pytest.raises(ValueError, match=shown):
        ALL[name][0](*(np.ones(shape, np.float32) for shape in shapes))


def test_equal_settings_of_every_kernel_compare_equal():
    def make():
        return [
            laplacian(2),
            laplacian(3),
            rational_quadratic(2),
            rational_quadratic(2, alpha=2),
            polynomial(2),
            polynomial(3),
            polynomial(3, scale=0.5),
            polynomial(3, offset=0),
            linear,
            gaussian_mixture((1, 3)),
            gaussian_mixture((1, 4)),
            gaussian_mixture((1, 3), reduction="sum"),
            laplacian(2) + linear,
            linear + laplacian(2),
            laplacian(2) * linear,
            2 * linear,
            3 * linear,
            linear.on(_flat),
            linear.on(_square),
        ]

    first, second = make(), make()
    assert first == second
    assert first == copy.deepcopy(first)
    for same in ([1, 3], (1.0, 3.0), np.array([1, 3])):
        assert gaussian_mixture(same) == gaussian_mixture((1, 3))
    assert [hash(kernel) for kernel in first] == [hash(kernel) for kernel in second]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(
    "make",
    [
        lambda: laplacian(0.7),
        lambda: 0.5 * (gaussian_mixture([2]) + polynomial(2)) * linear,
        lambda: rational_quadratic(0.7).on(_flat),
    ],
)
def test_equal_kernels_are_compiled_once(make):
    x, y = _points(0, 6, 3), np.eye(2, dtype=np.float32)[[0, 1, 0, 1, 0, 1]]
    value = cmmd(x, y, x + 1, y, kernel=make())
    with jax.no_tracing(True):
        again = cmmd(x, y, x + 1, y, kernel=make())
    assert again == value


# --- single kernels ----------------------------------------------------------


def test_laplacian_is_that_of_scikit_learn():
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    expected = pairwise.laplacian_kernel(a, b, gamma=1 / 2.5)
    np.testing.assert_allclose(laplacian(2.5)(a, b), expected, rtol=1e-5)


def test_no_array_of_pairs_and_features_is_formed():
    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for sub in core.jaxprs_in_params(equation.params):
                yield from equations(sub)

    x = np.zeros((30, 50), np.float32)
    f = lambda z: laplacian()(z, z).sum()  # noqa: E731
    for form in (f, jax.grad(f)):
        sizes = [
            variable.aval.size
            for equation in equations(jax.make_jaxpr(form)(x).jaxpr)
            for variable in equation.outvars
        ]
        assert 900 in sizes
        assert max(sizes) <= 1500  # x itself.


def test_rational_quadratic_tends_to_the_gaussian_of_its_bandwidth():
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    wide = rational_quadratic(2.0, alpha=1e5)(a, b)
    np.testing.assert_allclose(wide, gaussian_mixture((2.0,))(a, b), rtol=1e-3)


# --- operators ---------------------------------------------------------------


def _own(a, b):
    """A kernel of the user's own: no operators."""
    return jnp.exp(-squared_distances(a, b))


def test_operators_take_callables_and_numbers_on_either_side():
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    k, own = laplacian(2.0)(a, b), _own(a, b)
    for composed, expected in (
        (laplacian(2.0) + _own, k + own),
        (_own + laplacian(2.0), k + own),
        (laplacian(2.0) * _own, k * own),
        (_own * laplacian(2.0), k * own),
        (3 * laplacian(2.0), 3 * k),
        (laplacian(2.0) * 3.0, 3 * k),
        (np.float32(3) * laplacian(2.0), 3 * k),
        (jnp.float32(3) * laplacian(2.0), 3 * k),
        (linear + linear, 2 * linear(a, b)),
        (linear * linear, polynomial(2, offset=0)(a, b)),
        (sum([laplacian(2.0), linear]), k + linear(a, b)),
        (linear.on(_square).on(_double), linear(_square(2 * a), _square(2 * b))),
    ):
        assert isinstance(composed, ComposableKernel)
        np.testing.assert_allclose(composed(a, b), expected, rtol=1e-5, atol=1e-6)


# --- on ----------------------------------------------------------------------


def test_embedding_is_given_images_as_they_are():
    def embedding(images):
        assert images.dtype == jnp.uint8
        return images.reshape(len(images), -1) / 255

    kernel = gaussian_mixture().on(embedding)
    images = np.arange(5 * 8, dtype=np.uint8).reshape(5, 2, 2, 2)
    flat = images.reshape(5, -1).astype(np.float32) / np.float32(255)
    expected = reference.gaussian_mixture()(flat, flat[:3])
    for composed, scale in ((kernel, 1), (2.0 * kernel, 2), (kernel + kernel, 2)):
        gram = composed(images, images[:3])
        np.testing.assert_allclose(gram, scale * expected, rtol=1e-5)


def test_embedding_of_one_set_is_computed_once():
    calls = []

    def embedding(x):
        calls.append(len(x))
        return x

    kernel = (laplacian() + linear).on(embedding)
    x = _points(0, 4, 3)
    kernel(x, x)
    assert calls == [4]
    kernel(x, x[:2])
    assert calls == [4, 4, 2]


def test_parameters_of_an_embedding_have_a_gradient():
    x = _points(0, 4, 3)

    @jax.jit
    @jax.grad
    def gradient(w):
        return gaussian_mixture().on(lambda z: z @ w)(x, x).sum()

    @jax.grad
    def expected(w):
        return gaussian_mixture()(x @ w, x @ w).sum()

    w = _points(1, 3, 2)
    np.testing.assert_allclose(gradient(w), expected(w), rtol=1e-4, atol=1e-5)


class _Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


@pytest.mark.parametrize("embedding", [_Unhashable(), 3, None])
def test_embedding_that_is_no_hashable_callable_is_refused(embedding):
    with pytest.raises(ValueError, match=r"embedding=.*hashable callable"):
        linear.on(embedding)


# --- settings ----------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3.5, 1e-40, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("bandwidths", lambda b: gaussian_mixture((1, b, 9))),
        ("scale of laplacian", laplacian),
        ("bandwidth of rational", rational_quadratic),
        ("alpha of rational", lambda a: rational_quadratic(alpha=a)),
        ("scale of polynomial", lambda s: polynomial(scale=s)),
        ("degree of polynomial", polynomial),
        ("factor", lambda f: f * linear),
        ("factor", lambda f: linear * f),
    ],
)
def test_setting_that_is_not_positive_is_refused(name, make, value):
    with pytest.raises(ValueError, match=rf"{name}.*positive"):
        make(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 1e39 * linear, r"factor.* 1e\+39, .* finite"),
        (lambda: rational_quadratic(1e20, alpha=1e20), "2 alpha b .* positive"),
        (lambda: rational_quadratic(1e-20, alpha=1e-20), "2 alpha b .* positive"),
        (lambda: polynomial(1.5), r"degree.*1\.5.*integer"),
        (lambda: polynomial(offset=-1), "offset.*-1.*0 or positive"),
        (lambda: polynomial(offset=float("nan")), "offset.*nan.*0 or positive"),
        (lambda: polynomial(offset=float("inf")), "offset.*inf.*0 or positive"),
        (lambda: gaussian_mixture(()), "bandwidths are .* one or more"),
        (lambda: gaussian_mixture((1, 3), reduction="median"), "'median'.*mean.*sum"),
        (lambda: gaussian_mixture(("abc",)), "bandwidth is 'abc'.* a number"),
        (lambda: gaussian_mixture((None,)), "bandwidth is None.* a number"),
        (lambda: gaussian_mixture(1.0), r"bandwidths are 1\.0.* a sequence"),
        (lambda: gaussian_mixture("13"), "bandwidths are '13'.* a sequence"),
        (lambda: gaussian_mixture(None), "bandwidths are None.* a sequence"),
        (lambda: gaussian_mixture(np.array(3.0)), "bandwidths are .* a sequence"),
        (lambda: np.ones(2, np.float32) * linear, "factor.*must be a number"),
        (lambda: jnp.ones(2) * linear, "factor.*must be a number"),
        (lambda: linear + laplacian, "operand=laplacian makes a kernel: call"),
        (lambda: laplacian * linear, "operand=laplacian makes a kernel: call"),
    ],
)
def test_what_makes_no_kernel_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zero_offset_is_taken_and_a_number_is_no_summand():
    assert polynomial(offset=0)([[2.0]], [[1.0]]) == 8
    with pytest.raises(TypeError):
        linear + 1


def test_largest_value_too_large_for_a_float_is_infinite():
    assert largest_value(polynomial(400, scale=1e3), jnp.ones((2, 1))) == float("inf")


@pytest.mark.parametrize(
    "make",
    [lambda b: gaussian_mixture((b,)), laplacian, lambda b: b * linear],
)
def test_setting_that_is_traced_says_what_to_do(make):
    with pytest.raises(ValueError, match="scale the features"):
        jax.jit(lambda b: make(b)([[0.0]], [[1.0]]))(2.0)


# --- median_bandwidth --------------------------------------------------------


@KERNELS
@given(
    seed=st.integers(0, 2**16),
    copies=st.integers(0, 11),
    log_scale=st.floats(-2, 2),
    offset=st.sampled_from([0.0, 1e3]),
)
def test_median_bandwidth_equals_the_definition(seed, copies, log_scale, offset):
    x = _points(seed, 12, 3, 10.0**log_scale, offset)
    x[1 : 1 + copies] = x[0]
    bandwidth = median_bandwidth(x)
    assert bandwidth.shape == ()
    assert bandwidth.dtype == jnp.float32
    np.testing.assert_allclose(bandwidth, reference.median_bandwidth(x), rtol=1e-4)


def test_median_bandwidth_of_many_points_is_exact_and_makes_no_infinity():
    x = _points(0, 150, 3)
    x[:30] = x[0]
    expected = reference.median_bandwidth(x)
    with jax.debug_infs(True):
        np.testing.assert_allclose(median_bandwidth(x), expected, rtol=1e-6)


def test_median_bandwidth_of_points_that_are_not_finite_is_nan():
    for value in (np.nan, np.inf):
        x = np.array([[0.0], [2.0], [value], [3.0]], np.float32)
        assert np.isnan(median_bandwidth(x))


@pytest.mark.parametrize("stop_gradient", [True, False])
def test_median_bandwidth_where_all_points_coincide(stop_gradient):
    x = np.full((5, 3), 0.3, np.float32)
    f = functools.partial(median_bandwidth, stop_gradient=stop_gradient)
    assert f(x) == 1
    np.testing.assert_array_equal(jax.grad(f)(x), np.zeros((5, 3)))


def test_gradient_of_median_bandwidth_is_stopped_unless_asked_for():
    x = np.float64(_points(0, 6, 3))
    x[1] = x[0]
    with jax.enable_x64(True):
        stopped = jax.grad(median_bandwidth)(x)
        gradient = jax.grad(functools.partial(median_bandwidth, stop_gradient=False))(x)
    np.testing.assert_array_equal(stopped, np.zeros_like(x))
    # Without the pair whose distance of 0 a step of a difference would make count.
    expected = reference.central_differences(
        lambda z: reference.median_bandwidth(
            np.where(np.arange(6)[:, None] == 1, z[0], z)
        ),
        [x],
        0,
    )
    np.testing.assert_allclose(gradient[2:], expected[2:], rtol=1e-6, atol=1e-8)
    assert np.abs(gradient).max() > 0.1


def test_median_bandwidth_under_jit_and_vmap():
    x = _points(0, 3 * 6, 2).reshape(3, 6, 2)
    x[1, :] = 0
    values = jax.jit(jax.vmap(median_bandwidth))(x)
    expected = [reference.median_bandwidth(points) for points in x]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (4,), (4, 2, 2)])
def test_median_bandwidth_needs_two_points(shape):
    with pytest.raises(ValueError, match="median_bandwidth") as error:
        median_bandwidth(np.zeros(shape, np.float32))
    assert str(shape) in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("rbf", "kernel='rbf' must be a function"),
        (None, "kernel=None must be a function"),
        (_Unhashable(), "kernel=.* must be hashable"),
        (np.eye(3), r"kernel is an array of shape \(3, 3\), .* cmmd_from_grams takes"),
        (jnp.eye(3), r"kernel is an array of shape \(3, 3\), .* cmmd_from_grams takes"),
        (gaussian_mixture, "kernel=gaussian_mixture makes a kernel: call it"),
    ],
)
def test_what_is_no_kernel_is_refused(kernel, message):
    x, y = jnp.ones((3, 2)), jnp.ones((3, 1))
    with pytest.raises(ValueError, match=message):
        mmd(x, x, kernel=kernel)
    with pytest.raises(ValueError, match=message):
        cmmd(x, y, x, y, kernel=kernel)
    with pytest.raises(ValueError, match=f"label_{message}"):
        cmmd(x, y, x, y, label_kernel=kernel)


def _of_single_points(a, b):
    return jnp.exp(-jnp.sum((a - b) ** 2))


def _with_keepdims(a, b):
    return jnp.exp(-jnp.sum((a - b) ** 2, axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("kernel", "returned"),
    [(_of_single_points, r"\(\)"), (_with_keepdims, r"\([36], 1\)")],
)
def test_values_that_are_no_gram_matrix_are_refused(kernel, returned):
    key = jax.random.key(0)
    x, y = jax.random.normal(key, (3, 2)), jnp.ones((3, 1))
    embedding = conditional_embedding(x, y)
    test = functools.partial(cmmd_test, x, y, x, y, key=key, num_resamples=19)
    for call in (
        lambda: mmd(x, x, kernel=kernel),
        lambda: mmd(x, x, kernel=laplacian() + kernel),
        lambda: mmd(x, x, kernel=kernel * laplacian()),
        lambda: cmmd(x, y, x, y, kernel=kernel),
        lambda: cmmd(x, y, x, y, label_kernel=kernel),
        lambda: test(kernel=kernel),
        lambda: test(label_kernel=kernel),
        lambda: cmmd_nystroem(x, y, x, y, kernel=kernel, key=key, num_landmarks=6),
        lambda: dataclasses.replace(embedding, kernel=kernel).predict(x),
        lambda: dataclasses.replace(embedding, kernel=kernel).distance(
            dataclasses.replace(embedding, kernel=kernel)
        ),
    ):
        for program in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=f"returned shape {returned}.*vmap tw"):
                program()
    with pytest.raises(ValueError, match=r"returned shape .* their Gram .*\(3, 3\)"):
        conditional_embedding(x, y, kernel=kernel)


def test_a_function_of_single_points_is_a_kernel_by_vmap_twice():
    x = jax.random.normal(jax.random.key(0), (3, 2))
    pairs = jax.vmap(jax.vmap(_of_single_points, (None, 0)), (0, None))
    expected = mmd(x, x + 1, kernel=gaussian_mixture((0.5,)))
    np.testing.assert_allclose(mmd(x, x + 1, kernel=pairs), expected, rtol=1e-5)


def test_sets_of_other_types_are_not_converted_for_an_embedding():
    kernel = gaussian_mixture().on(lambda images: images.reshape(len(images), -1))
    images, y = np.ones((3, 2, 2), np.uint8), jnp.ones((3, 1))
    with pytest.raises(ValueError, match=r"uint8 and float32.* must be of one type"):
        mmd(images, images.astype(np.float32), kernel=kernel)
    with pytest.raises(ValueError, match=r"float32 and uint8.* must be of one type"):
        cmmd(images.astype(np.float32), y, images, y, kernel=kernel)
