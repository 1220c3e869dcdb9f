import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kln_jax.training import optimizers


def test_step_schedule_decays_at_each_milestone():
    schedule = optimizers.step_schedule(0.02, milestones=(5, 10), decay=0.2)
    rates = [float(schedule(i)) for i in (0, 4, 5, 9, 10, 50)]
    np.testing.assert_allclose(
        rates, [0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008], rtol=1e-6
    )


def test_step_schedule_decays_twice_at_two_milestones_in_one():
    schedule = optimizers.step_schedule(1.0, milestones=(3, 3), decay=0.2)
    rates = [float(schedule(i)) for i in (2, 3)]
    np.testing.assert_allclose(rates, [1.0, 0.04], rtol=1e-6)


def test_step_schedule_warms_up_linearly_from_the_first_step():
    schedule = optimizers.step_schedule(1.0, milestones=(2,), decay=0.5, warmup_steps=4)
    rates = [float(schedule(i)) for i in range(6)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.375, 0.5, 0.5, 0.5])


def _trajectory(optimizer, gradients, start):
    params, state = start, optimizer.init(start)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_sgd_is_pytorchs_momentum_and_weight_decay():
    # v <- 0.9 v + (g + decay w); w <- w - rate v.
    w, v = np.array([1.0, -2.0]), np.zeros(2)
    gradients = [np.array([0.5, 1.0]), np.array([-1.0, 0.25]), np.array([2.0, 0.0])]
    for g in gradients:
        v = 0.9 * v + (g + 0.1 * w)
        w = w - 0.02 * v
    sgd = optimizers.optimizer("sgd", optimizers.step_schedule(0.02), weight_decay=0.1)
    actual = _trajectory(
        sgd, [jnp.float32(g) for g in gradients], jnp.array([1.0, -2.0])
    )
    np.testing.assert_allclose(actual, w, rtol=1e-6)


@jax.numpy_dtype_promotion("standard")  # Which optax's bias correction needs.
def test_adam_is_kingma_and_bas():
    w, m, v = 1.0, 0.0, 0.0
    gradients = [0.5, -1.0, 2.0]
    for i, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        w -= 1e-3 * (m / (1 - 0.9**i)) / (np.sqrt(v / (1 - 0.99**i)) + 1e-8)
    adam = optimizers.optimizer("adam", optimizers.step_schedule(1e-3))
    actual = _trajectory(adam, [jnp.float32(g) for g in gradients], jnp.float32(1.0))
    np.testing.assert_allclose(actual, w, rtol=1e-5)


def test_clipping_bounds_the_gradient_before_weight_decay():
    sgd = optimizers.optimizer(
        "sgd",
        optimizers.step_schedule(1.0),
        momentum=0.0,
        weight_decay=0.5,
        clip_norm=1.0,
    )
    params = {"a": jnp.array([4.0]), "b": jnp.array([0.0])}
    updates, _ = sgd.update(
        {"a": jnp.array([30.0]), "b": jnp.array([40.0])}, sgd.init(params), params
    )
    np.testing.assert_allclose(updates["a"], [-(0.6 + 2.0)], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-0.8], rtol=1e-6)


def test_unknown_optimiser_is_named():
    with pytest.raises(ValueError, match=r"optimizer='rmsprop' must be"):
        optimizers.optimizer("rmsprop", optimizers.step_schedule(0.1))
