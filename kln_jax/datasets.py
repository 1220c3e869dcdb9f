"""Data sets as uint8 arrays: TFDS sets, scikit-learn's digits, the user's images.

`load` returns a `Dataset`; `labelled_split` draws the labels that a
semi-supervised run may use. Sets of tensorflow-datasets are read without
TensorFlow, from files that ``python -m kln_jax.datasets prepare NAME
--data_dir=DIR`` writes once on a machine with a network and TensorFlow.
Decoded images are cached as memory-mapped files.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import pathlib
import re
import shlex
import struct
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)


class DatasetError(ValueError):
    """Data that cannot be had or used; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known about a set of tensorflow-datasets."""

    sizes: dict[str, int]
    image_shape: tuple[int, int, int]
    num_classes: int
    # Asked before a download: does the network reach the place of the files?
    source: str


_KNOWN = {
    "mnist": _Known(
        {"train": 60_000, "test": 10_000},
        (28, 28, 1),
        10,
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion_mnist": _Known(
        {"train": 60_000, "test": 10_000},
        (28, 28, 1),
        10,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    "svhn_cropped": _Known(
        {"train": 73_257, "test": 26_032, "extra": 531_131},
        (32, 32, 3),
        10,
        "http://ufldl.stanford.edu/housenumbers/",
    ),
    "cifar10": _Known(
        {"train": 50_000, "test": 10_000},
        (32, 32, 3),
        10,
        "https://www.cs.toronto.edu/~kriz/",
    ),
    "cifar100": _Known(
        {"train": 50_000, "test": 10_000},
        (32, 32, 3),
        100,
        "https://www.cs.toronto.edu/~kriz/",
    ),
}
NAMES = ("digits", *_KNOWN, "own_images")

_DIGITS_TEST_IMAGES = 360
# Image modes that Pillow turns into 8-bit grey or RGB without losing range.
_MODES = ("1", "L", "P", "RGB", "LA", "PA", "RGBA", "CMYK", "YCbCr")
_SUFFIXES = (".png", ".jpg", ".jpeg")
# More classes than this are summed up in one line of the summary.
_CLASSES_LISTED = 20
_DECODE_CHUNK = 1000
_CHECKSUM_BLOCK = 1 << 17
_NETWORK_TIMEOUT_SECONDS = 5


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images and labels in memory, or memory-mapped from the cache.

    Attributes:
      name: The name given to `load`.
      version: The version of the data: TFDS's for its sets.
      train_images: (n, height, width, channels) uint8.
      train_labels: (n,) int32 in 0..C-1.
      eval_images: The images to evaluate on, like ``train_images``.
      eval_labels: Their labels.
      class_names: C names.
      evaluate_on: "test" or "validation", what the evaluation images are.
      partial: Whether it is only a part of the set of this name.
    """

    name: str
    version: str
    train_images: np.ndarray
    train_labels: np.ndarray
    eval_images: np.ndarray
    eval_labels: np.ndarray
    class_names: tuple[str, ...]
    evaluate_on: str = "test"
    partial: bool = False

    def summary(self) -> list[str]:
        """Says what the data are, one line each: to be logged first.

        Returns:
          Lines with name, version, sizes, image shape and class counts.
        """
        height, width, channels = self.train_images.shape[1:]
        lines = [
            f"data set {self.name}, version {self.version}: "
            f"{len(self.train_images):,} train and {len(self.eval_images):,} "
            f"{self.evaluate_on} images of {height}x{width}x{channels}, "
            f"{len(self.class_names)} classes"
            f"{', ONLY A PART OF THE SET' if self.partial else ''}"
        ]
        for part, labels in (
            ("train", self.train_labels),
            (self.evaluate_on, self.eval_labels),
        ):
            counts = np.bincount(labels, minlength=len(self.class_names))
            if len(counts) > _CLASSES_LISTED:
                text = f"{counts.min():,} to {counts.max():,} images of each class"
            else:
                text = ", ".join(
                    f"{name}: {count:,}"
                    for name, count in zip(self.class_names, counts, strict=True)
                )
            lines.append(f"{part} class counts: {text}")
        return lines


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
    - ``own_images``: ``data_dir`` is a folder with train/CLASS/*.png (or .jpg,
      .jpeg) and, if there is one, test/CLASS/*; or an .npz file with ``images``
      (n, height, width) or (n, height, width, channels) uint8, ``labels`` (n,)
      integers 0..C-1 and, if given, ``test_images``, ``test_labels`` and
      ``class_names``. Images must be square; they are resized. Without a test
      part, a fixed stratified ``test_fraction`` of the images is held out.

    The validation part is the last ``validation_fraction`` of the training
    images, in the data set's fixed order. (TFDS has shuffled its sets; digits and
    own images are put in an order whose every stretch is stratified; of SVHN with
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
    if evaluate_on == "validation" and validation_fraction == 0:
        raise DatasetError(
            'evaluate_on is "validation" but validation_fraction is 0; set '
            "validation_fraction to the share of the training images to evaluate on"
        )
    if image_size not in (28, 32):
        raise DatasetError(f"image_size must be 28 or 32, not {image_size}")
    if use_extra and name != "svhn_cropped":
        raise DatasetError(f"use_extra is for svhn_cropped; {name} has no extra images")

    if name == "digits":
        parts = _load_digits(image_size)
    elif name == "own_images":
        parts = _load_own_images(data_dir, image_size, test_fraction)
    else:
        parts = _load_tfds(
            name,
            data_dir=data_dir,
            use_extra=use_extra,
            allow_partial_data=allow_partial_data,
            cache_dir=cache_dir,
        )
        width = margin(name, image_size)
        parts = dataclasses.replace(
            parts,
            train_images=_with_margin(parts.train_images, width),
            eval_images=_with_margin(parts.eval_images, width),
        )

    num_validation = round(validation_fraction * len(parts.train_labels))
    if validation_fraction > 0 and not 0 < num_validation < len(parts.train_labels):
        raise DatasetError(
            f"validation_fraction {validation_fraction} of "
            f"{len(parts.train_labels)} training images leaves one part empty"
        )
    num_train = len(parts.train_labels) - num_validation
    if evaluate_on == "validation":
        parts = dataclasses.replace(
            parts,
            eval_images=parts.train_images[num_train:],
            eval_labels=parts.train_labels[num_train:],
            evaluate_on="validation",
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


def labelled_split(labels: np.ndarray, num_labels: int, *, seed: int) -> np.ndarray:
    """Draws the examples whose labels a semi-supervised run may use.

    Every class gets ``num_labels // C`` examples. Where C does not divide
    ``num_labels``, the remainder goes to classes drawn at random, one more each.
    The draw depends on ``labels``, ``num_labels`` and ``seed`` only, and with
    the same seed a larger draw contains a smaller one wherever C divides both.

    Args:
      labels: (n,) integer labels of the training images.
      num_labels: How many to draw.
      seed: The seed of this draw alone.

    Returns:
      (num_labels,) int32 indices into ``labels``, ascending, no two the same.

    Raises:
      ValueError: ``num_labels`` is below the number of classes or more than
        there are, in all or of one class.

    Examples:
      >>> import numpy as np
      >>> labels = np.array([0, 1, 0, 1, 0, 1])
      >>> chosen = labelled_split(labels, 4, seed=0)
      >>> np.bincount(labels[chosen]).tolist()
      [2, 2]
    """
    labels = np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    if not len(classes) <= num_labels <= len(labels):
        raise DatasetError(
            f"num_labels must be between the number of classes, {len(classes)}, and "
            f"the number of training images, {len(labels)}, not {num_labels}"
        )
    share, remainder = divmod(num_labels, len(classes))
    rng = np.random.default_rng(seed)
    # All classes are shuffled whatever num_labels is, so that draws are nested.
    shuffled = [rng.permutation(np.flatnonzero(labels == c)) for c in classes]
    wanted = np.full(len(classes), share)
    wanted[rng.permutation(len(classes))[:remainder]] += 1
    short = np.flatnonzero(counts < wanted)
    if short.size:
        c = short[0]
        raise DatasetError(
            f"num_labels {num_labels} needs {wanted[c]} labels of class {classes[c]}, "
            f"which has {counts[c]}; use at most {counts.min() * len(classes)}"
        )
    chosen = [members[:k] for members, k in zip(shuffled, wanted, strict=True)]
    return np.sort(np.concatenate(chosen)).astype(np.int32)


def shared_images(images: np.ndarray, eval_images: np.ndarray) -> int:
    """Counts the evaluation images that are pixel for pixel among ``images``.

    The parts of a data set are disjoint as indices; published sets contain some
    images twice all the same, which is worth a warning and no more.

    Args:
      images: (n, height, width, channels) uint8, for example the labelled ones.
      eval_images: (m, height, width, channels) uint8.

    Returns:
      How many of the m are among the n.
    """

    def digests(rows: np.ndarray) -> Iterator[bytes]:
        return (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)

    seen = set(digests(images))
    return sum(digest in seen for digest in digests(eval_images))


def margin(name: str, side: int) -> int:
    """Returns how many black pixels a set's images get on each side.

    Args:
      name: One of `NAMES`.
      side: Side that they are to have; larger images stay as they are.

    Examples:
      >>> margin("mnist", 32), margin("cifar10", 28), margin("own_images", 32)
      (2, 0, 0)
    """
    # What is in no known size is resized.
    return max(0, side - _KNOWN[name].image_shape[0]) // 2 if name in _KNOWN else 0


def _with_margin(images: np.ndarray, width: int) -> np.ndarray:
    """Puts images (..., height, width, channels) in the middle of black ones."""
    if not width:  # TFDS's are on disk, and need not be read.
        return images
    return np.pad(
        images, [(0, 0)] * (images.ndim - 3) + [(width, width)] * 2 + [(0, 0)]
    )


# --- Sets in memory -----------------------------------------------------------


def _stratified_order(labels: np.ndarray) -> np.ndarray:
    """A fixed random order in which every stretch has the classes' shares."""
    rng = np.random.default_rng(0)
    place = np.empty(len(labels))
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.argsort(place, kind="stable")


def _load_digits(side: int) -> Dataset:
    import PIL.Image

    package = importlib.metadata.distribution("scikit-learn")
    # The file of its load_digits, which takes a second to import.
    path = package.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    pixels, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    pixels = np.round(pixels * (255 / 16)).astype(np.uint8)
    images = np.empty((len(pixels), side, side, 1), np.uint8)
    for image, small in zip(images, pixels, strict=True):
        resized = PIL.Image.fromarray(small).resize(
            (side, side), PIL.Image.Resampling.BILINEAR
        )
        image[..., 0] = np.asarray(resized)
    order = _stratified_order(labels)
    images, labels = images[order], labels[order].astype(np.int32)
    return Dataset(
        name="digits",
        version=_version_of(images, labels),
        train_images=images[:-_DIGITS_TEST_IMAGES],
        train_labels=labels[:-_DIGITS_TEST_IMAGES],
        eval_images=images[-_DIGITS_TEST_IMAGES:],
        eval_labels=labels[-_DIGITS_TEST_IMAGES:],
        class_names=tuple(str(digit) for digit in range(10)),
    )


def _load_own_images(
    data_dir: str | os.PathLike[str] | None, image_size: int, test_fraction: float
) -> Dataset:
    if data_dir is None:
        raise DatasetError(
            "own_images needs data_dir: a folder with train/CLASS/*.png or an .npz file"
        )
    if not 0 < test_fraction < 1:
        raise DatasetError(f"test_fraction must be in (0, 1), not {test_fraction}")
    path = _expanded(data_dir)
    shape = (image_size, image_size, 1 if image_size == 28 else 3)
    if path.is_dir():
        train, test, class_names = _read_folder(path, shape)
    elif path.is_file() and path.suffix == ".npz":
        train, test, class_names = _read_npz(path, shape)
    else:
        raise DatasetError(
            f"data_dir {path} is neither a folder with train/CLASS/*.png nor an "
            "existing .npz file"
        )
    for name in class_names:
        if not name.isprintable():  # Neither logs nor pages could hold it.
            raise DatasetError(
                f"{path}: the class {name!a} has a character that cannot be shown; "
                "give it a name of printable text"
            )
    images, labels = train
    order = _stratified_order(labels)
    images, labels = images[order], labels[order]
    if test is None:
        num_test = round(test_fraction * len(labels))
        if not 0 < num_test < len(labels):
            raise DatasetError(
                f"test_fraction {test_fraction} of {len(labels)} images leaves one "
                "part empty; give more images or a test part"
            )
        test = images[-num_test:], labels[-num_test:]
        images, labels = images[:-num_test], labels[:-num_test]
    return Dataset(
        name="own_images",
        version=_version_of(images, labels, *test),
        train_images=images,
        train_labels=labels,
        eval_images=test[0],
        eval_labels=test[1],
        class_names=class_names,
    )


def _version_of(*arrays: np.ndarray) -> str:
    """Returns a version for data that have none: equal for equal data."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array.data, checksum)
    return f"crc32 {checksum:08x}"


_Part = tuple[np.ndarray, np.ndarray]


def _resized(image: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Turns a Pillow image into uint8 of a square shape, or says why not.

    Raises:
      ValueError: The image has the wrong shape or would lose information.
    """
    import PIL.Image
    import PIL.ImageOps

    if image.mode not in _MODES:
        raise ValueError(f"has pixels of Pillow's mode {image.mode}, not 8-bit ones")
    image = PIL.ImageOps.exif_transpose(image)
    if image.width != image.height:
        raise ValueError(
            f"is not square ({image.width}x{image.height} pixels); crop or pad it"
        )
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        raise ValueError("has transparent pixels; flatten it onto a background")
    side, _, channels = shape
    image = image.convert("L" if channels == 1 else "RGB")
    if image.width != side:
        image = image.resize((side, side), PIL.Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(shape)


def read_image(
    path: pathlib.Path, shape: tuple[int, int, int], *, margin: int = 0
) -> np.ndarray:
    """Reads an image as those of own data sets are.

    Args:
      path: A file that Pillow can read.
      shape: Height, width and channels, ``(side, side, 1)`` or ``(side, side, 3)``.
      margin: Black pixels on each side of it, among those of the shape.

    Returns:
      The image of that shape, uint8.

    Raises:
      OSError: If it cannot be read.
      ValueError: If it is not square or would lose information. What a damaged file
        raises beside these depends on its format.
    """
    import PIL.Image

    with PIL.Image.open(path) as image:
        inner = (shape[0] - 2 * margin, shape[1] - 2 * margin, shape[2])
        return _with_margin(_resized(image, inner), margin)


def image_files(
    folder: pathlib.Path, pattern: str
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Tells the images in a folder from what else is there, by their names.

    Args:
      folder: Where to look.
      pattern: ``"*"``, or ``"**/*"`` for its subfolders too.

    Returns:
      Files that end as images do, and the rest, each sorted. Hidden files are in
      neither, nor are those of hidden folders.
    """
    images: list[pathlib.Path] = []
    others: list[pathlib.Path] = []
    for path in sorted(folder.glob(pattern)):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        # A link that leads nowhere stays, to be reported.
        is_image = path.suffix.lower() in _SUFFIXES and not path.is_dir()
        (images if is_image else others).append(path)
    return images, others


def _read_folder(
    root: pathlib.Path, shape: tuple[int, int, int]
) -> tuple[_Part, _Part | None, tuple[str, ...]]:
    def class_folders(part: str) -> list[pathlib.Path]:
        return sorted(
            folder
            for folder in (root / part).iterdir()
            if folder.is_dir() and not folder.name.startswith(".")
        )

    problems: list[str] = []

    def read(part: str, class_names: tuple[str, ...]) -> _Part:
        images: list[np.ndarray] = []
        labels: list[int] = []
        ignored = 0
        for folder in class_folders(part):
            if folder.name not in class_names:
                problems.append(f"{folder}: no class of this name in {root / 'train'}")
                continue
            paths, others = image_files(folder, "*")
            ignored += len(others)
            for path in paths:
                try:
                    images.append(read_image(path, shape))
                # What a damaged file raises depends on its format and damage.
                except Exception as error:
                    problems.append(f"{path}: {_one_line(error)}")
                labels.append(class_names.index(folder.name))
            if not paths and part == "train":
                problems.append(f"{folder}: holds no .png, .jpg or .jpeg file")
        if ignored:
            _log.warning(
                "%s: ignored %d files or folders that are no .png, .jpg or .jpeg files",
                root / part,
                ignored,
            )
        if not labels and not problems:
            problems.append(f"{root / part}: holds no images as {part}/CLASS/*.png")
        if problems:
            return np.empty(0), np.empty(0)
        return np.stack(images), np.array(labels, np.int32)

    if not (root / "train").is_dir():
        raise DatasetError(f"{root} has no folder train with one folder per class")
    class_names = tuple(folder.name for folder in class_folders("train"))
    if len(class_names) < 2:
        raise DatasetError(
            f"{root / 'train'} needs one folder per class and at least two, "
            f"not {len(class_names)}"
        )
    train = read("train", class_names)
    test = read("test", class_names) if (root / "test").is_dir() else None
    if problems:
        raise DatasetError(
            f"{len(problems)} files or folders of {root} cannot be used:\n  "
            + "\n  ".join(problems)
        )
    return train, test, class_names


def _read_npz(
    path: pathlib.Path, shape: tuple[int, int, int]
) -> tuple[_Part, _Part | None, tuple[str, ...]]:
    import PIL.Image

    arrays: dict[str, np.ndarray] = {}
    key = ""
    try:
        # Opened here: np.load leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            for key in stored.files:
                arrays[key] = stored[key]
    except Exception as error:
        # NumPy names an option that its caller has, but the user has not.
        if key and "allow_pickle" in str(error):
            raise DatasetError(
                f"{path}: {key} is an array of Python objects, which are not read; "
                "save it as numbers or text, with a dtype such as np.uint8 or str"
            ) from error
        raise DatasetError(f"{path} cannot be read: {_one_line(error)}") from error

    def part(prefix: str) -> _Part:
        for key in (f"{prefix}images", f"{prefix}labels"):
            if key not in arrays:
                raise DatasetError(
                    f"{path} has no array {key!r}; it has {sorted(arrays)}"
                )
        images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
        if images.ndim == 4 and images.shape[-1] == 1:
            images = images[..., 0]
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or (images.ndim == 4 and images.shape[-1] != 3)
            or images.size == 0
        ):
            raise DatasetError(
                f"{path}: {prefix}images must be uint8 of shape (n, side, side), "
                f"(n, side, side, 1) or (n, side, side, 3), not {images.dtype} of "
                f"shape {images.shape}"
            )
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            raise DatasetError(
                f"{path}: {prefix}labels must be {len(images)} integers, not "
                f"{labels.dtype} of shape {labels.shape}"
            )
        try:
            resized = np.stack(
                [_resized(PIL.Image.fromarray(image), shape) for image in images]
            )
        except ValueError as error:
            raise DatasetError(f"{path}: an image {error}") from error
        return resized, labels

    train = part("")
    with_test = "test_images" in arrays or "test_labels" in arrays
    test = part("test_") if with_test else None
    found = set(train[1].tolist())
    if "class_names" in arrays:
        class_names = _class_names(path, arrays["class_names"].ravel())
    else:
        # Not up to the largest label, which may be one of billions.
        class_names = tuple(map(str, range(len(found))))
    wrong = set(range(len(class_names))) ^ found
    if test is not None:
        wrong |= set(test[1].tolist()) - set(range(len(class_names)))
    if wrong or len(class_names) < 2:
        raise DatasetError(
            f"{path}: labels must be 0..C-1 with every class among the training "
            f"labels and C >= 2; C is {len(class_names)}, wrong or missing: "
            f"{sorted(wrong)[:10]}"
        )
    train = train[0], train[1].astype(np.int32)
    if test is not None:
        test = test[0], test[1].astype(np.int32)
    return train, test, class_names


def _class_names(path: pathlib.Path, names: np.ndarray) -> tuple[str, ...]:
    """Returns the names of an .npz file as text, if no two are the same."""
    try:
        class_names = tuple(
            name.decode() if isinstance(name, bytes) else str(name) for name in names
        )
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: class_names has bytes that are not UTF-8 ({_one_line(error)}); "
            "save the names as text"
        ) from error
    for name, count in collections.Counter(class_names).items():
        if count > 1:
            raise DatasetError(
                f"{path}: class_names has {name!r} {count} times; give each class a "
                "name of its own"
            )
    return class_names


def _expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise DatasetError(
            f"{path}: there is no such home directory; give a path without ~"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- Sets of tensorflow-datasets ----------------------------------------------


def _tfds_root(data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return _expanded(data_dir).absolute()


def _command(name: str, root: pathlib.Path) -> str:
    folder = shlex.quote(str(root))
    return f"python -m kln_jax.datasets prepare {name} --data_dir={folder}"


def _find_prepared(name: str, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """The newest prepared version of each file format: {format: directory}."""
    found: dict[str, pathlib.Path] = {}
    versions = [
        path
        for path in (root / name).glob("*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name)
    ]
    for path in sorted(versions, key=lambda p: tuple(map(int, p.name.split(".")))):
        try:
            info = json.loads((path / "dataset_info.json").read_text())
            formats = [
                info.get("fileFormat") or "tfrecord",
                *info.get("alternativeFileFormats", []),
            ]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DatasetError(
                f"{path / 'dataset_info.json'} cannot be read ({_one_line(error)}); "
                f"remove {path} and prepare it again with: {_command(name, root)}"
            ) from error
        found.update(dict.fromkeys(formats, path))
    return found


def _load_tfds(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None,
    use_extra: bool,
    allow_partial_data: bool,
    cache_dir: str | os.PathLike[str] | None,
) -> Dataset:
    root = _tfds_root(data_dir)
    found = _find_prepared(name, root)
    if "array_record" in found:
        directory = found["array_record"]
    elif "tfrecord" in found:
        raise DatasetError(
            f"{name} in {found['tfrecord']} is prepared as TFRecord, which is not read "
            f"directly; convert it with: {_command(name, root)}"
        )
    else:
        directory = _download_and_prepare(name, root)

    import tensorflow_datasets as tfds

    known = _KNOWN[name]
    try:
        builder = tfds.builder_from_directory(directory)
        names = builder.info.features["label"].names
        num_classes = builder.info.features["label"].num_classes
        sizes = {k: v.num_examples for k, v in builder.info.splits.items()}
    except ImportError:
        raise
    # A damaged directory fails in many ways inside tfds.
    except Exception as error:
        raise DatasetError(
            f"{directory} cannot be read ({_one_line(error)}); if it is damaged, "
            f"remove it and prepare it again with: {_command(name, root)}"
        ) from error
    if num_classes != known.num_classes:
        raise DatasetError(
            f"{name} in {directory} has {num_classes} classes, not {known.num_classes}"
        )
    splits = ("train", "test", *(["extra"] if use_extra else []))
    for split in splits:
        if not sizes.get(split):
            raise DatasetError(f"{name} in {directory} has no {split} images")
        if sizes[split] != known.sizes[split] and not allow_partial_data:
            raise DatasetError(
                f"{name} in {directory} has {sizes[split]:,} {split} images instead "
                f"of {known.sizes[split]:,}; prepare all of it, or set "
                "allow_partial_data to go on with these"
            )

    reader = _Reader(name, builder, directory, known.image_shape, num_classes)
    places = _cache_places(root, cache_dir)
    # In this order the end of the training images, the validation part, is from
    # train: the extra images are easier.
    train_images, train_labels = _cached(
        reader, "extra+train" if use_extra else "train", places
    )
    test_images, test_labels = _cached(reader, "test", places)
    return Dataset(
        name=name,
        version=directory.name,
        train_images=train_images,
        train_labels=train_labels,
        eval_images=test_images,
        eval_labels=test_labels,
        class_names=tuple(names or map(str, range(num_classes))),
        partial=any(sizes[split] != known.sizes[split] for split in splits),
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Decodes the splits of one prepared set."""

    name: str
    builder: Any
    directory: pathlib.Path
    image_shape: tuple[int, int, int]
    num_classes: int

    def num_images(self, split: str) -> int:
        return sum(self.builder.info.splits[s].num_examples for s in split.split("+"))

    def cache_stem(self, split: str) -> str:
        """A file name that other data, another version or size does not share."""
        digest = hashlib.sha256((self.directory / "dataset_info.json").read_bytes())
        for part in split.split("+"):
            shards = self.directory.glob(f"{self.name}-{part}.array_record-*")
            for path in sorted(shards):
                digest.update(f"{path.name} {path.stat().st_size}".encode())
        return f"{self.name}-{self.directory.name}-{split}-{digest.hexdigest()[:16]}"

    def chunks(self, split: str) -> Iterator[_Part]:
        """Yields (images, labels) in the set's order, a chunk at a time."""
        import PIL.Image
        import tensorflow_datasets as tfds
        import tqdm

        total = self.num_images(split)
        try:
            source = self.builder.as_data_source(
                split=split,
                decoders={"image": tfds.decode.SkipDecoding()},
                file_format="array_record",
            )
            with tqdm.tqdm(
                total=total,
                desc=f"decoding {self.name} {split}",
                unit=" images",
                unit_scale=True,
                leave=False,
                disable=None,
            ) as bar:
                for start in range(0, total, _DECODE_CHUNK):
                    records = source.__getitems__(
                        list(range(start, min(start + _DECODE_CHUNK, total)))
                    )
                    images = np.empty((len(records), *self.image_shape), np.uint8)
                    for i, record in enumerate(records):
                        with PIL.Image.open(io.BytesIO(record["image"])) as image:
                            pixels = np.asarray(image)
                        images[i] = pixels.reshape(self.image_shape)
                    labels = np.array([record["label"] for record in records], np.int32)
                    if labels.min() < 0 or labels.max() >= self.num_classes:
                        raise ValueError(
                            f"a label is outside 0..{self.num_classes - 1}"
                        )
                    yield images, labels
                    bar.update(len(records))
        except ImportError:
            raise
        # array_record, protobuf and Pillow each have their own errors.
        except Exception as error:
            raise DatasetError(
                f"{self.name} {split} in {self.directory} cannot be decoded "
                f"({_one_line(error)}); if it is damaged, remove it and prepare it "
                f"again with: {_command(self.name, self.directory.parent.parent)}"
            ) from error


