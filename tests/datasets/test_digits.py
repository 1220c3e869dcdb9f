import numpy as np
import PIL.Image
import sklearn.datasets

from kln_jax import datasets


def test_digits_are_scikit_learns_in_a_fixed_stratified_split():
    data = datasets.load("digits")
    assert data.train_images.shape == (1437, 28, 28, 1)
    assert data.eval_images.shape == (360, 28, 28, 1)
    assert data.train_images.dtype == data.eval_images.dtype == np.uint8
    assert data.train_labels.dtype == data.eval_labels.dtype == np.int32
    assert data.class_names == tuple("0123456789")
    larger = datasets.load("digits", image_size=32)
    assert larger.train_images.shape == (1437, 32, 32, 1)
    np.testing.assert_array_equal(larger.train_labels, data.train_labels)
    source = sklearn.datasets.load_digits()
    # All images and labels are there once: the sums of a downsized image tell.
    images = np.concatenate([data.train_images, data.eval_images])[..., 0]
    labels = np.concatenate([data.train_labels, data.eval_labels])
    small = np.stack(
        [np.asarray(PIL.Image.fromarray(i).resize((8, 8))) for i in images]
    )
    a, b = small.reshape(-1, 64) / 255, source.images.reshape(-1, 64) / 16
    distance = np.square(b).sum(1) - 2 * a @ b.T
    nearest = distance.argmin(axis=1)
    assert len(set(nearest)) > 1780
    assert (source.target[nearest] == labels).mean() > 0.998
    assert images.max() == 255
    assert images.min() == 0
    counts = np.bincount(source.target)
    np.testing.assert_allclose(
        np.bincount(data.eval_labels), counts * 360 / 1797, atol=1
    )
    again = datasets.load("digits")
    np.testing.assert_array_equal(again.eval_images, data.eval_images)
    # That of the data: a run goes on with another scikit-learn.
    assert again.version == data.version != larger.version
    assert data.version.startswith("crc32 ")
