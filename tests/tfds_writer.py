"""Writes small data sets to disk in the prepared form of tensorflow-datasets.

TensorFlow is not needed: the description of the features and the records are made
by tfds's own code, the files by array_record's writer or, for TFRecord, here.
"""

import io
import json
import pathlib
import struct

import numpy as np
import PIL.Image
import tensorflow_datasets as tfds
from array_record.python import array_record_module

VERSIONS = {
    "mnist": "3.0.1",
    "fashion_mnist": "3.0.1",
    "svhn_cropped": "3.1.0",
    "cifar10": "3.0.2",
    "cifar100": "3.0.2",
}
SHAPES = {
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "svhn_cropped": (32, 32, 3),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}
NUM_CLASSES = dict.fromkeys(SHAPES, 10) | {"cifar100": 100}


def png(image: np.ndarray) -> bytes:
    """Encodes a (height, width, channels) uint8 image."""
    file = io.BytesIO()
    PIL.Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(
        file, "png"
    )
    return file.getvalue()


def write_set(
    root: pathlib.Path,
    name: str,
    splits: dict[str, tuple[np.ndarray, np.ndarray]],
    *,
    file_format: str = "array_record",
    num_shards: int = 1,
) -> pathlib.Path:
    """Writes ``splits`` as the set ``name``, prepared in the data directory ``root``.

    Args:
      root: The data directory.
      name: A set of `SHAPES`; it has the features that it has in TFDS.
      splits: Split -> (images (n, *SHAPES[name]) uint8, labels (n,)).
      file_format: "array_record" or "tfrecord".
      num_shards: Files a split.

    Returns:
      The version's directory, root/name/version.
    """
    directory = root / name / VERSIONS[name]
    directory.mkdir(parents=True)
    features = {
        "image": tfds.features.Image(shape=SHAPES[name], encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES[name]),
    }
    if name.startswith("cifar"):
        features["id"] = tfds.features.Text()
    if name == "cifar100":
        features["coarse_label"] = tfds.features.ClassLabel(num_classes=20)
    features = tfds.features.FeaturesDict(features)
    features.save_config(directory)
    serializer = tfds.core.example_serializer.ExampleSerializer(
        features.get_serialized_info()
    )

    def record(number: int, image: np.ndarray, label: int) -> bytes:
        example = {"image": png(image), "label": label}
        if "id" in features:
            example["id"] = f"train_{number:05d}"
        if "coarse_label" in features:
            example["coarse_label"] = label % 20
        return serializer.serialize_example(example)

    split_infos = []
    for split, (images, labels) in splits.items():
        records = [
            record(i, image, int(label))
            for i, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        bounds = np.linspace(0, len(records), num_shards + 1).astype(int)
        for shard in range(num_shards):
            path = directory / (
                f"{name}-{split}.{file_format}-{shard:05d}-of-{num_shards:05d}"
            )
            _write_records(path, records[bounds[shard] : bounds[shard + 1]])
        split_infos.append(
            {
                "name": split,
                "shardLengths": [str(n) for n in np.diff(bounds)],
                "numBytes": str(sum(map(len, records))),
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
        )
    info = {
        "name": name,
        "version": VERSIONS[name],
        "fileFormat": file_format,
        "splits": split_infos,
    }
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return directory


def write_random_set(
    root: pathlib.Path, name: str, sizes: dict[str, int], *, seed: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes random images with balanced labels in random order; see `write_set`.

    Args:
      root: The data directory.
      name: A set of `SHAPES`.
      sizes: Split -> number of images.
      seed: Of the images and labels.

    Returns:
      What was written: split -> (images, labels).
    """
    rng = np.random.default_rng(seed)
    splits = {
        split: (
            rng.integers(0, 256, (n, *SHAPES[name]), np.uint8),
            rng.permutation(np.arange(n) % NUM_CLASSES[name]).astype(np.int32),
        )
        for split, n in sizes.items()
    }
    write_set(root, name, splits)
    return splits


def _write_records(path: pathlib.Path, records: list[bytes]) -> None:
    if ".array_record-" in path.name:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        return
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))


def _masked_crc(data: bytes) -> bytes:
    """TFRecord's checksum: CRC-32C, rotated by 15 bits plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)
