import subprocess
import sys

import numpy as np
import pytest
import tfds_writer
from small_sets import SIZES, assert_equal, load_part

from kln_jax import datasets


@pytest.mark.parametrize("evaluate_on", ["test", "validation"])
def test_validation_part_is_not_trained_on_whichever_is_evaluated(root, evaluate_on):
    written = tfds_writer.write_random_set(root, "mnist", SIZES)
    images, labels = written["train"]
    data = load_part("mnist", root, validation_fraction=1 / 6, evaluate_on=evaluate_on)
    held_out = {"test": written["test"], "validation": (images[100:], labels[100:])}
    assert_equal(data, (images[:100], labels[:100]), held_out[evaluate_on])
    assert data.evaluate_on == evaluate_on
    assert f"{len(data.eval_labels)} {evaluate_on} images" in data.summary()[0]


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


def test_summary_says_what_the_data_are(root):
    tfds_writer.write_random_set(root, "svhn_cropped", {"train": 1230, "test": 50})
    lines = load_part("svhn_cropped", root).summary()
    assert lines == [
        "data set svhn_cropped, version 3.1.0: 1,230 train and 50 test images of "
        "32x32x3, 10 classes, ONLY A PART OF THE SET",
        "train class counts: " + ", ".join(f"{c}: 123" for c in range(10)),
        "test class counts: " + ", ".join(f"{c}: 5" for c in range(10)),
    ]
    tfds_writer.write_random_set(root, "cifar100", {"train": 250, "test": 100})
    lines = load_part("cifar100", root).summary()
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
