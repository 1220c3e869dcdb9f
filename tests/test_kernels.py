"""The kernels against their definitions in `reference`, and at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from kln_jax import gaussian_mixture, linear, squared_distances

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
    log_scale=st.floats(-4, 4),
    offset=st.sampled_from([0.0, -3.0, 1e3, 1e4]),
)
def test_squared_distances_are_nonnegative_and_near_zero_on_the_diagonal(
    seed, log_scale, offset
):
    a = _points(seed, 12, 5, 10.0**log_scale, offset)
    distances = np.asarray(squared_distances(a, a))
    # Rounding leaves the diagonal of an expanded square on both sides of 0.
    assert distances.min() >= 0
    assert np.diagonal(distances).max() <= 1e-5 * distances.max()
    np.testing.assert_allclose(distances, distances.T, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("offset", [1e3, -1e3, 1e4])
def test_squared_distances_far_from_the_origin(offset):
    a, b = _points(0, 20, 6, offset=offset), _points(1, 15, 6, offset=offset)
    np.testing.assert_allclose(
        squared_distances(a, b), reference.squared_distances(a, b), rtol=1e-4
    )


def test_squared_distances_of_sets_far_apart():
    # One centre for both sets would lie half-way, far from either.
    a, b = _points(0, 20, 6), _points(1, 15, 6, offset=1e4)
    for left, right in ((a, a), (b, b), (a, b)):
        np.testing.assert_allclose(
            squared_distances(left, right),
            reference.squared_distances(left, right),
            rtol=1e-4,
            atol=1e-4,
        )


def test_squared_distances_of_integers_do_not_wrap_around():
    a = np.array([[0, 255], [3, 9]], np.uint8)
    b = np.array([[255, 0], [4, 7], [0, 1]], np.uint8)
    distances = squared_distances(a, b)
    assert distances.dtype == jnp.float32
    np.testing.assert_allclose(
        distances, reference.squared_distances(a, b), rtol=1e-5, atol=2e-2
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    a = jnp.asarray(_points(0, 6, 3), dtype)
    b = jnp.asarray(_points(1, 5, 3), dtype)
    exact = [np.asarray(z.astype(jnp.float32)) for z in (a, b)]
    for ours, definition in (
        (squared_distances, reference.squared_distances),
        (gaussian_mixture(), reference.gaussian_mixture()),
        (linear, reference.linear),
    ):
        gram = ours(a, b)
        assert gram.dtype == jnp.float32
        np.testing.assert_allclose(gram, definition(*exact), rtol=1e-5, atol=1e-5)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        a = jnp.asarray(_points(0, 6, 3), jnp.float64) + 1 / 3
        b = jnp.asarray(_points(1, 5, 3), jnp.float64) - 1 / 7
        for ours, definition in (
            (squared_distances, reference.squared_distances),
            (gaussian_mixture(), reference.gaussian_mixture()),
            (linear, reference.linear),
        ):
            gram = ours(a, b)
            assert gram.dtype == jnp.float64
            np.testing.assert_allclose(gram, definition(a, b), rtol=1e-12, atol=1e-13)
            # float32 alone stays float32 even where float64 is on.
            assert ours(a.astype(jnp.float32), b.astype(jnp.float32)).dtype == (
                jnp.float32
            )


def test_gradient_of_distances_is_right_where_points_coincide():
    a = np.repeat(_points(0, 1, 3), 4, axis=0)
    b = np.concatenate([a[:2], a[:2] + 1])
    gradient = jax.grad(lambda z: squared_distances(z, b).sum())(a)
    # d/da_i sum_j |a_i - b_j|^2 = 2 sum_j (a_i - b_j)
    np.testing.assert_allclose(gradient, np.full((4, 3), -4.0), atol=1e-4)

    gradient = jax.grad(lambda z: squared_distances(z, z).sum())(a)
    np.testing.assert_allclose(gradient, np.zeros((4, 3)), atol=1e-4)


@pytest.mark.parametrize("function", [squared_distances, linear, gaussian_mixture()])
@pytest.mark.parametrize(
    ("shape_a", "shape_b", "shown"),
    [
        ((4, 3), (5, 2), r"\(4, 3\).*\(5, 2\)"),
        ((3,), (5, 3), r"\(3,\)"),
        ((4, 3), (3,), r"\(3,\)"),
        ((2, 4, 3), (5, 3), r"\(2, 4, 3\)"),
        ((), (5, 3), r"\(\)"),
    ],
)
def test_shapes_that_are_no_two_sets_of_points_are_refused(
    function, shape_a, shape_b, shown
):
    with pytest.raises(ValueError, match=shown):
        function(np.ones(shape_a, np.float32), np.ones(shape_b, np.float32))


# --- gaussian_mixture and linear ---------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bandwidths", [(1, 3, 5, 7, 9), (0.5,), (1, 9, 20, 40, 80)])
def test_gaussian_mixture_equals_the_definition(bandwidths, reduction):
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    gram = gaussian_mixture(bandwidths, reduction=reduction)(a, b)
    assert gram.shape == (6, 9)
    assert gram.dtype == jnp.float32
    np.testing.assert_allclose(
        gram, reference.gaussian_mixture(bandwidths, reduction)(a, b), rtol=1e-5
    )


def test_default_is_the_mean_over_the_variances_of_the_paper():
    a, b = _points(0, 4, 3), _points(1, 5, 3)
    np.testing.assert_array_equal(
        gaussian_mixture()(a, b),
        gaussian_mixture((1, 3, 5, 7, 9), reduction="mean")(a, b),
    )


def test_bandwidth_is_a_variance():
    # |a - b|^2 = 4, so that variance 2 gives exp(-4 / (2 * 2)) = 1 / e.
    a, b = np.array([[0.0]], np.float32), np.array([[2.0]], np.float32)
    np.testing.assert_allclose(gaussian_mixture((2,))(a, b), [[np.exp(-1)]], rtol=1e-6)


@KERNELS
@given(
    seed=st.integers(0, 2**16),
    log_scale=st.floats(-2, 1),
    offset=st.sampled_from([0.0, 1e3, 1e4]),
)
def test_kernel_of_a_point_with_itself_is_one(seed, log_scale, offset):
    x = _points(seed, 12, 5, 10.0**log_scale, offset)
    diagonal = np.diagonal(gaussian_mixture()(x, x))
    np.testing.assert_allclose(diagonal, np.ones(12), atol=1e-4)
    assert diagonal.max() <= 1 + 1e-6
    total = np.diagonal(gaussian_mixture(reduction="sum")(x, x))
    np.testing.assert_allclose(total, 5 * diagonal, rtol=1e-6)


@KERNELS
@given(seed=st.integers(0, 2**16), log_scale=st.floats(-2, 2))
def test_gram_of_one_set_is_symmetric_and_positive_semidefinite(seed, log_scale):
    x = _points(seed, 12, 5, 10.0**log_scale)
    x[3] = x[7]
    gram = np.asarray(gaussian_mixture()(x, x), np.float64)
    np.testing.assert_allclose(gram, gram.T, atol=1e-6)
    assert np.linalg.eigvalsh((gram + gram.T) / 2).min() >= -1e-5


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


def test_linear_equals_the_definition():
    a, b = _points(0, 6, 3), _points(1, 9, 3)
    gram = linear(a, b)
    assert gram.shape == (6, 9)
    assert gram.dtype == jnp.float32
    np.testing.assert_allclose(gram, reference.linear(a, b), rtol=1e-5, atol=1e-6)


def test_linear_of_integers_does_not_wrap_around():
    a = np.array([[200, 100]], np.uint8)
    np.testing.assert_array_equal(linear(a, a), [[50_000.0]])


def test_kernels_take_different_dtypes_on_either_side():
    a = jnp.asarray(_points(0, 4, 3), jnp.bfloat16)
    b = np.arange(6).reshape(2, 3).astype(np.uint8)
    for kernel in (gaussian_mixture(), linear):
        np.testing.assert_allclose(
            kernel(a, b), kernel(a.astype(jnp.float32), b.astype(np.float32))
        )


def test_gradient_is_finite_where_all_points_coincide():
    x = np.repeat(_points(0, 1, 3), 5, axis=0)
    gradient = jax.grad(lambda z: gaussian_mixture()(z, z).sum())(x)
    np.testing.assert_allclose(gradient, np.zeros((5, 3)), atol=1e-5)


def test_equal_settings_give_equal_kernels():
    kernel = gaussian_mixture((1, 3, 5))
    for same in ([1, 3, 5], (1.0, 3.0, 5.0), np.array([1, 3, 5])):
        assert gaussian_mixture(same) == kernel
        assert hash(gaussian_mixture(same)) == hash(kernel)
    assert gaussian_mixture() == gaussian_mixture((1, 3, 5, 7, 9), reduction="mean")
    for other in (
        gaussian_mixture((1, 3, 6)),
        gaussian_mixture((1, 3)),
        gaussian_mixture((1, 3, 5), reduction="sum"),
        linear,
    ):
        assert other != kernel


@pytest.mark.parametrize("bandwidth", [0, -3.5, float("nan"), float("inf")])
def test_bandwidth_that_is_no_variance_is_refused(bandwidth):
    with pytest.raises(ValueError, match=rf"(?i)bandwidth(?s:.*){bandwidth}"):
        gaussian_mixture((1, bandwidth, 9))


def test_empty_bandwidths_are_refused():
    with pytest.raises(ValueError, match=r"(?i)bandwidth"):
        gaussian_mixture(())


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r"(?s)(?=.*median)(?=.*mean)(?=.*sum)"):
        gaussian_mixture((1, 3), reduction="median")
