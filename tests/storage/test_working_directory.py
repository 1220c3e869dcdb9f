"""Working directories: which a run may use, and what is said of the others."""

import json

import numpy as np
import pytest

from configs import digits, own_images
from kln_jax import datasets
from kln_jax.datasets import Dataset
from kln_jax.storage import working_directory
from kln_jax.training import experiment


def _config(**changes):
    config = digits.get_config()
    config.update(batch_size=40, **changes)  # It divides over the eight devices.
    return config


@pytest.fixture
def workdir(tmp_path):
    images, labels = np.zeros((2, 28, 28, 1), np.uint8), np.arange(2, dtype=np.int32)
    data = Dataset("digits", "1", images, labels, images, labels, ("0", "1"), "test")
    working_directory.prepare(tmp_path / "run", _config(), data, labels)
    return tmp_path / "run"


def test_a_workdir_of_another_config_is_refused(workdir):
    with pytest.raises(ValueError, match=r"ridge \(0.1 there, 0.2 here\)"):
        experiment.train_and_evaluate(_config(ridge=0.2), str(workdir))


def test_what_a_run_was_not_allowed_it_may_be_but_not_the_reverse(workdir):
    working_directory.check(workdir, _config(allow_partial_data=True))
    allowed = json.loads((workdir / "config.json").read_text())
    allowed["allow_partial_data"] = True
    (workdir / "config.json").write_text(json.dumps(allowed))
    with pytest.raises(ValueError, match=r"allow_partial_data \(True there, False he"):
        working_directory.check(workdir, _config())


def test_a_finished_run_is_not_that_of_other_data(tmp_path, capsys):
    config = own_images.get_config()
    config.update(batch_size=8)
    workdir = tmp_path / "run"
    for i, name in enumerate(("cats", "planes")):
        config.data_dir = str(tmp_path / f"{name}.npz")
        images = np.full((40, 28, 28), i, np.uint8)
        np.savez(config.data_dir, images=images, labels=np.arange(40) % 2)
        if name == "cats":
            data = datasets.load("own_images", data_dir=config.data_dir)
            working_directory.prepare(
                workdir, config, data, np.arange(32, dtype=np.int32)
            )
            result = {"test_error_percent": 1.0, "num_test_images": 8, "epochs": 1}
            result |= {"wall_seconds": 1.0}
            (workdir / "result.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match=r"a run on other data: version \(crc32"):
        experiment.train_and_evaluate(config, str(workdir))
    config.data_dir = str(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match=r"absent\.npz is neither a folder"):
        experiment.train_and_evaluate(config, str(workdir))
    # The same images in another place, and none in that which they had.
    (tmp_path / "cats.npz").rename(tmp_path / "moved.npz")
    for name in ("moved", "cats"):
        config.data_dir = str(tmp_path / f"{name}.npz")
        experiment.train_and_evaluate(config, str(workdir))
        assert "This run is finished" in capsys.readouterr().out


def test_processes_that_read_other_data_than_the_first_are_named(monkeypatch):
    images, labels = np.zeros((2, 28, 28, 1), np.uint8), np.arange(2)
    data = Dataset("own_images", "crc32 1", images, labels, images, labels, ("0", "1"))
    working_directory.check_everywhere(data)

    def gathered(numbers):
        (own,) = numbers
        assert 0 <= own < 2**31
        return np.array([[own], [own], [own + 1]])

    monkeypatch.setattr(working_directory.parallel, "gather", gathered)
    with pytest.raises(ValueError, match=r"^Processes \[2\] read other data than pro"):
        working_directory.check_everywhere(data)


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    path = tmp_path / "data.npz"
    rng = np.random.default_rng(0)

    def store(count):
        images = rng.integers(0, 256, (count, 28, 28, 1)).astype(np.uint8)
        np.savez(path, images=images, labels=np.arange(count) % 2)

    config = own_images.get_config("semi")
    config.update(data_dir=str(path), batch_size=8, num_labels=4)
    store(40)
    data = datasets.load("own_images", data_dir=path)
    workdir = tmp_path / "run"
    working_directory.check_data(workdir, data)
    working_directory.prepare(workdir, config, data, np.arange(4, dtype=np.int32))
    working_directory.check_data(workdir, data)
    before = (workdir / "data.json").read_bytes()
    for count, named in ((40, r"version \(crc32"), (50, r"num_train_images \(")):
        store(count)
        with pytest.raises(ValueError, match=rf"run on other data: .*{named}"):
            experiment.train_and_evaluate(config, str(workdir))
        assert (workdir / "data.json").read_bytes() == before
    # Earlier versions of kln_jax wrote these two alone.
    about = json.loads(before)
    about = {name: about[name] for name in ("class_names", "image_shape")}
    (workdir / "data.json").write_text(json.dumps(about))
    working_directory.check_data(workdir, datasets.load("own_images", data_dir=path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json is damaged: .* take another working dir"),
        ("result.json", '{"a', r"result\.json is damaged: .* take another"),
        ("config.json", "[]", r"config\.json is damaged: it holds no JSON object"),
        ("config.json", None, "holds a run without config.json"),
    ],
)
def test_a_damaged_workdir_is_refused_by_the_name_of_the_file(
    name, content, message, workdir
):
    (workdir / "result.json").write_text("{}")
    if content is None:
        (workdir / name).unlink()
    else:
        (workdir / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        experiment.train_and_evaluate(_config(), str(workdir))


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--workdir=.*file is a file"):
        experiment.train_and_evaluate(_config(), str(tmp_path / "file"))


def test_a_workdir_is_of_one_process_at_a_time(tmp_path):
    config, data = _config(), datasets.load("digits")
    rows = np.arange(len(data.train_labels), dtype=np.int32)
    working_directory.prepare(tmp_path, config, data, rows)
    for _ in range(2):  # Let go of by the first.
        with (
            working_directory.held(tmp_path),
            pytest.raises(ValueError, match=r"Another process trains in .*--workdir"),
        ):
            experiment.train_and_evaluate(config, str(tmp_path))


def test_without_a_workdir_a_fresh_one_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = set()
    for _ in range(2):
        directory = working_directory.fresh(_config())
        directory.mkdir(parents=True)
        names.add(directory.name)
    assert len(names) == 2
    assert all(name.startswith("digits-supervised-") for name in names)


def test_the_labelled_images_do_not_depend_on_the_seed_of_the_model():
    labels = np.arange(200) % 10

    def rows(**changes):
        config = _config(num_labels=20, **changes)
        return working_directory.labelled_rows(None, config, labels)

    np.testing.assert_array_equal(rows(seed=1), rows(seed=2))
    assert (rows(split_seed=1) != rows(split_seed=2)).any()


@pytest.mark.parametrize("key", digits.get_config().keys())
def test_a_run_without_a_key_is_said_to_be_of_another_version(key, workdir):
    written = json.loads((workdir / "config.json").read_text())
    del written[key]
    (workdir / "config.json").write_text(json.dumps(written))
    message = rf"^config\.json of .* written by another version .* has no {key}\.$"
    with pytest.raises(ValueError, match=message):
        working_directory.read_config(workdir)
