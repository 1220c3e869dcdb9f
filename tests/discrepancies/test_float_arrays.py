"""Arrays of all types, in all that takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from kln_jax import (
    cmmd,
    cmmd_test,
    conditional_embedding,
    gaussian_mixture,
    linear,
    median_bandwidth,
    mmd,
    squared_distances,
)


def _points(seed, n, d):
    return np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)


def test_integers_beyond_32_bits_do_not_wrap_around():
    x = np.array([[0], [2**31], [2**32]])
    expected = reference.squared_distances(x.astype(float), x.astype(float))
    for points in (x, x.astype(np.uint64), x.tolist()):
        np.testing.assert_allclose(squared_distances(points, points), expected, 1e-5)
    flat = gaussian_mixture((1e19,)).on(lambda images: images.reshape(len(images), -1))
    np.testing.assert_allclose(flat(x, x), gaussian_mixture((1e19,))(x, x), 1e-5)
    np.testing.assert_array_equal(squared_distances([[2**80]], [[2**80]]), [[0]])


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


def test_kernels_take_different_dtypes_on_either_side():
    a = jnp.asarray(_points(0, 4, 3), jnp.bfloat16)
    b = np.arange(6).reshape(2, 3).astype(np.uint8)
    for kernel in (gaussian_mixture(), linear):
        np.testing.assert_allclose(
            kernel(a, b), kernel(a.astype(jnp.float32), b.astype(np.float32))
        )


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones((3, 2), np.complex64), "complex64"),
        (np.ones((3, 2), object), "object"),
        (np.full((3, 2), "a"), "<U1"),
        (jax.random.split(jax.random.key(0), (3, 2)), "key<fry>"),
    ],
)
def test_points_that_are_no_real_numbers_are_refused(array, dtype):
    x, y = jnp.ones((3, 2)), jnp.ones((3, 1))
    for call in (
        lambda: gaussian_mixture()(x, array),
        lambda: mmd(x, array),
        lambda: cmmd(x, y, array, y),
        lambda: cmmd(x, array, x, array),
    ):
        with pytest.raises(ValueError, match=f"array of {dtype} .* real numbers"):
            call()


def test_lists_and_arrays_of_another_byte_order_are_taken():
    x, y = _points(0, 4, 3), np.eye(4, dtype=np.float32)
    key = jax.random.key(0)
    calls = (
        lambda x, y: cmmd(x, y, x, y),
        lambda x, y: mmd(x, y[:, :3] if hasattr(y, "shape") else [r[:3] for r in y]),
        lambda x, y: cmmd_test(x, y, x, y, key=key, num_resamples=19).statistic,
        lambda x, y: conditional_embedding(x, y).predict(x),
        lambda x, y: median_bandwidth(x),
    )
    for call in calls:
        expected = call(x, y)
        for given in (
            (x.tolist(), y.tolist()),
            (x.astype(">f4"), y.astype(">f8")),
            (x.astype(">f4"), y.astype(">i2")),
        ):
            np.testing.assert_allclose(call(*given), expected, rtol=1e-5, atol=1e-6)
