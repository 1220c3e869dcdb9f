"""Files of a run, whole or not at all."""

import json

import pytest

from kln_jax import files


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": list(range(100))})
    files.write_json(path, {"a": (1,)})
    assert json.loads(path.read_text()) == {"a": [1]}
    assert list(tmp_path.iterdir()) == [path]


def test_differences_are_named_with_both_values_in_order():
    there = {"c": 1, "b": (2,), "a": 3, "same": 4}
    here = {"d": 5, "b": (6,), "a": 3.5, "same": 4}
    assert files.differences(there, here) == (
        "a (3 there, 3.5 here), b ((2,) there, (6,) here), c (1 there, absent here), "
        "d (absent there, 5 here)"
    )
    assert files.differences(there, dict(there)) == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "absent" / "result.json"
    with pytest.raises(FileNotFoundError, match=rf"'{path}'$"):
        files.write_json(path, {})
