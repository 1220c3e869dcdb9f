"""CMMD against the float64 definitions in `reference`, and at its edges."""

import functools
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from jax.test_util import check_grads

from kln_jax import (
    cmmd,
    cmmd_from_grams,
    cmmd_nystroem,
    cmmd_test,
    conditional_embedding,
    gaussian_mixture,
    laplacian,
    linear,
    mmd,
    polynomial,
    squared_distances,
    weight_matrix,
)
from kln_jax.discrepancies.cmmd import check_ridge, solve_both
from kln_jax.training import fixed_embeddings

# The same examples in every run, and no clock in the verdict.
settings.register_profile("cmmd", derandomize=True, deadline=None, max_examples=20)
CMMD = settings.get_profile("cmmd")

LABEL_KERNELS = {
    "linear": (linear, reference.linear),
    "gaussian": (gaussian_mixture(), reference.gaussian_mixture()),
}
# n_s, n_t, d, C
EQUAL, UNEQUAL = (6, 6, 3, 2), (6, 5, 3, 2)


def _features(rng, n, d, scale=1.0):
    return (scale * rng.normal(size=(n, d))).astype(np.float32)


def _one_hot(rng, n, classes):
    return np.eye(classes, dtype=np.float32)[rng.integers(classes, size=n)]


def _probabilities(rng, n, classes):
    return rng.dirichlet(np.ones(classes), size=n).astype(np.float32)


def _problem(seed=0, n_s=6, n_t=5, d=3, classes=2, scale=1.0):
    """One-hot labels on s, probabilities on t, as in training."""
    rng = np.random.default_rng(seed)
    return (
        _features(rng, n_s, d, scale),
        _one_hot(rng, n_s, classes),
        _features(rng, n_t, d, scale),
        _probabilities(rng, n_t, classes),
    )


@functools.partial(jax.jit, static_argnames=("label_kernel",))
def _grams(x_s, y_s, x_t, y_t, *, label_kernel):
    K, L = gaussian_mixture(), label_kernel
    grams = (K(x_s, x_s), K(x_t, x_t), K(x_t, x_s))
    return *grams, L(y_s, y_s), L(y_t, y_t), L(y_s, y_t)


def _through_grams(*problem, label_kernel=linear, ridge=0.1):
    """The same value by way of `cmmd_from_grams`."""
    return cmmd_from_grams(*_grams(*problem, label_kernel=label_kernel), ridge=ridge)


# Compiling is what takes the time here, so most tests share `_values` and `_gradients`.
hasty = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def _value(form, label, ridge, *problem):
    return form(*problem, label_kernel=LABEL_KERNELS[label][0], ridge=ridge)


def _each_value(ridge, *problem):
    """The value by each form and label kernel."""
    return {
        (form.__name__, label): _value(form, label, ridge, *problem)
        for form in (cmmd, _through_grams)
        for label in LABEL_KERNELS
    }


def _each_gradient(ridge, *problem):
    """The gradient in all four arrays, by each form and label kernel."""
    return {
        (form.__name__, label): jax.grad(
            functools.partial(_value, form, label), argnums=(1, 2, 3, 4)
        )(ridge, *problem)
        for form in (cmmd, _through_grams)
        for label in LABEL_KERNELS
    }


_values, _gradients = hasty(_each_value), hasty(_each_gradient)


FORMS = pytest.mark.parametrize("form", [cmmd, _through_grams])
LABELS = pytest.mark.parametrize("label", LABEL_KERNELS)


# --- the oracle itself -------------------------------------------------------


@LABELS
@pytest.mark.parametrize("ridge", [0.001, 0.1, 1.0])
def test_oracle_agrees_with_the_distance_of_two_regressors(label, ridge):
    _, label_kernel = LABEL_KERNELS[label]
    problem = [array.astype(np.float64) for array in _problem()]
    options = dict(label_kernel=label_kernel, ridge=ridge)
    np.testing.assert_allclose(
        reference.cmmd(*problem, **options),
        reference.regressor_distance(*problem, **options),
        rtol=1e-9,
    )


@FORMS
def test_one_point_on_each_side_by_hand(form):
    # K = 1, so A = y / (1 + ridge); k(x_s, x_t) averages exp(-4 / (2 v)).
    x_s, x_t = np.zeros((1, 1), np.float32), np.full((1, 1), 2, np.float32)
    y_s, y_t = np.array([[1, 0]], np.float32), np.array([[0.75, 0.25]], np.float32)
    k = np.mean([np.exp(-2 / v) for v in (1, 3, 5, 7, 9)])
    expected = (1 + (0.75**2 + 0.25**2) - 2 * k * 0.75) / 1.1**2
    np.testing.assert_allclose(form(x_s, y_s, x_t, y_t), expected, rtol=1e-5)
    np.testing.assert_allclose(reference.cmmd(x_s, y_s, x_t, y_t), expected, rtol=1e-12)


# --- values ------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_with_other_kernels(reduction):
    problem, bandwidths = _problem(2), (1, 9, 20, 40, 80)
    value = cmmd(*problem, kernel=gaussian_mixture(bandwidths, reduction=reduction))
    kernel = reference.gaussian_mixture(bandwidths, reduction)
    np.testing.assert_allclose(value, reference.cmmd(*problem, kernel), rtol=1e-4)


def test_callables_of_the_users_own_are_kernels():
    def laplace(a, b):
        return jnp.exp(-jnp.sqrt(squared_distances(a, b) + 1e-6))

    def same(a, b):
        return jnp.matmul(a, b.T, precision="highest")

    def exact(a, b):
        return np.exp(-np.sqrt(reference.squared_distances(a, b) + 1e-6))

    problem = _problem(4)
    value = cmmd(*problem, kernel=laplace, label_kernel=same)
    np.testing.assert_allclose(value, reference.cmmd(*problem, exact), rtol=1e-3)


@CMMD
@given(
    seed=st.integers(0, 2**16),
    sizes=st.sampled_from([EQUAL, UNEQUAL, (30, 1, 6, 10)]),
    log_scale=st.floats(-0.5, 6),
    ridge=st.floats(0.05, 10),
)
def test_both_forms_equal_the_oracle_in_either_order(seed, sizes, log_scale, ridge):
    x_s, y_s, x_t, y_t = problem = _problem(seed, *sizes, scale=10.0**log_scale)
    order = np.random.default_rng(seed).permutation(len(x_t))
    swapped = _values(ridge, x_t[order], y_t[order], x_s, y_s)
    for (form, label), value in _values(ridge, *problem).items():
        assert (value.shape, value.dtype) == ((), jnp.float32)
        expected = reference.cmmd(
            *problem, label_kernel=LABEL_KERNELS[label][1], ridge=ridge
        )
        for found in (value, swapped[form, label]):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_defaults_are_the_papers_kernels_and_ridge_one_tenth():
    problem = _problem(3)
    expected = reference.cmmd(*problem, reference.gaussian_mixture((1, 3, 5, 7, 9)))
    np.testing.assert_allclose(cmmd(*problem), expected, rtol=1e-4)


