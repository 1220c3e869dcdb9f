"""Sets of tensorflow-datasets, read without TensorFlow."""

import dataclasses
import hashlib
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kln_jax.datasets import _cache
from kln_jax.datasets._dataset import Dataset, DatasetError, Part, without_bar
from kln_jax.datasets._known import KNOWN, command, find_prepared, tfds_root
from kln_jax.datasets._prepare import download_and_prepare
from kln_jax.storage.whole_files import one_line

_DECODE_CHUNK = 1000


def load_tfds(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None,
    use_extra: bool,
    allow_partial_data: bool,
    cache_dir: str | os.PathLike[str] | None,
) -> Dataset:
    """Loads a set as `kln_jax.datasets.load` says; prepares it if it is absent."""
    root = tfds_root(data_dir)
    found = find_prepared(name, root)
    if "array_record" in found:
        directory = found["array_record"]
    elif "tfrecord" in found:
        raise DatasetError(
            f"{name} in {found['tfrecord']} is prepared as TFRecord, which is not read "
            f"directly; convert it with: {command(name, root)}"
        )
    else:
        directory = download_and_prepare(name, root)

    import tensorflow_datasets as tfds

    known = KNOWN[name]
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
            f"{directory} cannot be read ({one_line(error)}); if it is damaged, "
            f"remove it and prepare it again with: {command(name, root)}"
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
    places = _cache.places(root, cache_dir)
    # In this order the end of the training images, the validation part, is from
    # train: the extra images are easier.
    train_images, train_labels = reader.read(
        "extra+train" if use_extra else "train", places
    )
    test_images, test_labels = reader.read("test", places)
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

    def read(self, split: str, places: Sequence[pathlib.Path]) -> Part:
        """Reads a split from the cache in one of these places, or decodes it there."""
        shape = (self.num_images(split), *self.image_shape)
        stem = self.cache_stem(split)
        return _cache.cached(stem, shape, lambda: self.chunks(split), places)

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

    def chunks(self, split: str) -> Iterator[Part]:
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
                disable=without_bar(),
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
            damaged = self.damaged_shards(split)
            which = f"{', '.join(damaged)} damaged:" if damaged else "if it is damaged,"
            raise DatasetError(
                f"{self.name} {split} in {self.directory} cannot be decoded "
                f"({one_line(error)}); {which} remove the folder and prepare it again "
                f"with: {command(self.name, self.directory.parent.parent)}"
            ) from error

    def damaged_shards(self, split: str) -> list[str]:
        """Returns the names of the files that have not all their records."""
        from array_record.python import array_record_module

        damaged = []
        for part in split.split("+"):
            lengths = self.builder.info.splits[part].shard_lengths
            for i, length in enumerate(lengths):
                name = f"{self.name}-{part}.array_record-{i:05}-of-{len(lengths):05}"
                try:
                    reader = array_record_module.ArrayRecordReader(
                        str(self.directory / name)
                    )
                    is_whole = len(reader.read_all()) == length
                    reader.close()  # It raises what reading may pass over.
                except Exception:
                    is_whole = False
                if not is_whole:
                    damaged.append(name)
        return damaged
