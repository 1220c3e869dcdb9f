"""Parts of sets in TFDS's form: loaded, compared."""

import numpy as np

from kln_jax import datasets

SIZES = {"train": 120, "test": 50}


def load_part(name, root, **options):
    return datasets.load(name, data_dir=root, allow_partial_data=True, **options)


def assert_equal(data, train, test):
    np.testing.assert_array_equal(data.train_images, train[0])
    np.testing.assert_array_equal(data.train_labels, train[1])
    np.testing.assert_array_equal(data.eval_images, test[0])
    np.testing.assert_array_equal(data.eval_labels, test[1])


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
