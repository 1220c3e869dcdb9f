"""What a data set is here, and what all that read one share."""

import dataclasses
import sys
import zlib

import numpy as np

# Images and their labels.
Part = tuple[np.ndarray, np.ndarray]

# More classes than this are summed up in one line of the summary.
_CLASSES_LISTED = 20


class DatasetError(ValueError):
    """Data that cannot be had or used; the message says what to do."""


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


def without_bar() -> bool | None:
    """What tqdm calls disable: None for a bar in a terminal alone."""
    return None if sys.stderr else True  # It fails where there is no standard error.


def version_of(*arrays: np.ndarray) -> str:
    """Returns a version for data that have none: equal for equal data."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array.data, checksum)
    return f"crc32 {checksum:08x}"


def resized(images: np.ndarray, side: int) -> np.ndarray:
    """Resizes images bilinearly, as Pillow does, each channel by itself.

    Args:
      images: uint8 images, shape ``(n, height, width, channels)``.
      side: Pixels of a side of the new ones.

    Returns:
      uint8 images, shape ``(n, side, side, channels)``.
    """
    import PIL.Image

    n, _, _, channels = images.shape
    found = np.empty((n, side, side, channels), np.uint8)
    for i, channel in np.ndindex(n, channels):
        image = PIL.Image.fromarray(images[i, ..., channel])
        image = image.resize((side, side), PIL.Image.Resampling.BILINEAR)
        found[i, ..., channel] = np.asarray(image)
    return found


def with_margin(images: np.ndarray, width: int) -> np.ndarray:
    """Puts images (..., height, width, channels) in the middle of black ones."""
    if not width:  # TFDS's are on disk, and need not be read.
        return images
    return np.pad(
        images, [(0, 0)] * (images.ndim - 3) + [(width, width)] * 2 + [(0, 0)]
    )
