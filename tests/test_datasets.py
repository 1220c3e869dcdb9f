import dataclasses
import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
import types

import numpy as np
import PIL.Image
import pytest
import sklearn.datasets
import tensorflow_datasets as tfds
import tfds_writer

from kln_jax import datasets

SIZES = {"train": 120, "test": 50}


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    """Nothing is read from or written to the user's folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default_data"))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def no_decoding(monkeypatch):
    """Lets a test switch decoding off, so that only a cache can answer."""

    def refuse(*_):
        pytest.fail("decoded although it should have been cached")

    return lambda: monkeypatch.setattr(datasets._Reader, "chunks", refuse)


def _load(name, root, **options):
    return datasets.load(name, data_dir=root, allow_partial_data=True, **options)


def _assert_equal(data, train, test):
    np.testing.assert_array_equal(data.train_images, train[0])
    np.testing.assert_array_equal(data.train_labels, train[1])
    np.testing.assert_array_equal(data.eval_images, test[0])
    np.testing.assert_array_equal(data.eval_labels, test[1])


def _files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- Digits -------------------------------------------------------------------


def test_digits_are_scikit_learns_in_a_fixed_stratified_split():
    data = datasets.load("digits")
    assert data.train_images.shape == (1437, 28, 28, 1)
    assert data.eval_images.shape == (360, 28, 28, 1)
    assert data.train_images.dtype == data.eval_images.dtype == np.uint8
    assert data.train_labels.dtype == data.eval_labels.dtype == np.int32
    assert data.class_names == tuple("0123456789")
    larger = datasets.load("digits", image_size=32)
    assert larger.train_images.shape == (1437, 32, 32, 1)
    np.testing.assert_array_equal(larger.train_labels, data.train_labels)
    source = sklearn.datasets.load_digits()
    # All images and labels are there once: the sums of a downsized image tell.
    images = np.concatenate([data.train_images, data.eval_images])[..., 0]
    labels = np.concatenate([data.train_labels, data.eval_labels])
    small = np.stack(
        [np.asarray(PIL.Image.fromarray(i).resize((8, 8))) for i in images]
    )
    a, b = small.reshape(-1, 64) / 255, source.images.reshape(-1, 64) / 16
    distance = np.square(b).sum(1) - 2 * a @ b.T
    nearest = distance.argmin(axis=1)
    assert len(set(nearest)) > 1780
    assert (source.target[nearest] == labels).mean() > 0.998
    assert images.max() == 255
    assert images.min() == 0
    counts = np.bincount(source.target)
    np.testing.assert_allclose(
        np.bincount(data.eval_labels), counts * 360 / 1797, atol=1
    )
    again = datasets.load("digits")
    np.testing.assert_array_equal(again.eval_images, data.eval_images)
    # That of the data: a run goes on with another scikit-learn.
    assert again.version == data.version != larger.version
    assert data.version.startswith("crc32 ")


# --- TFDS ---------------------------------------------------------------------


@pytest.mark.parametrize("name", tfds_writer.SHAPES)
def test_tfds_set_is_read_as_written_and_cached(name, root, no_decoding):
    written = tfds_writer.write_random_set(root, name, SIZES)
    for _ in range(2):
        data = _load(name, root)
        _assert_equal(data, written["train"], written["test"])
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
    _assert_equal(_load(name, root, image_size=32), train, test)


def test_class_names_and_shards_are_those_of_the_set(root, monkeypatch):
    monkeypatch.setattr(datasets, "_DECODE_CHUNK", 50)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (130, 28, 28, 1), np.uint8)
    labels = rng.integers(0, 10, 130)
    part = images, labels
    directory = tfds_writer.write_set(
        root, "fashion_mnist", {"train": part, "test": part}, num_shards=3
    )
    names = [f"class {c}" for c in range(10)]
    (directory / "label.labels.txt").write_text("\n".join(names))
    data = _load("fashion_mnist", root)
    _assert_equal(data, part, part)
    assert data.class_names == tuple(names)


def test_default_data_dir_is_that_of_tfds(tmp_path):
    written = tfds_writer.write_random_set(tmp_path / "default_data", "mnist", SIZES)
    data = datasets.load("mnist", allow_partial_data=True)
    _assert_equal(data, written["train"], written["test"])


def test_newest_prepared_version_is_read(root):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    for version in ("2.9.9", "3.0.9", "incomplete.ABC_3.0.1"):
        (root / "mnist" / version).mkdir()
    old = root / "mnist" / "2.9.9"
    (old / "dataset_info.json").write_text('{"fileFormat": "array_record"}')
    data = _load("mnist", root)
    assert data.version == "3.0.1"
    _assert_equal(data, written["train"], written["test"])


def test_extra_images_are_used_when_asked(root):
    written = tfds_writer.write_random_set(root, "svhn_cropped", {**SIZES, "extra": 90})
    without = _load("svhn_cropped", root)
    assert len(without.train_labels) == 120
    data = _load("svhn_cropped", root, use_extra=True, validation_fraction=0.5)
    everything = [
        np.concatenate([written["extra"][i], written["train"][i]]) for i in range(2)
    ]
    np.testing.assert_array_equal(data.train_images, everything[0][:105])
    # The validation part is from the end of train.
    data = _load(
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
    known = datasets._KNOWN["svhn_cropped"]
    assert sum(known.sizes.values()) - known.sizes["test"] == 604_388
    monkeypatch.setitem(
        datasets._KNOWN,
        "svhn_cropped",
        dataclasses.replace(known, sizes={**known.sizes, **SIZES}),
    )
    assert len(datasets.load("svhn_cropped", data_dir=root).train_labels) == 120
    with pytest.raises(ValueError, match=r"90 extra images instead of 531,131"):
        datasets.load("svhn_cropped", data_dir=root, use_extra=True)


def test_absent_split_is_an_error_also_for_partial_data(root):
    tfds_writer.write_random_set(root, "svhn_cropped", SIZES)
    with pytest.raises(ValueError, match="no extra images"):
        _load("svhn_cropped", root, use_extra=True)


def test_label_out_of_range_is_an_error(root):
    images = np.zeros((20, 28, 28, 1), np.uint8)
    good, bad = np.arange(20) % 10, np.arange(20) % 10 + 1
    tfds_writer.write_set(
        root, "mnist", {"train": (images, bad), "test": (images, good)}
    )
    with pytest.raises(ValueError, match=r"mnist train .*a label is outside 0\.\.9"):
        _load("mnist", root)


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove", "zero"])
def test_damaged_shard_is_named_with_what_to_do(root, damage):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    (path,) = (root / "mnist").rglob("mnist-train*")
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
        _load("mnist", root)
    message = str(caught.value)
    assert f"mnist train in {path.parent} cannot be decoded" in message
    assert f"prepare mnist --data_dir={root}" in message
    assert "\n" not in message


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_description_is_named_with_what_to_do(root, content):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    (path,) = root.rglob("dataset_info.json")
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{path} cannot be read .* prepare mnist"):
        _load("mnist", root)


def test_absent_features_are_named_with_what_to_do(root):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    (path,) = root.rglob("features.json")
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.parent} cannot be read .* prepare"):
        _load("mnist", root)


# --- Validation ---------------------------------------------------------------


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_validation_part_is_not_trained_on_whichever_is_evaluated(root, evaluate_on):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    images, labels = written["train"]
    data = _load("mnist", root, validation_fraction=1 / 6, evaluate_on=evaluate_on)
    held_out = {"test": written["test"], "validation": (images[100:], labels[100:])}
    _assert_equal(data, (images[:100], labels[:100]), held_out[evaluate_on])
    assert data.evaluate_on == evaluate_on
    assert f"20 {evaluate_on} images" in data.summary()[0] or evaluate_on == "test"


def test_validation_part_of_digits_is_stratified():
    data = datasets.load("digits", validation_fraction=0.2, evaluate_on="validation")
    assert len(data.eval_labels) == 287
    counts = np.bincount(data.eval_labels)
    everything = counts + np.bincount(data.train_labels)
    np.testing.assert_allclose(counts, everything * 0.2, atol=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_on": "validation"}, "validation_fraction is 0"),
        ({"evaluate_on": "train"}, "not 'train'"),
        ({"validation_fraction": 1.0}, r"in \[0, 1\), not 1.0"),
        ({"validation_fraction": -0.1}, r"in \[0, 1\), not -0.1"),
        ({"validation_fraction": 1e-9}, "leaves one part empty"),
    ],
)
def test_senseless_parts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        datasets.load("digits", **options)


def test_unknown_data_set_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"digits, mnist, .* not 'mnits'"):
        datasets.load("mnits")


# --- Cache --------------------------------------------------------------------


@pytest.fixture
def cached(root):
    """A set and its cache: (root, what was written, the cache's folder)."""
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    _load("mnist", root)
    return root, written, root / ".kln_jax_cache"


def _flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*train*-images.npy", _flip_a_byte),
        ("*train*-images.npy", lambda path: os.truncate(path, 5000)),
        ("*train*-images.npy", lambda path: path.unlink()),
        ("*train*-labels.npy", lambda path: path.write_bytes(b"")),
        ("*test*.json", lambda path: path.write_text("")),
        ("*test*.json", lambda path: path.write_text("[]")),
    ],
    ids=["bit", "truncated", "removed", "emptied", "no_record", "other_record"],
)
def test_damaged_cache_is_made_anew_with_a_warning(
    cached, pattern, damage, caplog, no_decoding
):
    root, written, cache = cached
    before = _files(cache)
    (path,) = cache.glob(pattern)
    damage(path)
    data = _load("mnist", root)
    _assert_equal(data, written["train"], written["test"])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "is damaged" in caplog.text
    assert str(cache) in caplog.text
    assert _files(cache) == before
    no_decoding()
    _load("mnist", root)


