"""Low-rank CMMD against the exact one, and what it costs."""

import functools
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.extend import core

from kln_jax import cmmd, cmmd_nystroem, gaussian_mixture, laplacian, linear
from kln_jax.discrepancies.nystroem import draw_landmarks

KEY = jax.random.key(0)
MIXTURE = gaussian_mixture()
ROOT = pathlib.Path(__file__).parents[2]


def _problem(seed=0, n_s=30, n_t=24, d=2, scale=1.0):
    rng = np.random.default_rng(seed)
    x_s, x_t = (scale * rng.normal(size=(n, d)) for n in (n_s, n_t))
    y_s, y_t = np.eye(2)[(x_s[:, 0] > 0).astype(int)], rng.dirichlet(np.ones(2), n_t)
    return tuple(array.astype(np.float32) for array in (x_s, y_s, x_t, y_t))


def _doubles(problem):
    return tuple(np.float64(array) for array in problem)


@functools.partial(jax.jit, static_argnames=("m", "kernel"))
def _value(key, *problem, m, kernel=MIXTURE):
    return cmmd_nystroem(*problem, num_landmarks=m, key=key, kernel=kernel)


_gradient = jax.grad(_value, argnums=(1, 2, 3, 4))


@pytest.mark.parametrize("kernel", [gaussian_mixture(), laplacian(3.0)])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_all_points_as_landmarks_give_the_exact_value(kernel, scale):
    problem = _problem(scale=scale)
    value = _value(KEY, *problem, m=54, kernel=kernel)
    assert value.shape == ()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, cmmd(*problem, kernel=kernel), rtol=2e-3)


def test_all_points_as_landmarks_are_exact_to_rounding_in_float64():
    problem = _doubles(_problem())
    with jax.enable_x64(True):
        value = _value(KEY, *problem, m=54)
    assert value.dtype == jnp.float64
    np.testing.assert_allclose(value, reference.cmmd(*problem), rtol=1e-9)


@pytest.mark.parametrize("m", [1, 7, 20])
def test_value_equals_the_definition_for_its_landmarks(m):
    problem = _doubles(_problem(1))
    with jax.enable_x64(True):
        value = _value(KEY, *problem, m=m)
        z = np.asarray(draw_landmarks(KEY, problem[0], problem[2], m))
    expected = reference.cmmd_nystroem(*problem, z)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_error_falls_with_the_number_of_landmarks():
    problem = _problem(2, 100, 80, d=3)
    exact = cmmd(*problem)
    keys = jax.random.split(KEY, 5)
    errors = []
    for m in (5, 20, 80):
        values = jax.vmap(lambda key, m=m: _value(key, *problem, m=m))(keys)
        errors.append(float(jnp.median(jnp.abs(values / exact - 1))))
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]


def test_landmarks_of_a_kernel_of_low_rank_add_no_noise():
    # Five directions are all that this kernel has; the other landmarks repeat them.
    problem = _problem(3, 100, 80, d=5)
    with jax.enable_x64(True):
        exact = cmmd(*_doubles(problem), kernel=linear)
    value = _value(KEY, *problem, m=80, kernel=linear)
    np.testing.assert_allclose(value, exact, rtol=1e-4)


def test_blocks_of_rows_sum_to_the_whole(monkeypatch):
    # 29 rows make 4 blocks of 8, and 22 make 3: the rows that fill them must not count.
    monkeypatch.setattr("kln_jax.discrepancies.nystroem._BLOCK_ROWS", 8)
    problem = _doubles(_problem(4, 29, 22))
    with jax.enable_x64(True):
        value = _value(KEY, *problem, m=20)
        z = np.asarray(draw_landmarks(KEY, problem[0], problem[2], 20))
    expected = reference.cmmd_nystroem(*problem, z)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_equal_sets_in_any_order_are_at_zero():
    x, y, _, _ = _problem(5)
    order = np.random.default_rng(0).permutation(len(x))
    assert _value(KEY, x, y, x, y, m=20) == 0
    assert _value(KEY, x, y, x[order], y[order], m=20) <= 1e-6
    assert _value(KEY, x, y, x, y[order], m=20) > 1e-2


def test_key_alone_decides_the_landmarks():
    problem = _problem(6)
    values = [float(_value(jax.random.key(i), *problem, m=5)) for i in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("m", "from_s"), [(10, 5), (11, 5), (1, 0), (40, 20), (54, 30), (50, 26)]
)
def test_landmarks_are_distinct_points_of_both_sets(m, from_s):
    s, t = np.arange(30, dtype=np.float32), np.arange(100, 124, dtype=np.float32)
    z = np.asarray(draw_landmarks(KEY, s[:, None], t[:, None], m))[:, 0]
    assert len(set(z)) == m
    assert set(z) <= {*s, *t}
    assert (z < 100).sum() == from_s


