"""The parts that a configuration describes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kln_jax import gaussian_mixture, linear
from kln_jax.training import fixed_embeddings, objectives, optimizers, parts
from kln_jax.training.configuration import FIELDS, Config


def test_the_kernel_acts_on_what_the_configuration_names():
    embeds = [
        parts.embed(Config(kernel_on=name), "the network")
        for name in FIELDS["kernel_on"].choices
    ]
    fixed = [None, fixed_embeddings.pixels, fixed_embeddings.project]
    assert embeds[:-1] == fixed
    assert (embeds[-1].func, embeds[-1].keywords) == (
        fixed_embeddings.encode,
        {"model": "the network"},
    )


def test_the_kernels_are_those_of_the_configuration():
    config = Config(bandwidths=(2, 4), kernel_reduction="sum")
    on_features = gaussian_mixture((2, 4), reduction="sum")
    assert parts.kernels(config) == (on_features, linear)
    # The paper's mixture, whatever the kernel on features.
    on_labels = gaussian_mixture((1, 3, 5, 7, 9), reduction="sum")
    config = config.replace(label_kernel="gaussian")
    assert parts.kernels(config) == (on_features, on_labels)


@pytest.mark.parametrize("name", FIELDS["optimizer"].choices)
@jax.numpy_dtype_promotion("standard")  # Which optax's Adam needs.
def test_the_optimizer_has_the_settings_of_the_configuration(name):
    settings = dict(momentum=0.8, weight_decay=0.1, clip_norm=0.5)
    schedule = dict(learning_rate=0.3, lr_milestones=(2, 3), lr_decay=0.5)
    config = Config(optimizer=name, warmup_steps=3, **schedule, **settings)
    rate = optimizers.step_schedule(0.3, milestones=(4, 6), decay=0.5, warmup_steps=3)
    ours = parts.optimizer(config, steps_per_epoch=2)
    trajectories = []
    for optimizer in (ours, optimizers.optimizer(name, rate, **settings)):
        params, trajectory = jnp.array([1.0, -2.0]), []
        state = optimizer.init(params)
        for i in range(8):
            updates, state = optimizer.update(jnp.array([1.0, i]), state, params)
            params = optax.apply_updates(params, updates)
            trajectory.append(params)
        trajectories.append(trajectory)
    np.testing.assert_array_equal(*trajectories)


@pytest.mark.parametrize("objective", ["cmmd", "cross_entropy"])
def test_the_objective_has_the_settings_of_the_configuration(objective):
    weights = dict(reconstruction_weight=0.5, confidence_weight=0.25)
    settings = dict(weights)
    if objective == "cmmd":
        settings |= dict(ridge=0.2, kernel=gaussian_mixture(), label_kernel=linear)
    made = parts.objective(Config(objective=objective, ridge=0.2, **weights))
    assert made.keywords == settings


def test_the_objective_is_symmetric_where_the_configuration_says_so(monkeypatch):
    monkeypatch.setattr(objectives, "symmetric", lambda one_way: ("both", one_way.func))
    made = parts.objective(Config(pairing="symmetric"))
    assert made == ("both", objectives.kln_objective)
    with pytest.raises(ValueError, match=r"num_labels=100 leaves some unknown"):
        Config(pairing="symmetric", num_labels=100)


@pytest.mark.parametrize(
    ("prior", "expected"),
    [("uniform", None), ("labelled", [0.25, 0.75]), ("0.9,0.1", [0.9, 0.1])],
)
def test_the_prior_of_the_confidence_is_uniform_counted_or_given(prior, expected):
    config = Config(class_prior=prior)
    found = parts.class_prior(config, np.array([1, 0, 1, 1]), 2)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("prior", ["even", "0.5,0.6", "1.0,0.0", ""])
def test_a_prior_that_is_none_is_refused(prior):
    with pytest.raises(ValueError, match=r"class_prior=.* with the sum 1"):
        Config(class_prior=prior)


def test_a_prior_of_other_classes_is_refused():
    with pytest.raises(ValueError, match="has 2 numbers, but there are 3 classes"):
        parts.class_prior(Config(class_prior="0.9,0.1"), np.arange(3), 3)
