"""Draws of examples: stratified orders, labelled examples, images of two parts."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from kln_jax.datasets._dataset import DatasetError


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """A fixed random order in which every stretch has the classes' shares."""
    rng = np.random.default_rng(0)
    place = np.empty(len(labels))
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.argsort(place, kind="stable")


def labelled_split(
    labels: np.ndarray,
    num_labels: int,
    *,
    seed: int,
    class_names: Sequence[str] | None = None,
) -> np.ndarray:
    """Draws the examples whose labels a semi-supervised run may use.

    Every class gets ``num_labels // C`` examples. Where C does not divide
    ``num_labels``, the remainder goes to classes drawn at random, one more each.
    The draw depends on ``labels``, ``num_labels`` and ``seed`` only, and with
    the same seed a larger draw contains a smaller one wherever C divides both.

    Args:
      labels: (n,) integer labels of the training images.
      num_labels: How many to draw.
      seed: The seed of this draw alone.
      class_names: What messages call the classes; None for their numbers.

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
        name = classes[c] if class_names is None else repr(class_names[classes[c]])
        raise DatasetError(
            f"num_labels {num_labels} needs {wanted[c]} labels of class {name}, which "
            f"has {counts[c]}; use at most {counts.min() * len(classes)}"
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