# --- The cache of decoded images ----------------------------------------------


def _cache_places(
    root: pathlib.Path, cache_dir: str | os.PathLike[str] | None
) -> list[pathlib.Path]:
    if cache_dir is not None:
        return [_expanded(cache_dir).absolute()]
    places = [root / ".kln_jax_cache"]
    # Without a home directory there is none of the user's.
    with contextlib.suppress(DatasetError):
        user = _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        places.append(user / "kln_jax")
    return places


def _is_writable(directory: pathlib.Path) -> bool:
    """Whether files may be made in a directory that may not exist yet."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    # For root, access() says yes to a directory whose write bits were taken off.
    return os.access(directory, os.W_OK) and bool(directory.stat().st_mode & 0o222)


def _cached(reader: _Reader, split: str, places: Sequence[pathlib.Path]) -> _Part:
    """Reads a split from the first place that has it, or decodes it there."""
    stem = reader.cache_stem(split)
    shape = (reader.num_images(split), *reader.image_shape)
    for place in places:
        part = _read_cache(place, stem, shape)
        if part is not None:
            return part
    for place in places:
        if not _is_writable(place):
            continue
        try:
            _write_cache(place, stem, shape, reader.chunks(split))
            return _map_cache(place, stem)
        except OSError as error:
            _log.warning("cannot cache images in %s: %s", place, _one_line(error))
    _log.warning(
        "decoded images are not cached (no space or no right to write in %s); "
        "every start decodes them anew; set XDG_CACHE_HOME to a writable folder",
        " or ".join(map(str, places)),
    )
    images = np.empty(shape, np.uint8)
    labels = np.empty(shape[0], np.int32)
    start = 0
    for chunk_images, chunk_labels in reader.chunks(split):
        stop = start + len(chunk_labels)
        images[start:stop], labels[start:stop] = chunk_images, chunk_labels
        start = stop
    return images, labels


def _map_cache(place: pathlib.Path, stem: str) -> _Part:
    images = np.load(place / f"{stem}-images.npy", mmap_mode="r")
    labels = np.load(place / f"{stem}-labels.npy")
    # Plain arrays: the subclass memmap survives indexing and surprises.
    return images.view(np.ndarray), labels.astype(np.int32, copy=False)


def _checksum(path: pathlib.Path) -> int:
    """The CRC-32 of a file, read by blocks so that it takes no memory."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_CHECKSUM_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _read_cache(place: pathlib.Path, stem: str, shape: tuple[int, ...]) -> _Part | None:
    """Maps cached images after checking them; None if there are none to use."""
    # The record is written last: without it a write was not finished.
    record = place / f"{stem}.json"
    if not record.exists():
        return None
    try:
        checksums = json.loads(record.read_text())
        for part in ("images", "labels"):
            if _checksum(place / f"{stem}-{part}.npy") != checksums[part]:
                raise ValueError(f"the checksum of the {part} does not match")
        images, labels = _map_cache(place, stem)
        if (images.shape, images.dtype) != (shape, np.dtype(np.uint8)):
            raise ValueError(f"images have {images.dtype} and shape {images.shape}")
        if (labels.shape, labels.dtype) != (shape[:1], np.dtype(np.int32)):
            raise ValueError(f"labels have {labels.dtype} and shape {labels.shape}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.warning(
            "the cache %s-*.npy in %s is damaged (%s) and is made anew",
            stem,
            place,
            _one_line(error),
        )
        return None
    return images, labels


