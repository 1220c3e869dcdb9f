"""The conditional test: its law under the null, its power, its parts by definition."""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy.special import expit
from scipy.stats import binom

from kln_jax import cmmd, gaussian_mixture, linear, median_bandwidth
from kln_jax.discrepancies import two_sample as module

# One number of resamples, so that most tests share one compiled program.
cmmd_test = functools.partial(module.cmmd_test, num_resamples=99)

# What the test itself takes is of another scale.
KERNEL = gaussian_mixture((1, 3, 5, 7, 9))
N_S, N_T = 30, 40


def _ratio(x):
    """Of N(-1, 1) over N(1, 1)."""
    return -2.0 * x[:, 0]


def _draw(key, shift=0.0, n_s=N_S, n_t=N_T):
    """Different marginals; y is noisy, and its mean bends where they overlap."""
    keys = jax.random.split(key, 4)
    x_s = jax.random.normal(keys[0], (n_s, 1)) - 1.0
    x_t = jax.random.normal(keys[1], (n_t, 1)) + 1.0
    y_s = jnp.sin(2.0 * x_s) + 0.5 * jax.random.normal(keys[2], (n_s, 1))
    y_t = jnp.sin(2.0 * x_t) + 0.5 * jax.random.normal(keys[3], (n_t, 1))
    return x_s, y_s, x_t, y_t + shift


@functools.lru_cache
def _program(n_s, n_t, num_resamples, known):
    def one(key, shift):
        keys = jax.random.split(key)
        return cmmd_test(
            *_draw(keys[0], shift, n_s, n_t),
            key=keys[1],
            num_resamples=num_resamples,
            log_density_ratio=_ratio if known else None,
        ).p_value

    return jax.jit(lambda keys, shift: lax.map(lambda key: one(key, shift), keys))


@functools.lru_cache
def _p_values(shift, known=False, num_sets=120, n=(20, 30), num_resamples=39):
    run = _program(*n, num_resamples, known)
    return np.asarray(run(jax.random.split(jax.random.key(0), num_sets), shift))


def _residuals(x, y):
    """Of ridge regression; its ridge by leaving points out, one after the other."""
    K = np.asarray(KERNEL(x, x), np.float64)
    y = np.asarray(y, np.float64)
    y = y - y.mean(axis=0)

    def error(lam):
        total = 0.0
        for i in range(len(y)):
            kept = np.arange(len(y)) != i
            A = K[np.ix_(kept, kept)] + lam * np.eye(kept.sum())
            total += np.sum((y[i] - K[i, kept] @ np.linalg.solve(A, y[kept])) ** 2)
        return total

    lam = min((np.trace(K) / 4.0**power for power in range(8)), key=error)
    return y - K @ np.linalg.solve(K + lam * np.eye(len(y)), y), np.trace(K)


# --- the statistic -----------------------------------------------------------


@pytest.mark.parametrize("ridge", [None, 0.5])
def test_the_statistic_is_the_cmmd_of_the_pooled_residuals(ridge):
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1))
    x, y = jnp.concatenate([x_s, x_t]), jnp.concatenate([y_s, y_t])
    r, trace = _residuals(x, y)
    r = jnp.asarray(r, jnp.float32)
    expected = cmmd(
        x_s, r[:N_S], x_t, r[N_S:], ridge=trace / 10 if ridge is None else ridge
    )
    found = cmmd_test(
        x_s, y_s, x_t, y_t, key=jax.random.key(0), ridge=ridge, kernel=KERNEL
    )
    np.testing.assert_allclose(found.statistic, expected, rtol=2e-3)


def test_any_label_kernel_goes_through_its_features():
    data = _draw(jax.random.key(1))
    key = jax.random.key(0)
    by_features = cmmd_test(*data, key=key, label_kernel=lambda a, b: linear(a, b))
    directly = cmmd_test(*data, key=key)
    np.testing.assert_allclose(by_features.statistic, directly.statistic, rtol=1e-3)
    np.testing.assert_allclose(by_features.p_value, directly.p_value, atol=0.021)


