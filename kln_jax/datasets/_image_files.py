"""Image files of the user's: found in folders, and read."""

import pathlib
import stat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kln_jax.datasets._dataset import with_margin

if TYPE_CHECKING:
    import PIL.Image

_SUFFIXES = (".png", ".jpg", ".jpeg")
# Of these only PNG can have more than 8 bits a channel, which Pillow would cut off.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")


class FolderContent(NamedTuple):
    """What `image_files` found, each sorted; what is hidden is not in it.

    Attributes:
      images: Files that end as images do.
      others: All other files, and the folders.
      unreadable: Errors of what could not be looked at; each has its ``filename``.
    """

    images: list[pathlib.Path]
    others: list[pathlib.Path]
    unreadable: list[OSError]


def image_files(folder: pathlib.Path, *, subfolders: bool = False) -> FolderContent:
    """Tells the images in a folder from what else is there, by their names.

    Links to folders are followed, unless they lead back to a folder that they are in.

    Args:
      folder: Where to look; it may be hidden itself.
      subfolders: Whether to look into its subfolders too.

    Returns:
      The `FolderContent`.
    """
    found = FolderContent([], [], [])

    def look(place: pathlib.Path, above: tuple[pathlib.Path, ...]) -> None:
        for path in sorted(place.iterdir()):
            if path.name.startswith("."):
                continue
            try:
                is_folder = _is_folder(path)
                if path.suffix.lower() in _SUFFIXES and not is_folder:
                    found.images.append(path)
                else:
                    found.others.append(path)
                # A link to a folder that it is in would be followed without end.
                if is_folder and subfolders and path.resolve() not in above:
                    look(path, (*above, path.resolve()))
            except OSError as error:
                found.unreadable.append(error)

    try:
        look(folder, (folder.resolve(),))
    except OSError as error:
        found.unreadable.append(error)
    return found


def _is_folder(path: pathlib.Path) -> bool:
    """Whether it is a folder; `pathlib.Path.is_dir` may say no where it cannot look."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False  # A link that leads nowhere.


def read_image(
    path: pathlib.Path, shape: tuple[int, int, int], *, margin: int = 0
) -> np.ndarray:
    """Reads an image as those of own data sets are.

    Args:
      path: A file in the format PNG, JPEG, WebP, BMP or GIF.
      shape: Height, width and channels, ``(side, side, 1)`` or ``(side, side, 3)``.
      margin: Black pixels on each side of it, among those of the shape.

    Returns:
      The image of that shape, uint8.

    Raises:
      OSError: If it cannot be read.
      ValueError: If it is not square or would lose information. What a damaged file
        raises beside these depends on its format.
    """
    import PIL.Image

    with PIL.Image.open(path, formats=_FORMATS) as image:
        # Pillow's mode does not say it: for colour it is RGB, whatever the depth.
        if image.format == "PNG" and (bits := _bits_of_png(path)) > 8:
            raise ValueError(f"has {bits} bits a channel; save it with 8")
        inner = (shape[0] - 2 * margin, shape[1] - 2 * margin, shape[2])
        return with_margin(fitted(image, inner), margin)


def _bits_of_png(path: pathlib.Path) -> int:
    """Reads from a PNG's header how many bits a channel has."""
    with open(path, "rb") as file:
        # The signature (8 bytes), length and name of the header, width and height (4
        # bytes each) come before.
        return file.read(25)[24]


def fitted(image: "PIL.Image.Image", shape: tuple[int, int, int]) -> np.ndarray:
    """Turns an image of 8 bits a channel into uint8 of a square shape.

    Raises:
      ValueError: If it is not square, or has transparent pixels.
    """
    import PIL.Image
    import PIL.ImageOps

    image = PIL.ImageOps.exif_transpose(image)
    if image.width != image.height:
        raise ValueError(
            f"is not square ({image.width}x{image.height} pixels); crop or pad it"
        )
    transparent = image.has_transparency_data
    if transparent and np.asarray(image.convert("RGBA").getchannel("A")).min() < 255:
        raise ValueError("has transparent pixels; flatten it onto a background")
    side, _, channels = shape
    image = image.convert("L" if channels == 1 else "RGB")
    if image.width != side:
        image = image.resize((side, side), PIL.Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(shape)