def test_arrays_of_another_shape_are_not_taken_from_the_cache(cached, caplog):
    root, written, cache = cached
    (path,) = cache.glob("*train*-images.npy")
    np.save(path, written["train"][0][:, :14])
    (record,) = cache.glob("*train*.json")
    checksums = json.loads(record.read_text())
    checksums["images"] = datasets._checksum(path)
    record.write_text(json.dumps(checksums))
    _assert_equal(_load("mnist", root), written["train"], written["test"])
    assert "shape (120, 14, 28, 1)" in caplog.text


def test_unfinished_write_leaves_nothing_and_is_no_damage(root, monkeypatch, caplog):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    chunks = datasets._Reader.chunks

    def interrupted(self, split):
        yield from chunks(self, split)
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets._Reader, "chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _load("mnist", root)
    assert list((root / ".kln_jax_cache").iterdir()) == []
    monkeypatch.setattr(datasets._Reader, "chunks", chunks)
    _assert_equal(_load("mnist", root), written["train"], written["test"])
    assert caplog.text == ""


def test_two_sets_of_one_version_share_a_cache_dir(tmp_path, caplog):
    written = [
        tfds_writer.write_random_set(
            tmp_path / f"data{seed}",
            "mnist",
            {"train": 120 + seed, "test": 50},
            seed=seed,
        )
        for seed in range(2)
    ]
    for seed in (0, 1, 0):
        root = tmp_path / f"data{seed}"
        data = _load("mnist", root, cache_dir=tmp_path / "cache")
        _assert_equal(data, written[seed]["train"], written[seed]["test"])
        assert not (root / ".kln_jax_cache").exists()
    assert caplog.text == ""


