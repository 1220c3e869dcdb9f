import os
import pathlib

import numpy as np
import PIL.Image
import pytest

from kln_jax import datasets


def _save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(image).save(path)


def _folder(root, classes=("ant", "bee"), part="train", n=10, side=28):
    """Images of one colour each, so that the right result is known."""
    for c, name in enumerate(classes):
        for i in range(n):
            colour = np.array([100 * c + i, 50, 200], np.uint8)
            suffix = ".png" if i % 2 else ".PNG"
            _save(
                root / part / name / f"{i:02d}{suffix}",
                np.broadcast_to(colour, (side, side, 3)),
            )


@pytest.mark.parametrize(("image_size", "channels"), [(28, 1), (32, 3)])
def test_folder_is_resized_and_split_by_class(root, image_size, channels):
    _folder(root, classes=("bee", "ant"), side=40)
    data = datasets.load("own_images", data_dir=root, image_size=image_size)
    assert data.class_names == ("ant", "bee")
    assert data.train_images.shape == (16, image_size, image_size, channels)
    np.testing.assert_array_equal(np.bincount(data.train_labels), [8, 8])
    np.testing.assert_array_equal(np.bincount(data.eval_labels), [2, 2])
    images = np.concatenate([data.train_images, data.eval_images])
    labels = np.concatenate([data.train_labels, data.eval_labels])
    assert (images == images[:, :1, :1]).all()
    if channels == 3:
        # Red is 100 c + i where "bee" was written as class 0.
        assert sorted(images[:, 0, 0, 0]) == [*range(10), *range(100, 110)]
        np.testing.assert_array_equal(labels, images[:, 0, 0, 0] < 100)
        assert (images[:, 0, 0, 1:] == [50, 200]).all()
    else:
        grey = 0.299 * (100 * (1 - labels) + 4.5) + 0.587 * 50 + 0.114 * 200
        np.testing.assert_allclose(images[:, 0, 0, 0], grey, atol=2)
    again = datasets.load("own_images", data_dir=root, image_size=image_size)
    np.testing.assert_array_equal(again.train_images, data.train_images)
    assert again.version == data.version
    held_out = datasets.load("own_images", data_dir=root, test_fraction=0.5)
    np.testing.assert_array_equal(np.bincount(held_out.eval_labels), [5, 5])


def test_a_class_without_an_image_to_train_is_named(root):
    _folder(root, classes=("ant",), n=40)
    _folder(root, classes=("bee",), n=1)
    with pytest.raises(
        datasets.DatasetError,
        match=r"class 'bee' has too few images: none is left to train, for validation_f"
        r"raction=0\.4 and, without a test part, test_fraction=0\.2 hold them out$",
    ):
        datasets.load("own_images", data_dir=root, validation_fraction=0.4)


@pytest.mark.parametrize("name", ["test", "Test", "TESTING", "val", "Validation"])
def test_a_part_to_evaluate_on_may_have_any_usual_name(root, name, caplog):
    _folder(root)
    _folder(root, classes=("bee",), part=name, n=3)
    data = datasets.load("own_images", data_dir=root, image_size=32)
    assert len(data.train_labels) == 20
    np.testing.assert_array_equal(data.eval_labels, [1, 1, 1])
    assert datasets.shared_images(data.train_images, data.eval_images) == 3
    is_test = name.lower().startswith("test")
    said = f"{root}: its 3 validation images are taken to test"
    assert caplog.text == "" if is_test else said in caplog.text


def test_a_validation_part_that_is_given_is_evaluated_on_request(root, caplog):
    _folder(root, part="Training")
    _folder(root, part="val", n=3)
    _folder(root, part="test", n=2)
    data = datasets.load("own_images", data_dir=root)
    assert (len(data.eval_labels), data.evaluate_on) == (4, "test")
    assert "its 6 validation images are not used, for evaluate_on is" in caplog.text
    caplog.clear()
    data = datasets.load("own_images", data_dir=root, evaluate_on="validation")
    assert (len(data.eval_labels), data.evaluate_on) == (6, "validation")
    assert (len(data.train_labels), caplog.text) == (20, "")
    with pytest.raises(ValueError, match=r"set validation_fraction to 0, not 0\.1"):
        datasets.load("own_images", data_dir=root, validation_fraction=0.1)


def test_a_validation_part_that_is_not_given_is_asked_for(root):
    _folder(root)
    with pytest.raises(ValueError, match=r"is 0; .* or give a validation part"):
        datasets.load("own_images", data_dir=root, evaluate_on="validation")


