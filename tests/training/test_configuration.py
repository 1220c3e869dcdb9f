"""Configurations that no run can have, and what others make."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from configs import digits
from kln_jax.training import configuration, experiment, fixed_embeddings, optimizers
from tests.small_run import config_of_digits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_epochs=0), "num_epochs=0 must be a whole number of at least 1"),
        (dict(learning_rate=-0.1), "learning_rate=-0.1 must be a number of at least 0"),
        (dict(clip_norm=float("nan")), "clip_norm=nan must be"),
        (dict(ridge=0.0), "ridge=0.0 must be a positive"),
        (dict(ridge=1e-9), "ridge=1e-09 is below"),
        (dict(ridge=1e-5, kernel_reduction="sum"), "ridge=1e-05 is below"),
        (dict(bandwidths=(1.0, -3.0)), r"bandwidths are \(1.0, -3.0\), but must be"),
        (dict(bandwidths=("abc",)), "bandwidths: .* is 'abc', but must be a number"),
        (
            dict(label_bandwidths=(0.0,)),
            r"label_bandwidths: The bandwidths are \(0.0,\), but",
        ),
        (dict(kernel_reduction="max"), "kernel_reduction='max' must be"),
        (dict(label_kernel="delta"), "label_kernel='delta' must be"),
        (dict(reconstruction_reduction="max"), "reconstruction_reduction='max'"),
        (dict(pairing="same"), "pairing='same' must be"),
        (dict(optimizer="lamb"), "optimizer='lamb' must be"),
        (dict(dtype="float16"), "dtype='float16' must be"),
        (dict(batch_size=41), "batch_size=41 does not divide over 8 devices"),
        (dict(network="vgg"), "network='vgg' must be"),
        (dict(network="conv_large"), "32x32 pixels, but the data set has 28x28"),
        (dict(dataset="imagenet"), "dataset must be one of"),
        (dict(num_labels=5000), "num_labels"),
        (dict(platform="tpu"), "platform='tpu'"),
        (dict(on_nonfinite="ignore"), "on_nonfinite='ignore' must be"),
        (dict(keep_last=0), "keep_last=0 must be a whole number of at least 1"),
        (dict(keep_best=1), "keep_best=1 needs evaluate_on='validation'"),
        (dict(divergence_bound=0.0), "divergence_bound=0.0 must be"),
        (dict(num_seeds=0), "num_seeds=0 must be a whole number of at least 1"),
        (dict(num_seeds=2, profile=3), r"num_seeds=2 .*profile=3\): set profile=0"),
        (dict(num_seeds=2, kernel_on="autoencoder"), "num_seeds=2 .*num_seeds=1"),
        (dict(num_seeds=2), "num_seeds=2 .* has 8 in 1 processes: let it see one"),
        # A number that no count of epochs meets would never end.
        (dict(num_epochs=2.5), "num_epochs=2.5 must be a whole number"),
        (dict(batch_size="40"), "batch_size='40' must be a whole number"),
        (dict(seed=0.5), "seed=0.5 must be a whole number"),
        (dict(learning_rate="x"), "learning_rate='x' must be a number"),
        (dict(width=True), "width=True must be a number"),
        (dict(width=0), "width=0 leaves no channels"),
        (
            dict(seed=2**32 - 1, num_seeds=2),
            r"seed=4294967295 must be below 2\*\*32 wi",
        ),
        (dict(warmup_steps=2**31), r"warmup_steps=2147483648 must be below 2\*\*31"),
        (dict(profile=2**31), r"profile=2147483648 must be below 2\*\*31"),
        (dict(lr_milestones=(10**8,)), r"lr_milestones=\(100000000,\) .* 35 steps an"),
        (dict(width=1e7), "width=10000000.0 must be at most 100"),
        (dict(split_seed=-1), "split_seed=-1 must be a whole number of at least 0"),
        (dict(momentum=2.0), "momentum=2.0 must be below 1"),
        (dict(batch_size=99_999), "batch_size=99999 must be at most 20000"),
        (dict(bandwidths="13"), "bandwidths are '13', but must be a sequence"),
        (dict(ridge=True), "ridge=True must be a number"),
        (dict(flip="False"), "flip='False' must be True or False"),
        (dict(normalise_z=1), "normalise_z=1 must be True or False"),
        (dict(kernel_on="pca", latent_dim=785), "latent_dim=785 must be at most 784"),
        (
            dict(kernel_on="autoencoder", objective="cross_entropy"),
            "objective='cross_entropy' has no kernel to act on 'autoencoder'",
        ),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_before_anything_is_made(
    changes, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = ConfigDict({**digits.get_config().to_dict(), "batch_size": 40, **changes})
    with pytest.raises(ValueError, match=message):
        experiment.train_and_evaluate(config)
    assert not list(pathlib.Path().iterdir())


@pytest.mark.parametrize("milestones", [(5, 1), (1.5,), 3, (0, 1), (True,)])
def test_milestones_are_whole_epochs_in_ascending_order(milestones):
    config = ConfigDict({**digits.get_config().to_dict(), "lr_milestones": milestones})
    with pytest.raises(
        ValueError, match=r"lr_milestones=.* must be whole epochs in asc"
    ):
        configuration.validate(config)


def test_the_kernel_acts_on_what_the_configuration_names():
    def embed(name):
        return configuration.embed(config_of_digits(kernel_on=name), "the network")

    assert embed("z") is None
    assert (embed("pixels"), embed("pca")) == (
        fixed_embeddings.pixels,
        fixed_embeddings.project,
    )
    encode = embed("autoencoder")
    assert (encode.func, encode.keywords) == (
        fixed_embeddings.encode,
        {"model": "the network"},
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
@jax.numpy_dtype_promotion("standard")  # Which optax's Adam needs.
def test_the_optimizer_has_the_settings_of_the_configuration(name):
    settings = dict(momentum=0.8, b1=0.7, b2=0.6, weight_decay=0.1, clip_norm=0.5)
    schedule = dict(learning_rate=0.3, lr_milestones=(2, 3), lr_decay=0.5)
    config = config_of_digits(optimizer=name, warmup_steps=3, **schedule, **settings)
    rate = optimizers.step_schedule(0.3, milestones=(4, 6), decay=0.5, warmup_steps=3)
    ours = configuration.optimizer(config, steps_per_epoch=2)
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