def test_read_only_data_dir_is_cached_in_the_users_cache(
    root, tmp_path, no_decoding, caplog
):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    root.chmod(0o555)
    _load("mnist", root)
    assert [path.name for path in root.iterdir()] == ["mnist"]
    assert len(list((tmp_path / "user_cache" / "kln_jax").iterdir())) == 6
    no_decoding()
    _assert_equal(_load("mnist", root), written["train"], written["test"])
    assert caplog.text == ""
    root.chmod(0o755)


def test_without_a_place_for_the_cache_it_goes_on_with_a_warning(
    root, tmp_path, caplog
):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    blocked = tmp_path / "blocked"
    blocked.mkdir(mode=0o555)
    data = _load("mnist", root, cache_dir=blocked / "cache")
    _assert_equal(data, written["train"], written["test"])
    assert "not cached" in caplog.text
    assert not (blocked / "cache").exists()


def test_a_home_directory_that_is_not_there_is_needed_only_where_it_is_named(
    root, monkeypatch
):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody.here/.cache")
    _load("mnist", root)
    for options in ({"root": "~nobody.here/x"}, {"root": root, "cache_dir": "~no.one"}):
        with pytest.raises(datasets.DatasetError, match="there is no such home"):
            _load("mnist", **options)


def test_full_disk_goes_on_with_a_warning(root, tmp_path, monkeypatch, caplog):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "_checksum", full)
    data = _load("mnist", root)
    _assert_equal(data, written["train"], written["test"])
    assert f"cannot cache images in {root / '.kln_jax_cache'}" in caplog.text
    assert "No space left" in caplog.text
    assert _files(root / ".kln_jax_cache") == {}
    assert _files(tmp_path / "user_cache") == {}