def test_what_is_not_used_is_named_and_what_is_held_out_instead(root, caplog):
    _folder(root, part="train")
    for name in ("extra/a.png", "train/loose.png", "train/ant/more/b.png", "a.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    (root / "train" / "ant" / "notes.txt").touch()
    data = datasets.load("own_images", data_dir=root)
    assert len(data.train_labels) == 16
    unused = "a.txt, extra, train/loose.png, train/ant/more, train/ant/notes.txt"
    assert f"{root}: not used: {unused}\n" in caplog.text
    assert "4 of its 20 training images are held out instead" in caplog.text
    for i in range(10):
        (root / f"b{i}").touch()
    datasets.load("own_images", data_dir=root)
    assert "b7, b8 and 5 more\n" in caplog.text


def test_two_folders_of_one_part_are_refused(root):
    _folder(root)
    _folder(root, part="val", n=1)
    _folder(root, part="validation", n=1)
    with pytest.raises(ValueError, match="of validation images, val and validation;"):
        datasets.load("own_images", data_dir=root)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("two\nlines", r"'two\\nlines'"), ("caf\udce9", r"'caf\\udce9'")],
)
def test_a_class_whose_name_cannot_be_shown_is_refused(name, shown, root):
    _folder(root, classes=("ant", name))
    with pytest.raises(datasets.DatasetError, match=rf"the class {shown} has a char"):
        datasets.load("own_images", data_dir=root)


def test_all_unusable_files_are_listed_by_name(root, monkeypatch):
    _folder(root)
    train = root / "train"
    content = (train / "ant" / "01.png").read_bytes()
    (train / "ant" / "broken.png").write_bytes(content[: len(content) // 2])
    (train / "ant" / "text.jpg").write_text("no image")
    (train / "ant" / ".hidden.png").write_text("not looked at")
    (train / "wasp").mkdir()
    iterdir = pathlib.Path.iterdir

    def refuse(folder):  # As for chmod 000, which does not stop root.
        if folder == root / "test" / "ant":
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    _save(train / "bee" / "wide.png", np.zeros((28, 56), np.uint8))
    _save(train / "bee" / "deep.png", np.zeros((28, 28), np.uint16))
    _save(train / "bee" / "glass.png", np.zeros((28, 28, 4), np.uint8))
    _folder(root, classes=("ant", "fly"), part="test", n=1)
    with pytest.raises(datasets.DatasetError) as caught:
        datasets.load("own_images", data_dir=root)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("8 files or folders")
    for name, reason in (
        ("train/ant/broken.png", "truncated"),
        ("train/ant/text.jpg", "cannot identify"),
        ("train/wasp", "no .png"),
        ("train/bee/wide.png", "not square (56x28"),
        ("train/bee/deep.png", "16 bits"),
        ("train/bee/glass.png", "transparent"),
        ("test/ant", "Permission denied"),
        ("test/fly", "no class of this name"),
    ):
        (line,) = [line for line in lines if f"{root / name}: " in line]
        assert reason in line
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs data_dir"),
        ({"data_dir": "absent"}, "neither a folder"),
        ({"data_dir": "~nobody.here/x"}, "^~nobody.here/x: there is no such home"),
        ({"data_dir": "."}, "no folder train"),
        ({"data_dir": ".", "image_size": 64}, "28 or 32, not 64"),
        ({"data_dir": ".", "test_fraction": 0.0}, "test_fraction must be in"),
    ],
)
def test_senseless_own_images_are_refused(root, monkeypatch, options, message):
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match=message):
        datasets.load("own_images", **options)


def test_one_class_is_refused(root):
    _folder(root, classes=("ant",))
    with pytest.raises(ValueError, match="at least two, not 1"):
        datasets.load("own_images", data_dir=root)


def _arrays(n=20, shape=(28, 28), seed=0):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.integers(0, 256, (n, *shape), np.uint8),
        "labels": np.arange(n) % 4,
    }


def test_npz_with_its_own_test_part(root):
    test = _arrays(8, seed=1)
    names = ["n", "e", "s", "w"]
    np.savez(
        root / "own.npz",
        **_arrays(),
        test_images=test["images"][..., None],
        test_labels=test["labels"],
        class_names=names,
    )
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert data.class_names == tuple(names)
    np.testing.assert_array_equal(data.eval_images[..., 0], test["images"])
    np.testing.assert_array_equal(data.eval_labels, test["labels"])
    # The training images are in another order, with their own labels.
    train = _arrays()
    rows = {
        image.tobytes(): label for image, label in zip(*train.values(), strict=True)
    }
    assert len(data.train_labels) == len(rows) == 20
    for image, label in zip(data.train_images, data.train_labels, strict=True):
        assert rows[image.tobytes()] == label


