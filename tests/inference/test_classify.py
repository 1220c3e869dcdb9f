"""python -m kln_jax.inference predict, on a run whose data set is gone."""

import io
import json
import pathlib
import sys

import jax
import numpy as np
import PIL.Image
import pytest

from configs import mnist
from kln_jax import datasets
from kln_jax.inference import classify, trained_network
from kln_jax.inference.__main__ import main
from kln_jax.storage import working_directory
from kln_jax.storage.checkpoints import Checkpoints
from kln_jax.training import compiled, experiment, parts
from kln_jax.training.configuration import Config
from tests import small_run

ERROR = "python -m kln_jax.inference predict: error: "


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run.finished(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(small):
    """Class names, their probabilities and errors of the images of the run."""
    unit = small.images.astype(np.float32) / 255
    outputs = small_run.predict(small)
    p = np.asarray(jax.nn.softmax(outputs.logits))
    errors = np.square(unit - outputs.reconstruction).sum(axis=(1, 2, 3))
    names = [small_run.CLASS_NAMES[i] for i in p.argmax(axis=1)]
    assert set(names) == set(small_run.CLASS_NAMES)  # Or there is little to see.
    return names, p, errors


@pytest.fixture
def folder(small, tmp_path):
    """The first six images, in files of several kinds, and what is no image."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    images = [PIL.Image.fromarray(image[..., 0]) for image in small.images[:6]]
    images[0].save(folder / "0.png")
    images[1].convert("RGB").save(folder / "1.PNG")
    images[2].convert("RGBA").save(folder / "2.png")
    images[3].resize((56, 56), PIL.Image.Resampling.NEAREST).save(folder / "3.png")
    images[4].save(folder / "4.jpg", quality=100)
    images[5].save(folder / "more" / "5.png")
    (folder / ".hidden.png").write_text("")
    (folder / ".thumbnails").mkdir()
    images[0].save(folder / ".thumbnails" / "0.png")
    (folder / "notes.txt").write_text("")
    (folder / "no image.png").mkdir()
    return folder


def _run(small, *arguments):
    return main(["predict", f"--workdir={small.workdir}", *map(str, arguments)])


def _assert_rows(rows, expected, order, **tolerance):
    names, p, errors = expected
    assert [row["class"] for row in rows] == [names[i] for i in order]
    for row, i in zip(rows, order, strict=True):
        assert row["probability"] == pytest.approx(p[i].max(), **tolerance)
        assert row["reconstruction_error"] == pytest.approx(errors[i], **tolerance)


def test_json_lines_say_what_the_network_says(small, expected, folder, capsys):
    files = [folder / "more" / "5.png", folder / "0.png", folder / "0.png"]
    assert _run(small, "--json", *files) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == list(map(str, files))
    assert set(rows[0]) == {"image", "class", "probability", "reconstruction_error"}
    _assert_rows(rows, expected, (5, 0, 0), rel=1e-4)


def test_a_folder_is_read_in_order_whatever_the_kind_of_its_images(
    small, expected, folder, capsys, monkeypatch
):
    monkeypatch.setattr(classify, "_CHUNK", 4)  # So that there are several.
    assert _run(small, "--json", folder) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    places = [str(pathlib.Path(row["image"]).relative_to(folder)) for row in rows]
    assert places == ["0.png", "1.PNG", "2.png", "3.png", "4.jpg", "more/5.png"]
    # JPEG is not exact, nor is an enlarged image that was made small again.
    _assert_rows([*rows[:3], rows[5]], expected, (0, 1, 2, 5), rel=1e-4)
    _assert_rows(rows[3:5], expected, (3, 4), rel=0.1)


def test_the_table_is_aligned(small, expected, folder, capsys):
    names, p, errors = expected
    files = {0: folder / "0.png", 5: folder / "more" / "5.png"}
    assert len(names[0]) != len(names[5])
    assert _run(small, *files.values()) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    column = head.index("image")
    for line, (i, path) in zip(lines, files.items(), strict=True):
        assert line[column:] == str(path)
        assert line[:column].split("  ")[0] == names[i]
        probability, error = map(float, line[len(names[i]) : column].split())
        assert probability == pytest.approx(p[i].max(), abs=2e-4)
        assert error == pytest.approx(errors[i], abs=0.01)


def test_an_image_gets_the_margin_of_the_data_set(tmp_path, capsys):
    config = Config.from_mapping(mnist.get_config()).replace(
        network="conv_large", image_size=32, width=0.01, latent_dim=2
    )
    some = np.zeros((100, 32, 32, 1), np.uint8), np.arange(100) % 2
    data = datasets.Dataset("mnist", "", *some, *some, ("0", "1"))
    model = parts.model(config, image_shape=(32, 32, 1), num_classes=2)
    made = compiled.compile_functions(config, data)
    state = made.init(jax.random.key(0), *made.channels)
    about = experiment.about(data)
    working_directory.prepare(tmp_path, config.to_dict(), about, np.arange(100))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state)
    image = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    PIL.Image.fromarray(image).save(tmp_path / "image.png")
    arguments = [f"--workdir={tmp_path}", "--json", str(tmp_path / "image.png")]
    assert main(["predict", *arguments]) == 0
    row = json.loads(capsys.readouterr().out)
    said = trained_network.predict_in_batches(
        model,
        state,
        np.pad(image, 2)[None, :, :, None],
        reconstruction_reduction="sum",
    )
    assert row["reconstruction_error"] == pytest.approx(
        said.reconstruction_error[0], rel=1e-5
    )


def test_paths_come_from_the_standard_input(
    small, expected, folder, capsys, monkeypatch
):
    lines = f"{folder / '1.PNG'}\n\n{folder / 'more'}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert _run(small, "--json", folder / "2.png", "-", folder / "0.png") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    _assert_rows(rows, expected, (2, 1, 5, 0), rel=1e-4)


def test_what_cannot_be_used_is_listed_and_the_rest_classified(
    small, expected, folder, tmp_path, capsys, monkeypatch
):
    iterdir = pathlib.Path.iterdir

    def refuse(place):  # As for chmod 000, which does not stop root.
        if place == folder / "closed":
            raise PermissionError(13, "Permission denied", str(place))
        return iterdir(place)

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    (folder / "closed").mkdir()
    (folder / "a.png").write_text("no image")
    PIL.Image.new("L", (28, 20)).save(folder / "b.png")
    (tmp_path / "empty").mkdir()
    arguments = folder, tmp_path / "absent.png", tmp_path / "empty", folder / "0.png"
    assert _run(small, "--json", *arguments) == 1
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 7
    _assert_rows([rows[0], rows[-1]], expected, (0, 0), rel=1e-4)
    starts = [
        (folder / "closed", "Permission denied"),
        (tmp_path / "empty", "holds no .png, .jpg or .jpeg file"),
        (folder / "a.png", "cannot identify image file"),
        (folder / "b.png", "is not square (28x20 pixels); crop or pad it"),
        (tmp_path / "absent.png", "No such file or directory"),
    ]
    lines = err.splitlines()
    assert len(lines) == len(starts)
    for path, reason in starts:
        start = f"{ERROR}{path}: {reason}"
        assert any(line.startswith(start) for line in lines), (start, lines)


def test_without_one_usable_image_there_is_no_traceback(small, tmp_path, capsys):
    assert _run(small, tmp_path / "absent.png") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_what_is_not_finite_is_an_error(small, folder, capsys, monkeypatch):
    trained = trained_network.load(small.workdir)
    nan = jax.tree.map(lambda leaf: leaf * np.nan, trained.state.params)
    diverged = trained._replace(state=trained.state.replace(params=nan))
    monkeypatch.setattr(trained_network, "load", lambda *_, **__: diverged)
    image = folder / "0.png"
    assert _run(small, "--json", image) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{ERROR}{image}: what the network says is ")
    assert err.count("\n") == 1


def test_a_standard_input_that_is_closed_is_named(small, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert _run(small, "-") == 1
    error = f"{ERROR}-: the standard input is closed\n"
    assert capsys.readouterr().err == error