def _write_cache(
    place: pathlib.Path, stem: str, shape: tuple[int, ...], chunks: Iterator[_Part]
) -> None:
    """Writes decoded images as they come, and names the files when all are there."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="unfinished-") as folder:
        temporary = pathlib.Path(folder)
        # Written, not mapped: a full disk is then an error and not a bus error.
        with (
            open(temporary / "images.npy", "wb") as image_file,
            open(temporary / "labels.npy", "wb") as label_file,
        ):
            for file, descr, array_shape in (
                (image_file, "|u1", shape),
                (label_file, "<i4", shape[:1]),
            ):
                np.lib.format.write_array_header_1_0(
                    file,
                    {"descr": descr, "fortran_order": False, "shape": array_shape},
                )
            for images, labels in chunks:
                image_file.write(images.data)
                label_file.write(labels.astype("<i4").data)
        checksums = {
            part: _checksum(temporary / f"{part}.npy") for part in ("images", "labels")
        }
        (temporary / "record.json").write_text(json.dumps(checksums))
        for source, target in (
            ("images.npy", f"{stem}-images.npy"),
            ("labels.npy", f"{stem}-labels.npy"),
            ("record.json", f"{stem}.json"),
        ):
            os.replace(temporary / source, place / target)


# --- Preparation --------------------------------------------------------------


def prepare(name: str, *, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Prepares a TFDS set so that `load` can read it without network and TensorFlow.

    A set that is there as TFRecord is converted, which needs neither. Otherwise it
    is downloaded and prepared by tensorflow-datasets, which shows its progress.

    Args:
      name: A set of tensorflow-datasets among `NAMES`.
      data_dir: Where to; None means as in `load`.

    Returns:
      One line that says what is where.

    Raises:
      DatasetError: The set cannot be prepared here; the message says why.
    """
    if name not in _KNOWN:
        raise DatasetError(f"only {', '.join(_KNOWN)} are prepared, not {name!r}")
    root = _tfds_root(data_dir)
    found = _find_prepared(name, root)
    if "array_record" in found:
        return f"{name} is prepared in {found['array_record']}"
    try:
        if "tfrecord" in found:
            _convert(found["tfrecord"])
            return f"{name} is converted to array_record in {found['tfrecord']}"
        return f"{name} is prepared in {_download_and_prepare(name, root)}"
    except OSError as error:
        raise DatasetError(
            f"{name} cannot be prepared in {root}: {_one_line(error)}"
        ) from error


