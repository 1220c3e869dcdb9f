"""What a run learned is looked at, stored and read back the same."""

import dataclasses

import numpy as np
import pytest

from kln_jax.analysis import learned
from kln_jax.inference import trained_network


@pytest.fixture(scope="module")
def run(out):
    (directory,) = out.glob("digits/supervised,*width=0.05,epochs=3/0")
    return learned.load_run(directory)


def test_what_is_learned_is_z_and_what_comes_back_of_evaluation_images(run):
    network, data = run
    shown = learned.look_at(network, data, num_images=50)
    prediction = trained_network.predict_in_batches(
        network.model, network.state, data.eval_images, reconstruction_reduction="sum"
    )
    for image, label, z in zip(shown.images, shown.labels, shown.z, strict=True):
        same = (data.eval_images == image).all(axis=(1, 2, 3))
        (row,) = np.flatnonzero(same)
        assert data.eval_labels[row] == label
        np.testing.assert_allclose(z, prediction.z[row], rtol=1e-4, atol=1e-4)
    assert sorted(shown.labels[shown.examples]) == sorted(set(shown.labels))
    errors = np.square(shown.images[shown.examples] / 255 - shown.reconstructions)
    rows = [
        np.flatnonzero((data.eval_images == image).all(axis=(1, 2, 3)))[0]
        for image in shown.images[shown.examples]
    ]
    np.testing.assert_allclose(
        errors.sum(axis=(1, 2, 3)), prediction.reconstruction_error[rows], rtol=1e-3
    )


def test_images_that_are_sorted_by_class_are_looked_at_all_the_same(run):
    network, data = run
    order = np.argsort(data.eval_labels)
    data = dataclasses.replace(
        data,
        eval_images=data.eval_images[order],
        eval_labels=data.eval_labels[order],
    )
    # Fewer than the images of a class.
    shown = learned.look_at(network, data, num_images=30)
    assert len(set(shown.labels)) > 5


def test_it_is_read_back_from_a_file_in_half_precision(run, tmp_path):
    shown = learned.look_at(*run, num_images=50)
    learned.save_arrays(tmp_path / "a.npz.xz", learned.to_arrays(shown))
    again = learned.read(tmp_path / "a.npz.xz", shown.config)
    for name, value in shown._asdict().items():
        if name in ("z", "reconstructions"):
            value = value.astype(np.float16).astype(np.float32)
        np.testing.assert_equal(getattr(again, name), value)
    learned.save_arrays(tmp_path / "b.npz.xz", {"images": shown.images})
    with pytest.raises(ValueError, match=r"b\.npz\.xz is damaged: it has no 'labels"):
        learned.read(tmp_path / "b.npz.xz", shown.config)


def test_fewer_images_keep_the_examples_among_them(run):
    shown = learned.look_at(*run, num_images=50)
    few = shown.first(5)
    assert len(few.images) == len(few.labels) == len(few.z) == 5
    assert (few.examples < 5).all()
    assert len(few.reconstructions) == len(few.examples) == len(set(few.labels))