@FORMS
@LABELS
def test_value_far_from_the_origin_and_of_sets_far_apart(form, label):
    ours, definition = LABEL_KERNELS[label]
    x_s, y_s, x_t, y_t = _problem(5)
    for shift_s, shift_t in ((1e3, 1e3), (1e4, 1e4), (-10, 10)):
        problem = (x_s + np.float32(shift_s), y_s, x_t + np.float32(shift_t), y_t)
        expected = reference.cmmd(*problem, label_kernel=definition)
        value = form(*problem, label_kernel=ours)
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def _pixels_as_they_are(rng):
    x = rng.integers(256, size=(2, 15, 784)).astype(np.uint8)
    x[1, :5] = x[0, :5]
    return x[0], _one_hot(rng, 15, 3), x[1], _one_hot(rng, 15, 3)


def _two_clusters(rng):
    x = np.array([[1.5217], [2.9012], [20000.0], [1.6]], np.float32)
    return x, _one_hot(rng, 4, 2), x[::-1], _one_hot(rng, 4, 2)


def _one_outlier(rng):
    x_s, x_t = _features(rng, 20, 2), _features(rng, 20, 2)
    x_s[3] = 99999
    return x_s, _one_hot(rng, 20, 2), x_t, _one_hot(rng, 20, 2)


def _at_the_end_of_float32(rng):
    x_s, y_s, x_t, y_t = _one_outlier(rng)
    x_s[3] = 1e30
    return x_s, y_s, x_t, y_t


def _of_large_scale(rng):
    x_s, x_t = _features(rng, 20, 2, 1e4), _features(rng, 20, 2, 1e4)
    x_t[:9] = x_s[:9]
    return x_s, _one_hot(rng, 20, 2), x_t, _one_hot(rng, 20, 2)


def _moved_by_a_thousand(rng):
    x, y = _features(rng, 20, 2), _one_hot(rng, 20, 2)
    return x, y, x + np.float32(1000), y


@FORMS
@pytest.mark.parametrize(
    "make",
    [
        _pixels_as_they_are,
        _two_clusters,
        _one_outlier,
        _at_the_end_of_float32,
        _of_large_scale,
        _moved_by_a_thousand,
    ],
)
def test_features_of_any_scale_give_right_values_and_gradients(make, form):
    for seed in range(1 if make is _pixels_as_they_are else 8):
        problem = make(np.random.default_rng(seed))
        value = form(*problem)
        np.testing.assert_allclose(value, reference.cmmd(*problem), rtol=1e-4)
    floats = [np.float32(array) for array in problem]
    gradients = jax.grad(form, argnums=(0, 1, 2, 3))(*floats)
    with jax.enable_x64(True):
        exact = jax.grad(form, argnums=(0, 1, 2, 3))(*map(np.float64, floats))
    for ours, expected in zip(gradients, exact, strict=True):
        atol = 1e-3 * np.abs(expected).max() + 1e-5
        if make in (_of_large_scale, _moved_by_a_thousand):
            # Many points lie far from the most central one.
            atol += 5e-6 * np.ptp(np.concatenate(floats[::2]))
        if make is not _at_the_end_of_float32:
            np.testing.assert_allclose(ours, expected, atol=atol)
        assert np.isfinite(ours).all()


@CMMD
@given(seed=st.integers(0, 2**16), ridge=st.sampled_from([1e-2, 0.1, 1.0]))
def test_a_set_against_itself_in_any_order_is_zero(seed, ridge):
    x, y, _, _ = _problem(seed, 30, 1, 8, 5)
    order = np.random.default_rng(seed).permutation(30)
    same = _values(ridge, x, y, x, y)
    permuted = _values(ridge, x, y, x[order], y[order])
    # The pairs count, not the two sets of values: this is another set.
    other = _values(ridge, x, y, x, y[order])
    for key in same:
        assert abs(same[key]) <= 1e-5
        assert abs(permuted[key]) <= 1e-4
        assert other[key] > 1e-2


@pytest.mark.parametrize(
    ("label", "sizes"),
    [
        ("linear", (100, 100, 128, 10)),
        ("linear", (30, 50, 3, 4)),
        ("linear", (16, 16, 1, 2)),
        ("gaussian", (40, 40, 64, 10)),
        ("gaussian", (16, 16, 1, 2)),
    ],
)
def test_never_below_zero_over_hundreds_of_random_batches(label, sizes):
    n_s, n_t, d, classes = sizes
    n = min(n_s, n_t)
    value = hasty(
        lambda batches: jax.lax.map(lambda batch: _value(cmmd, label, *batch), batches)
    )
    rng = np.random.default_rng(0)
    batches, equal = [], []
    for i in range(80):
        scale = 10.0 ** rng.uniform(-0.5, 1)
        x_s, x_t = _features(rng, n_s, d, scale), _features(rng, n_t, d, scale)
        y_s, y_t = _one_hot(rng, n_s, classes), _probabilities(rng, n_t, classes)
        ridge = (1e-3, 1e-2, 1e-1, 1)[i % 4]
        # Where the sets are equal up to their order, rounding decides the sign. It
        # grows with 1 / ridge: in one dimension, 1e-2 is too small for float32.
        equal.append(ridge >= 0.1 and i % 8 >= 4)
        if equal[-1]:
            order = rng.permutation(n)
            x_t[:n], y_t[:n] = x_s[order], y_s[order]
        batches.append((np.float32(ridge), x_s, y_s, x_t, y_t))
    values = np.asarray(value(tuple(map(np.stack, zip(*batches, strict=True)))))
    assert np.isfinite(values).all()
    assert values.min() >= -1e-4
    # The other batches are no trivial ones.
    assert values[~np.array(equal)].min() > 1e-3
    if n_s == n_t:
        assert values[np.array(equal)].max() <= 1e-4


# --- weight_matrix -----------------------------------------------------------