@pytest.mark.parametrize("with_cache", [True, False])
def test_loading_takes_less_than_half_more_than_the_decoded_images(
    root, tmp_path, with_cache, monkeypatch
):
    monkeypatch.setattr(datasets, "_DECODE_CHUNK", 100)
    n = 1600
    part = np.zeros((n, 32, 32, 3), np.uint8), np.arange(n) % 10
    few = part[0][:10], part[1][:10]
    tfds_writer.write_set(root, "cifar10", {"train": part, "test": few})
    nowhere = tmp_path / "blocked"
    nowhere.mkdir(mode=0o555)
    # The libraries' own start is not counted.
    _load("cifar10", root, cache_dir=nowhere)
    tracemalloc.start()
    _load("cifar10", root, cache_dir=None if with_cache else nowhere)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Mapped files are not counted: their pages can be dropped.
    assert peak < (0.5 if with_cache else 1.5) * part[0].nbytes


# --- Preparation --------------------------------------------------------------


def _pretend_tensorflow(monkeypatch, is_there):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (is_there or None) if name == "tensorflow" else find_spec(name),
    )


def test_absent_set_without_tensorflow_says_what_to_run_where(root, monkeypatch):
    _pretend_tensorflow(monkeypatch, False)
    monkeypatch.setattr(datasets, "_reaches", lambda _: pytest.fail("network used"))
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.load("svhn_cropped", data_dir=root)
    message = str(caught.value)
    assert f"data directory {root} " in message
    assert "TensorFlow" in message
    assert (
        f"python -m kln_jax.datasets prepare svhn_cropped --data_dir={root}" in message
    )
    assert "\n" not in message


def test_absent_set_without_network_says_what_to_run_where(root, monkeypatch):
    _pretend_tensorflow(monkeypatch, True)

    def blocked(*_, **__):
        raise RuntimeError("sockets are blocked")

    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    with pytest.raises(ValueError, match=rf"stanford\S* cannot be reached.*={root}"):
        datasets.load("svhn_cropped", data_dir=root)


def test_read_only_data_dir_says_so_before_a_download(root, monkeypatch):
    _pretend_tensorflow(monkeypatch, True)
    monkeypatch.setattr(datasets, "_reaches", lambda _: pytest.fail("network used"))
    root.chmod(0o555)
    with pytest.raises(ValueError, match="read-only"):
        datasets.load("cifar10", data_dir=root)
    root.chmod(0o755)


def test_command_quotes_a_folder_with_a_blank(tmp_path, monkeypatch):
    _pretend_tensorflow(monkeypatch, False)
    with pytest.raises(ValueError, match=r"--data_dir='\S*/my data'"):
        datasets.load("mnist", data_dir=tmp_path / "my data")


def test_silent_server_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(datasets, "_NETWORK_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not datasets._reaches(f"http://127.0.0.1:{port}/")


def test_hanging_look_up_of_a_host_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(datasets, "_NETWORK_TIMEOUT_SECONDS", 0.1)
    done = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(60) and [])
    assert not datasets._reaches("http://example.org/")
    done.set()


@pytest.fixture
def fake_tensorflow(monkeypatch):
    """TensorFlow and tfds's preparation, as far as they are used."""
    hidden = []
    fake = types.ModuleType("tensorflow")
    fake.config = types.SimpleNamespace(
        set_visible_devices=lambda devices, kind: hidden.append((devices, kind))
    )
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    _pretend_tensorflow(monkeypatch, True)
    monkeypatch.setattr(datasets, "_reaches", lambda _: True)
    written = {}

    def builder(name, *, data_dir, file_format):
        assert file_format == "array_record"

        def prepare():
            assert hidden == [([], "GPU")]
            written.update(tfds_writer.write_random_set(data_dir, name, SIZES))

        return types.SimpleNamespace(download_and_prepare=prepare)

    monkeypatch.setattr(tfds, "builder", builder)
    return written


def test_absent_set_is_prepared_where_that_is_possible(root, fake_tensorflow):
    data = _load("cifar100", root)
    _assert_equal(data, fake_tensorflow["train"], fake_tensorflow["test"])


def test_command_line_prepares_and_says_where(root, fake_tensorflow, capsys):
    arguments = ["prepare", "svhn_cropped", f"--data_dir={root}"]
    for _ in range(2):
        assert datasets.main(arguments) == 0
        out = capsys.readouterr().out
        assert out == f"svhn_cropped is prepared in {root}/svhn_cropped/3.1.0\n"
    assert len(_load("svhn_cropped", root).train_labels) == 120


