import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kln_jax import cmmd, gaussian_mixture, linear
from kln_jax.training import objectives


def test_reconstruction_error_sums_pixels_and_averages_images():
    x = jnp.zeros((3, 2, 2, 1)).at[0].set(1.0).at[1, 0, 0].set(2.0)
    error = objectives.reconstruction_error(x, jnp.zeros_like(x))
    np.testing.assert_allclose(error, (4 * 1.0 + 4.0) / 3, rtol=1e-6)
    mean = objectives.reconstruction_error(x, jnp.zeros_like(x), reduction="mean")
    np.testing.assert_allclose(mean, error / 4, rtol=1e-6)


def test_reconstruction_error_refuses_another_reduction():
    x = jnp.zeros((1, 2, 2, 1))
    with pytest.raises(ValueError, match=r"reconstruction_reduction='max' must be"):
        objectives.reconstruction_error(x, x, reduction="max")


def test_reconstruction_error_refuses_what_would_be_broadcast():
    x = jnp.zeros((2, 4, 4, 3))
    with pytest.raises(ValueError, match=r"\(2, 4, 4, 3\) .* another, \(2, 4, 4, 1\)"):
        objectives.reconstruction_error(x, x[..., :1])


def test_confidence_is_entropy_plus_cross_entropy_with_the_uniform_prior():
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    expected = -(p * np.log(p)).sum(1).mean() - np.log(p.mean(0)).mean()
    np.testing.assert_allclose(
        objectives.confidence(jnp.float32(np.log(p) + 5.0)), expected, rtol=1e-6
    )


def test_confidence_is_least_for_sure_and_balanced_predictions():
    sure = 50.0 * jnp.eye(4)
    np.testing.assert_allclose(objectives.confidence(sure), np.log(4), rtol=1e-6)
    assert objectives.confidence(sure[jnp.array([0, 0, 1, 2])]) > np.log(4) + 1
    assert objectives.confidence(0.01 * sure) > np.log(4) + 0.5


def test_confidence_of_extreme_scores_is_finite_with_its_gradient():
    for logits in (1e4 * jnp.eye(3), jnp.full((3, 3), -1e4)):
        value, gradient = jax.value_and_grad(objectives.confidence)(logits)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    z, logits = rng.normal(size=(2, 12, 4)), rng.normal(size=(2, 12, 3))
    y = jax.nn.one_hot(rng.integers(0, 3, 12), 3)
    arrays = (z[0], y, logits[0], z[1], logits[1], 7.0)
    return objectives.Batch(*map(jnp.float32, arrays))


WEIGHTS = dict(reconstruction_weight=0.1, confidence_weight=2.0)
KLN = dict(kernel=gaussian_mixture((1, 3)), label_kernel=linear, ridge=0.2)


def test_a_symmetric_objective_uses_the_labels_of_both_batches(batch):
    z_s, y_s, logits_s, z_t, logits_t, *_ = batch
    y_t = jnp.roll(y_s, 1, axis=0)
    weights = dict(reconstruction_weight=0.1, confidence_weight=0.0)
    one_way = functools.partial(objectives.kln_objective, **KLN, **weights)
    loss, terms = objectives.symmetric(one_way)(batch._replace(y_t=y_t))
    options = dict(kernel=KLN["kernel"], ridge=0.2)
    there = cmmd(z_s, y_s, z_t, jax.nn.softmax(logits_t), **options)
    back = cmmd(z_t, y_t, z_s, jax.nn.softmax(logits_s), **options)
    np.testing.assert_allclose(terms["cmmd"], (there + back) / 2, rtol=1e-6)
    np.testing.assert_allclose(loss, (there + back) / 2 + 0.7, rtol=1e-6)


