"""What is read back of a run whose data set is gone."""

import shutil

import jax
import numpy as np
import pytest

from kln_jax.inference import trained_network
from tests import small_run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run.finished(tmp_path_factory)


def test_a_run_is_read_back_without_its_data_set(small):
    trained = trained_network.load(str(small.workdir))
    assert trained.class_names == small_run.CLASS_NAMES
    assert trained.image_shape == (28, 28, 1)
    assert trained.config.dataset == "own_images"
    expected = small.state.replace(opt_state=())
    assert jax.tree.structure(trained.state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, trained.state, expected)


def test_more_images_than_a_batch_are_the_same_in_any_number(small):
    images = np.concatenate([small.images] * 4)[:205]
    trained = trained_network.load(small.workdir)
    prediction = trained_network.predict_in_batches(
        trained.model, trained.state, images, reconstruction_reduction="mean"
    )
    outputs = small_run.predict(small)
    unit = small.images.astype(np.float32) / 255
    errors = np.square(unit - outputs.reconstruction).mean(axis=(1, 2, 3))
    rows = np.arange(205) % 60
    np.testing.assert_allclose(
        prediction.probabilities, jax.nn.softmax(outputs.logits)[rows], rtol=1e-4
    )
    np.testing.assert_allclose(prediction.reconstruction_error, errors[rows], rtol=1e-4)
    np.testing.assert_allclose(prediction.z, outputs.z[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_a_description_that_is_damaged_or_missing_is_named(name, tmp_path, small):
    shutil.copytree(small.workdir, tmp_path / "damaged")
    for content, message in (
        ("{", rf"{name} is damaged: .* Restore it"),
        ("{}", rf"{name} of .* was written by another version of kln_jax: "),
    ):
        (tmp_path / "damaged" / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            trained_network.load(tmp_path / "damaged")
    (tmp_path / "damaged" / name).unlink()
    with pytest.raises(ValueError, match=f"holds no run: {name} is missing"):
        trained_network.load(tmp_path / "damaged")


def test_a_run_without_a_checkpoint_is_named(tmp_path, small):
    for name in ("config.json", "data.json"):
        shutil.copy(small.workdir / name, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=f"^{tmp_path} holds no checkpoint"):
        trained_network.load(tmp_path)
