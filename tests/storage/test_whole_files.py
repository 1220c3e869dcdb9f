"""Files of a run, whole or not at all."""

import json
import os
import stat

import pytest

from kln_jax.storage import whole_files


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    whole_files.write_json(path, {"a": list(range(100))})
    whole_files.write_json(path, {"a": (1,)})
    assert json.loads(path.read_text()) == {"a": [1]}
    assert list(tmp_path.iterdir()) == [path]


def test_differences_are_named_with_both_values_in_order():
    there = {"c": 1, "b": (2,), "a": 3, "same": 4}
    here = {"d": 5, "b": (6,), "a": 3.5, "same": 4}
    assert whole_files.differences(there, here) == (
        "a (3 there, 3.5 here), b ((2,) there, (6,) here), c (1 there, absent here), "
        "d (absent there, 5 here)"
    )
    assert whole_files.differences(there, dict(there)) == ""


@pytest.mark.parametrize("place", ["absent", "file"])
def test_a_file_that_cannot_be_written_is_named(place, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / place / "result.json"
    with pytest.raises(OSError, match=rf"'{path}'$"):
        whole_files.write_json(path, {})


def test_a_link_stays_one(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link"
    link.symlink_to(path.name)
    whole_files.write_json(link, {})
    assert link.is_symlink()
    assert whole_files.read_json(path) == {}


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    path, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(path)
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(OSError, match=rf"Not a regular file, .*: '{name}'$"):
            whole_files.write_json(name, {})
    assert stat.S_ISFIFO(path.stat().st_mode)
