import dataclasses
import sys

import numpy as np
import pytest
import tfds_writer
from small_sets import SIZES, assert_equal, load_part

from kln_jax import datasets
from kln_jax.datasets import _known, _tfds


@pytest.mark.parametrize("name", tfds_writer.SHAPES)
def test_tfds_set_is_read_as_written_and_cached(name, root, no_decoding):
    written = tfds_writer.write_random_set(root, name, SIZES)
    for _ in range(2):
        data = load_part(name, root)
        assert_equal(data, written["train"], written["test"])
        assert data.train_images.dtype == np.uint8
        assert data.train_labels.dtype == np.int32
        assert data.version == tfds_writer.VERSIONS[name]
        assert len(data.class_names) == tfds_writer.NUM_CLASSES[name]
        assert data.train_labels.min() == 0
        no_decoding()
    assert not data.train_images.flags.writeable


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_small_images_get_a_black_margin_and_large_ones_stay(name, root):
    written = tfds_writer.write_random_set(root, name, SIZES)
    margin = (32 - tfds_writer.SHAPES[name][0]) // 2
    around = ((0, 0), (margin, margin), (margin, margin), (0, 0))
    train, test = (
        (np.pad(images, around), labels)
        for images, labels in (written["train"], written["test"])
    )
    assert_equal(load_part(name, root, image_size=32), train, test)


def test_a_closed_standard_error_is_no_matter(root, monkeypatch):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    monkeypatch.setattr(sys, "stderr", None)
    assert_equal(load_part("mnist", root), written["train"], written["test"])


def test_class_names_and_shards_are_those_of_the_set(root, monkeypatch):
    monkeypatch.setattr(_tfds, "_DECODE_CHUNK", 50)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (130, 28, 28, 1), np.uint8)
    labels = rng.integers(0, 10, 130)
    part = images, labels
    directory = tfds_writer.write_set(
        root, "fashion_mnist", {"train": part, "test": part}, num_shards=3
    )
    names = [f"class {c}" for c in range(10)]
    (directory / "label.labels.txt").write_text("\n".join(names))
    data = load_part("fashion_mnist", root)
    assert_equal(data, part, part)
    assert data.class_names == tuple(names)


def test_default_data_dir_is_that_of_tfds(tmp_path):
    written = tfds_writer.write_random_set(tmp_path / "default_data", "mnist", SIZES)
    data = datasets.load("mnist", allow_partial_data=True)
    assert_equal(data, written["train"], written["test"])


def test_newest_prepared_version_is_read(root):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    for version in ("2.9.9", "3.0.9", "incomplete.ABC_3.0.1"):
        (root / "mnist" / version).mkdir()
    old = root / "mnist" / "2.9.9"
    (old / "dataset_info.json").write_text('{"fileFormat": "array_record"}')
    data = load_part("mnist", root)
    assert data.version == "3.0.1"
    assert_equal(data, written["train"], written["test"])


@pytest.mark.parametrize("below", ["mnist", "mnist/3.0.1"])
@pytest.mark.parametrize("use", [datasets.load, datasets.prepare])
def test_a_folder_of_the_set_itself_is_no_data_dir(use, below, root):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    with pytest.raises(datasets.DatasetError, match=f"give the one .* in, {root}$"):
        use("mnist", data_dir=root / below)


def test_extra_images_are_used_when_asked(root):
    written = tfds_writer.write_random_set(root, "svhn_cropped", {**SIZES, "extra": 90})
    without = load_part("svhn_cropped", root)
    assert len(without.train_labels) == 120
    data = load_part("svhn_cropped", root, use_extra=True, validation_fraction=0.5)
    everything = [
        np.concatenate([written["extra"][i], written["train"][i]]) for i in range(2)
    ]
    np.testing.assert_array_equal(data.train_images, everything[0][:105])
    # The validation part is from the end of train.
    data = load_part(
        "svhn_cropped",
        root,
        use_extra=True,
        validation_fraction=0.5,
        evaluate_on="validation",
    )
    np.testing.assert_array_equal(data.eval_images, written["train"][0][-105:])
    with pytest.raises(ValueError, match="cifar10 has no extra images"):
        datasets.load("cifar10", data_dir=root, use_extra=True)


def test_sizes_must_be_the_known_ones(root, monkeypatch):
    tfds_writer.write_random_set(root, "svhn_cropped", {**SIZES, "extra": 90})
    with pytest.raises(ValueError, match=r"120 train .* 73,257.*allow_partial_data"):
        datasets.load("svhn_cropped", data_dir=root)
    known = _known.KNOWN["svhn_cropped"]
    assert sum(known.sizes.values()) - known.sizes["test"] == 604_388
    monkeypatch.setitem(
        _known.KNOWN,
        "svhn_cropped",
        dataclasses.replace(known, sizes={**known.sizes, **SIZES}),
    )
    assert len(datasets.load("svhn_cropped", data_dir=root).train_labels) == 120
    with pytest.raises(ValueError, match=r"90 extra images instead of 531,131"):
        datasets.load("svhn_cropped", data_dir=root, use_extra=True)


def test_absent_split_is_an_error_also_for_partial_data(root):
    tfds_writer.write_random_set(root, "svhn_cropped", SIZES)
    with pytest.raises(ValueError, match="no extra images"):
        load_part("svhn_cropped", root, use_extra=True)


def test_label_out_of_range_is_an_error(root):
    images = np.zeros((20, 28, 28, 1), np.uint8)
    good, bad = np.arange(20) % 10, np.arange(20) % 10 + 1
    tfds_writer.write_set(
        root, "mnist", {"train": (images, bad), "test": (images, good)}
    )
    with pytest.raises(ValueError, match=r"mnist train .*a label is outside 0\.\.9"):
        load_part("mnist", root)


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove", "zero"])
def test_damaged_shard_is_named_with_what_to_do(root, damage):
    part = np.zeros((20, 28, 28, 1), np.uint8), np.arange(20) % 10
    directory = tfds_writer.write_set(
        root, "mnist", {"train": part, "test": part}, num_shards=3
    )
    path = directory / "mnist-train.array_record-00001-of-00003"
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content.replace(b"IDAT", b"IDAX"))
    with pytest.raises(datasets.DatasetError) as caught:
        load_part("mnist", root)
    message = str(caught.value)
    assert message.startswith(f"mnist train in {directory} cannot be decoded (")
    assert f"); {path.name} damaged: remove the folder" in message
    assert f"prepare mnist --data_dir={root}" in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_description_is_named_with_what_to_do(root, content):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    (path,) = root.rglob("dataset_info.json")
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{path} cannot be read .* prepare mnist"):
        load_part("mnist", root)


def test_absent_features_are_named_with_what_to_do(root):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    (path,) = root.rglob("features.json")
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.parent} cannot be read .* prepare"):
        load_part("mnist", root)
