"""MMD against its definition in `reference`, and what its two forms promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from kln_jax import gaussian_mixture, laplacian, linear, mmd

# The same examples in every run, and no clock in the verdict.
settings.register_profile("mmd", derandomize=True, deadline=None, max_examples=20)
MMD = settings.get_profile("mmd")
UNBIASED = pytest.mark.parametrize("unbiased", [False, True])


def _sets(seed=0, n=7, m=5, d=3, shift=0.0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + shift
    return x.astype(np.float32), y.astype(np.float32)


@UNBIASED
@pytest.mark.parametrize(
    ("ours", "definition"),
    [
        (None, reference.gaussian_mixture()),
        (laplacian(2.0), reference.laplacian(2.0)),
        (linear, reference.linear),
    ],
)
def test_value_equals_the_definition(unbiased, ours, definition):
    x, y = _sets(shift=0.5)
    kernel = {} if ours is None else dict(kernel=ours)
    value = mmd(x, y, unbiased=unbiased, **kernel)
    assert value.shape == ()
    assert value.dtype == jnp.float32
    expected = reference.mmd(x, y, definition, unbiased)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


@MMD
@given(
    seed=st.integers(0, 2**16),
    shift=st.sampled_from([0.0, 0.1, 3.0]),
    unbiased=st.booleans(),
)
def test_symmetric_and_blind_to_order(seed, shift, unbiased):
    x, y = _sets(seed, shift=shift)
    rng = np.random.default_rng(seed)
    value = mmd(x, y, unbiased=unbiased)
    # The biased value is never negative; the unbiased one may be.
    assert unbiased or value >= -1e-6
    np.testing.assert_allclose(mmd(y, x, unbiased=unbiased), value, atol=1e-6)
    moved = mmd(rng.permutation(x), rng.permutation(y), unbiased=unbiased)
    np.testing.assert_allclose(moved, value, atol=1e-6)
    # The biased value of a set with itself is zero, whatever the order.
    assert abs(mmd(x, rng.permutation(x))) <= 1e-6


def test_unbiased_mean_is_zero_under_the_null_and_the_biased_one_is_not():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(400, n, 3)).astype(np.float32) for n in (7, 5))
    unbiased, biased = (
        np.asarray(jax.vmap(functools.partial(mmd, unbiased=form))(x, y))
        for form in (True, False)
    )
    error = unbiased.std() / np.sqrt(len(unbiased))
    assert abs(unbiased.mean()) < 3 * error
    assert unbiased.min() < 0
    assert biased.mean() > 10 * error
    assert biased.min() > 0


@UNBIASED
def test_gradients_equal_finite_differences_also_where_points_coincide(unbiased):
    x, y = (np.float64(array) for array in _sets())
    x[1], y[0] = x[0], x[0]
    gradient = jax.grad(functools.partial(mmd, unbiased=unbiased), argnums=(0, 1))
    with jax.enable_x64(True):
        gradients = gradient(x, y)
    oracle = functools.partial(reference.mmd, unbiased=unbiased)
    for argument in (0, 1):
        expected = reference.central_differences(oracle, (x, y), argument)
        np.testing.assert_allclose(gradients[argument], expected, atol=1e-8)


def test_images_are_taken_with_an_embedding():
    x, y = _sets(d=4)
    flat = gaussian_mixture().on(lambda images: images.reshape(len(images), -1))
    images = x.reshape(-1, 2, 2), y.reshape(-1, 2, 2)
    np.testing.assert_allclose(mmd(*images, kernel=flat), mmd(x, y), rtol=1e-5)
    with pytest.raises(ValueError, match=r"\(7, 2, 2\).*kernel\.on"):
        mmd(*images)


@pytest.mark.parametrize(
    "shapes", [((4, 3), (5, 2)), ((4,), (5,)), ((0, 3), (5, 3)), ((), (5, 3))]
)
def test_wrong_shapes_are_named(shapes):
    with pytest.raises(ValueError, match="mmd takes points") as error:
        mmd(*(np.zeros(shape, np.float32) for shape in shapes))
    for shape in shapes:
        assert str(shape) in str(error.value)


@pytest.mark.parametrize("sizes", [(1, 5), (5, 1)])
def test_unbiased_value_needs_two_points_a_set(sizes):
    x, y = _sets(0, *sizes)
    with pytest.raises(ValueError, match=r"two points.*unbiased=False"):
        mmd(x, y, unbiased=True)
    assert mmd(x, y) > 0


def test_equal_kernels_are_not_compiled_again():
    x, y = _sets()
    mmd(x, y, kernel=gaussian_mixture([2, 4]))
    with jax.no_tracing(True):
        mmd(x, y, kernel=gaussian_mixture([2, 4]))


@UNBIASED
@pytest.mark.parametrize("rows", [5, 6, 100])
def test_blocks_of_rows_sum_to_the_whole(unbiased, rows, monkeypatch):
    monkeypatch.setattr("kln_jax.discrepancies.blocks._BLOCK_ROWS", rows)
    x, y = _sets(shift=0.5)
    kernel = gaussian_mixture((rows, 2))  # Of each number of rows compiled anew.
    value = mmd(x, y, kernel=kernel, unbiased=unbiased)
    expected = reference.mmd(x, y, reference.gaussian_mixture((rows, 2)), unbiased)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_no_more_than_a_block_of_the_gram_matrix_is_held():
    points = jax.ShapeDtypeStruct((25_000, 4), np.float32)
    program = jax.jit(jax.value_and_grad(mmd)).lower(points, points).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**30
