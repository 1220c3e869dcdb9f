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


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "absent" / "result.json"
    with pytest.raises(FileNotFoundError, match=rf"'{path}'$"):
        files.write_json(path, {})