@pytest.mark.parametrize(
    "names",
    [
        "images labels test_images test_labels class_names",
        "train_images train_labels val_images val_labels classes",
        "images_train labels_train images_test labels_test names",
        "x_train y_train X_test y_test label_names",
        "Image Label valid_image valid_label Classes",
    ],
)
def test_arrays_may_have_any_usual_name(root, names):
    train, test = _arrays(), _arrays(8, seed=1)
    arrays = *train.values(), *test.values(), ["n", "e", "s", "w"]
    np.savez(root / "own.npz", **dict(zip(names.split(), arrays, strict=True)))
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert len(data.train_labels) == 20
    assert data.class_names == ("n", "e", "s", "w")
    np.testing.assert_array_equal(data.eval_images[..., 0], test["images"])
    np.testing.assert_array_equal(data.eval_labels, test["labels"])


def test_arrays_that_are_not_used_are_named_and_not_read(root, caplog):
    unused = {"extra_images": np.zeros(3), "meta": np.array([None])}
    np.savez(root / "own.npz", **_arrays(), **unused)
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert len(data.train_labels) == 16
    assert f"{root / 'own.npz'}: not used: extra_images, meta\n" in caplog.text
    assert "4 of its 20 training images are held out instead" in caplog.text


def test_npz_may_hold_names_as_bytes(root):
    names = ["nord", "öst", "süd", "väst"]
    encoded = np.array([name.encode() for name in names])
    np.savez(root / "own.npz", **_arrays(), class_names=encoded)
    data = datasets.load("own_images", data_dir=root / "own.npz")
    assert data.class_names == tuple(names)


@pytest.mark.parametrize("shape", [(14, 14), (40, 40, 1), (50, 50, 3)])
def test_npz_is_resized_and_split_by_class(root, shape):
    np.savez(root / "own.npz", **_arrays(shape=shape))
    data = datasets.load("own_images", data_dir=root / "own.npz", image_size=32)
    assert data.train_images.shape == (16, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(data.eval_labels), [1, 1, 1, 1])
    assert data.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.arange(20) % 4 + 1}, r"labels must be 0\.\.C-1 .*: \[0, 4\]"),
        ({"labels": np.arange(20) % 4 - 1}, r"labels must be 0\.\.C-1 .*-1"),
        ({"labels": np.zeros(20, int)}, "C >= 2"),
        ({"labels": np.zeros(20)}, "20 integers, not float64"),
        ({"labels": np.zeros(19, int)}, r"20 integers, not int64 of shape \(19,\)"),
        ({"class_names": ["a", "b", "c"]}, r"C is 3, .*: \[3\]"),
        ({"images": np.zeros((20, 28, 28))}, "uint8 .* not float64"),
        ({"images": np.zeros((20, 784), np.uint8)}, r"shape \(20, 784\)"),
        ({"images": np.zeros((20, 28, 28, 2), np.uint8)}, r"\(20, 28, 28, 2\)"),
        ({"images": np.zeros((20, 28, 20), np.uint8)}, r"not square \(20x28"),
        ({"test_images": np.zeros((2, 28, 28), np.uint8)}, "no array 'test_labels'"),
        (
            {
                "test_images": np.zeros((2, 28, 28), np.uint8),
                "test_labels": np.array([0, 7]),
            },
            r"C is 4, .*: \[7\]",
        ),
        ({"train_images": np.zeros(3)}, "has images and train_images, which mean"),
        (
            {
                "val_images": np.zeros((1, 28, 28), np.uint8),
                "val_labels": np.array([4]),
            },
            r"C is 4, .*: \[4\]",
        ),
        ({"val_images": np.zeros((1, 28, 28))}, "no array 'validation_labels'; it has"),
        # All numbers up to it need not be made: it could be the largest there is.
        ({"labels": np.array([10**6, *range(19)])}, r"C is 20, .*: \[19, 1000000\]"),
        (
            {"labels": np.array([2**64 - 1, *range(19)], np.uint64)},
            rf"C is 20, .*: \[19, {2**64 - 1}\]",
        ),
        (
            {"class_names": ["a", "b", "a", "c"]},
            "class_names has 'a' 2 times; give each class a name of its own",
        ),
        (
            {"class_names": np.array([b"a", b"b", b"c", b"\xff"])},
            "class_names has bytes that are not UTF-8 .*; save the names as text",
        ),
        (
            {"images": np.array([None] * 20)},
            "images is an array of Python objects, .*; save it as numbers or text",
        ),
    ],
)
def test_npz_with_wrong_arrays_is_refused(root, change, message):
    np.savez(root / "own.npz", **{**_arrays(), **change})
    with pytest.raises(ValueError, match=message) as caught:
        datasets.load("own_images", data_dir=root / "own.npz")
    assert str(root / "own.npz") in str(caught.value)


def test_truncated_npz_is_refused(root):
    path = root / "own.npz"
    np.savez(path, **_arrays())
    os.truncate(path, 5000)
    with pytest.raises(ValueError, match=rf"{path} cannot be read"):
        datasets.load("own_images", data_dir=path)