def test_failed_download_is_one_line_and_exit_status_1(
    root, fake_tensorflow, monkeypatch, capsys
):
    def failing(*_, **__):
        raise RuntimeError("checksum\nis wrong")

    monkeypatch.setattr(tfds, "builder", failing)
    assert datasets.main(["prepare", "mnist", f"--data_dir={root}"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: preparing mnist in {root} failed: RuntimeError: checksum is wrong\n"
    )


def test_command_line_refuses_an_unknown_set(capsys):
    with pytest.raises(SystemExit) as caught:
        datasets.main(["prepare", "digits"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.fixture
def tfrecord(root):
    """A set prepared as TFRecord: (root, what was written, its directory)."""
    rng = np.random.default_rng(0)
    written = {
        split: (rng.integers(0, 256, (n, 28, 28, 1), np.uint8), np.arange(n) % 10)
        for split, n in SIZES.items()
    }
    directory = tfds_writer.write_set(
        root, "mnist", written, file_format="tfrecord", num_shards=2
    )
    return root, written, directory


def test_tfrecord_is_named_and_converted_by_the_command_named(tfrecord):
    root, written, directory = tfrecord
    with pytest.raises(datasets.DatasetError) as caught:
        _load("mnist", root)
    message = str(caught.value)
    assert f"{directory} is prepared as TFRecord" in message
    command = message.rpartition("convert it with: python -m kln_jax.datasets ")[2]
    assert datasets.main(command.split()) == 0
    _assert_equal(_load("mnist", root), written["train"], written["test"])


def test_truncated_tfrecord_is_named_and_nothing_is_changed(tfrecord, capsys):
    root, _, directory = tfrecord
    path = directory / "mnist-train.tfrecord-00001-of-00002"
    os.truncate(path, path.stat().st_size - 3)
    before = _files(root)
    assert datasets.main(["prepare", "mnist", f"--data_dir={root}"]) == 1
    assert f"{path} is truncated" in capsys.readouterr().err
    assert _files(root) == before


# --- Own images ---------------------------------------------------------------


def _save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(image).save(path)


def _folder(root, classes=("ant", "bee"), part="train", n=10, side=28):
    """Images of one colour each, so that the right result is known."""
    for c, name in enumerate(classes):
        for i in range(n):
            colour = np.array([100 * c + i, 50, 200], np.uint8)
            suffix = ".png" if i % 2 else ".PNG"
            _save(
                root / part / name / f"{i:02d}{suffix}",
                np.broadcast_to(colour, (side, side, 3)),
            )


@pytest.mark.parametrize(("image_size", "channels"), [(28, 1), (32, 3)])
def test_folder_is_resized_and_split_by_class(root, image_size, channels):
    _folder(root, classes=("bee", "ant"), side=40)
    data = datasets.load("own_images", data_dir=root, image_size=image_size)
    assert data.class_names == ("ant", "bee")
    assert data.train_images.shape == (16, image_size, image_size, channels)
    np.testing.assert_array_equal(np.bincount(data.train_labels), [8, 8])
    np.testing.assert_array_equal(np.bincount(data.eval_labels), [2, 2])
    images = np.concatenate([data.train_images, data.eval_images])
    labels = np.concatenate([data.train_labels, data.eval_labels])
    assert (images == images[:, :1, :1]).all()
    if channels == 3:
        # Red is 100 c + i where "bee" was written as class 0.
        assert sorted(images[:, 0, 0, 0]) == [*range(10), *range(100, 110)]
        np.testing.assert_array_equal(labels, images[:, 0, 0, 0] < 100)
        assert (images[:, 0, 0, 1:] == [50, 200]).all()
    else:
        grey = 0.299 * (100 * (1 - labels) + 4.5) + 0.587 * 50 + 0.114 * 200
        np.testing.assert_allclose(images[:, 0, 0, 0], grey, atol=2)
    again = datasets.load("own_images", data_dir=root, image_size=image_size)
    np.testing.assert_array_equal(again.train_images, data.train_images)
    assert again.version == data.version
    held_out = datasets.load("own_images", data_dir=root, test_fraction=0.5)
    np.testing.assert_array_equal(np.bincount(held_out.eval_labels), [5, 5])


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 1), (28, 28, 3)])
def test_an_image_is_read_in_the_shape_of_the_network(tmp_path, shape, margin):
    path = tmp_path / "image.png"
    PIL.Image.new("RGB", (40, 40), (100, 100, 100)).save(path)
    image = datasets.read_image(path, shape, margin=margin)
    assert image.shape == shape
    inside = image[margin : shape[0] - margin, margin : shape[1] - margin]
    assert (inside == 100).all()
    assert image.sum(dtype=int) == inside.sum(dtype=int)