def _download_and_prepare(name: str, root: pathlib.Path) -> pathlib.Path:
    reason = None
    if importlib.util.find_spec("tensorflow") is None:
        reason = "TensorFlow, which this takes, is not installed"
    elif not _is_writable(root):
        reason = "the data directory is read-only"
    elif not _reaches(_KNOWN[name].source):
        reason = f"{_KNOWN[name].source} cannot be reached"
    if reason is not None:
        raise DatasetError(
            f"{name} is not in the data directory {root} and cannot be prepared "
            f"here: {reason}. On a machine with network and TensorFlow run: "
            f"{_command(name, root)} (and copy the directory here if it is not shared)"
        )
    _log.warning("%s is not in %s: downloading and preparing it", name, root)
    try:
        import tensorflow as tf
        import tensorflow_datasets as tfds

        # Or TensorFlow would take the memory of the devices that JAX trains on.
        tf.config.set_visible_devices([], "GPU")
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare()
        return _find_prepared(name, root)["array_record"]
    # Network, disk, checksum and TensorFlow each have their own errors.
    except Exception as error:
        raise DatasetError(
            f"preparing {name} in {root} failed: {type(error).__name__}: "
            f"{_one_line(error)}"
        ) from error


def _reaches(url: str) -> bool:
    """Whether the network answers for a URL, within seconds."""
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_NETWORK_TIMEOUT_SECONDS):
                answers.append(True)
        except urllib.error.HTTPError:
            # Some answer, for example that the folder may not be listed.
            answers.append(True)
        except Exception:
            answers.append(False)

    # Looking up a host's name may hang longer than the timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _NETWORK_TIMEOUT_SECONDS)
    return answers == [True]


