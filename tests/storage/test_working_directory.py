"""Working directories: which a run may use, and what is said of the others."""

import json
import pathlib

import numpy as np
import pytest

from kln_jax.storage import working_directory
from kln_jax.storage.whole_files import DamagedError

CONFIG = {"dataset": "digits", "ridge": 0.1, "data_dir": "a", "bandwidths": [1.0, 3.0]}
ABOUT = {"class_names": ["cat", "dog"], "version": "crc32 1", "partial": False}


@pytest.fixture
def workdir(tmp_path):
    working_directory.prepare(tmp_path, CONFIG, ABOUT, np.array([3, 1], np.int32))
    return tmp_path


def test_a_run_is_known_by_its_configuration(workdir):
    assert working_directory.read_config(workdir) == CONFIG
    allowed = {"data_dir"}
    elsewhere = CONFIG | {"data_dir": "b"}
    working_directory.check_config(workdir, elsewhere, may_differ=allowed)
    with pytest.raises(ValueError, match=r"figuration: data_dir \(a there, b here\)"):
        working_directory.check_config(workdir, elsewhere, may_differ=())
    other = elsewhere | {"ridge": 0.2, "seed": 1}
    with pytest.raises(ValueError, match=r"ridge \(0.1 there, 0.2 here\), seed \(abs"):
        working_directory.check_config(workdir, other, may_differ=allowed)
    assert working_directory.reads_elsewhere(workdir, "b")
    assert not working_directory.reads_elsewhere(workdir, "a")


def test_a_directory_without_a_run_may_be_used_and_not_read(tmp_path):
    working_directory.check_config(tmp_path, CONFIG, may_differ=())
    working_directory.check_data(tmp_path, ABOUT)
    assert not working_directory.reads_elsewhere(tmp_path, "a")
    assert working_directory.stored_rows(tmp_path, 2, 4) is None
    with pytest.raises(ValueError, match=r"holds no run: config\.json is missing"):
        working_directory.read_config(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "checkpoints"])
def test_a_run_that_nothing_describes_is_refused(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"holds a run without config\.json"):
        working_directory.check_config(tmp_path, CONFIG, may_differ=())


@pytest.mark.parametrize(
    ("content", "why"), [("{", "Expecting"), ("[]", "it holds no JSON object")]
)
def test_a_damaged_description_is_named(content, why, workdir):
    for name in ("config.json", "data.json"):
        (workdir / name).write_text(content)
    for check in (
        lambda: working_directory.read_config(workdir),
        lambda: working_directory.check_config(workdir, CONFIG, may_differ=()),
        lambda: working_directory.check_data(workdir, ABOUT),
    ):
        with pytest.raises(DamagedError, match=rf"\.json is damaged: {why}.* another "):
            check()


def test_a_run_is_not_resumed_on_other_data(workdir):
    working_directory.check_data(workdir, ABOUT)
    with pytest.raises(ValueError, match=r"on other data: version \(crc32 1 there, "):
        working_directory.check_data(workdir, ABOUT | {"version": "crc32 2"})
    # Earlier versions of kln_jax wrote less, and later ones may write more.
    about = {"class_names": ABOUT["class_names"], "size": 3}
    (workdir / "data.json").write_text(json.dumps(about))
    working_directory.check_data(workdir, ABOUT)


def test_the_rows_of_the_first_start_stay(workdir):
    path = workdir / "labelled.npy"
    np.save(path, np.array([0, 2]))
    working_directory.prepare(workdir, CONFIG, ABOUT, np.array([3, 1], np.int32))
    rows = working_directory.stored_rows(workdir, 2, 4)
    assert (rows.dtype, rows.tolist()) == (np.int32, [0, 2])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b"no array", "cannot be read"),
        (np.array([{}, {}]), "cannot be read"),  # Which would be unpickled.
        (np.array([0.0, 1.0]), "must hold 2 integers, .* not float64"),
        (np.array([0, 1, 2]), r"must hold 2 integers, .* of shape \(3,\)"),
        (np.array([0, 4]), r"2 different rows of 0\.\.3, .* has 2 from 0 to 4"),
        (np.array([-1, 0]), "has 2 from -1 to 0"),
        (np.array([1, 1]), "has 1 from 1 to 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message, tmp_path):
    path = tmp_path / "labelled.npy"
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        np.save(path, rows, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"labelled\.npy .*{message}.* Remove the"):
        working_directory.stored_rows(tmp_path, 2, 4)


def test_a_run_that_ends_well_has_not_diverged(workdir):
    working_directory.write_failure(workdir, "loss is nan")
    assert json.loads((workdir / "diverged.json").read_text()) == "loss is nan"
    working_directory.write_result(workdir, {"epochs": 2})
    assert json.loads((workdir / "result.json").read_text()) == {"epochs": 2}
    assert not (workdir / "diverged.json").exists()


def test_a_directory_is_held_by_one_at_a_time(tmp_path):
    """A lock is that of an open file, also of two in one process."""
    message = f"Another process trains in {tmp_path}. Wait "
    with working_directory.held(tmp_path):
        with pytest.raises(ValueError, match=message), working_directory.held(tmp_path):
            pass
        assert list(tmp_path.iterdir())
    with working_directory.held(tmp_path):
        pass


def test_a_directory_is_made_and_is_gone_if_nothing_was_written(tmp_path):
    directory = tmp_path / "a" / "b"
    with working_directory.held(directory):
        assert directory.is_dir()
    assert not list(tmp_path.iterdir())
    with working_directory.held(directory):
        (directory / "a file").touch()
    assert (directory / "a file").exists()
    (empty := tmp_path / "empty").mkdir()
    with working_directory.held(empty):
        pass
    assert empty.is_dir()  # It is the user's own.


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match=r"--workdir=.*file is a file"),
        working_directory.held(tmp_path / "file"),
    ):
        pass


def test_fresh_directories_have_different_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(2):
        paths.append(working_directory.fresh("digits-semi"))
        assert paths[-1].parent == pathlib.Path("runs")
        assert paths[-1].name.startswith("digits-semi-")
        with working_directory.held(paths[-1]):
            (paths[-1] / "a file").touch()
    assert sorted(pathlib.Path("runs").iterdir()) == sorted(set(paths))