def test_a_class_without_an_image_to_train_is_named(root):
    _folder(root, classes=("ant",), n=40)
    _folder(root, classes=("bee",), n=1)
    with pytest.raises(
        datasets.DatasetError,
        match=r"class 'bee' has too few images: none is left to train, for validation_f"
        r"raction=0\.4 and, without a test part, test_fraction=0\.2 hold them out$",
    ):
        datasets.load("own_images", data_dir=root, validation_fraction=0.4)


def test_folders_own_test_part_is_used(root):
    _folder(root)
    _folder(root, classes=("bee",), part="test", n=3)
    data = datasets.load("own_images", data_dir=root, image_size=32)
    assert len(data.train_labels) == 20
    np.testing.assert_array_equal(data.eval_labels, [1, 1, 1])
    assert datasets.shared_images(data.train_images, data.eval_images) == 3


@pytest.mark.parametrize(
    ("name", "shown"),
    [("two\nlines", r"'two\\nlines'"), ("caf\udce9", r"'caf\\udce9'")],
)
def test_a_class_whose_name_cannot_be_shown_is_refused(name, shown, root):
    _folder(root, classes=("ant", name))
    with pytest.raises(datasets.DatasetError, match=rf"the class {shown} has a char"):
        datasets.load("own_images", data_dir=root)


def test_all_unusable_files_are_listed_by_name(root, caplog):
    _folder(root)
    train = root / "train"
    content = (train / "ant" / "01.png").read_bytes()
    (train / "ant" / "broken.png").write_bytes(content[: len(content) // 2])
    (train / "ant" / "text.jpg").write_text("no image")
    (train / "ant" / ".hidden.png").write_text("not looked at")
    (train / "ant" / "notes.txt").write_text("ignored with a warning")
    (train / "ant" / "folder.png").mkdir()
    (train / "wasp").mkdir()
    _save(train / "bee" / "wide.png", np.zeros((28, 56), np.uint8))
    _save(train / "bee" / "deep.png", np.zeros((28, 28), np.uint16))
    _save(train / "bee" / "glass.png", np.zeros((28, 28, 4), np.uint8))
    _folder(root, classes=("fly",), part="test", n=1)
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.load("own_images", data_dir=root)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("7 files or folders")
    for name, reason in (
        ("train/ant/broken.png", "truncated"),
        ("train/ant/text.jpg", "cannot identify"),
        ("train/wasp", "no .png"),
        ("train/bee/wide.png", "not square (56x28"),
        ("train/bee/deep.png", "mode I;16"),
        ("train/bee/glass.png", "transparent"),
        ("test/fly", "no class of this name"),
    ):
        (line,) = [line for line in lines if f"{root / name}: " in line]
        assert reason in line
    assert len(lines) == 7
    assert "ignored 2 files or folders" in caplog.text


@pytest.mark.parametrize(("pattern", "deeper"), [("*", []), ("**/*", ["more/6.jpeg"])])
def test_image_files_are_neither_hidden_nor_folders(tmp_path, pattern, deeper):
    root = tmp_path / ".data"  # What is asked for may be hidden.
    for folder in (".hidden", "folder.png", "more/.hidden"):
        (root / folder).mkdir(parents=True)
    visible = "1.PNG", "4.jpg", "more/6.jpeg", "notes.txt"
    for name in (*visible, ".2.png", ".hidden/3.png", "more/.hidden/7.png"):
        (root / name).touch()
    (root / "5.png").symlink_to("absent")
    images, others = datasets.image_files(root, pattern)
    names = [str(path.relative_to(root)) for path in images]
    assert names == ["1.PNG", "4.jpg", "5.png", *deeper]
    assert [path.name for path in others] == ["folder.png", "more", "notes.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs data_dir"),
        ({"data_dir": "absent"}, "neither a folder"),
        ({"data_dir": "~nobody.here/x"}, "^~nobody.here/x: there is no such home"),
        ({"data_dir": "."}, "no folder train"),
        ({"data_dir": ".", "image_size": 64}, "28 or 32, not 64"),
        ({"data_dir": ".", "test_fraction": 0.0}, "test_fraction must be in"),
    ],
)
def test_senseless_own_images_are_refused(root, monkeypatch, options, message):
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=message):
        datasets.load("own_images", **options)


