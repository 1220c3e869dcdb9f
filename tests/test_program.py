"""The compiled functions of a run."""

import chex
import jax
import numpy as np

from kln_jax import configuration, datasets, program, steps
from tests.small_run import config_of_digits


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
