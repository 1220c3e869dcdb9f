"""The digits that come with scikit-learn."""

import importlib.metadata

import numpy as np

from kln_jax.datasets._dataset import Dataset, resized, version_of
from kln_jax.datasets._split import stratified_order

_TEST_IMAGES = 360


def load_digits(side: int) -> Dataset:
    """Loads all of them, resized from 8x8 to a side of so many pixels."""
    package = importlib.metadata.distribution("scikit-learn")
    # The file of its load_digits, which takes a second to import.
    path = package.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    pixels, labels = table[:, :-1].reshape(-1, 8, 8, 1), table[:, -1]
    images = resized(np.round(pixels * (255 / 16)).astype(np.uint8), side)
    order = stratified_order(labels)
    images, labels = images[order], labels[order].astype(np.int32)
    return Dataset(
        name="digits",
        version=version_of(images, labels),
        train_images=images[:-_TEST_IMAGES],
        train_labels=labels[:-_TEST_IMAGES],
        eval_images=images[-_TEST_IMAGES:],
        eval_labels=labels[-_TEST_IMAGES:],
        class_names=tuple(str(digit) for digit in range(10)),
    )
