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
from kln_jax.training import compiled, parts, steps
from kln_jax.training.configuration import Config

CLASS_NAMES = ("cat", "dog", "long-tailed owl")


class SmallRun(NamedTuple):
    workdir: pathlib.Path
    model: models.KLN
    state: steps.TrainState
    images: np.ndarray  # (n, 28, 28, 1), uint8; each class is predicted for some.


def config_of_digits(variant="supervised", **changes):
    """A network of a twentieth of the width, trained for two epochs."""
    # 40 divides over the eight devices, and makes 35 steps an epoch.
    small = dict(width=0.05, latent_dim=8, batch_size=40, num_epochs=2)
    small |= dict(lr_milestones=())
    config = Config.from_mapping(digits.get_config(variant))
    return config.replace(**small | changes)


def restored(workdir, config):
    """What the newest checkpoint of a run on digits holds."""
    made = compiled.compile_functions(config, datasets.load("digits"))
    like = jax.eval_shape(made.init, jax.random.key(0), *made.channels)
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
    config = Config.from_mapping(own_images.get_config()).replace(
        data_dir=str(directory / "data.npz"),
        width=0.05,
        latent_dim=4,
        normalise=True,
    )
    labels = np.arange(60) % 3
    data = datasets.Dataset(
        "own_images", "", images, labels, images, labels, CLASS_NAMES
    )
    model = parts.model(config, image_shape=images.shape[1:], num_classes=3)
    made = compiled.compile_functions(config, data)
    state = made.init(jax.random.key(0), *made.channels)
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
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    about = {"class_names": CLASS_NAMES, "image_shape": images.shape[1:]}
    (workdir / "data.json").write_text(json.dumps(about))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(7, state)
    return SmallRun(workdir, model, state, images)


def predict(run):
    """What the network says of the images."""
    unit = run.images.astype(np.float32) / 255
    return jax.jit(functools.partial(steps.apply_trained, run.model))(run.state, unit)
