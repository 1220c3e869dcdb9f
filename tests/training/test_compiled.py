"""The compiled functions of a run."""

import chex
import jax
import numpy as np
import pytest

from kln_jax import datasets, gaussian_mixture, linear
from kln_jax.training import compiled, fixed_embeddings, objectives, steps
from tests.small_run import config_of_digits


def _black(count):
    images, labels = np.zeros((count, 28, 28, 1), np.uint8), np.arange(count) % 10
    names = tuple("0123456789")
    return datasets.Dataset("digits", "", images, labels, images, labels, names)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (dict(batch_size=20, num_labels=20), ""),
        (dict(num_labels=20), "batch_size=40 is more than the 20 labelled images: a "),
        (dict(batch_size=61), "batch_size=61 is more than the 60 training images: a b"),
    ],
)
def test_a_batch_that_has_images_twice_is_said(changes, warning, caplog):
    compiled.compile_functions(config_of_digits(**changes), _black(60))
    messages = [record.getMessage() for record in caplog.records]
    assert [m[: len(warning)] for m in messages] == [warning] * bool(warning)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(crop_padding=28), "crop_padding=28 must be below 28, the side of the im"),
        (dict(kernel_on="pca", latent_dim=785), "latent_dim=785 must be at most 784"),
    ],
)
def test_what_the_images_cannot_give_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        compiled.compile_functions(config_of_digits(**changes), _black(60))


def test_the_method_has_the_settings_of_the_configuration():
    weights = dict(ridge=0.5, reconstruction_weight=0.7, confidence_weight=0.6)
    config = config_of_digits(
        **weights,
        pairing="shared",
        bandwidths=(3.0,),
        kernel_on="pixels",
        reconstruction_reduction="mean",
        crop_padding=2,
        flip=True,
    )
    method = compiled.make_method(config, (80, 28, 28, 1), 10)
    kernel = gaussian_mixture((3.0,))
    expected = dict(
        kernel=kernel,
        ridge=0.5,
        embed=fixed_embeddings.pixels,
        batch_size=40,
        steps_per_epoch=2,
        shared_batch=True,
        crop_padding=2,
        flip=True,
        bound=1e6,
    )
    assert {name: getattr(method, name) for name in expected} == expected
    assert method.model.axis_name == steps.AXIS
    assert method.objective.func is objectives.kln_objective
    assert method.objective.keywords == dict(
        kernel=kernel, label_kernel=linear, **weights
    )
    assert method.reconstruction_error.keywords == dict(reduction="mean")
    # An epoch has at least one step.
    assert compiled.make_method(config, (30, 28, 28, 1), 10).steps_per_epoch == 1


def test_images_are_normalised_by_all_training_images():
    data = datasets.load("digits")
    config = config_of_digits(normalise=True, network="mlp")
    made = compiled.compile_functions(config, data)
    state = made.init(jax.random.key(0), *made.channels)
    unit = data.train_images / 255
    np.testing.assert_allclose(state.mean, [unit.mean()], rtol=1e-5)
    np.testing.assert_allclose(state.std, [unit.std()], rtol=1e-5)


def test_initial_values_do_not_depend_on_how_they_are_compiled():
    config = config_of_digits(network="mlp")
    data = datasets.load(config.dataset)
    made = compiled.compile_functions(config, data)

    method = compiled.make_method(config, data.train_images.shape, 10)

    def init(key):
        return steps.init_state(
            method.model,
            method.optimizer,
            key,
            mean=np.zeros(1),
            std=np.ones(1),
            image_shape=data.train_images.shape[1:],
        )

    key = jax.random.key(3)
    chex.assert_trees_all_close(
        made.init(key, *made.channels), jax.jit(init)(key), rtol=1e-6
    )