def test_batches_of_resamples_change_nothing(monkeypatch):
    x = _draw(jax.random.key(1))[0]
    K, R = KERNEL(x, x), jnp.sin(3.0 * x)
    signs = jax.random.rademacher(jax.random.key(0), (7, N_S), jnp.float32)
    at_once = module._statistics(K, R, signs, jnp.float32(3.0))
    monkeypatch.setattr(module, "_BATCH_ELEMENTS", 3 * N_S)
    in_batches = module._statistics(K, R, signs, jnp.float32(3.0))
    np.testing.assert_allclose(in_batches, at_once, rtol=1e-4)


# --- the groups --------------------------------------------------------------


def test_groups_are_drawn_with_their_conditional_law():
    g, n_s, num = np.array([0.3, -1.0, 2.0, 0.0, 0.7], np.float32), 2, 20_000
    signs = np.asarray(module._draw_groups(jax.random.key(0), jnp.asarray(g), n_s, num))
    sets = list(itertools.combinations(range(5), n_s))
    weights = np.array([np.exp(g[list(chosen)].sum()) for chosen in sets])
    expected = weights / weights.sum()
    drawn = [tuple(np.flatnonzero(row > 0)) for row in signs]
    shares = np.array([drawn.count(chosen) for chosen in sets]) / num
    assert set(drawn) == set(sets)
    error = np.abs(shares - expected) / np.sqrt(expected * (1 - expected) / num)
    assert error.max() < 3.5


def test_the_odds_are_those_of_penalised_logistic_regression():
    x_s, _, x_t, _ = _draw(jax.random.key(1))
    x = jnp.concatenate([x_s, x_t])
    K = np.asarray(KERNEL(x, x), np.float64)
    S = np.where(np.arange(len(x)) < N_S, 1.0, -1.0)
    lam = 2.0
    P = np.linalg.solve(K + lam * np.eye(len(x)), K).T
    f = np.asarray(
        module._fit_log_odds(jnp.asarray(P, jnp.float32), jnp.asarray(S, jnp.float32))
    )
    # Where the gradient of the penalised likelihood is zero, f = K a with these a.
    a = (4.0 / lam) * ((S > 0) - expit(f + np.log(N_S / N_T)))
    np.testing.assert_allclose(f, K @ a, atol=2e-3)
    assert np.corrcoef(f, _ratio(np.asarray(x)))[0, 1] > 0.9


# --- level and power ---------------------------------------------------------


def test_p_values_are_uniform_under_the_null_though_marginals_differ():
    p = _p_values(0.0)
    for level in (0.1, 0.3, 0.5, 0.8):
        low, high = binom.ppf([0.005, 0.995], len(p), level)
        assert low <= np.sum(p <= level) <= high, level


def test_free_exchange_of_the_groups_rejects_a_true_null():
    def one(key):
        keys = jax.random.split(key)
        x_s, y_s, x_t, y_t = _draw(keys[0])
        x, y = jnp.concatenate([x_s, x_t]), jnp.concatenate([y_s, y_t])
        K = KERNEL(x, x)
        S = jnp.where(jnp.arange(len(x)) < N_S, 1.0, -1.0)
        drawn = module._draw_groups(keys[1], jnp.zeros(len(x)), N_S, 99)
        T = module._statistics(K, y, jnp.vstack([S, drawn]), jnp.trace(K) / 10.0)
        return (1 + jnp.sum(T[1:] >= T[0])) / 100

    run = jax.jit(lambda keys: lax.map(one, keys))
    p = run(jax.random.split(jax.random.key(0), 60))
    assert np.mean(np.asarray(p) <= 0.05) > 0.5


def test_power_rises_to_one():
    powers = [np.mean(_p_values(shift) <= 0.05) for shift in (0.0, 0.7, 2.0)]
    assert powers[0] < 0.12 < powers[1] < powers[2]
    assert powers[2] > 0.97


