import pathlib
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from kln_jax import datasets


def _chunk(name, content):
    data = name + content
    return struct.pack(">I", len(content)) + data + struct.pack(">I", zlib.crc32(data))


def _write_png(path, pixels):
    """Writes pixels (side, side, channels) of dtype uint8 or uint16."""
    side, _, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]  # Grey, with alpha, RGB, with alpha.
    bits = 8 * pixels.itemsize
    header = struct.pack(">IIBBBBB", side, side, bits, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in pixels)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 1), (28, 28, 3)])
def test_an_image_is_read_in_the_shape_of_the_network(tmp_path, shape, margin):
    path = tmp_path / "image.png"
    PIL.Image.new("RGB", (40, 40), (100, 100, 100)).save(path)
    image = datasets.read_image(path, shape, margin=margin)
    assert image.shape == shape
    inside = image[margin : shape[0] - margin, margin : shape[1] - margin]
    assert (inside == 100).all()
    assert image.sum(dtype=int) == inside.sum(dtype=int)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_an_image_of_16_bits_is_refused_whatever_its_channels(
    tmp_path, channels, dtype
):
    pixels = np.full((28, 28, channels), 100, dtype)
    if channels in (2, 4):
        pixels[..., -1] = np.iinfo(dtype).max  # Opaque.
    _write_png(tmp_path / "image.png", pixels)
    if dtype == np.uint8:
        image = datasets.read_image(tmp_path / "image.png", (28, 28, 3))
        assert (image == 100).all()
        return
    with pytest.raises(ValueError, match="has 16 bits a channel; save it with 8"):
        datasets.read_image(tmp_path / "image.png", (28, 28, 3))


@pytest.mark.parametrize("name", ["JPEG", "WEBP", "BMP", "GIF"])
def test_the_name_of_a_file_need_not_be_that_of_its_format(tmp_path, name):
    PIL.Image.new("L", (28, 28), 100).save(tmp_path / "image.png", format=name)
    image = datasets.read_image(tmp_path / "image.png", (28, 28, 1))
    np.testing.assert_allclose(image, 100, atol=2)


def test_a_format_that_may_have_more_than_8_bits_is_refused(tmp_path):
    PIL.Image.new("RGB", (28, 28)).save(tmp_path / "image.png", format="TIFF")
    with pytest.raises(OSError, match="cannot identify image file"):
        datasets.read_image(tmp_path / "image.png", (28, 28, 1))


@pytest.mark.parametrize("subfolders", [False, True])
def test_image_files_are_neither_hidden_nor_folders(tmp_path, subfolders):
    root = tmp_path / ".data"  # What is asked for may be hidden.
    for folder in (".hidden", "folder.png", "more/.hidden"):
        (root / folder).mkdir(parents=True)
    visible = "1.PNG", "4.jpg", "more/6.jpeg", "notes.txt"
    for name in (*visible, ".2.png", ".hidden/3.png", "more/.hidden/7.png"):
        (root / name).touch()
    (root / "5.png").symlink_to("absent")
    found = datasets.image_files(root, subfolders=subfolders)
    names = [str(path.relative_to(root)) for path in found.images]
    assert names == ["1.PNG", "4.jpg", "5.png", *["more/6.jpeg"] * subfolders]
    assert [path.name for path in found.others] == ["folder.png", "more", "notes.txt"]
    assert found.unreadable == []


def test_linked_folders_are_followed_but_not_without_end(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root, elsewhere):
        folder.mkdir()
        (folder / "0.png").touch()
    (root / "a").symlink_to(elsewhere)
    (root / "itself").symlink_to(root)
    (elsewhere / "back").symlink_to(root)
    found = datasets.image_files(root, subfolders=True)
    assert found.images == [root / "0.png", root / "a" / "0.png"]
    assert found.unreadable == []


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    for name in ("1.png", "closed/2.png", "open/3.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    iterdir = pathlib.Path.iterdir

    def refuse(folder):  # As for chmod 000, which does not stop root.
        if folder == tmp_path / "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    found = datasets.image_files(tmp_path, subfolders=True)
    assert found.images == [tmp_path / "1.png", tmp_path / "open" / "3.png"]
    (error,) = found.unreadable
    assert error.filename == str(tmp_path / "closed")
    (error,) = datasets.image_files(tmp_path / "closed").unreadable
    assert error.filename == str(tmp_path / "closed")