@CMMD
@given(
    seed=st.integers(0, 2**16),
    log_scale=st.floats(-1, 2),
    ridge=st.sampled_from([0.1, 0.5, 1.0, 10.0]),
)
def test_weight_matrix_equals_the_definition(seed, log_scale, ridge):
    x = _features(np.random.default_rng(seed), 6, 3, 10.0**log_scale)
    K = reference.gaussian_mixture()(x, x).astype(np.float32)
    H = np.asarray(weight_matrix(K, ridge=ridge))
    assert H.dtype == np.float32
    expected = reference.weight_matrix(K, ridge)
    np.testing.assert_allclose(H, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(H, H.T, atol=1e-6 * np.abs(H).max())


def test_weight_matrix_weighs_the_labels_in_cmmd():
    # With no second set to speak of (labels 0), CMMD is <H, L> alone.
    x, y, x_t, y_t = _problem(7)
    H = weight_matrix(gaussian_mixture()(x, x), ridge=0.1)
    np.testing.assert_allclose(
        cmmd(x, y, x_t, 0 * y_t), np.sum(H * linear(y, y)), rtol=1e-4
    )


def test_weight_matrix_under_jit_vmap_and_grad():
    K = np.stack([gaussian_mixture()(x, x) for x in _problem(8, *EQUAL)[::2]])
    H = functools.partial(weight_matrix, ridge=0.1)
    for gram, weights in zip(K, jax.jit(jax.vmap(H))(K), strict=True):
        np.testing.assert_allclose(weights, H(gram), atol=1e-4)
    assert np.isfinite(jax.grad(lambda gram: H(gram).sum())(K[0])).all()


# --- gradients ---------------------------------------------------------------


def _edge(name):
    """Inputs at which a careless gradient is NaN, in float64."""
    x_s, y_s, x_t, y_t = _problem(9, *(UNEQUAL if name == "unequal" else EQUAL))
    if name == "equal sets":
        x_t, y_t = x_s, y_s
    elif name == "equal sets permuted":
        x_t, y_t = x_s[::-1], y_s[::-1]
    elif name == "duplicate rows":
        x_s[1], y_s[1], x_t[2], y_t[2] = x_s[0], y_s[0], x_s[0], y_s[0]
    elif name == "duplicate rows of other labels":
        x_s[1], y_s[0], y_s[1] = x_s[0], np.eye(2)[0], np.eye(2)[1]
    elif name == "one class only":
        y_s = y_t = np.eye(2)[[1] * 6]
    elif name == "coincident features":
        x_s, x_t = np.ones_like(x_s), np.ones_like(x_t)
    else:
        assert name == "unequal"
    return tuple(np.array(array, np.float64) for array in (x_s, y_s, x_t, y_t))


EDGES = pytest.mark.parametrize(
    "edge",
    [
        "unequal",
        "equal sets",
        "equal sets permuted",
        "duplicate rows",
        "duplicate rows of other labels",
        "one class only",
        "coincident features",
    ],
)


@EDGES
def test_float64_gradients_equal_finite_differences_of_the_oracle(edge):
    problem = _edge(edge)
    with jax.enable_x64(True):
        gradients = _gradients(0.1, *problem)
    for label, (_, definition) in LABEL_KERNELS.items():
        oracle = functools.partial(reference.cmmd, label_kernel=definition)
        for argument in range(4):
            expected = reference.central_differences(oracle, problem, argument)
            for form in ("cmmd", "_through_grams"):
                gradient = gradients[form, label][argument]
                assert gradient.dtype == jnp.float64
                np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


def test_float64_gradients_through_the_gram_matrices():
    @jax.jit
    def f(K_s, K_t, *rest):
        # A perturbation keeps K symmetric: others are outside the definition.
        return cmmd_from_grams((K_s + K_s.T) / 2, (K_t + K_t.T) / 2, *rest, ridge=0.1)

    with jax.enable_x64(True):
        grams = _grams(*_edge("unequal"), label_kernel=linear)
        check_grads(f, grams, order=1, modes=("fwd", "rev"))


@EDGES
@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_float32_gradients_are_finite(edge, ridge):
    problem = [array.astype(np.float32) for array in _edge(edge)]
    for gradients in _gradients(ridge, *problem).values():
        for array, gradient in zip(problem, gradients, strict=True):
            assert gradient.shape == array.shape
            assert gradient.dtype == jnp.float32
            assert np.isfinite(gradient).all()


def test_float32_gradients_equal_float64_gradients():
    problem = _problem(10, *UNEQUAL)
    single = _gradients(0.1, *problem)
    with jax.enable_x64(True):
        double = _gradients(0.1, *(array.astype(np.float64) for array in problem))
    for key in single:
        for ours, exact in zip(single[key], double[key], strict=True):
            largest = np.abs(exact).max()
            assert largest > 1e-3
            np.testing.assert_allclose(ours, exact, atol=1e-4 * largest)


# --- dtypes ------------------------------------------------------------------


def test_float64_values_equal_the_definition_to_float64_precision():
    problem = tuple(np.array(array, np.float64) + 1 / 3 for array in _problem(11))
    with jax.enable_x64(True):
        for ridge, rtol in ((0.1, 1e-11), (1e-9, 1e-5)):
            for (_, label), value in _values(ridge, *problem).items():
                assert value.dtype == jnp.float64
                definition = LABEL_KERNELS[label][1]
                expected = reference.cmmd(
                    *problem, label_kernel=definition, ridge=ridge
                )
                np.testing.assert_allclose(value, expected, rtol=rtol)
        K = reference.gaussian_mixture()(problem[0], problem[0])
        np.testing.assert_allclose(
            weight_matrix(K, ridge=0.1), reference.weight_matrix(K, 0.1), rtol=1e-10
        )


def test_float64_features_allow_the_ridge_of_float64():
    x_s, y_s, x_t, y_t = _problem(11)
    # Features, embedded ones, or labels alone make the Gram matrices float64.
    kernel = gaussian_mixture().on(lambda x: x)
    with jax.enable_x64(True):
        s, t = (x_s.astype(np.float64), y_s), (x_t.astype(np.float64), y_t)
        options = dict(kernel=kernel, ridge=1e-9)
        expected = cmmd(*s, *t, **options)
        of_s, of_t = (conditional_embedding(*one, **options) for one in (s, t))
        np.testing.assert_allclose(of_s.distance(of_t), expected, rtol=1e-5)
        num, key = len(x_s) + len(x_t), jax.random.key(0)
        low_rank = cmmd_nystroem(*s, *t, num_landmarks=num, key=key, **options)
        np.testing.assert_allclose(low_rank, expected, rtol=1e-3)
        kernel = gaussian_mixture().on(lambda x: x.astype(jnp.float64))
        values = [
            function(x_s, y_s.astype(dtype), x_t, y_t.astype(dtype), kernel=kernel)
            for dtype in (np.float32, np.float64)
            for function in (cmmd, _distance)
        ]
    np.testing.assert_allclose(values, values[0], rtol=1e-10)


def test_one_float64_input_makes_it_float64_and_none_leaves_it_float32():
    x_s, y_s, x_t, y_t = _problem(12)
    mixed = (x_s.astype(np.float64), y_s.astype(np.int64), x_t, y_t)
    ridge = np.float32(0.1)
    with jax.enable_x64(True):
        for key, value in _values(ridge, *mixed).items():
            assert value.dtype == jnp.float64
            definition = LABEL_KERNELS[key[1]][1]
            expected = reference.cmmd(*mixed, label_kernel=definition, ridge=ridge)
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        single = (x_s, y_s.astype(np.int64), x_t, y_t)
        for value in jax.eval_shape(_each_value, np.float64(0.1), *single).values():
            assert value.dtype == jnp.float32


@LABELS
@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool", "bfloat16", "float16"])
def test_other_dtypes_are_computed_in_float32(dtype, label):
    ours, definition = LABEL_KERNELS[label]
    rng = np.random.default_rng(13)
    dtype = jnp.dtype(dtype)
    scale = 1 / 3 if jnp.issubdtype(dtype, jnp.floating) else 1
    x_s, x_t = ((rng.integers(4, size=(n, 3)) * scale).astype(dtype) for n in (6, 5))
    y_s, y_t = (_one_hot(rng, n, 2).astype(dtype) for n in (6, 5))
    exact = [array.astype(np.float64) for array in (x_s, y_s, x_t, y_t)]
    value = cmmd(x_s, y_s, x_t, y_t, label_kernel=ours)
    assert value.dtype == jnp.float32
    expected = reference.cmmd(*exact, label_kernel=definition)
    np.testing.assert_allclose(value, expected, rtol=1e-4)

    grams = reference.grams(*exact, reference.gaussian_mixture(), definition)
    grams = [gram.astype(jnp.bfloat16) for gram in grams[:3]] + [
        gram.astype(dtype) for gram in grams[3:]
    ]
    value = cmmd_from_grams(*grams, ridge=0.1)
    assert value.dtype == jnp.float32
    expected = reference.cmmd_from_grams(*(np.float64(gram) for gram in grams), 0.1)
    np.testing.assert_allclose(value, expected, rtol=1e-3)


def test_gradients_have_the_dtype_of_each_input():
    x_s, y_s, x_t, y_t = map(jnp.asarray, _problem(15))
    half = (x_s.astype(jnp.bfloat16), y_s, x_t.astype(jnp.float16), y_t)
    gradients = hasty(jax.grad(cmmd, argnums=(0, 1, 2, 3)))(*half)
    exact = _gradients(0.1, *(z.astype(y_s.dtype) for z in half))["cmmd", "linear"]
    for array, gradient, expected in zip(half, gradients, exact, strict=True):
        assert gradient.dtype == array.dtype
        # Rounded once, at the end: bfloat16 has 8 bits.
        np.testing.assert_allclose(
            gradient.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5
        )


# --- what is compiled --------------------------------------------------------


def _equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs within it."""
    for equation in jaxpr.eqns:
        yield equation
        # Some primitives keep theirs in named tuples: custom_linear_solve does.
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, core.ClosedJaxpr):
                yield from _equations(parameter.jaxpr)
            elif isinstance(parameter, core.Jaxpr):
                yield from _equations(parameter)


def _jaxprs(n_s, n_t, d, classes, dtype=jnp.float32, kernel=None):
    """Forward and gradient jaxprs of everything that is differentiated."""
    kernel = kernel or gaussian_mixture()

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    problem = (shape(n_s, d), shape(n_s, classes), shape(n_t, d), shape(n_t, classes))
    square_s, square_t = shape(n_s, n_s), shape(n_t, n_t)
    cross, labels = shape(n_t, n_s), shape(n_s, n_t)
    grams = (square_s, square_t, cross, square_s, square_t, labels)

    def linear_labels(*arrays):
        return cmmd(*arrays, kernel=kernel)

    def gaussian_labels(*arrays):
        return cmmd(*arrays, kernel=kernel, label_kernel=kernel)

    def from_grams(*arrays):
        return cmmd_from_grams(*arrays, ridge=0.1)

    def total_weight(gram):
        return weight_matrix(gram, ridge=0.1).sum()

    for f, shapes in (
        (linear_labels, problem),
        (gaussian_labels, problem),
        (from_grams, grams),
        (total_weight, (square_s,)),
    ):
        yield jax.make_jaxpr(f)(*shapes).jaxpr
        argnums = tuple(range(len(shapes)))
        yield jax.make_jaxpr(jax.grad(f, argnums))(*shapes).jaxpr


@pytest.mark.parametrize(("n_s", "n_t"), [(2048, 2048), (2048, 1024)])
def test_no_array_over_pairs_and_features_or_bandwidths_is_formed(n_s, n_t):
    # All Gram matrices and right-hand sides of both sets make less than 10 n_s^2;
    # 128 features or 40 bandwidths of each pair make more, in whatever layout.
    kernel = gaussian_mixture(range(1, 41))
    for jaxpr in _jaxprs(n_s, n_t, d=128, classes=128, kernel=kernel):
        for equation in _equations(jaxpr):
            for variable in equation.outvars:
                shape = variable.aval.shape
                assert math.prod(shape) < 10 * n_s**2, (equation.primitive, shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_product_has_the_highest_precision(dtype):
    highest, names = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST), set()
    for jaxpr in _jaxprs(16, 12, d=5, classes=3, dtype=dtype):
        for equation in _equations(jaxpr):
            names.add(equation.primitive.name)
            if equation.primitive.name == "dot_general":
                assert equation.params["precision"] == highest, equation
                for operand in equation.invars:
                    assert operand.aval.dtype == jnp.float32, equation
            assert "conv" not in equation.primitive.name.split("_"), equation
    # Within custom_linear_solve, so that what is nested is found.
    assert {"dot_general", "triangular_solve"} <= names


OTHERS = {
    "mmd": lambda x, y, key: mmd(x, x),
    "nystroem": lambda x, y, key: cmmd_nystroem(x, y, x, y, num_landmarks=5, key=key),
    "test": lambda x, y, key: cmmd_test(x, y, x, y, key=key, num_resamples=19),
    "predict": lambda x, y, key: conditional_embedding(x, y).predict(x),
    "distance": lambda x, y, key: conditional_embedding(x, y).distance(
        conditional_embedding(x, y)
    ),
    "linear": lambda x, y, key: linear(x, x),
    "polynomial": lambda x, y, key: polynomial(2)(x, x),
    "project": lambda x, y, key: fixed_embeddings.project((x[0], x.T), x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_product_beside_cmmd_has_the_highest_precision(name):
    x, y, key = jnp.ones((6, 3)), jnp.ones((6, 2)), jax.random.key(0)
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    found = {
        equation.params["precision"]
        for equation in _equations(jax.make_jaxpr(OTHERS[name])(x, y, key).jaxpr)
        if equation.primitive.name == "dot_general"
    }
    assert found == {highest}


@LABELS
def test_one_factorisation_for_each_gram_matrix(label):
    label_kernel = LABEL_KERNELS[label][0]

    f = jax.value_and_grad(lambda *z: cmmd(*z, label_kernel=label_kernel))
    for sizes in (EQUAL, UNEQUAL):
        jaxpr = jax.make_jaxpr(f)(*_problem(0, *sizes)).jaxpr
        names = [equation.primitive.name for equation in _equations(jaxpr)]
        assert 1 <= names.count("cholesky") <= 2
        assert not {"lu", "eigh", "svd", "qr"} & set(names)


def test_nothing_is_compiled_anew_for_equal_kernels_and_other_ridges():
    problem = _problem(17)

    def call(ridge):
        kernels = gaussian_mixture([1, 3, 5]), gaussian_mixture([2, 4])
        value = cmmd(*problem, kernel=kernels[0], label_kernel=kernels[1], ridge=ridge)
        return value, _through_grams(*problem), weight_matrix(K, ridge=ridge)

    K = gaussian_mixture()(problem[0], problem[0])
    values = [call(0.1)[0]]
    with jax.no_tracing(True):
        values += [call(0.1)[0], call(0.2)[0]]
    assert values[0] == values[1] != values[2]


# --- transformations ---------------------------------------------------------


def test_vmap_over_problems_equals_a_loop():
    problems = [_problem(seed, *UNEQUAL) for seed in range(4)]
    batch = tuple(map(np.stack, zip(*problems, strict=True)))
    values = hasty(jax.vmap(functools.partial(_each_value, 0.1)))(*batch)
    gradients = hasty(
        jax.vmap(jax.grad(functools.partial(_value, cmmd, "linear", 0.1)))
    )
    for i, problem in enumerate(problems):
        for key, value in _values(0.1, *problem).items():
            np.testing.assert_allclose(values[key][i], value, rtol=1e-4)
        expected = _gradients(0.1, *problem)["cmmd", "linear"][0]
        np.testing.assert_allclose(gradients(*batch)[i], expected, atol=1e-4)


# XLA's CPU runtime of JAX 0.10 locks up on two batched factorisations at once.
_VMAP_OF_UNEQUAL_SETS = """
import functools, jax
from kln_jax import cmmd
from kln_jax.discrepancies.nystroem import cmmd_nystroem
keys = jax.random.split(jax.random.key(0), 4)
x_s = jax.random.normal(keys[0], (100, 100, 5))
x_t = jax.random.normal(keys[1], (100, 90, 5))
y_s = jax.nn.softmax(jax.random.normal(keys[2], (100, 100, 3)))
y_t = jax.nn.softmax(jax.random.normal(keys[3], (100, 90, 3)))
low_rank = functools.partial(cmmd_nystroem, num_landmarks=60, key=keys[0])
for function in (cmmd, low_rank):
    program = jax.jit(jax.vmap(jax.value_and_grad(function, argnums=(0, 2))))
    for _ in range(3):
        jax.block_until_ready(program(x_s, y_s, x_t, y_t))
"""


def test_vmap_of_sets_of_unequal_sizes_comes_to_an_end():
    command = [sys.executable, "-c", _VMAP_OF_UNEQUAL_SETS]
    subprocess.run(command, env=processes.environment(), check=True, timeout=100)


@pytest.mark.parametrize(("platform", "as_one"), [("cpu", False), ("gpu", True)])
def test_sets_of_one_size_are_solved_as_fits_the_platform(
    platform, as_one, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    x_s, y_s, x_t, y_t = _problem(21, n_t=6)
    with jax.enable_x64(True):
        pairs = [
            (np.float64(x @ x.T), np.float64(y)) for x, y in ((x_s, y_s), (x_t, y_t))
        ]

        def solve(s, t):
            return solve_both(s, t, jnp.float64(0.1))

        graph = str(jax.make_jaxpr(solve)(*pairs))
        assert ("f64[2,6,6]" in graph) == as_one
        for (K, B), A in zip(pairs, solve(*pairs), strict=True):
            np.testing.assert_allclose(K @ A + 0.1 * A, B, atol=1e-9)


def test_ridge_may_be_traced():
    problem = _problem(21)
    ridges = np.array([0.05, 0.1, 2.0], np.float32)
    expected = [reference.cmmd(*problem, ridge=float(ridge)) for ridge in ridges]
    K = gaussian_mixture()(problem[0], problem[0])

    @jax.jit
    @jax.vmap
    def f(ridge):
        form = _through_grams(*problem, ridge=ridge)
        unbounded = cmmd(*problem, kernel=linear, ridge=ridge)
        values = cmmd(*problem, ridge=ridge)
        return values, form, weight_matrix(K, ridge=ridge), unbounded

    values, through_grams, H, unbounded = f(ridges)
    np.testing.assert_allclose(values, expected, rtol=1e-4)
    np.testing.assert_allclose(through_grams, expected, rtol=1e-4)
    np.testing.assert_allclose(H[2], reference.weight_matrix(K, 2), atol=1e-5)
    expected = reference.cmmd(*problem, kernel=reference.linear, ridge=2.0)
    np.testing.assert_allclose(unbounded[2], expected, rtol=1e-4)


# --- embeddings of images ----------------------------------------------------


def _pixels(images):
    assert images.ndim == 4
    assert images.dtype == jnp.uint8
    return images.reshape(len(images), -1) / 64


def _images(seed=23, n_s=6, n_t=5):
    rng = np.random.default_rng(seed)
    x_s, x_t = (rng.integers(0, 256, (n, 2, 2, 1), np.uint8) for n in (n_s, n_t))
    return x_s, _one_hot(rng, n_s, 2), x_t, _probabilities(rng, n_t, 2)


@LABELS
def test_images_are_taken_with_a_kernel_on_an_embedding(label):
    ours, definition = LABEL_KERNELS[label]
    x_s, y_s, x_t, y_t = _images()
    flat = [x.reshape(len(x), -1) / 64 for x in (x_s, x_t)]
    expected = reference.cmmd(flat[0], y_s, flat[1], y_t, label_kernel=definition)
    kernel = 1.0 * gaussian_mixture().on(_pixels)
    value = cmmd(x_s, y_s, x_t, y_t, kernel=kernel, label_kernel=ours)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-4)


# --- conditional_embedding ---------------------------------------------------

FEATURE_KERNELS = {
    "mixture": (gaussian_mixture(), reference.gaussian_mixture()),
    "laplacian": (laplacian(2.0), reference.laplacian(2.0)),
}


@functools.partial(jax.jit, static_argnames=("kernel",))
def _distance(x_s, y_s, x_t, y_t, *, ridge=0.1, kernel=gaussian_mixture()):  # noqa: B008
    s = conditional_embedding(x_s, y_s, kernel=kernel, ridge=ridge)
    return s.distance(conditional_embedding(x_t, y_t, kernel=kernel, ridge=ridge))


@pytest.mark.parametrize("name", FEATURE_KERNELS)
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_distance_of_embeddings_is_cmmd(name, sizes):
    kernel, definition = FEATURE_KERNELS[name]
    problem = _problem(25, *sizes)
    for ridge in (0.1, 1.0):
        value = _distance(*problem, ridge=ridge, kernel=kernel)
        assert value.dtype == jnp.float32
        exact = cmmd(*problem, ridge=ridge, kernel=kernel)
        np.testing.assert_allclose(value, exact, rtol=1e-5)
        expected = reference.cmmd(*problem, definition, ridge=ridge)
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_gradient_of_the_distance_is_that_of_cmmd():
    problem = _edge("unequal")
    with jax.enable_x64(True):
        ours = jax.grad(_distance, argnums=(0, 1, 2, 3))(*problem)
        exact = _gradients(0.1, *problem)["cmmd", "linear"]
    for left, right in zip(ours, exact, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", FEATURE_KERNELS)
def test_prediction_is_the_kernel_ridge_mean(name):
    kernel, definition = FEATURE_KERNELS[name]
    x, y, x_new, _ = _problem(26)
    prediction = conditional_embedding(x, y, kernel=kernel, ridge=0.2).predict(x_new)
    assert prediction.shape == (len(x_new), 2)
    assert prediction.dtype == jnp.float32
    expected = reference.kernel_ridge(x, y, x_new, definition, 0.2)
    np.testing.assert_allclose(prediction, expected, rtol=1e-4, atol=1e-5)


def test_embeddings_are_pytrees():
    x_s, y_s, x_t, _ = _problem(27)
    embedding = jax.jit(conditional_embedding)(x_s, y_s)
    assert len(jax.tree.leaves(embedding)) == 2
    predict = jax.jit(lambda embedding, x: embedding.predict(x))
    np.testing.assert_allclose(
        predict(embedding, x_t), embedding.predict(x_t), rtol=1e-5, atol=1e-6
    )
    # A batch of embeddings, one for each labelling.
    batch = jax.vmap(lambda y: conditional_embedding(x_s, y))(np.stack([y_s, 1 - y_s]))
    distances = jax.vmap(lambda one: one.distance(embedding))(batch)
    assert abs(distances[0]) <= 1e-5
    np.testing.assert_allclose(distances[1], cmmd(x_s, 1 - y_s, x_s, y_s), rtol=1e-4)


def test_embeddings_of_images_predict_and_compare():
    kernel = gaussian_mixture().on(_pixels)
    x_s, y_s, x_t, y_t = _images()
    s = conditional_embedding(x_s, y_s, kernel=kernel)
    t = conditional_embedding(x_t, y_t, kernel=kernel)
    exact = cmmd(x_s, y_s, x_t, y_t, kernel=kernel)
    np.testing.assert_allclose(s.distance(t), exact, rtol=1e-5)
    flat = [x.reshape(len(x), -1) / 64 for x in (x_s, x_t)]
    expected = reference.kernel_ridge(flat[0], y_s, flat[1])
    np.testing.assert_allclose(s.predict(x_t), expected, rtol=1e-4, atol=1e-5)


# --- errors ------------------------------------------------------------------


def _zeros(*shapes):
    return [np.zeros(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "shown"),
    [
        (((5, 4), (6, 3), (7, 4), (7, 3)), [(5, 4), (6, 3)]),
        (((5, 4), (5, 3), (7, 4), (6, 3)), [(7, 4), (6, 3)]),
        (((5, 4), (5, 3), (7, 2), (7, 3)), [(5, 4), (7, 2)]),
        (((5, 4), (5, 3), (7, 4), (7, 2)), [(5, 3), (7, 2)]),
        (((5, 1), (5, 3), (7, 4), (7, 3)), [(5, 1), (7, 4)]),
        (((5, 4), (5,), (7, 4), (7,)), [(5,), (7,), "one_hot"]),
        (((5,), (5, 3), (7,), (7, 3)), [(5,)]),
        (((5, 2, 2), (5, 3), (7, 2, 2), (7, 3)), [(5, 2, 2), "kernel.on"]),
        (((0, 4), (0, 3), (7, 4), (7, 3)), [(0, 4)]),
    ],
)
def test_wrong_shapes_are_named(shapes, shown):
    for call in (cmmd, jax.jit(cmmd)):
        with pytest.raises(ValueError, match=r"x_s|y_s|x_t|y_t") as error:
            call(*_zeros(*shapes))
        for part in shown:
            assert str(part) in str(error.value)


@pytest.mark.parametrize(
    ("x_t", "kernel"),
    [
        ((5, 1, 2, 1), gaussian_mixture().on(_pixels)),
        ((5, 2, 1), gaussian_mixture().on(_pixels)),
        ((4, 2, 2, 1), gaussian_mixture().on(_pixels)),
        ((), gaussian_mixture().on(_pixels)),
        # A part of the kernel embeds nothing.
        ((5, 2, 2, 1), gaussian_mixture().on(_pixels) + linear),
    ],
)
def test_images_of_other_shapes_are_named(x_t, kernel):
    x_s, y_s, _, y_t = _images()
    with pytest.raises(ValueError, match=r"features \(n, .*kernel\.on") as error:
        cmmd(x_s, y_s, np.zeros(x_t, np.uint8), y_t, kernel=kernel)
    assert str(x_t) in str(error.value)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("shape", [None, (5,), ()])
def test_gram_matrices_that_do_not_fit_are_named(position, shape):
    right = [(5, 5), (7, 7), (7, 5), (5, 5), (7, 7), (5, 7)]
    # Transposed where that is wrong, and else too large.
    wrong = [(5, 6), (7, 8), (5, 7), (6, 6), (5, 5), (7, 5)][position]
    wrong = wrong if shape is None else shape
    shapes = [*right[:position], wrong, *right[position + 1 :]]
    name = ("K_s", "K_t", "K_ts", "L_s", "L_t", "L_st")[position]
    with pytest.raises(ValueError, match=name) as error:
        cmmd_from_grams(*_zeros(*shapes), ridge=0.1)
    assert str(wrong) in str(error.value)


@pytest.mark.parametrize("shape", [(5,), (0, 0), (5, 6), (2, 5, 5), ()])
def test_weight_matrix_of_what_is_not_square_is_refused(shape):
    with pytest.raises(ValueError, match="weight_matrix takes") as error:
        weight_matrix(np.zeros(shape, np.float32), ridge=0.1)
    assert str(shape) in str(error.value)


def test_embeddings_that_do_not_compare_are_named():
    x, y, _, _ = _problem(28)
    embedding = conditional_embedding(x, y)
    for other, message in (
        (conditional_embedding(x, y, kernel=laplacian()), r"kernels.*_Lapl.*equal"),
        (conditional_embedding(x[:, :2], y), r"\(6, 3\) and \(6, 2\)"),
        (conditional_embedding(x, y[:, :1]), r"\(6, 2\) and \(6, 1\)"),
        (x, "conditional_embedding, but got ndarray"),
    ):
        with pytest.raises(ValueError, match=message):
            embedding.distance(other)
    for shape in ((4, 2), (3,), (), (4, 3, 1)):
        with pytest.raises(ValueError, match=r"x \(6, 3\)") as error:
            embedding.predict(np.zeros(shape, np.float32))
        assert str(shape) in str(error.value)
    with pytest.raises(ValueError, match=r"conditional_embedding.*y \(5, 2\)"):
        conditional_embedding(x, y[:5])
    images, y, new, _ = _images()
    embedding = conditional_embedding(images, y, kernel=gaussian_mixture().on(_pixels))
    with pytest.raises(ValueError, match=r"of float32 and uint8.* one type"):
        embedding.predict(new.astype(np.float32))


def _calls(n, dtype=np.float32):
    """The functions that take a ridge, on n points."""
    x, y = np.arange(n, dtype=dtype)[:, None], np.ones((n, 2), dtype)
    K = np.eye(n, dtype=dtype)
    return (
        lambda ridge: cmmd(x, y, x[:2], y[:2], ridge=ridge),
        lambda ridge: cmmd(x[:2], y[:2], x, y, ridge=ridge),
        lambda ridge: cmmd_from_grams(K, K, K, K, K, K, ridge=ridge),
        lambda ridge: weight_matrix(K, ridge=ridge),
        lambda ridge: conditional_embedding(x, y, ridge=ridge),
    )


@pytest.mark.parametrize("ridge", [0, -0.5, math.nan, math.inf, 10**400, 1j, {}, "1"])
def test_ridge_that_is_no_positive_number_is_refused(ridge):
    for call in _calls(3):
        # A constant is checked while the caller's own function is traced, too.
        for program in (
            lambda call=call: call(ridge),
            jax.jit(lambda c=call: c(ridge)),
        ):
            with pytest.raises(
                ValueError, match=r"ridge=.* a positive, finite"
            ) as error:
                program()
            assert f"ridge={ridge!r} " in str(error.value)


@pytest.mark.parametrize(
    "ridge", [np.ones(2, np.float32), jnp.ones(3), jnp.complex64(1)]
)
def test_ridge_must_be_a_real_scalar(ridge):
    for call in _calls(3):
        for program in (call, jax.jit(call)):
            with pytest.raises(ValueError, match="must be a positive, finite number"):
                program(ridge)


@pytest.mark.parametrize(
    "ridge", [2, 2.0, np.float32(2), np.float64(2), np.array(2), jnp.float32(2)]
)
def test_ridge_is_any_number(ridge):
    problem = _problem(21)
    for form in (cmmd, _through_grams):
        value = form(*problem, ridge=ridge)
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, reference.cmmd(*problem, ridge=2), rtol=1e-4)


def test_ridge_too_small_for_the_precision_says_what_to_do():
    bound = 3 * np.finfo(np.float32).eps
    for call in _calls(3):
        jax.eval_shape(lambda call=call: call(1.1 * bound))
        with pytest.raises(ValueError, match=rf"(?s)ridge={0.9 * bound:g} is") as error:
            call(0.9 * bound)
        for fix in ("larger", "float64", "jax_enable_x64"):
            assert fix in str(error.value)
    with jax.enable_x64(True):
        for call in _calls(3, np.float64):
            jax.eval_shape(lambda call=call: call(0.9 * bound))
            with pytest.raises(ValueError, match=r"ridge=1e-16"):
                call(1e-16)


@pytest.mark.parametrize("largest", [1.0, 1e-4, 3e6])
def test_the_ridge_that_is_suggested_is_accepted(largest):
    n = 2_000_000
    with pytest.raises(ValueError, match=r"^ridge=1e-05 is below") as error:
        check_ridge(1e-5, n, np.float32, largest)
    (suggested,) = re.findall(r"such as (\S+), or", str(error.value))
    check_ridge(float(suggested), n, np.float32, largest)


@pytest.mark.parametrize(
    ("kernel", "largest"),
    [
        (gaussian_mixture(), 1),
        (gaussian_mixture(reduction="sum"), 5),
        (1e4 * laplacian(), 1e4),
        (linear, 3e4),
        (polynomial(2, scale=0.01), 301**2),
        (0.1 * (linear + gaussian_mixture()), 3000.1),
        (linear * linear, 9e8),
        (gaussian_mixture(reduction="sum").on(jnp.sin), 5),
        (linear.on(jnp.sin), 1),  # Not known, and of the next neither.
        (polynomial(10).on(jnp.sin), 1),
        (lambda a, b: linear(a, b), 1),  # Not known.
    ],
)
def test_ridge_is_in_units_of_the_kernel(kernel, largest):
    x, y = np.full((4, 3), -10.0, np.float32), np.eye(4, dtype=np.float32)
    x[2] = 100.0
    bound = 4 * np.finfo(np.float32).eps * largest
    for call in (
        lambda ridge: cmmd(x, y, x[:3], y[:3], kernel=kernel, ridge=ridge),
        lambda ridge: conditional_embedding(x, y, kernel=kernel, ridge=ridge),
        lambda ridge: cmmd_nystroem(
            x,
            y,
            x[:3],
            y[:3],
            kernel=kernel,
            ridge=ridge,
            num_landmarks=2,
            key=jax.random.key(0),
        ),
    ):
        with pytest.raises(ValueError, match=r"is below n \* eps"):
            call(0.9 * bound)
        jax.eval_shape(functools.partial(call, 1.1 * bound))


def test_ridge_is_in_units_of_the_gram_matrices():
    K = 1e4 * np.eye(3, dtype=np.float32)
    for call in (
        lambda ridge: weight_matrix(K, ridge=ridge),
        lambda ridge: cmmd_from_grams(K / 1e4, K, K, K, K, K, ridge=ridge),
    ):
        with pytest.raises(ValueError, match=r"up to 1e\+04 in float32"):
            call(1e-3)
        assert np.isfinite(call(1e-2)).all()
        assert np.isfinite(jax.jit(call)(1e-2)).all()


def _line(n, seed=0):
    x = np.linspace(0, 1, n, dtype=np.float32)[:, None]
    rng = np.random.default_rng(seed)
    return x, _one_hot(rng, n, 2), x, _one_hot(rng, n, 2)


def _exact(problem, **options):
    with jax.enable_x64(True):
        return float(cmmd(*map(np.float64, problem), **options))


LINES = pytest.mark.parametrize(("n", "ridge"), [(10, 1.3e-6), (300, 1e-3), (500, 0.1)])


@LINES
def test_a_value_that_float32_would_round_is_computed_in_float64(n, ridge):
    value = cmmd(*_line(n), ridge=ridge)
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, _exact(_line(n), ridge=ridge), rtol=1e-6)


@LINES
@pytest.mark.parametrize("name", ["grams", "embedding", "weights", "float32", "grad"])
def test_what_would_be_rounding_is_refused(n, ridge, name):
    x_s, y_s, x_t, y_t = problem = tuple(map(np.float32, _line(n)))
    K = gaussian_mixture()(x_s, x_s)

    def in_float32(a, b):
        return gaussian_mixture()(a.astype(np.float32), b.astype(np.float32))

    calls = dict(
        grams=lambda: cmmd_from_grams(
            K, K, K, y_s @ y_s.T, y_t @ y_t.T, y_s @ y_t.T, ridge=ridge
        ),
        embedding=lambda: conditional_embedding(x_s, y_s, ridge=ridge),
        weights=lambda: weight_matrix(K, ridge=ridge),
        float32=lambda: cmmd(*problem, ridge=ridge, kernel=in_float32),
        grad=lambda: jax.grad(lambda x: cmmd(x, y_s, x_t, y_t, ridge=ridge))(x_s),
    )
    with pytest.raises(ValueError, match=rf"{ridge:g} is too small for these points"):
        calls[name]()


@pytest.mark.parametrize("n", [10, 60, 300])
@pytest.mark.parametrize("scale", [0.01, 1, 100])
@pytest.mark.parametrize("d", [1, 20])
def test_a_ridge_that_is_accepted_gives_the_right_value(n, scale, d):
    rng = np.random.default_rng(0)
    problem = (
        _features(rng, n, d, scale), _one_hot(rng, n, 3),
        _features(rng, n, d, scale), _one_hot(rng, n, 3),
    )  # fmt: skip
    accepted = 0
    for ridge in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0):
        for bandwidths in ((1, 3, 5, 7, 9), (100,)):
            options = dict(ridge=ridge, kernel=gaussian_mixture(bandwidths))
            try:
                value = cmmd(*problem, **options)
            except ValueError:
                continue
            accepted += 1
            np.testing.assert_allclose(value, _exact(problem, **options), rtol=1e-3)
    assert accepted >= 10


@pytest.mark.parametrize("label_kernel", [linear, gaussian_mixture()])
def test_a_whole_weight_repeats_a_point(label_kernel):
    x_s, y_s, x_t, y_t = _problem()
    counts = 1 + np.arange(len(x_s)) % 3
    options = dict(label_kernel=label_kernel, ridge=0.3)
    value = cmmd(x_s, y_s, x_t, y_t, weights_s=counts, **options)
    repeated = np.repeat(x_s, counts, 0), np.repeat(y_s, counts, 0), x_t, y_t
    np.testing.assert_allclose(value, cmmd(*repeated, **options), rtol=1e-5)
    ones = np.ones(len(x_s)), np.ones(len(x_t))
    equal = cmmd(x_s, y_s, x_t, y_t, weights_s=ones[0], weights_t=ones[1], **options)
    np.testing.assert_allclose(equal, cmmd(x_s, y_s, x_t, y_t, **options), rtol=1e-6)


def test_weighted_value_equals_the_definition():
    problem = _problem()
    rng = np.random.default_rng(1)
    weights = rng.uniform(0.1, 4, len(problem[0])), rng.uniform(0.1, 4, len(problem[2]))
    value = cmmd(*problem, weights_s=weights[0], weights_t=weights[1], ridge=0.3)
    np.testing.assert_allclose(
        value, reference.weighted_cmmd(*problem, *weights, ridge=0.3), rtol=1e-4
    )


@pytest.mark.parametrize("weights", [[1.0], [0.0] * 3, [-1.0] * 3, [np.nan] * 3])
def test_weights_that_will_not_do_are_named(weights):
    x, y = np.eye(3), np.eye(3)
    with pytest.raises(ValueError, match="weights_t"):
        cmmd(x, y, x, y, weights_t=weights)


def test_many_points_are_taken_by_blocks(monkeypatch):
    """Values and gradients are those of the whole matrix, which is not formed."""
    rng = np.random.default_rng(0)
    n_s, n_t = 300, 400
    problem = (
        _features(rng, n_s, 4, 1.0), _one_hot(rng, n_s, 3),
        _features(rng, n_t, 4, 1.0), _one_hot(rng, n_t, 3),
    )  # fmt: skip
    problem += rng.uniform(0.5, 2, n_s), rng.uniform(0.5, 2, n_t), np.float32(0.3)

    def value(*arrays):
        x_s, y_s, x_t, y_t, weights_s, weights_t, ridge = arrays
        weights = dict(weights_s=weights_s, weights_t=weights_t)
        return cmmd(x_s, y_s, x_t, y_t, ridge=ridge, **weights)

    arrays = tuple(jnp.asarray(array, jnp.float32) for array in problem)
    function = jax.value_and_grad(value, tuple(range(7)))
    whole = function(*arrays)
    monkeypatch.setattr(sys.modules[check_ridge.__module__], "_MOST_WHOLE", 10)
    jax.clear_caches()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        function(*arrays),
        whole,
    )
    largest = max(
        math.prod(variable.aval.shape)
        for equation in _equations(jax.make_jaxpr(function)(*arrays).jaxpr)
        for variable in equation.outvars
    )
    assert largest == 256 * (n_s + n_t)  # A block of rows, above n_t^2 here.
    jax.clear_caches()


def test_labels_that_are_zero_have_no_distance():
    x_s, y_s, x_t, y_t = _problem()
    assert cmmd(x_s, 0 * y_s, x_t, 0 * y_t) == 0


@FORMS
def test_a_traced_ridge_that_would_be_refused_gives_nan(form):
    x, y, _, _ = _line(256)
    equal = np.ones_like(x), y, np.ones_like(x), y[::-1]
    program = jax.jit(lambda ridge: form(*equal, ridge=ridge))
    for ridge in (-2.0, 0.0, 1e-6, np.nan):
        assert np.isnan(program(ridge))
    np.testing.assert_allclose(program(1.0), _exact(equal, ridge=1.0), atol=1e-3)


def test_features_that_are_not_finite_are_not_blamed_on_the_ridge():
    x, y, x_t, y_t = _problem()
    x[0] = np.inf
    assert np.isnan(cmmd(x, y, x_t, y_t, kernel=linear))