def test_class_labels_that_are_swapped_are_told_apart():
    x_s, y_s, x_t, y_t = _draw(jax.random.key(2))
    one_hot = functools.partial(jax.nn.one_hot, num_classes=2)
    labels = one_hot((y_s[:, 0] > 0).astype(int)), one_hot((y_t[:, 0] < 0).astype(int))
    found = cmmd_test(x_s, labels[0], x_t, labels[1], key=jax.random.key(0))
    assert found.p_value == pytest.approx(1 / 100)  # The least there is.


def test_a_gaussian_label_kernel_sees_a_change_of_variance():
    keys = jax.random.split(jax.random.key(4), 4)
    x_s, x_t = (jax.random.normal(k, (n, 1)) for k, n in ((keys[0], 30), (keys[1], 40)))
    y_s = 0.3 * jax.random.normal(keys[2], (30, 1))
    y_t = 3.0 * jax.random.normal(keys[3], (40, 1))
    data, key = (x_s, y_s, x_t, y_t), jax.random.key(0)
    assert cmmd_test(*data, key=key, label_kernel=KERNEL).p_value < 0.02
    assert cmmd_test(*data, key=key).p_value > 0.05


@pytest.mark.parametrize("d", [3, 10, 200])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_opposite_labels_are_told_apart_on_any_scale(d, scale):
    rng = np.random.default_rng(0)
    x_s, x_t = 50 * scale + scale * rng.normal(size=(2, 100, d))
    y_s, y_t = (np.eye(2)[(x[:, 0] > 50 * scale).astype(int)] for x in (x_s, x_t))
    found = cmmd_test(x_s, y_s, x_t, 1 - y_t, key=jax.random.key(0))
    assert found.p_value <= (0.01 if d < 200 else 0.2)  # Few points for 200.
    wide = median_bandwidth(np.concatenate([x_s, x_t]))
    kernel = gaussian_mixture([b * float(wide) for b in (0.25, 0.5, 1, 2, 4)])
    explicit = cmmd_test(x_s, y_s, x_t, 1 - y_t, key=jax.random.key(0), kernel=kernel)
    np.testing.assert_allclose(explicit.statistic, found.statistic, rtol=1e-3)


@pytest.mark.parametrize(
    ("scale", "share"), [(1e3, "values between two points are about 0"),
                         (1e-4, r"about k\(x, x\)")]
)  # fmt: skip
def test_a_kernel_that_sees_nothing_is_warned_of(scale, share):
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cmmd_test(
            scale * x_s, y_s, scale * x_t, y_t, key=jax.random.key(0), kernel=KERNEL
        )
    (message,) = {str(one.message) for one in found if share[-5:-2] in str(one.message)}
    assert re.search(share + ".*Leave the kernel out", message)


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_level_over_500_null_sets(known):
    p = _p_values(0.0, known, 500, (100, 100), 199)
    low, high = binom.ppf([0.005, 0.995], 500, 0.05)
    assert low <= np.sum(p <= 0.05) <= high


# --- invariances, determinism, edges -----------------------------------------


def test_the_key_decides_the_resamples():
    data = _draw(jax.random.key(5), 0.2)
    one, same, other = (cmmd_test(*data, key=jax.random.key(k)) for k in (0, 0, 1))
    assert one.p_value == same.p_value
    assert one.statistic == same.statistic == other.statistic
    assert one.p_value != other.p_value


def test_swapped_sets_and_other_orders_agree():
    x_s, y_s, x_t, y_t = _draw(jax.random.key(5), 0.2)
    key, order = jax.random.key(0), np.random.default_rng(0).permutation(N_S)
    one = cmmd_test(x_s, y_s, x_t, y_t, key=key)
    swapped = cmmd_test(x_t, y_t, x_s, y_s, key=key)
    shuffled = cmmd_test(x_s[order], y_s[order], x_t, y_t, key=key)
    for other in (swapped, shuffled):
        np.testing.assert_allclose(other.statistic, one.statistic, rtol=1e-3)
        # Other draws of the same law: within their Monte-Carlo error.
        assert abs(other.p_value - one.p_value) < 5 * np.sqrt(2 * 0.25 / 99)


