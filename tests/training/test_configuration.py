"""The declaration of the keys, and the configurations that it refuses."""

import dataclasses
import json
import pathlib
import pickle

import pytest

from configs import digits
from kln_jax.training import experiment
from kln_jax.training.configuration import FIELDS, Config
from tests.small_run import config_of_digits

VALUES = digits.get_config().to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(num_epochs=0),
            r"num_epochs=0 must be a whole number of at least 1 and below 2\*\*31; its "
            "default is 150",
        ),
        # A number that no count of epochs meets would never end.
        (dict(num_epochs=2.5), "num_epochs=2.5 must be a whole number"),
        (dict(batch_size="40"), "batch_size='40' must be a whole number"),
        (dict(batch_size=99_999), "batch_size=99999 must be .* at most 20000"),
        (dict(seed=0.5), "seed=0.5 must be a whole number"),
        (dict(seed=2**32), r"seed=4294967296 must be .* below 2\*\*32"),
        (dict(seed=True), "seed=True must be a whole number"),
        (dict(split_seed=-1), "split_seed=-1 must be a whole number of at least 0"),
        (dict(warmup_steps=2**31), r"warmup_steps=2147483648 must be .* 2\*\*31"),
        (dict(learning_rate=-0.1), "learning_rate=-0.1 must be a number of at least 0"),
        (dict(learning_rate="x"), "learning_rate='x' must be a number"),
        (dict(clip_norm=float("nan")), "clip_norm=nan must be a number"),
        (dict(clip_norm=float("inf")), "clip_norm=inf must be a number"),
        (dict(weight_decay=10**400), "weight_decay=10+ must be a number"),
        (dict(momentum=2.0), "momentum=2.0 must be a number of at least 0 and below 1"),
        (dict(momentum=1), "momentum=1 must be .* below 1"),
        (dict(width=0), "width=0 must be a number above 0 and at most 100"),
        (dict(width=1e7), "width=10000000.0 must be .* at most 100"),
        (dict(width=True), "width=True must be a number"),
        (dict(test_fraction=1.0), "test_fraction=1.0 must be .* above 0 and below 1"),
        (dict(flip="False"), "flip='False' must be True or False"),
        (dict(data_dir=None), "data_dir=None must be a string; its default is ''"),
        (
            dict(optimizer="lamb"),
            "optimizer='lamb' must be 'sgd' or 'adam'; its default is 'sgd'",
        ),
        (dict(optimizer=["sgd"]), r"optimizer=\['sgd'\] must be 'sgd' or 'adam'"),
        (dict(image_size=64), "image_size=64 must be 28 or 32"),
        (dict(image_size=28.0), "image_size=28.0 must be 28 or 32"),
        (dict(dataset="imagenet"), "dataset='imagenet' must be 'digits', 'mnist', "),
        (dict(network="vgg"), "network='vgg' must be 'mnist', 'mlp' or 'conv_large'"),
        (dict(bandwidths="13"), "bandwidths='13' must be a sequence of numbers"),
        (dict(bandwidths=("1",)), r"bandwidths=\('1',\) must be a sequence of numbers"),
        (dict(bandwidths=(1.0, -3.0)), r"bandwidths=\(1.0, -3.0\) must be .* above 0"),
        (dict(bandwidths=()), r"bandwidths are \(\), but must be one or more"),
        (dict(lr_milestones=3), "lr_milestones=3 must be a sequence of whole numbers"),
        (
            dict(lr_milestones=(1.5,)),
            r"lr_milestones=\(1.5,\) must be a sequence of wh",
        ),
        (dict(lr_milestones=(True,)), r"lr_milestones=\(True,\) must be a sequence of"),
        (dict(lr_milestones=(0, 1)), r"lr_milestones=\(0, 1\) must be .* at least 1"),
        (
            dict(lr_milestones=(5, 1)),
            r"lr_milestones=\(5, 1\) must be in ascending order, such as \(1, 5\)",
        ),
        (dict(ridge=0.0), "ridge=0.0 must be a number above 0"),
        (dict(ridge=1e-9), "ridge=1e-09 is below"),
        (dict(ridge=1e-5, kernel_reduction="sum"), "ridge=1e-05 is below"),
        (
            dict(kernel_on="autoencoder", objective="cross_entropy"),
            "objective='cross_entropy' has no kernel to act on 'autoencoder'",
        ),
        (dict(rigde=0.1), "unknown configuration key 'rigde'; did you mean 'ridge'"),
        (dict(note=1), "unknown configuration key 'note'; kln_jax/training/conf"),
    ],
)
def test_an_invalid_configuration_cannot_be_made(changes, message):
    for make in (
        lambda: Config.from_mapping(VALUES | changes),
        lambda: Config.from_mapping(VALUES).replace(**changes),
    ):
        with pytest.raises(ValueError, match=f"^(The )?{message}") as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_missing_key_is_named_with_its_default():
    values = {name: value for name, value in VALUES.items() if name != "ridge"}
    with pytest.raises(ValueError, match=r"'ridge' is missing; its default is 0\.1"):
        Config.from_mapping(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch_size=41), "batch_size=41 does not divide over 8 devices"),
        (dict(network="conv_large"), "32x32 pixels, but the data set has 28x28"),
        (dict(num_labels=5000), "num_labels"),
        (dict(platform="tpu"), "platform='tpu'"),
        (dict(lr_milestones=(10**8,)), r"lr_milestones=\(100000000,\) .* 35 steps an"),
    ],
)
def test_what_data_or_devices_do_not_allow_is_refused_before_anything_is_made(
    changes, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = Config.from_mapping(VALUES | dict(batch_size=40) | changes)
    with pytest.raises(ValueError, match=message):
        experiment.train_and_evaluate(config)
    assert not list(pathlib.Path().iterdir())


def test_values_have_the_types_of_their_keys():
    config = Config(ridge=1, bandwidths=[1, 2], lr_milestones=[3])
    values = config.ridge, config.bandwidths, config.lr_milestones
    assert repr(values) == "(1.0, (1.0, 2.0), (3,))"
    changed = config.replace(ridge=2, lr_milestones=[])
    assert (repr(changed.ridge), changed.lr_milestones) == ("2.0", ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ridge = 0.5


def test_a_configuration_survives_json_and_pickle():
    config = config_of_digits("semi_cgmmn")
    values = json.loads(json.dumps(config.to_dict()))
    assert values == config.to_dict()
    again = Config.from_mapping(values)
    assert again == config == pickle.loads(pickle.dumps(config))
    assert hash(again) == hash(config)


def test_each_key_is_declared_in_full():
    assert Config().to_dict().keys() == FIELDS.keys()
    for name, key in FIELDS.items():
        assert key.checked(key.default) == key.default, name
        assert key.doc.endswith("."), name
        # Numbers have a lower bound, and whole ones an upper bound.
        if key.kind in (int, float) and not key.choices:
            assert key.bounds.keys() & {"at_least", "above"}, name
            upper = key.bounds.keys() & {"at_most", "below"}
            assert upper or key.kind is float, name
    groups = ["Data", "Augmentation", "Network", "Objective", "Optimisation", "Run"]
    assert list(dict.fromkeys(key.group for key in FIELDS.values())) == groups


def test_each_key_belongs_to_the_experiment_the_run_or_its_whereabouts():
    whereabouts = "data_dir checkpoint_every checkpoint_every_steps platform"
    assert Config.keys_of("whereabouts") == tuple(whereabouts.split())
    of_run = "allow_partial_data evaluate_on split_seed num_epochs seed variant"
    assert Config.keys_of("run") == tuple(of_run.split())
    owners = ("experiment", "run", "whereabouts")
    assert sum(len(Config.keys_of(owner)) for owner in owners) == len(FIELDS)
