"""The compiled functions of a run."""

import chex
import jax
import numpy as np
import pytest

from kln_jax import configuration, datasets, program, steps
from tests.small_run import config_of_digits


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
    images, labels = np.zeros((60, 28, 28, 1), np.uint8), np.arange(60) % 10
    names = tuple("0123456789")
    data = datasets.Dataset("digits", "", images, labels, images, labels, names)
    program.make_program(config_of_digits(**changes), data)
    messages = [record.getMessage() for record in caplog.records]
    assert [m[: len(warning)] for m in messages] == [warning] * bool(warning)


def test_initial_values_do_not_depend_on_how_they_are_compiled():
    config = config_of_digits()
    data = datasets.load(config.dataset)
    made = program.make_program(config, data)

    def init(key):
        return steps.init_state(
            program.make_model(config, data),
            configuration.optimizer(config, steps_per_epoch=made.steps_per_epoch),
            key,
            mean=np.zeros(1),
            std=np.ones(1),
            image_shape=data.train_images.shape[1:],
        )

    key = jax.random.key(3)
    chex.assert_trees_all_close(made.init(key), jax.jit(init)(key), rtol=1e-6)