def test_one_class_is_refused(root):
    _folder(root, classes=("ant",))
    with pytest.raises(ValueError, match="at least two, not 1"):
        datasets.load("own_images", data_dir=root)


def _arrays(n=20, shape=(28, 28), seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (n, *shape), np.uint8),
        "labels": np.arange(n) % 4,
    }


def test_npz_with_its_own_test_part(root):
    test = _arrays(8, seed=1)
    names = ["n", "e", "s", "w"]
    np.savez(
        root / "own.npz",
        **_arrays(),
        test_images=test["images"][..., None],
        test_labels=test["labels"],
        class_names=names,
    )
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert data.class_names == tuple(names)
    np.testing.assert_array_equal(data.eval_images[..., 0], test["images"])
    np.testing.assert_array_equal(data.eval_labels, test["labels"])
    # The training images are in another order, with their own labels.
    train = _arrays()
    rows = {
        image.tobytes(): label for image, label in zip(*train.values(), strict=True)
    }
    assert len(data.train_labels) == len(rows) == 20
    for image, label in zip(data.train_images, data.train_labels, strict=True):
        assert rows[image.tobytes()] == label


def test_npz_may_hold_names_as_bytes(root):
    names = ["nord", "öst", "süd", "väst"]
    encoded = np.array([name.encode() for name in names])
    np.savez(root / "own.npz", **_arrays(), class_names=encoded)
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert data.class_names == tuple(names)


@pytest.mark.parametrize("shape", [(14, 14), (40, 40, 1), (50, 50, 3)])
def test_npz_is_resized_and_split_by_class(root, shape):
    np.savez(root / "own.npz", **_arrays(shape=shape))
    data = datasets.load("own_images", data_dir=root / "own.npz", image_size=32)
    assert data.train_images.shape == (16, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(data.eval_labels), [1, 1, 1, 1])
    assert data.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.arange(20) % 4 + 1}, r"labels must be 0\.\.C-1 .*: \[0, 4\]"),
        ({"labels": np.arange(20) % 4 - 1}, r"labels must be 0\.\.C-1 .*-1"),
        ({"labels": np.zeros(20, int)}, "C >= 2"),
        ({"labels": np.zeros(20)}, "20 integers, not float64"),
        ({"labels": np.zeros(19, int)}, r"20 integers, not int64 of shape \(19,\)"),
        ({"class_names": ["a", "b", "c"]}, r"C is 3, .*: \[3\]"),
        ({"images": np.zeros((20, 28, 28))}, "uint8 .* not float64"),
        ({"images": np.zeros((20, 784), np.uint8)}, r"shape \(20, 784\)"),
        ({"images": np.zeros((20, 28, 28, 2), np.uint8)}, r"\(20, 28, 28, 2\)"),
        ({"images": np.zeros((20, 28, 20), np.uint8)}, r"not square \(20x28"),
        ({"test_images": np.zeros((2, 28, 28), np.uint8)}, "no array 'test_labels'"),
        (
            {
                "test_images": np.zeros((2, 28, 28), np.uint8),
                "test_labels": np.array([0, 7]),
            },
            r"C is 4, .*: \[7\]",
        ),
        # All numbers up to it need not be made: it could be the largest there is.
        ({"labels": np.array([10**6, *range(19)])}, r"C is 20, .*: \[19, 1000000\]"),
        (
            {"labels": np.array([2**64 - 1, *range(19)], np.uint64)},
            rf"C is 20, .*: \[19, {2**64 - 1}\]",
        ),
        (
            {"class_names": ["a", "b", "a", "c"]},
            "class_names has 'a' 2 times; give each class a name of its own",
        ),
        (
            {"class_names": np.array([b"a", b"b", b"c", b"\xff"])},
            "class_names has bytes that are not UTF-8 .*; save the names as text",
        ),
        (
            {"images": np.array([None] * 20)},
            "images is an array of Python objects, .*; save it as numbers or text",
        ),
    ],
)
def test_npz_with_wrong_arrays_is_refused(root, change, message):
    np.savez(root / "own.npz", **{**_arrays(), **change})
    with pytest.raises(ValueError, match=message) as caught:
        datasets.load("own_images", data_dir=root / "own.npz")
    assert str(root / "own.npz") in str(caught.value)


