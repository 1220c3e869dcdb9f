"""The user's images: a folder with one of each class, or an .npz file."""

import collections
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kln_jax.datasets._dataset import Dataset, DatasetError, Part, version_of
from kln_jax.datasets._image_files import fitted, image_files, read_image
from kln_jax.datasets._paths import expanded
from kln_jax.datasets._split import stratified_order
from kln_jax.storage.whole_files import one_line

_log = logging.getLogger(__name__)

# Names of folders and in keys of arrays, in any case.
_PART_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "val", "valid"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_KIND_OF = {
    **dict.fromkeys(("images", "image", "x"), "images"),
    **dict.fromkeys(("labels", "label", "y"), "labels"),
}
_CLASS_NAMES = ("class_names", "classes", "label_names", "names")
# Of what is not used, so many are named.
_NAMED = 10


class _Parts(NamedTuple):
    """What is in a folder or file: parts by name, among them "train"."""

    parts: dict[str, Part]
    class_names: tuple[str, ...]
    unused: list[str]


def load_own_images(
    data_dir: str | os.PathLike[str] | None,
    image_size: int,
    test_fraction: float,
    evaluate_on: str,
) -> tuple[Dataset, Part | None]:
    """Loads them as `kln_jax.datasets.load` says.

    Returns:
      The data set, whose evaluation images are those to test on, and the images to
      validate on, if they are given.
    """
    if data_dir is None:
        raise DatasetError(
            "own_images needs data_dir: a folder with train/CLASS/*.png or an .npz file"
        )
    if not 0 < test_fraction < 1:
        raise DatasetError(f"test_fraction must be in (0, 1), not {test_fraction}")
    path = expanded(data_dir)
    shape = (image_size, image_size, 1 if image_size == 28 else 3)
    if path.is_dir():
        found = _read_folder(path, shape)
    elif path.is_file() and path.suffix == ".npz":
        found = _read_npz(path, shape)
    else:
        raise DatasetError(
            f"data_dir {path} is neither a folder with train/CLASS/*.png nor an "
            "existing .npz file"
        )
    for name in found.class_names:
        if not name.isprintable():  # Neither logs nor pages could hold it.
            raise DatasetError(
                f"{path}: the class {name!a} has a character that cannot be shown; "
                "give it a name of printable text"
            )
    if found.unused:
        more = len(found.unused) - _NAMED
        _log.warning(
            "%s: not used: %s%s",
            path,
            ", ".join(found.unused[:_NAMED]),
            f" and {more} more" if more > 0 else "",
        )
    images, labels = found.parts["train"]
    order = stratified_order(labels)
    images, labels = images[order], labels[order]
    validation, test = (found.parts.get(part) for part in ("validation", "test"))
    if validation is not None and evaluate_on == "test":
        _log.warning(
            "%s: its %d validation images are %s",
            path,
            len(validation[1]),
            "taken to test, for it has no test images"
            if test is None
            else "not used, for evaluate_on is 'test'",
        )
    test = test or validation
    if test is None:
        num_test = round(test_fraction * len(labels))
        if not 0 < num_test < len(labels):
            raise DatasetError(
                f"test_fraction {test_fraction} of {len(labels)} images leaves one "
                "part empty; give more images or a test part"
            )
        _log.log(
            logging.WARNING if found.unused else logging.INFO,
            "%s has no test images: %d of its %d training images are held out instead",
            path,
            num_test,
            len(labels),
        )
        test = images[-num_test:], labels[-num_test:]
        images, labels = images[:-num_test], labels[:-num_test]
    data = Dataset(
        name="own_images",
        version=version_of(images, labels, *test, *(validation or ())),
        train_images=images,
        train_labels=labels,
        eval_images=test[0],
        eval_labels=test[1],
        class_names=found.class_names,
    )
    return data, validation


def _read_folder(root: pathlib.Path, shape: tuple[int, int, int]) -> _Parts:
    folders, unused = _part_folders(root)
    if "train" not in folders:
        raise DatasetError(f"{root} has no folder train with one folder per class")
    problems: list[str] = []

    def class_folders(folder: pathlib.Path) -> list[pathlib.Path]:
        found = image_files(folder)
        problems.extend(f"{e.filename}: {e.strerror}" for e in found.unreadable)
        inside = [path for path in found.others if path.is_dir()]
        loose = {*found.images, *found.others}.difference(inside)
        unused.extend(str(path.relative_to(root)) for path in sorted(loose))
        return inside

    def read(part: pathlib.Path, of_classes: Sequence[pathlib.Path]) -> Part:
        images: list[np.ndarray] = []
        labels: list[int] = []
        for folder in of_classes:
            if folder.name not in class_names:
                problems.append(f"{folder}: no class of this name in {train}")
                continue
            found = image_files(folder)
            unused.extend(str(path.relative_to(root)) for path in found.others)
            problems.extend(f"{e.filename}: {e.strerror}" for e in found.unreadable)
            for path in found.images:
                try:
                    images.append(read_image(path, shape))
                # What a damaged file raises depends on its format and damage.
                except Exception as error:
                    problems.append(f"{path}: {one_line(error)}")
                labels.append(class_names.index(folder.name))
            if part == train and not (found.images or found.unreadable):
                problems.append(f"{folder}: holds no .png, .jpg or .jpeg file")
        if not labels and not problems:
            problems.append(f"{part}: holds no images as {part.name}/CLASS/*.png")
        if problems:  # They are all found before they are raised.
            return np.empty(0), np.empty(0)
        return np.stack(images), np.array(labels, np.int32)

    train = folders["train"]
    inside = {part: class_folders(folder) for part, folder in folders.items()}
    class_names = tuple(folder.name for folder in inside["train"])
    if len(class_names) < 2 and not problems:
        raise DatasetError(
            f"{train} needs one folder per class and at least two, "
            f"not {len(class_names)}"
        )
    parts = {part: read(folder, inside[part]) for part, folder in folders.items()}
    if problems:
        raise DatasetError(
            f"{len(problems)} files or folders of {root} cannot be used:\n  "
            + "\n  ".join(problems)
        )
    return _Parts(parts, class_names, unused)