def test_float64_gradients_equal_those_of_the_exact_value():
    problem = _doubles(_problem(7, 12, 9, d=3))
    with jax.enable_x64(True):
        ours = _gradient(KEY, *problem, m=21)
        exact = jax.grad(cmmd, argnums=(0, 1, 2, 3))(*problem)
    for left, right in zip(ours, exact, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "edge", ["equal sets", "coincident features", "duplicates", "far apart"]
)
def test_float32_gradients_are_finite(edge):
    x_s, y_s, x_t, y_t = _problem(8)
    if edge == "equal sets":
        x_t, y_t = x_s[:24], y_s[:24]
    elif edge == "coincident features":
        x_s, x_t = np.ones_like(x_s), np.ones_like(x_t)
    elif edge == "far apart":  # The Gram matrix is the identity: equal eigenvalues.
        x_s, x_t = 1e4 * x_s, 1e4 * x_t
    else:
        x_s[1:9], x_t[:4] = x_s[0], x_s[0]
    gradients = _gradient(KEY, x_s, y_s, x_t, y_t, m=40)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


def test_features_that_are_no_numbers_are_not_hidden():
    x_s, *rest = _problem(9)
    x_s[3] = np.nan
    assert np.isnan(_value(KEY, x_s, *rest, m=54))


def test_images_are_taken_with_an_embedding():
    x_s, y_s, x_t, y_t = _problem(10, d=4)

    def flat(images):
        assert images.ndim == 3
        return images.reshape(len(images), -1)

    images = x_s.reshape(-1, 2, 2), y_s, x_t.reshape(-1, 2, 2), y_t
    value = _value(KEY, *images, m=20, kernel=gaussian_mixture().on(flat))
    expected = _value(KEY, x_s, y_s, x_t, y_t, m=20)
    np.testing.assert_allclose(value, expected, rtol=1e-3)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for sub in core.jaxprs_in_params(equation.params):
            yield from _equations(sub)


def test_neither_value_nor_gradient_holds_a_row_of_features_for_each_point():
    problem = _problem(0, 5000, 4000)
    m, block = 40, 1024
    f = functools.partial(cmmd_nystroem, num_landmarks=m, key=KEY)
    found = 0
    for form in (f, jax.grad(f, argnums=(0, 1, 2, 3))):
        for equation in _equations(jax.make_jaxpr(form)(*problem).jaxpr):
            found += equation.primitive.name == "scan"
            for variable in equation.outvars:
                size = math.prod(variable.aval.shape)
                assert size <= block * m, (equation.primitive, variable.aval.shape)
    assert found >= 4  # Both sets, in both forms.


def test_twenty_thousand_points_a_set_take_less_than_two_gib():
    code = """
import jax
import numpy as np
from kln_jax import cmmd_nystroem
rng = np.random.default_rng(0)
x_s, x_t = (rng.normal(size=(20_000, 16)).astype(np.float32) for _ in range(2))
y_s, y_t = (np.eye(10, dtype=np.float32)[rng.integers(10, size=20_000)] for _ in "st")
value = cmmd_nystroem(x_s, y_s, x_t, y_t, num_landmarks=200, key=jax.random.key(0))
assert np.isfinite(value)
# Not ru_maxrss, in which the process that started this one is counted, too.
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("reads the peak memory from Linux")
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 2 * 2**20  # In KiB.


# --- errors ------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, -3, 55])
def test_number_of_landmarks_out_of_range_is_refused(m):
    with pytest.raises(ValueError, match=rf"num_landmarks={m}.*54"):
        cmmd_nystroem(*_problem(), num_landmarks=m, key=KEY)


@pytest.mark.parametrize("ridge", [0, -1.0, 1e-9])
def test_what_cmmd_refuses_is_refused(ridge):
    x_s, y_s, x_t, y_t = _problem()
    with pytest.raises(ValueError, match="ridge"):
        cmmd_nystroem(x_s, y_s, x_t, y_t, num_landmarks=5, key=KEY, ridge=ridge)
    with pytest.raises(ValueError, match=r"cmmd_nystroem takes.*x_t \(24, 1\)"):
        cmmd_nystroem(x_s, y_s, x_t[:, :1], y_t, num_landmarks=5, key=KEY)
