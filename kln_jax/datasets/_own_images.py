"""The user's images: a folder with one of each class, or an .npz file."""

import collections
import logging
import os
import pathlib

import numpy as np

from kln_jax.datasets._dataset import Dataset, DatasetError, Part, version_of
from kln_jax.datasets._image_files import fitted, image_files, read_image
from kln_jax.datasets._paths import expanded
from kln_jax.datasets._split import stratified_order
from kln_jax.storage.whole_files import one_line

_log = logging.getLogger(__name__)


def load_own_images(
    data_dir: str | os.PathLike[str] | None, image_size: int, test_fraction: float
) -> Dataset:
    """Loads them as `kln_jax.datasets.load` says."""
    if data_dir is None:
        raise DatasetError(
            "own_images needs data_dir: a folder with train/CLASS/*.png or an .npz file"
        )
    if not 0 < test_fraction < 1:
        raise DatasetError(f"test_fraction must be in (0, 1), not {test_fraction}")
    path = expanded(data_dir)
    shape = (image_size, image_size, 1 if image_size == 28 else 3)
    if path.is_dir():
        train, test, class_names = _read_folder(path, shape)
    elif path.is_file() and path.suffix == ".npz":
        train, test, class_names = _read_npz(path, shape)
    else:
        raise DatasetError(
            f"data_dir {path} is neither a folder with train/CLASS/*.png nor an "
            "existing .npz file"
        )
    for name in class_names:
        if not name.isprintable():  # Neither logs nor pages could hold it.
            raise DatasetError(
                f"{path}: the class {name!a} has a character that cannot be shown; "
                "give it a name of printable text"
            )
    images, labels = train
    order = stratified_order(labels)
    images, labels = images[order], labels[order]
    if test is None:
        num_test = round(test_fraction * len(labels))
        if not 0 < num_test < len(labels):
            raise DatasetError(
                f"test_fraction {test_fraction} of {len(labels)} images leaves one "
                "part empty; give more images or a test part"
            )
        test = images[-num_test:], labels[-num_test:]
        images, labels = images[:-num_test], labels[:-num_test]
    return Dataset(
        name="own_images",
        version=version_of(images, labels, *test),
        train_images=images,
        train_labels=labels,
        eval_images=test[0],
        eval_labels=test[1],
        class_names=class_names,
    )


def _read_folder(
    root: pathlib.Path, shape: tuple[int, int, int]
) -> tuple[Part, Part | None, tuple[str, ...]]:
    def class_folders(part: str) -> list[pathlib.Path]:
        return sorted(
            folder
            for folder in (root / part).iterdir()
            if folder.is_dir() and not folder.name.startswith(".")
        )

    problems: list[str] = []

    def read(part: str, class_names: tuple[str, ...]) -> Part:
        images: list[np.ndarray] = []
        labels: list[int] = []
        ignored = 0
        for folder in class_folders(part):
            if folder.name not in class_names:
                problems.append(f"{folder}: no class of this name in {root / 'train'}")
                continue
            paths, others, unreadable = image_files(folder)
            ignored += len(others)
            problems.extend(f"{e.filename}: {e.strerror}" for e in unreadable)
            for path in paths:
                try:
                    images.append(read_image(path, shape))
                # What a damaged file raises depends on its format and damage.
                except Exception as error:
                    problems.append(f"{path}: {one_line(error)}")
                labels.append(class_names.index(folder.name))
            if not paths and not unreadable and part == "train":
                problems.append(f"{folder}: holds no .png, .jpg or .jpeg file")
        if ignored:
            _log.warning(
                "%s: ignored %d files or folders that are no .png, .jpg or .jpeg files",
                root / part,
                ignored,
            )
        if not labels and not problems:
            problems.append(f"{root / part}: holds no images as {part}/CLASS/*.png")
        if problems:
            return np.empty(0), np.empty(0)
        return np.stack(images), np.array(labels, np.int32)

    if not (root / "train").is_dir():
        raise DatasetError(f"{root} has no folder train with one folder per class")
    class_names = tuple(folder.name for folder in class_folders("train"))
    if len(class_names) < 2:
        raise DatasetError(
            f"{root / 'train'} needs one folder per class and at least two, "
            f"not {len(class_names)}"
        )
    train = read("train", class_names)
    test = read("test", class_names) if (root / "test").is_dir() else None
    if problems:
        raise DatasetError(
            f"{len(problems)} files or folders of {root} cannot be used:\n  "
            + "\n  ".join(problems)
        )
    return train, test, class_names


