import errno
import json
import os
import tracemalloc

import numpy as np
import pytest
import tfds_writer
from small_sets import SIZES, assert_equal, files_in, load_part

from kln_jax import datasets
from kln_jax.datasets import _cache, _tfds


@pytest.fixture
def cached(root):
    """A set and its cache: (root, what was written, the cache's folder)."""
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    load_part("mnist", root)
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
    before = files_in(cache)
    (path,) = cache.glob(pattern)
    damage(path)
    data = load_part("mnist", root)
    assert_equal(data, written["train"], written["test"])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "is damaged" in caplog.text
    assert str(cache) in caplog.text
    assert files_in(cache) == before
    no_decoding()
    load_part("mnist", root)


def test_arrays_of_another_shape_are_not_taken_from_the_cache(cached, caplog):
    root, written, cache = cached
    (path,) = cache.glob("*train*-images.npy")
    np.save(path, written["train"][0][:, :14])
    (record,) = cache.glob("*train*.json")
    checksums = json.loads(record.read_text())
    checksums["images"] = _cache._checksum(path)
    record.write_text(json.dumps(checksums))
    assert_equal(load_part("mnist", root), written["train"], written["test"])
    assert "shape (120, 14, 28, 1)" in caplog.text


def test_unfinished_write_leaves_nothing_and_is_no_damage(root, monkeypatch, caplog):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    chunks = _tfds._Reader.chunks

    def interrupted(self, split):
        yield from chunks(self, split)
        raise KeyboardInterrupt

    monkeypatch.setattr(_tfds._Reader, "chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_part("mnist", root)
    assert list((root / ".kln_jax_cache").iterdir()) == []
    monkeypatch.setattr(_tfds._Reader, "chunks", chunks)
    assert_equal(load_part("mnist", root), written["train"], written["test"])
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
        data = load_part("mnist", root, cache_dir=tmp_path / "cache")
        assert_equal(data, written[seed]["train"], written[seed]["test"])
        assert not (root / ".kln_jax_cache").exists()
    assert caplog.text == ""


def test_read_only_data_dir_is_cached_in_the_users_cache(
    root, tmp_path, no_decoding, caplog
):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    root.chmod(0o555)
    load_part("mnist", root)
    assert [path.name for path in root.iterdir()] == ["mnist"]
    assert len(list((tmp_path / "user_cache" / "kln_jax").iterdir())) == 6
    no_decoding()
    assert_equal(load_part("mnist", root), written["train"], written["test"])
    assert caplog.text == ""
    root.chmod(0o755)


def test_without_a_place_for_the_cache_it_goes_on_with_a_warning(
    root, tmp_path, caplog
):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    blocked = tmp_path / "blocked"
    blocked.mkdir(mode=0o555)
    data = load_part("mnist", root, cache_dir=blocked / "cache")
    assert_equal(data, written["train"], written["test"])
    assert "not cached" in caplog.text
    assert not (blocked / "cache").exists()


def test_a_home_directory_that_is_not_there_is_needed_only_where_it_is_named(
    root, monkeypatch
):
    tfds_writer.write_random_set(root, "mnist", SIZES)
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody.here/.cache")
    load_part("mnist", root)
    for options in ({"root": "~nobody.here/x"}, {"root": root, "cache_dir": "~no.one"}):
        with pytest.raises(datasets.DatasetError, match="there is no such home"):
            load_part("mnist", **options)


def test_full_disk_goes_on_with_a_warning(root, tmp_path, monkeypatch, caplog):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_cache, "_checksum", full)
    data = load_part("mnist", root)
    assert_equal(data, written["train"], written["test"])
    assert f"cannot cache images in {root / '.kln_jax_cache'}" in caplog.text
    assert "No space left" in caplog.text
    assert files_in(root / ".kln_jax_cache") == {}
    assert files_in(tmp_path / "user_cache") == {}


@pytest.mark.parametrize("with_cache", [True, False])
def test_loading_takes_less_than_half_more_than_the_decoded_images(
    root, tmp_path, with_cache, monkeypatch
):
    monkeypatch.setattr(_tfds, "_DECODE_CHUNK", 100)
    n = 1600
    part = np.zeros((n, 32, 32, 3), np.uint8), np.arange(n) % 10
    few = part[0][:10], part[1][:10]
    tfds_writer.write_set(root, "cifar10", {"train": part, "test": few})
    nowhere = tmp_path / "blocked"
    nowhere.mkdir(mode=0o555)
    # The libraries' own start is not counted.
    load_part("cifar10", root, cache_dir=nowhere)
    tracemalloc.start()
    load_part("cifar10", root, cache_dir=None if with_cache else nowhere)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Mapped files are not counted: their pages can be dropped.
    assert peak < (0.5 if with_cache else 1.5) * part[0].nbytes
