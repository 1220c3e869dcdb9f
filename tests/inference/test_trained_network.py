"""What is read back of a run whose data set is gone."""

import shutil

import jax
import numpy as np
import pytest

from kln_jax.inference import export, trained_network
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


def test_a_process_of_64_bits_reads_the_same_network(small):
    expected = trained_network.load(small.workdir)
    with jax.enable_x64(True):
        trained = trained_network.load(small.workdir)
        prediction = trained_network.predict_in_batches(
            trained.model, trained.state, small.images, reconstruction_reduction="sum"
        )
        exported = export.export(trained, platforms=["cpu"]).call(small.images)
    assert trained.model == expected.model
    jax.tree.map(_assert_same, trained.state, expected.state)
    for name, rows in prediction._asdict().items():
        assert rows.dtype == exported[name].dtype == np.float32
        np.testing.assert_allclose(rows, exported[name], rtol=1e-4, atol=1e-5)
    p = jax.nn.softmax(small_run.predict(small).logits)
    np.testing.assert_allclose(prediction.probabilities, p, rtol=1e-4)


def _assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def test_what_is_loaded_can_be_trained_further(small):
    trained = trained_network.load(small.workdir)
    unit = small.images.astype(np.float32) / 255

    @jax.grad
    def gradients(params):
        outputs, _ = trained.model.apply(
            {"params": params, "batch_stats": trained.state.batch_stats},
            unit,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(0)},
        )
        return (outputs.logits**2).mean() + (outputs.reconstruction**2).mean()

    for leaf in jax.tree.leaves(gradients(trained.state.params)):
        assert np.isfinite(leaf).all()
        assert np.ptp(leaf) > 0 or leaf.size == 1


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
