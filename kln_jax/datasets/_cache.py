"""Decoded images as memory-mapped files."""

import contextlib
import json
import logging
import os
import pathlib
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kln_jax.datasets._dataset import DatasetError, Part
from kln_jax.datasets._paths import expanded, is_writable
from kln_jax.storage.whole_files import one_line

_log = logging.getLogger(__name__)

_CHECKSUM_BLOCK = 1 << 17


def places(
    root: pathlib.Path, cache_dir: str | os.PathLike[str] | None
) -> list[pathlib.Path]:
    """Returns where decoded images may lie: in one place, or where none is given, two.

    Args:
      root: The data directory.
      cache_dir: The place that the user names.
    """
    if cache_dir is not None:
        return [expanded(cache_dir).absolute()]
    found = [root / ".kln_jax_cache"]
    # Without a home directory there is none of the user's.
    with contextlib.suppress(DatasetError):
        user = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        found.append(user / "kln_jax")
    return found


def cached(
    stem: str,
    shape: tuple[int, ...],
    decode: Callable[[], Iterator[Part]],
    where: Sequence[pathlib.Path],
) -> Part:
    """Reads images from the first place that has them, or decodes them there.

    Args:
      stem: The name of their files, which no other images share.
      shape: Theirs, ``(n, height, width, channels)``.
      decode: Yields them and their labels in order, some at a time.
      where: The places.
    """
    for place in where:
        part = _read(place, stem, shape)
        if part is not None:
            return part
    for place in where:
        if not is_writable(place):
            continue
        try:
            _write(place, stem, shape, decode())
            return _map(place, stem)
        except OSError as error:
            _log.warning("cannot cache images in %s: %s", place, one_line(error))
    _log.warning(
        "decoded images are not cached (no space or no right to write in %s); "
        "every start decodes them anew; set XDG_CACHE_HOME to a writable folder",
        " or ".join(map(str, where)),
    )
    images = np.empty(shape, np.uint8)
    labels = np.empty(shape[0], np.int32)
    start = 0
    for chunk_images, chunk_labels in decode():
        stop = start + len(chunk_labels)
        images[start:stop], labels[start:stop] = chunk_images, chunk_labels
        start = stop
    return images, labels


def _map(place: pathlib.Path, stem: str) -> Part:
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


def _read(place: pathlib.Path, stem: str, shape: tuple[int, ...]) -> Part | None:
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
        images, labels = _map(place, stem)
        if (images.shape, images.dtype) != (shape, np.dtype(np.uint8)):
            raise ValueError(f"images have {images.dtype} and shape {images.shape}")
        if (labels.shape, labels.dtype) != (shape[:1], np.dtype(np.int32)):
            raise ValueError(f"labels have {labels.dtype} and shape {labels.shape}")
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.warning(
            "the cache %s-*.npy in %s is damaged (%s) and is made anew",
            stem,
            place,
            one_line(error),
        )
        return None
    return images, labels


def _write(
    place: pathlib.Path, stem: str, shape: tuple[int, ...], chunks: Iterator[Part]
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