def test_truncated_npz_is_refused(root):
    path = root / "own.npz"
    np.savez(path, **_arrays())
    os.truncate(path, 5000)
    with pytest.raises(ValueError, match=rf"{path} cannot be read"):
        datasets.load("own_images", data_dir=path)


# --- Labelled split -----------------------------------------------------------


@pytest.mark.parametrize("num_labels", [10, 40, 100])
def test_labelled_split_is_balanced_sorted_and_seeded(num_labels):
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    chosen = datasets.labelled_split(labels, num_labels, seed=1)
    assert chosen.dtype == np.int32
    assert (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(np.bincount(labels[chosen]), [num_labels // 10] * 10)
    np.random.seed(5)  # noqa: NPY002 - the global state must not matter
    again = datasets.labelled_split(labels, num_labels, seed=1)
    np.testing.assert_array_equal(again, chosen)
    other = datasets.labelled_split(labels, num_labels, seed=2)
    assert set(other) != set(chosen)
    larger = datasets.labelled_split(labels, num_labels + 30, seed=1)
    assert set(chosen) < set(larger)


def test_labelled_split_gives_the_remainder_to_drawn_classes():
    labels = np.arange(300) % 3
    drawn = set()
    for seed in range(20):
        chosen = datasets.labelled_split(labels, 100, seed=seed)
        counts = np.bincount(labels[chosen])
        assert sorted(counts) == [33, 33, 34]
        drawn.add(int(counts.argmax()))
    assert drawn == {0, 1, 2}


def test_labelled_split_can_take_every_label():
    labels = np.arange(30) % 3
    chosen = datasets.labelled_split(labels, 30, seed=0)
    np.testing.assert_array_equal(chosen, np.arange(30))


@pytest.mark.parametrize(
    ("num_labels", "message"),
    [
        (2, "number of classes, 3, and .* 25, not 2"),
        (26, "number of classes, 3, and .* 25, not 26"),
        (18, "needs 6 labels of class 2, which has 5; use at most 15"),
    ],
)
def test_labelled_split_refuses_what_is_not_there(num_labels, message):
    labels = np.repeat([0, 1, 2], [10, 10, 5])
    with pytest.raises(ValueError, match=message):
        datasets.labelled_split(labels, num_labels, seed=0)


def test_shared_images_counts_equal_images_only():
    images = _arrays(20, (28, 28, 1))["images"]
    other = _arrays(10, (28, 28, 1), seed=1)["images"]
    assert datasets.shared_images(images, other) == 0
    other[[2, 5]] = images[7]
    other[6] = images[3]
    other[6, 0, 0, 0] ^= 1
    assert datasets.shared_images(images, other) == 2


# --- Summary and imports ------------------------------------------------------


def test_summary_says_what_the_data_are(root):
    tfds_writer.write_random_set(root, "svhn_cropped", {"train": 1230, "test": 50})
    lines = _load("svhn_cropped", root).summary()
    assert lines == [
        "data set svhn_cropped, version 3.1.0: 1,230 train and 50 test images of "
        "32x32x3, 10 classes, ONLY A PART OF THE SET",
        "train class counts: " + ", ".join(f"{c}: 123" for c in range(10)),
        "test class counts: " + ", ".join(f"{c}: 5" for c in range(10)),
    ]
    tfds_writer.write_random_set(root, "cifar100", {"train": 250, "test": 100})
    lines = _load("cifar100", root).summary()
    assert lines[1] == "train class counts: 2 to 3 images of each class"


def test_neither_import_nor_reading_needs_tensorflow_or_sockets(root):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    program = f"""
import socket, sys
def blocked(*_, **__):
    raise RuntimeError("socket used")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = blocked
from kln_jax import datasets
heavy = {{"tensorflow_datasets", "sklearn", "PIL", "tqdm", "array_record"}}
print(sorted(heavy & set(sys.modules)))
data = datasets.load("mnist", data_dir={str(root)!r}, allow_partial_data=True)
print(len(data.train_labels), "tensorflow" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout == "[]\n120 False\n", result.stderr


def test_module_can_be_run(root, monkeypatch):
    result = subprocess.run(
        [sys.executable, "-m", "kln_jax.datasets", "prepare", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert "--data_dir" in result.stdout
    assert result.stderr == ""