def _part_folders(
    root: pathlib.Path,
) -> tuple[dict[str, pathlib.Path], list[str]]:
    """Returns the folders of the parts, and the names of what else is there."""
    folders: dict[str, pathlib.Path] = {}
    unused: list[str] = []
    for path in sorted(root.iterdir()):
        part = _PART_OF.get(path.name.lower())
        if path.name.startswith("."):
            continue
        if part is None or not path.is_dir():
            unused.append(path.name)
        elif part in folders:
            raise DatasetError(
                f"{root} has two folders of {part} images, {folders[part].name} and "
                f"{path.name}; keep one of them"
            )
        else:
            folders[part] = path
    return folders, unused


def _meaning(key: str) -> tuple[str, str] | None:
    """Returns part and kind of an array by its key, None for one that is not used."""
    if key.lower() in _CLASS_NAMES:
        return "", "class_names"
    words = key.lower().split("_")
    kinds = [_KIND_OF[word] for word in words if word in _KIND_OF]
    parts = [_PART_OF[word] for word in words if word in _PART_OF]
    if len(kinds) != 1 or len(parts) > 1 or len(words) > len(kinds) + len(parts):
        return None
    return (parts or ["train"])[0], kinds[0]


def _read_npz(path: pathlib.Path, shape: tuple[int, int, int]) -> _Parts:
    import PIL.Image

    arrays: dict[str, np.ndarray] = {}
    keys: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    unused: list[str] = []
    key = ""
    try:
        # Opened here: np.load leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            names = sorted(stored.files)
            for key in names:
                meaning = _meaning(key)
                if meaning is None:
                    unused.append(key)
                else:
                    keys[meaning].append(key)
                    arrays[key] = stored[key]
    except Exception as error:
        # NumPy names an option that its caller has, but the user has not.
        if key and "allow_pickle" in str(error):
            raise DatasetError(
                f"{path}: {key} is an array of Python objects, which are not read; "
                "save it as numbers or text, with a dtype such as np.uint8 or str"
            ) from error
        raise DatasetError(f"{path} cannot be read: {one_line(error)}") from error
    for several in keys.values():
        if len(several) > 1:
            raise DatasetError(
                f"{path} has {' and '.join(several)}, which mean the same; keep one of "
                "them"
            )

    def part(name: str) -> Part:
        found: dict[str, str] = {}
        for kind in ("images", "labels"):
            if (name, kind) not in keys:
                usual = kind if name == "train" else f"{name}_{kind}"
                raise DatasetError(f"{path} has no array {usual!r}; it has {names}")
            (found[kind],) = keys[name, kind]
        images, labels = arrays[found["images"]], arrays[found["labels"]]
        if images.ndim == 4 and images.shape[-1] == 1:
            images = images[..., 0]
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or (images.ndim == 4 and images.shape[-1] != 3)
            or images.size == 0
        ):
            raise DatasetError(
                f"{path}: {found['images']} must be uint8 of shape (n, side, side), "
                f"(n, side, side, 1) or (n, side, side, 3), not {images.dtype} of "
                f"shape {images.shape}"
            )
        if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
            raise DatasetError(
                f"{path}: {found['labels']} must be {len(images)} integers, not "
                f"{labels.dtype} of shape {labels.shape}"
            )
        try:
            resized = np.stack(
                [fitted(PIL.Image.fromarray(image), shape) for image in images]
            )
        except ValueError as error:
            raise DatasetError(f"{path}: an image {error}") from error
        return resized, labels

    given = {name for name, kind in keys if kind != "class_names"}
    parts = {name: part(name) for name in sorted({"train", *given})}
    found = set(parts["train"][1].tolist())
    if keys["", "class_names"]:
        (key,) = keys["", "class_names"]
        class_names = _class_names(path, key, arrays[key].ravel())
    else:
        # Not up to the largest label, which may be one of billions.
        class_names = tuple(map(str, range(len(found))))
    known = set(range(len(class_names)))
    wrong = known - found
    for _, labels in parts.values():
        wrong |= set(labels.tolist()) - known
    if wrong or len(class_names) < 2:
        raise DatasetError(
            f"{path}: labels must be 0..C-1 with every class among the training "
            f"labels and C >= 2; C is {len(class_names)}, wrong or missing: "
            f"{sorted(wrong)[:10]}"
        )
    as_read = {
        name: (images, labels.astype(np.int32))
        for name, (images, labels) in parts.items()
    }
    return _Parts(as_read, class_names, unused)


def _class_names(path: pathlib.Path, key: str, names: np.ndarray) -> tuple[str, ...]:
    """Returns the names of an .npz file as text, if no two are the same."""
    try:
        class_names = tuple(
            name.decode() if isinstance(name, bytes) else str(name) for name in names
        )
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{path}: {key} has bytes that are not UTF-8 ({one_line(error)}); "
            "save the names as text"
        ) from error
    for name, count in collections.Counter(class_names).items():
        if count > 1:
            raise DatasetError(
                f"{path}: {key} has {name!r} {count} times; give each class a "
                "name of its own"
            )
    return class_names
