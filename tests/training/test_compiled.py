"""The compiled functions of a run."""

import chex
import jax
import numpy as np
import pytest

from kln_jax import datasets, gaussian_mixture
from kln_jax.training import compiled, configuration, objectives, steps
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
        (dict(lr_milestones=(1,)), ""),
        (dict(lr_milestones=(1, 2, 3)), "lr_milestones=(1, 2, 3): [2, 3] come after"),
    ],
)
def test_what_does_other_than_it_seems_is_said(changes, warning, caplog):
    compiled.make_program(config_of_digits(**changes), _black(60))
    messages = [record.getMessage() for record in caplog.records]
    assert [m[: len(warning)] for m in messages] == [warning] * bool(warning)


def test_the_step_has_the_settings_of_the_configuration(monkeypatch):
    given, of_step, of_rows = [], {}, {}

    def make_train_step(*arguments, **options):
        given.extend(arguments)
        of_step.update(options)

    monkeypatch.setattr(steps, "make_train_step", make_train_step)
    monkeypatch.setattr(steps, "make_epoch_rows", lambda **made: of_rows.update(made))
    weights = dict(ridge=0.5, reconstruction_weight=0.7, confidence_weight=0.6)
    config = config_of_digits(
        **weights,
        pairing="shared",
        bandwidths=(3.0,),
        label_kernel="gaussian",
        label_bandwidths=(2.0,),
        reconstruction_reduction="mean",
        crop_padding=2,
        flip=True,
        divergence_bound=9.0,
        on_nonfinite="skip",
        max_skipped_steps=4,
    )
    compiled.make_program(config, _black(80))
    kernel = gaussian_mixture((3.0,))
    expected = dict(
        kernel=kernel,
        shared_batch=True,
        crop_padding=2,
        flip=True,
        bound=9.0,
        max_skipped=4,
        diagnose_every=2,
    )
    assert {name: of_step[name] for name in expected} == expected
    assert of_rows == dict(batch_size=40, steps_per_epoch=2, shared_batch=True)
    _, _, objective, error = given
    label_kernel = gaussian_mixture((2.0,))
    assert objective.func is objectives.kln_objective
    assert objective.keywords == dict(
        kernel=kernel, label_kernel=label_kernel, **weights
    )
    assert error.keywords == dict(reduction="mean")


def test_initial_values_do_not_depend_on_how_they_are_compiled():
    config = config_of_digits()
    data = datasets.load(config.dataset)
    made = compiled.make_program(config, data)

    def init(key):
        return steps.init_state(
            compiled.make_model(config, data),
            configuration.optimizer(config, steps_per_epoch=made.steps_per_epoch),
            key,
            mean=np.zeros(1),
            std=np.ones(1),
            image_shape=data.train_images.shape[1:],
        )

    key = jax.random.key(3)
    chex.assert_trees_all_close(made.init(key), jax.jit(init)(key), rtol=1e-6)
