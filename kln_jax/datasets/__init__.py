"""Data sets as uint8 arrays: TFDS sets, scikit-learn's digits, the user's images.

`load` returns a `Dataset`; `labelled_split` draws the labels that a
semi-supervised run may use. Sets of tensorflow-datasets are read without
TensorFlow, from files that ``python -m kln_jax.datasets prepare NAME
--data_dir=DIR`` writes once on a machine with a network and TensorFlow.
Decoded images are cached as memory-mapped files.
"""

import dataclasses
import os

import numpy as np

from kln_jax.datasets._dataset import Dataset, DatasetError, resized, with_margin
from kln_jax.datasets._digits import load_digits
from kln_jax.datasets._image_files import image_files, read_image
from kln_jax.datasets._known import KNOWN, margin
from kln_jax.datasets._own_images import load_own_images
from kln_jax.datasets._prepare import prepare
from kln_jax.datasets._split import labelled_split, shared_images
from kln_jax.datasets._tfds import load_tfds

__all__ = [
    "NAMES",
    "Dataset",
    "DatasetError",
    "image_files",
    "labelled_split",
    "load",
    "margin",
    "prepare",
    "read_image",
    "resized",
    "shared_images",
]

NAMES = ("digits", *KNOWN, "own_images")
_NO_VALIDATION = (
    'evaluate_on is "validation" but validation_fraction is 0; set '
    "validation_fraction to the share of the training images to evaluate on"
)


def load(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    evaluate_on: str = "test",
    validation_fraction: float = 0.0,
    test_fraction: float = 0.2,
    use_extra: bool = False,
    allow_partial_data: bool = False,
    image_size: int = 28,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads a data set.

    - ``digits``: the 1,797 digits that come with scikit-learn, 8x8 resized to
      ``image_size``, in a fixed stratified split of 1,437 train and 360 test images.
    - ``mnist``, ``fashion_mnist``, ``svhn_cropped``, ``cifar10``, ``cifar100``:
      from tensorflow-datasets. A set that is not in ``data_dir`` is prepared
      there, if the network and TensorFlow are there. Images of 28x28 get a margin
      of two black pixels where ``image_size`` is 32.
    - ``own_images``: ``data_dir`` is a folder with ``train/CLASS/*.png`` (or .jpg,
      .jpeg) and, if they are there, ``test/CLASS/*`` and ``val/CLASS/*``; or an .npz
      file with ``images`` (n, height, width) or (n, height, width, channels) uint8,
      ``labels`` (n,) integers 0..C-1 and, if given, ``test_images``,
      ``test_labels``, ``val_images``, ``val_labels`` and ``class_names``. Other
      common spellings of these are read too; what is not used is named in the log.
      Images must be square; they are resized. Without a test part the validation
      part is it; without both, a fixed stratified ``test_fraction`` of the images is
      held out.

    Unless it is given, the validation part is the last ``validation_fraction`` of the
    training images, in the data set's fixed order. (TFDS has shuffled its sets; digits
    and own images are put in an order whose every stretch is stratified; of SVHN with
    ``use_extra`` it is the end of ``train``, not of ``extra``.) It is removed from
    training whichever part is evaluated: the paper trains MNIST on 50,000 images.

    Args:
      name: One of `NAMES`.
      data_dir: Where the data lie. For TFDS's sets None means TFDS's own
        default, ``TFDS_DATA_DIR`` or ~/tensorflow_datasets. Unused by digits.
      evaluate_on: "test" or "validation".
      validation_fraction: Share of the training images kept out of training, in
        [0, 1); 1/6 for MNIST's 50,000 / 10,000.
      test_fraction: Share held out of own images that have no test part.
      use_extra: Adds SVHN's 531,131 extra images to the training images.
      allow_partial_data: Takes a TFDS set whose sizes are not the known ones.
      image_size: Side of digits, of own images and of sets of 28x28, 28 or 32. Own
        images become grey with 28 and RGB with 32.
      cache_dir: Where decoded TFDS images are kept. None means .kln_jax_cache in
        ``data_dir`` or, where that is read-only, kln_jax in the user's cache
        directory (``XDG_CACHE_HOME`` or ~/.cache).

    Returns:
      The data set. Images of TFDS's sets are read-only.

    Raises:
      DatasetError: A ValueError whose one-line message (one line per file for
        own images that cannot be read) says what is wrong and what to do.

    Examples:
      >>> data = load("digits")
      >>> data.train_images.shape, data.eval_images.shape
      ((1437, 28, 28, 1), (360, 28, 28, 1))
    """
    if name not in NAMES:
        raise DatasetError(f"dataset must be one of {', '.join(NAMES)}, not {name!r}")
    if evaluate_on not in ("test", "validation"):
        raise DatasetError(
            f'evaluate_on must be "test" or "validation", not {evaluate_on!r}'
        )
    if not 0 <= validation_fraction < 1:
        raise DatasetError(
            f"validation_fraction must be in [0, 1), not {validation_fraction}"
        )
    without_validation = evaluate_on == "validation" and validation_fraction == 0
    if without_validation and name != "own_images":
        raise DatasetError(_NO_VALIDATION)
    if image_size not in (28, 32):
        raise DatasetError(f"image_size must be 28 or 32, not {image_size}")
    if use_extra and name != "svhn_cropped":
        raise DatasetError(f"use_extra is for svhn_cropped; {name} has no extra images")

    given = None  # A validation part that need not be cut off.
    if name == "digits":
        parts = load_digits(image_size)
    elif name == "own_images":
        parts, given = load_own_images(data_dir, image_size, test_fraction, evaluate_on)
        if without_validation and given is None:
            raise DatasetError(f"{_NO_VALIDATION}, or give a validation part")
        if validation_fraction > 0 and given is not None:
            raise DatasetError(
                f"{data_dir} has a validation part; set validation_fraction to 0, not "
                f"{validation_fraction}"
            )
    else:
        parts = load_tfds(
            name,
            data_dir=data_dir,
            use_extra=use_extra,
            allow_partial_data=allow_partial_data,
            cache_dir=cache_dir,
        )
        width = margin(name, image_size)
        parts = dataclasses.replace(
            parts,
            train_images=with_margin(parts.train_images, width),
            eval_images=with_margin(parts.eval_images, width),
        )

    num_validation = round(validation_fraction * len(parts.train_labels))
    if validation_fraction > 0 and not 0 < num_validation < len(parts.train_labels):
        raise DatasetError(
            f"validation_fraction {validation_fraction} of "
            f"{len(parts.train_labels)} training images leaves one part empty"
        )
    num_train = len(parts.train_labels) - num_validation
    if evaluate_on == "validation":
        images, labels = given or (
            parts.train_images[num_train:],
            parts.train_labels[num_train:],
        )
        parts = dataclasses.replace(
            parts, eval_images=images, eval_labels=labels, evaluate_on="validation"
        )
    labels = parts.train_labels[:num_train]
    counts = np.bincount(labels, minlength=len(parts.class_names))
    # Known sets have many of each; a part of one may do without.
    if name == "own_images" and not counts.all():
        raise DatasetError(
            f"class {parts.class_names[int(counts.argmin())]!r} has too few images: "
            f"none is left to train, for validation_fraction={validation_fraction} "
            f"and, without a test part, test_fraction={test_fraction} hold them out"
        )
    return dataclasses.replace(
        parts, train_images=parts.train_images[:num_train], train_labels=labels
    )
