"""Preparation of sets of tensorflow-datasets, to be read offline."""

import http.client
import importlib.util
import json
import logging
import os
import pathlib
import struct
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator

from kln_jax.datasets._dataset import DatasetError, without_bar
from kln_jax.datasets._known import KNOWN, command, find_prepared, tfds_root
from kln_jax.datasets._paths import is_writable
from kln_jax.storage.whole_files import one_line

_log = logging.getLogger(__name__)

_NETWORK_TIMEOUT_SECONDS = 5


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
      DatasetError: If the set cannot be prepared here; the message says why.
    """
    if name not in KNOWN:
        raise DatasetError(f"only {', '.join(KNOWN)} are prepared, not {name!r}")
    root = tfds_root(data_dir)
    found = find_prepared(name, root)
    if "array_record" in found:
        return f"{name} is prepared in {found['array_record']}"
    try:
        if "tfrecord" in found:
            _convert(found["tfrecord"])
            return f"{name} is converted to array_record in {found['tfrecord']}"
        return f"{name} is prepared in {download_and_prepare(name, root)}"
    except OSError as error:
        raise DatasetError(
            f"{name} cannot be prepared in {root}: {one_line(error)}"
        ) from error


def download_and_prepare(name: str, root: pathlib.Path) -> pathlib.Path:
    """Has tensorflow-datasets prepare a set, and returns its directory."""
    reason = None
    if importlib.util.find_spec("tensorflow") is None:
        reason = "TensorFlow, which this takes, is not installed"
    elif not is_writable(root):
        reason = "the data directory is read-only"
    elif not _reaches(KNOWN[name].source):
        reason = f"{KNOWN[name].source} cannot be reached"
    if reason is not None:
        raise DatasetError(
            f"{name} is not in the data directory {root} and cannot be prepared "
            f"here: {reason}. On a machine with network and TensorFlow run: "
            f"{command(name, root)} (and copy the directory here if it is not shared)"
        )
    _log.warning("%s is not in %s: downloading and preparing it", name, root)
    try:
        import tensorflow as tf
        import tensorflow_datasets as tfds

        # Or TensorFlow would take the memory of the devices that JAX trains on.
        tf.config.set_visible_devices([], "GPU")
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare()
        return find_prepared(name, root)["array_record"]
    # Network, disk, checksum and TensorFlow each have their own errors.
    except Exception as error:
        raise DatasetError(
            f"preparing {name} in {root} failed: {type(error).__name__}: "
            f"{one_line(error)}"
        ) from error


def _reaches(url: str) -> bool:
    """Whether the network answers for a URL, within seconds."""
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_NETWORK_TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # Some answer, for example that the folder may not be listed.
    except (OSError, http.client.HTTPException):
        return False


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
        for shard in tqdm.tqdm(
            shards, desc="converting", unit=" files", disable=without_bar()
        ):
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