def test_vmap_over_data_sets_is_a_loop():
    keys = jax.random.split(jax.random.key(6), 3)
    sets = [_draw(key) for key in keys]
    batch = jax.vmap(lambda key, *data: cmmd_test(*data, key=key))(
        keys, *(jnp.stack(arrays) for arrays in zip(*sets, strict=True))
    )
    for i, data in enumerate(sets):
        alone = cmmd_test(*data, key=keys[i])
        np.testing.assert_allclose(batch.statistic[i], alone.statistic, rtol=1e-3)
        np.testing.assert_allclose(batch.p_value[i], alone.p_value, atol=0.011)


def test_sets_without_overlap_are_never_told_apart():
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1))
    found = cmmd_test(
        x_s, y_s, x_t, y_t + 5.0, key=jax.random.key(0),
        log_density_ratio=lambda x: jnp.where(jnp.arange(len(x)) < N_S, 1e3, -1e3),
    )  # fmt: skip
    assert found.p_value == 1.0


def test_values_that_are_not_numbers_give_no_p_value():
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1))
    key, nan = jax.random.key(0), jnp.nan
    for found in (
        cmmd_test(x_s, y_s.at[0].set(nan), x_t, y_t, key=key),
        cmmd_test(x_s.at[0].set(nan), y_s, x_t, y_t, key=key),
        cmmd_test(
            x_s, y_s, x_t, y_t, key=key, log_density_ratio=lambda x: nan * x[:, 0]
        ),
    ):
        assert jnp.isnan(found.statistic)
        assert jnp.isnan(found.p_value)


@pytest.mark.parametrize("constant", [0.0, 1.1, 3.3, -1e4])
def test_a_constant_y_is_no_difference(constant):
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1))
    # Its mean is rounded.
    y_s, y_t = jnp.full_like(y_s, constant), jnp.full_like(y_t, constant)
    found = cmmd_test(x_s, y_s, x_t, y_t, key=jax.random.key(0))
    assert (found.statistic, found.p_value) == (0.0, 1.0)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18, 1e37])
def test_the_scale_of_y_does_not_count(scale):
    x_s, y_s, x_t, y_t = _draw(jax.random.key(2), 0.5)
    key = jax.random.key(0)
    expected = cmmd_test(x_s, y_s, x_t, y_t, key=key)
    found = cmmd_test(x_s, scale * y_s, x_t, scale * y_t, key=key)
    assert found.p_value == expected.p_value < 0.5
    with np.errstate(over="ignore"):  # To infinity, as the statistic itself.
        statistic = np.float32(np.float64(expected.statistic) * scale * scale)
    np.testing.assert_allclose(found.statistic, statistic, rtol=1e-4, atol=1e-37)


def test_what_is_left_of_y_without_a_constant_counts():
    x_s, y_s, x_t, y_t = _draw(jax.random.key(2), 0.5)
    key = jax.random.key(0)
    wide = [
        jnp.concatenate([jnp.full_like(y, 1e15), 1e-8 * y], axis=1) for y in (y_s, y_t)
    ]
    found = cmmd_test(x_s, wide[0], x_t, wide[1], key=key)
    assert found.p_value == cmmd_test(x_s, y_s, x_t, y_t, key=key).p_value


@pytest.mark.parametrize("ridge", [None, 0.1])
def test_a_kernel_that_is_zero_tells_nothing_apart(ridge):
    x_s, y_s, x_t, y_t = _draw(jax.random.key(1), 5.0)
    found = cmmd_test(
        0 * x_s, y_s, 0 * x_t, y_t,
        key=jax.random.key(0), kernel=linear, ridge=ridge,
    )  # fmt: skip
    assert (found.statistic, found.p_value) == (0.0, 1.0)


