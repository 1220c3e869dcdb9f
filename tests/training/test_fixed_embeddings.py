"""Fixed embeddings, against scikit-learn and the network itself."""

import functools

import jax
import numpy as np
import pytest
from sklearn.decomposition import PCA

from kln_jax.training import fixed_embeddings
from tests import small_run


def _images(count=200, shape=(6, 5, 2)):
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(count, 60)) @ rng.normal(size=(60, np.prod(shape)))
    return np.clip(128 + 10 * mixed, 0, 255).astype(np.uint8).reshape(count, *shape)


def test_pixels_are_the_images_row_by_row():
    images = _images() / 255
    np.testing.assert_array_equal(
        fixed_embeddings.pixels((), images), images.reshape(200, 60)
    )


@pytest.mark.parametrize("block", [10_000, 64])
def test_principal_components_are_those_of_scikit_learn(monkeypatch, block):
    monkeypatch.setattr(fixed_embeddings, "_BLOCK", block)
    images = _images()
    arrays = fixed_embeddings.principal_components(images, 7)
    found = np.asarray(fixed_embeddings.project(arrays, np.float32(images / 255)))
    pca = PCA(7, svd_solver="full").fit(images.reshape(200, 60) / 255)
    expected = pca.transform(images.reshape(200, 60) / 255)
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found * signs, expected, atol=1e-5)
    assert [array.dtype for array in arrays] == [np.float32, np.float32]


def test_more_components_than_values_are_refused():
    with pytest.raises(
        ValueError, match=r"latent_dim=61 must be at most 60, .*kernel_on='pca'"
    ):
        fixed_embeddings.principal_components(_images(), 61)


def test_encode_is_z_of_the_network(tmp_path_factory):
    run = small_run.finished(tmp_path_factory)
    encode = jax.jit(functools.partial(fixed_embeddings.encode, model=run.model))
    unit = run.images.astype(np.float32) / 255
    np.testing.assert_array_equal(
        encode(run.state.replace(opt_state=()), unit), small_run.predict(run).z
    )
