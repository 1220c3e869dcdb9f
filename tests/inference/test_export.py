"""python -m kln_jax.inference export, and its file in a process that has JAX alone."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from kln_jax.inference import export, trained_network
from kln_jax.inference.__main__ import main
from kln_jax.networks import models
from kln_jax.training import steps
from tests import small_run

# Refuses all but the standard library, JAX, what JAX needs and what reads the file.
JAX_ALONE = """
import sys

class JaxAlone:
    allowed = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy"}
    allowed |= {"flatbuffers"}

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        # JAX itself asks whether this debugger is there.
        if top not in self.allowed and not standard and top != "web_pdb":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, JaxAlone())
for name in ("kln_jax", "flax"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} could be imported")
"""

LOAD = """
import numpy as np
images = np.load("images.npy")
"""
USE = """
one = exported.call(images[:1])
assert {name: len(rows) for name, rows in one.items()} == dict.fromkeys(prediction, 1)
np.testing.assert_allclose(
    one["probabilities"], prediction["probabilities"][:1], rtol=1e-5
)
np.savez("prediction.npz", **prediction)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run.finished(tmp_path_factory)


def _assert_equal(prediction, run):
    unit = run.images.astype(np.float32) / 255
    outputs = small_run.predict(run)
    tolerance = dict(rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(prediction["z"], outputs.z, **tolerance)
    np.testing.assert_allclose(
        prediction["probabilities"], jax.nn.softmax(outputs.logits), **tolerance
    )
    np.testing.assert_allclose(
        prediction["reconstruction_error"],
        np.square(unit - outputs.reconstruction).sum(axis=(1, 2, 3)),
        **tolerance,
    )
    assert np.ptp(prediction["probabilities"], axis=0).min() > 1e-4
    assert {str(rows.dtype) for rows in prediction.values()} == {"float32"}


def test_the_file_predicts_without_this_package(small, tmp_path, capsys):
    out = tmp_path / "OUT"
    assert main(["export", f"--workdir={small.workdir}", str(out)]) == 0
    head, *names = capsys.readouterr().out.splitlines()
    assert head == f"Wrote {out}: uint8 images (b, 28, 28, 1) of classes"
    assert [name.split(maxsplit=1)[1] for name in names] == list(small_run.CLASS_NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["OUT"]

    np.save(tmp_path / "images.npy", small.images)
    lines = export.__doc__.splitlines(keepends=True)
    documented = "".join(line[4:] for line in lines if line.startswith("    "))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", JAX_ALONE + LOAD + documented + USE],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "prediction.npz") as prediction:
        _assert_equal(dict(prediction), small)


def test_images_in_colour_with_normalisation_and_dropout():
    shape = (32, 32, 3)
    model = models.build(
        "conv_large", image_shape=shape, num_classes=4, latent_dim=4, width=0.02
    )
    state = jax.jit(
        lambda key: steps.init_state(
            model,
            optax.identity(),
            key,
            mean=np.array([0.5, 0.4, 0.3]),
            std=np.array([0.01, 0.02, 0.03]),
            image_shape=shape,
        )
    )(jax.random.key(0))
    config = ConfigDict({"reconstruction_reduction": "sum"})
    trained = trained_network.TrainedNetwork(config, tuple("abcd"), shape, model, state)
    exported = export.export(trained, platforms=["cpu", "tpu"])
    assert exported.platforms == ("cpu", "tpu")
    images = np.random.default_rng(0).integers(0, 256, (5, *shape)).astype(np.uint8)
    prediction = jax.jit(exported.call)(images)
    run = small_run.SmallRun(None, model, state, images)
    _assert_equal(prediction, run)
