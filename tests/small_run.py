"""Small runs: the configuration of one, and one on own images that are gone."""

import functools
import json
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from configs import digits, own_images
from kln_jax import datasets
from kln_jax.networks import models
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import compiled, steps

CLASS_NAMES = ("cat", "dog", "long-tailed owl")


class SmallRun(NamedTuple):
    workdir: pathlib.Path
    model: models.KLN
    state: steps.TrainState
    images: np.ndarray  # (n, 28, 28, 1), uint8; each class is predicted for some.


def changed(config, **changes):
    """A configuration with other values."""
    config = config.copy_and_resolve_references()
    config.update(changes)
    return config


def config_of_digits(variant="supervised", **changes):
    """A network of a twentieth of the width, trained for two epochs."""
    # 40 divides over the eight devices, and makes 35 steps an epoch.
    small = dict(width=0.05, latent_dim=8, batch_size=40, num_epochs=2)
    small |= dict(lr_milestones=())
    return changed(digits.get_config(variant), **small | changes)


def as_json(config):
    """What config.json says of a configuration."""
    return json.loads(config.to_json())


# Keys of which the compiled functions do not depend.
_OF_NO_FUNCTION = ("num_epochs", "seed", "split_seed", "variant", "data_dir")
_OF_NO_FUNCTION += ("checkpoint_every", "checkpoint_every_steps", "num_labels")
_compiled = {}


def compile_once(config, data):
    """The functions of equal runs, which are then traced and compiled once."""
    values = as_json(config)
    key = json.dumps([values[name] for name in values if name not in _OF_NO_FUNCTION])
    key += f"{data.version} {data.train_images.shape} {data.eval_images.shape}"
    if key not in _compiled:
        _compiled[key] = compiled.compile_functions(config, data)
    return _compiled[key]


def restored(workdir, config):
    """What the newest checkpoint of a run on digits holds."""
    made = compile_once(config, datasets.load("digits"))
    like = jax.eval_shape(made.init, jax.random.key(0))
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore(like)


def finished(tmp_path_factory):
    """Writes the working directory of random weights, once for all tests."""
    return _finished(tmp_path_factory.getbasetemp() / "small-run")


@functools.cache
def _finished(directory):
    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    # Squares of 14 pixels, which change little in size and in a JPEG.
    levels = rng.integers(0, 256, (60, 2, 2, 1)).astype(np.uint8)
    images = levels.repeat(14, axis=1).repeat(14, axis=2)
    config = changed(
        own_images.get_config(),
        data_dir=str(directory / "data.npz"),
        width=0.05,
        latent_dim=4,
        normalise=True,
    )
    labels = np.arange(60) % 3
    data = datasets.Dataset(
        "own_images", "", images, labels, images, labels, CLASS_NAMES
    )
    model = compiled.make_model(config, data)
    state = compiled.compile_functions(config, data).init(jax.random.key(0))
    state = jax.tree.map(np.array, state)
    for leaf in jax.tree.leaves(state.batch_stats):
        leaf += rng.uniform(0, 0.3, leaf.shape).astype(np.float32)
    # Of random weights the logits hardly differ between images, but between classes.
    classifier = state.params["classifier"]
    classifier["kernel"] *= 100
    logits = predict(SmallRun(directory, model, state, images)).logits
    classifier["bias"] = -np.median(logits, axis=0)

    workdir = directory / "workdir"
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(as_json(config)))
    about = {"class_names": CLASS_NAMES, "image_shape": images.shape[1:]}
    (workdir / "data.json").write_text(json.dumps(about))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(7, state)
    return SmallRun(workdir, model, state, images)


def predict(run):
    """What the network says of the images."""
    unit = run.images.astype(np.float32) / 255
    return jax.jit(functools.partial(steps.apply_trained, run.model))(run.state, unit)
