import numpy as np
import pytest

from kln_jax import datasets


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


def test_labelled_split_names_the_class_that_is_short():
    labels = np.repeat([0, 1, 2], [10, 10, 5])
    with pytest.raises(ValueError, match="needs 6 labels of class 'cat', which has 5"):
        datasets.labelled_split(labels, 18, seed=0, class_names=["ant", "bee", "cat"])


def test_shared_images_counts_equal_images_only():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 28, 28, 1), np.uint8)
    other = rng.integers(0, 256, (10, 28, 28, 1), np.uint8)
    assert datasets.shared_images(images, other) == 0
    other[[2, 5]] = images[7]
    other[6] = images[3]
    other[6, 0, 0, 0] ^= 1
    assert datasets.shared_images(images, other) == 2
