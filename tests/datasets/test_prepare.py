import importlib.util
import os
import socket
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
import tfds_writer
from small_sets import SIZES, assert_equal, files_in, load_part

from kln_jax import datasets
from kln_jax.datasets import _prepare
from kln_jax.datasets.__main__ import main


def _pretend_tensorflow(monkeypatch, is_there):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (is_there or None) if name == "tensorflow" else find_spec(name),
    )


def test_absent_set_without_tensorflow_says_what_to_run_where(root, monkeypatch):
    _pretend_tensorflow(monkeypatch, False)
    monkeypatch.setattr(_prepare, "_reaches", lambda _: pytest.fail("network used"))
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
        raise OSError("sockets are blocked")

    monkeypatch.setattr(socket, "socket", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    with pytest.raises(ValueError, match=rf"stanford\S* cannot be reached.*={root}"):
        datasets.load("svhn_cropped", data_dir=root)


def test_read_only_data_dir_says_so_before_a_download(root, monkeypatch):
    _pretend_tensorflow(monkeypatch, True)
    monkeypatch.setattr(_prepare, "_reaches", lambda _: pytest.fail("network used"))
    root.chmod(0o555)
    with pytest.raises(ValueError, match="read-only"):
        datasets.load("cifar10", data_dir=root)
    root.chmod(0o755)


def test_command_quotes_a_folder_with_a_blank(tmp_path, monkeypatch):
    _pretend_tensorflow(monkeypatch, False)
    with pytest.raises(ValueError, match=r"--data_dir='\S*/my data'"):
        datasets.load("mnist", data_dir=tmp_path / "my data")


def test_silent_server_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(_prepare, "_NETWORK_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not _prepare._reaches(f"http://127.0.0.1:{port}/")


@pytest.fixture
def fake_tensorflow(monkeypatch):
    """TensorFlow and tfds's preparation, as far as they are used."""
    hidden = []
    fake = types.ModuleType("tensorflow")
    fake.config = types.SimpleNamespace(
        set_visible_devices=lambda devices, kind: hidden.append((devices, kind))
    )
    # What tfds asks for, unless an earlier test had it look at the same types.
    fake.__version__ = "2.19.0"
    fake.dtypes = types.SimpleNamespace(DType=type("DType", (), {}))
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    _pretend_tensorflow(monkeypatch, True)
    monkeypatch.setattr(_prepare, "_reaches", lambda _: True)
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
    data = load_part("cifar100", root)
    assert_equal(data, fake_tensorflow["train"], fake_tensorflow["test"])


def test_command_line_prepares_and_says_where(root, fake_tensorflow, capsys):
    arguments = ["prepare", "svhn_cropped", f"--data_dir={root}"]
    for _ in range(2):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert out == f"svhn_cropped is prepared in {root}/svhn_cropped/3.1.0\n"
    assert len(load_part("svhn_cropped", root).train_labels) == 120


def test_failed_download_is_one_line_and_exit_status_1(
    root, fake_tensorflow, monkeypatch, capsys
):
    def failing(*_, **__):
        raise RuntimeError("checksum\nis wrong")

    monkeypatch.setattr(tfds, "builder", failing)
    with pytest.raises(SystemExit, match="1"):
        main(["prepare", "mnist", f"--data_dir={root}"])
    assert capsys.readouterr() == (
        "",
        f"python -m kln_jax.datasets prepare: error: preparing mnist in {root} failed: "
        "RuntimeError: checksum is wrong\n",
    )


def test_command_line_refuses_an_unknown_set(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "digits"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_module_can_be_run():
    result = subprocess.run(
        [sys.executable, "-m", "kln_jax.datasets", "prepare", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert "--data_dir" in result.stdout
    assert result.stderr == ""


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


def test_tfrecord_is_named_and_converted_by_the_command_named(tfrecord, monkeypatch):
    root, written, directory = tfrecord
    with pytest.raises(datasets.DatasetError) as caught:
        load_part("mnist", root)
    message = str(caught.value)
    assert f"{directory} is prepared as TFRecord" in message
    command = message.rpartition("convert it with: python -m kln_jax.datasets ")[2]
    monkeypatch.setattr(sys, "stderr", None)  # As with 2>&-: there is no bar.
    assert main(command.split()) == 0
    assert_equal(load_part("mnist", root), written["train"], written["test"])


def test_truncated_tfrecord_is_named_and_nothing_is_changed(tfrecord, capsys):
    root, _, directory = tfrecord
    path = directory / "mnist-train.tfrecord-00001-of-00002"
    os.truncate(path, path.stat().st_size - 3)
    before = files_in(root)
    with pytest.raises(SystemExit, match="1"):
        main(["prepare", "mnist", f"--data_dir={root}"])
    assert f"{path} is truncated" in capsys.readouterr().err
    assert files_in(root) == before