def test_kln_objective_is_the_weighted_sum_of_its_terms(batch):
    loss, terms = objectives.kln_objective(batch, **KLN, **WEIGHTS)
    z_s, y_s, _, z_t, logits_t, *_ = batch
    p_t = jax.nn.softmax(logits_t)
    expected = {
        "cmmd": cmmd(z_s, y_s, z_t, p_t, kernel=KLN["kernel"], ridge=0.2),
        "reconstruction": 7.0,
        "confidence": objectives.confidence(logits_t),
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(terms[name], value, rtol=1e-6)
        assert terms[name] > 0
    np.testing.assert_allclose(
        loss, terms["cmmd"] + 0.7 + 2 * terms["confidence"], rtol=1e-6
    )


def test_cross_entropy_objective_has_the_labelled_batch_in_the_place_of_cmmd(batch):
    loss, terms = objectives.cross_entropy_objective(batch, **WEIGHTS)
    p_s = np.exp(np.float64(batch.logits_s))
    p_s /= p_s.sum(axis=1, keepdims=True)
    expected = {
        "cross_entropy": -np.log((p_s * batch.y_s).sum(axis=1)).mean(),
        "reconstruction": 7.0,
        "confidence": objectives.confidence(batch.logits_t),
    }
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(terms[name], value, rtol=1e-6)
    np.testing.assert_allclose(
        loss, terms["cross_entropy"] + 0.7 + 2 * terms["confidence"], rtol=1e-6
    )


def test_reconstruction_objective_is_the_reconstruction_alone(batch):
    loss, terms = objectives.reconstruction_objective(batch)
    assert (loss, terms) == (7.0, {"reconstruction": 7.0})


@pytest.mark.parametrize("name", ["cmmd", "cross_entropy"])
def test_a_term_without_weight_cannot_spoil_the_loss(batch, name):
    batch = batch._replace(reconstruction=jnp.float32(jnp.nan))
    weights = dict(reconstruction_weight=0.0, confidence_weight=0.0)
    loss, terms = (
        objectives.kln_objective(batch, **KLN, **weights)
        if name == "cmmd"
        else objectives.cross_entropy_objective(batch, **weights)
    )
    np.testing.assert_allclose(loss, terms[name])
    assert np.isfinite(loss)
    assert np.isnan(terms["reconstruction"])


def test_gram_diagnostics_are_those_of_numpy():
    z_s, z_t = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    kernel, labels = gaussian_mixture(), np.array([0, 0, 1, 1, 1, 2])
    found = objectives.gram_diagnostics(
        *map(jnp.asarray, (z_s, z_t, labels)), kernel=kernel, ridge=0.1
    )
    assert set(found) == set(objectives.DIAGNOSTICS)
    pivots = [
        np.diag(np.linalg.cholesky(np.float64(kernel(z, z)) + 0.1 * np.eye(6))) ** 2
        for z in (z_s, z_t)
    ]
    np.testing.assert_allclose(found["pivot_smallest"], np.min(pivots), rtol=1e-5)
    np.testing.assert_allclose(found["pivot_largest"], np.max(pivots), rtol=1e-5)
    z = np.concatenate([z_s, z_t])
    pairs = [((z[i] - z[j]) ** 2).sum() for i in range(12) for j in range(i)]
    np.testing.assert_allclose(
        found["median_squared_distance"], np.median(pairs), rtol=1e-5
    )
    K = np.asarray(kernel(z_s, z_s))
    sums, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for i in range(6):
        for j in range(6):
            if i != j:
                sums[labels[i] == labels[j]] += K[i, j]
                counts[labels[i] == labels[j]] += 1
    for name, is_same in ("same", True), ("different", False):
        np.testing.assert_allclose(
            found[f"kernel_{name}_sum"], sums[is_same], rtol=1e-5
        )
        assert found[f"kernel_{name}_count"] == counts[is_same]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_losses_of_half_precision_are_float32(dtype):
    x = jnp.full((4, 8, 8, 1), 0.1, dtype)
    logits = jnp.arange(12.0, dtype=dtype).reshape(4, 3)
    for loss, exact in (
        (
            objectives.reconstruction_error(x, jnp.zeros_like(x)),
            objectives.reconstruction_error(x.astype(jnp.float32), jnp.zeros(x.shape)),
        ),
        (
            objectives.confidence(logits),
            objectives.confidence(logits.astype(jnp.float32)),
        ),
    ):
        assert loss.dtype == jnp.float32
        assert loss == exact


def test_gram_diagnostics_stay_float32_where_float64_is_enabled():
    z = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    with jax.enable_x64(True):
        numbers = objectives.gram_diagnostics(
            *map(jnp.asarray, (z, z, np.arange(6) % 2)),
            kernel=gaussian_mixture(),
            ridge=0.5,
        )
        losses = objectives.confidence(jnp.ones((2, 3), jnp.float64))
    floats = [v for name, v in numbers.items() if not name.endswith("count")]
    assert {number.dtype.name for number in floats} == {"float32"}
    assert losses.dtype == jnp.float64


def test_the_confidence_is_smallest_where_predictions_have_the_prior():
    prior = jnp.array([0.8, 0.2])
    sure = 50.0 * jnp.eye(2)

    def value(first):  # So many of ten predictions are of the first class.
        classes = jnp.array([0] * first + [1] * (10 - first))
        return float(objectives.confidence(sure[classes], prior))

    values = [value(first) for first in range(1, 10)]
    assert np.argmin(values) + 1 == 8
    entropy = -float(jnp.sum(prior * jnp.log(prior)))
    np.testing.assert_allclose(min(values), entropy, rtol=1e-5)
    uniform = objectives.confidence(sure, jnp.array([0.5, 0.5]))
    np.testing.assert_allclose(uniform, objectives.confidence(sure), rtol=1e-6)