def _tfrecords(path: pathlib.Path) -> Iterator[bytes]:
    """Reads a TFRecord file: length, its CRC, data, their CRC, again and again."""
    with open(path, "rb") as file:
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            data, crc = file.read(length), file.read(4)
            if len(header) < 12 or len(data) < length or len(crc) < 4:
                raise DatasetError(f"{path} is truncated; copy or prepare it again")
            yield data


def _convert(directory: pathlib.Path) -> None:
    """Adds array_record files to a set that is prepared as TFRecord."""
    import tqdm
    from array_record.python import array_record_module

    shards = sorted(directory.glob("*.tfrecord-*"))
    if not shards:
        raise DatasetError(f"{directory} has no .tfrecord files; prepare it again")
    with tempfile.TemporaryDirectory(dir=directory, prefix="unfinished-") as folder:
        temporary = pathlib.Path(folder)
        for shard in tqdm.tqdm(shards, desc="converting", unit=" files", disable=None):
            target = temporary / shard.name.replace(".tfrecord-", ".array_record-")
            # As tfds writes them: one record a group, for random access.
            writer = array_record_module.ArrayRecordWriter(str(target), "group_size:1")
            for record in _tfrecords(shard):
                writer.write(record)
            writer.close()
        # The description is replaced last: it says that all files are there.
        info = json.loads((directory / "dataset_info.json").read_text())
        info.setdefault("alternativeFileFormats", []).append("array_record")
        (temporary / "dataset_info.json").write_text(json.dumps(info, indent=2))
        for shard in shards:
            target_name = shard.name.replace(".tfrecord-", ".array_record-")
            os.replace(temporary / target_name, directory / target_name)
        os.replace(temporary / "dataset_info.json", directory / "dataset_info.json")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: ``python -m kln_jax.datasets prepare NAME --data_dir=DIR``.

    Args:
      argv: The arguments; None means those of the process.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kln_jax.datasets", description="Prepares data sets."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser(
        "prepare",
        help="download a data set, or convert it from TFRecord, for reading offline",
    )
    sub.add_argument("name", choices=tuple(_KNOWN), metavar="NAME", help="data set")
    sub.add_argument(
        "--data_dir",
        help="where to; default: TFDS_DATA_DIR or ~/tensorflow_datasets",
    )
    arguments = parser.parse_args(argv)
    try:
        print(prepare(arguments.name, data_dir=arguments.data_dir))
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