@pytest.mark.parametrize(("n_s", "n_t", "least"), [(3, 3, 2 / 20), (2, 4, 1 / 15)])
def test_the_observed_groups_drawn_again_are_ties(n_s, n_t, least):
    """With a small ridge rounding decides between equal statistics."""

    def p_value(key):
        keys = jax.random.split(key, 3)
        x = 0.03 * jax.random.normal(keys[0], (n_s + n_t, 2))
        y = jax.random.normal(keys[1], (n_s + n_t, 1))
        return cmmd_test(
            x[:n_s], y[:n_s], x[n_s:], y[n_s:],
            key=keys[2], ridge=1e-5, log_density_ratio=lambda x: jnp.zeros(len(x)),
            num_resamples=399,
        ).p_value  # fmt: skip

    keys = jax.random.split(jax.random.key(0), 100)
    p = jax.jit(lambda keys: lax.map(p_value, keys))(keys)
    # Once in ten thousand, one of the p-values is smaller.
    assert p.min() >= (1 + binom.ppf(1e-4 / 100, 399, least)) / 400


def test_all_is_computed_in_the_type_of_the_gram_matrix():
    """Which an embedding may make wider than features and labels are."""
    data = _draw(jax.random.key(2))
    with jax.enable_x64(True):
        test = functools.partial(
            cmmd_test,
            key=jax.random.key(0),
            kernel=KERNEL.on(lambda x: x.astype(jnp.float64)),
            ridge=0.3,
            log_density_ratio=lambda x: -0.3 * x[:, 0],
        )
        x_s, y_s, x_t, y_t = map(np.asarray, data)
        found = test(x_s, y_s, x_t, y_t)
        exact = test(x_s, np.float64(y_s), x_t, np.float64(y_t))
    assert found.statistic.dtype == found.p_value.dtype == jnp.float64
    np.testing.assert_allclose(found.statistic, exact.statistic, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(y_s=jnp.zeros(N_S)), r"y_s \(30,\).*one_hot"),
        (dict(x_t=jnp.zeros((N_T, 2))), r"x_t \(40, 2\)"),
        (dict(y_t=jnp.zeros((N_T - 1, 1))), r"y_t \(39, 1\)"),
        (dict(x_s=jnp.zeros((1, 1)), y_s=jnp.zeros((1, 1))), "n_s=1 .* at least 2"),
        (dict(num_resamples=10), "num_resamples=10 .* at least 19"),
        (dict(num_resamples=99.5), r"num_resamples=99\.5"),
        (dict(ridge=0.0), "ridge=0.0 must be a positive"),
        (dict(ridge=1e-7), "below n"),
        (dict(ridge=0.01, kernel=1e6 * gaussian_mixture()), "below n"),
        (dict(log_density_ratio=lambda x: x), r"must return shape \(70,\)"),
        (dict(log_density_ratio=np.zeros(70)), "must be a function .* is ndarray"),
        (dict(kernel="rbf"), "kernel='rbf' must be a function"),
        (dict(label_kernel="rbf"), "label_kernel='rbf' must be a function"),
        (dict(key=np.int64(0)), r"key=\S+ must be a random key"),
        (dict(key=jnp.int32(0)), r"key=.* must be a random key"),
        (dict(key=jnp.arange(3)), r"key=.* must be a random key"),
        (dict(key=jax.random.split(jax.random.key(0))), "(?s)key=.* must be a random"),
        (dict(key=0), r"key=0 must be a random key, such as jax.random.key\(0\)"),
    ],
)
def test_errors_name_the_value_and_the_fix(change, message):
    names = ("x_s", "y_s", "x_t", "y_t")
    arguments = dict(zip(names, _draw(jax.random.key(1)), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        cmmd_test(**{"key": jax.random.key(0), **arguments})
