"""What is known about sets of tensorflow-datasets, and where they lie prepared."""

import dataclasses
import json
import os
import pathlib
import re
import shlex

from kln_jax.datasets._dataset import DatasetError
from kln_jax.datasets._paths import expanded
from kln_jax.storage.whole_files import one_line


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known about a set of tensorflow-datasets."""

    sizes: dict[str, int]
    image_shape: tuple[int, int, int]
    num_classes: int
    # Asked before a download: does the network reach the place of the files?
    source: str


KNOWN = {
    "mnist": Known(
        {"train": 60_000, "test": 10_000},
        (28, 28, 1),
        10,
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion_mnist": Known(
        {"train": 60_000, "test": 10_000},
        (28, 28, 1),
        10,
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    "svhn_cropped": Known(
        {"train": 73_257, "test": 26_032, "extra": 531_131},
        (32, 32, 3),
        10,
        "http://ufldl.stanford.edu/housenumbers/",
    ),
    "cifar10": Known(
        {"train": 50_000, "test": 10_000},
        (32, 32, 3),
        10,
        "https://www.cs.toronto.edu/~kriz/",
    ),
    "cifar100": Known(
        {"train": 50_000, "test": 10_000},
        (32, 32, 3),
        100,
        "https://www.cs.toronto.edu/~kriz/",
    ),
}


def margin(name: str, side: int) -> int:
    """Returns how many black pixels a set's images get on each side.

    Args:
      name: One of `NAMES`.
      side: Side that they are to have; larger images stay as they are.

    Examples:
      >>> margin("mnist", 32), margin("cifar10", 28), margin("own_images", 32)
      (2, 0, 0)
    """
    # What is in no known size is resized.
    return max(0, side - KNOWN[name].image_shape[0]) // 2 if name in KNOWN else 0


def tfds_root(data_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns where prepared sets lie: where the user says, or TFDS's own default."""
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return expanded(data_dir).absolute()


def command(name: str, root: pathlib.Path) -> str:
    """Returns the command that prepares a set."""
    folder = shlex.quote(str(root))
    return f"python -m kln_jax.datasets prepare {name} --data_dir={folder}"


def find_prepared(name: str, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """The newest prepared version of each file format: {format: directory}.

    Raises:
      DatasetError: If a version is damaged, or the set lies above the root.
    """
    found: dict[str, pathlib.Path] = {}
    for path in _versions(name, root):
        try:
            info = json.loads((path / "dataset_info.json").read_text())
            formats = [
                info.get("fileFormat") or "tfrecord",
                *info.get("alternativeFileFormats", []),
            ]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DatasetError(
                f"{path / 'dataset_info.json'} cannot be read ({one_line(error)}); "
                f"remove {path} and prepare it again with: {command(name, root)}"
            ) from error
        found.update(dict.fromkeys(formats, path))
    for above in (root.parent, root.parent.parent) if not found else ():
        if root in (above / name, *_versions(name, above)) and _versions(name, above):
            raise DatasetError(
                f"data_dir {root} is the folder of {name} itself; give the one that it "
                f"is in, {above}"
            )
    return found


def _versions(name: str, root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of a set's versions, the newest last."""
    versions = [
        path
        for path in (root / name).glob("*")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.name)
    ]
    return sorted(versions, key=lambda p: tuple(map(int, p.name.split("."))))