def _read_npz(
    path: pathlib.Path, shape: tuple[int, int, int]
) -> tuple[Part, Part | None, tuple[str, ...]]:
    import PIL.Image

    arrays: dict[str, np.ndarray] = {}
    key = ""
    try:
        # Opened here: np.load leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            for key in stored.files:
                arrays[key] = stored[key]
    except Exception as error:
        # NumPy names an option that its caller has, but the user has not.
        if key and "allow_pickle" in str(error):
            raise DatasetError(
                f"{path}: {key} is an array of Python objects, which are not read; "
                "save it as numbers or text, with a dtype such as np.uint8 or str"
            ) from error
        raise DatasetError(f"{path} cannot be read: {one_line(error)}") from error

    def part(prefix: str) -> Part:
        for key in (f"{prefix}images", f"{prefix}labels"):
            if key not in arrays:
                raise DatasetError(
                    f"{path} has no array {key!r}; it has {sorted(arrays)}"
                )
        images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
        if images.ndim == 4 and images.shape[-1] == 1:
            images = images[..., 0]
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or (images.ndim == 4 and images.shape[-1] != 3)
            or images.size == 0
        ):
            raise DatasetError(
                f"{path}: {prefix}images must be uint8 of shape (n, side, side), "
                f"(n, side, side, 1) or (n, side, side, 3), not {images.dtype} of "
                f"shape {images.shape}"
            )
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            raise DatasetError(
                f"{path}: {prefix}labels must be {len(images)} integers, not "
                f"{labels.dtype} of shape {labels.shape}"
            )
        try:
            resized = np.stack(
                [fitted(PIL.Image.fromarray(image), shape) for image in images]
            )
        except ValueError as error:
            raise DatasetError(f"{path}: an image {error}") from error
        return resized, labels

    train = part("")
    with_test = "test_images" in arrays or "test_labels" in arrays
    test = part("test_") if with_test else None
    found = set(train[1].tolist())
    if "class_names" in arrays:
        class_names = _class_names(path, arrays["class_names"].ravel())
    else:
        # Not up to the largest label, which may be one of billions.
        class_names = tuple(map(str, range(len(found))))
    wrong = set(range(len(class_names))) ^ found
    if test is not None:
        wrong |= set(test[1].tolist()) - set(range(len(class_names)))
    if wrong or len(class_names) < 2:
        raise DatasetError(
            f"{path}: labels must be 0..C-1 with every class among the training "
            f"labels and C >= 2; C is {len(class_names)}, wrong or missing: "
            f"{sorted(wrong)[:10]}"
        )
    train = train[0], train[1].astype(np.int32)
    if test is not None:
        test = test[0], test[1].astype(np.int32)
    return train, test, class_names


def _class_names(path: pathlib.Path, names: np.ndarray) -> tuple[str, ...]:
    """Returns the names of an .npz file as text, if no two are the same."""
    try:
        class_names = tuple(
            name.decode() if isinstance(name, bytes) else str(name) for name in names
        )
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: class_names has bytes that are not UTF-8 ({one_line(error)}); "
            "save the names as text"
        ) from error
    for name, count in collections.Counter(class_names).items():
        if count > 1:
            raise DatasetError(
                f"{path}: class_names has {name!r} {count} times; give each class a "
                "name of its own"
            )
    return class_names
