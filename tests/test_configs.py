"""Every configuration and variant: its keys, the paper's settings, and two steps.

The steps are made on tiny data of the set's real shape, written to disk.
"""

import ast
import functools
import json
import logging
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kln_jax import datasets
from kln_jax.analysis import learned
from kln_jax.storage import epoch_metrics
from kln_jax.training import (
    augmentation,
    compiled,
    experiment,
    progress,
    steps,
    variants,
)
from kln_jax.training.configuration import Config
from tests import tfds_writer

# What optax needs: its Adam, and its schedule by milestones.
pytestmark = pytest.mark.usefixtures("standard_promotion")

FILES = sorted(variants.files())
# Numbers of images on which every set has the same 17 to train and 9 to test, and
# hence programs in common: MNIST holds out a sixth, SVHN adds the extra images.
TRAIN, TEST = 17, 9
SIZES = {
    "mnist": {"train": 20, "test": TEST},
    "svhn": {"train": 14, "test": TEST, "extra": 3},
    "svhn:semi": {"train": TRAIN, "test": TEST},
}


def _config(name, variant="supervised"):
    return variants.named_config(name, variant)


def _variants(name):
    """The variants of a configuration, as its error message lists them."""
    try:
        _config(name, "?")
    except ValueError as error:
        return re.findall(r"'(\w+)'", str(error))
    raise AssertionError(name)


def _cases(variants_of):
    return [
        pytest.param(name, variant, id=f"{name}:{variant}")
        for name in FILES
        for variant in variants_of(name)
    ]


ALL = _cases(_variants)
CASES = _cases(lambda name: [v for v in ("supervised", "semi") if v in _variants(name)])


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _programs_in_common(tmp_path_factory):
    """Compiles what several configurations have in common once."""
    keys = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {key: getattr(jax.config, key) for key in keys}
    folder = str(tmp_path_factory.mktemp("programs"))
    for key, value in zip(keys, (folder, 0.2), strict=True):
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield
    for key, value in before.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()


# --- Keys ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_a_config_is_valid_and_names_its_variant(name, variant):
    config = _config(name, variant)
    checked = Config.from_mapping(config)
    assert checked.variant == variant
    # It has each value in the type of its key.
    assert str(checked.to_dict()) == str(json.loads(config.to_json()))


@pytest.mark.parametrize("name", FILES)
def test_a_config_opens_with_its_command(name):
    docstring = ast.get_docstring(ast.parse(variants.find(name).read_text()))
    assert f"\n    python train.py --config=configs/{name}.py" in docstring
    assert "Departures from the paper" in docstring


@pytest.mark.parametrize("name", FILES)
def test_an_unknown_variant_is_refused_and_the_known_ones_are_listed(name):
    with pytest.raises(ValueError, match=r"variant='quarter' must be one of \['as_pri"):
        _config(name, "quarter")


def test_the_variants_are_the_baselines_and_ablations_of_the_paper():
    supervised = {
        "supervised",
        "ce",
        "cgmmn",
        "identity",
        "pca",
        "autoencoder",
        "no_reconstruction",
        "as_printed",
    }
    assert set(_variants("cifar100")) == supervised
    ablations = supervised - {"supervised"} | {"no_confidence"}
    semi = {"semi", *(f"semi_{name}" for name in ablations)}
    assert set(_variants("svhn")) == supervised | semi
    mlp = {"cgmmn_mlp", "semi_cgmmn_mlp"}
    assert set(_variants("mnist")) == supervised | semi | mlp


def _changes(name, variant, base):
    """The keys in which a variant differs from another one."""
    first, second = _config(name, base).to_dict(), _config(name, variant).to_dict()
    changed = {key: value for key, value in second.items() if value != first[key]}
    assert changed.pop("variant") == variant
    return changed


@pytest.mark.parametrize("base", ["supervised", "semi"])
def test_a_variant_differs_in_what_its_name_says_and_in_nothing_else(base):
    prefix = "semi_" if base == "semi" else ""
    cgmmn = dict(
        kernel_on="pixels",
        pairing="shared",
        bandwidths=(1.0, 9.0, 20.0, 40.0, 80.0),
        kernel_reduction="sum",
        label_kernel="gaussian",
        ridge=1e-3,
        reconstruction_weight=0.0,
    )
    for name in ("mnist", "digits", "fashion_mnist", "own_images", "cifar10", "svhn"):
        printed = dict(z_distance=0.0) if name in ("cifar10", "svhn") else {}
        expected = {
            "ce": dict(objective="cross_entropy"),
            "cgmmn": cgmmn,
            "identity": dict(kernel_on="pixels"),
            "pca": dict(kernel_on="pca"),
            "autoencoder": dict(kernel_on="autoencoder"),
            "no_reconstruction": dict(reconstruction_weight=0.0),
            "as_printed": dict(clip_norm=0.0, ridge=2e-4, label_kernel="gaussian")
            | printed
            | (dict(flip=True) if name == "svhn" else {}),
        }
        if base == "semi":
            expected["no_confidence"] = dict(confidence_weight=0.0)
        if name not in ("cifar10", "svhn"):
            expected["cgmmn_mlp"] = dict(cgmmn, network="mlp")
        for variant, changes in expected.items():
            assert _changes(name, prefix + variant, base) == changes


# --- The paper's settings -----------------------------------------------------

EVERYWHERE = dict(
    batch_size=100,
    latent_dim=128,
    width=1.0,
    bandwidths=(1.0, 3.0, 5.0, 7.0, 9.0),
    reconstruction_weight=0.1,
    pairing="independent",
    evaluate_on="test",
)
SUPERVISED = dict(
    optimizer="sgd",
    learning_rate=0.02,
    momentum=0.9,
    weight_decay=5e-4,
    lr_decay=0.2,
    confidence_weight=0.0,
    num_labels=0,
)
SEMI = dict(
    optimizer="adam",
    learning_rate=1e-3,
    weight_decay=0.0,
    lr_milestones=(),
    confidence_weight=1.0,
    use_extra=False,
)
MNIST = dict(
    dataset="mnist",
    network="mnist",
    num_epochs=150,
    validation_fraction=1 / 6,
    crop_padding=0,
    flip=False,
    normalise=False,
)
SVHN = dict(
    dataset="svhn_cropped",
    network="conv_large",
    z_distance=25.0,  # A departure: 0 is as printed.
    num_epochs=40,
    validation_fraction=0.0,
    crop_padding=2,
    flip=False,
    normalise=True,
)
CIFAR = dict(
    network="conv_large",
    z_distance=25.0,  # The same departure.
    num_epochs=150,
    validation_fraction=0.0,
    crop_padding=2,
    flip=True,
    normalise=True,
)
PAPER = {
    ("mnist", "supervised"): MNIST | dict(lr_milestones=(50, 100, 130)),
    ("mnist", "semi"): MNIST | dict(num_labels=100),
    ("svhn", "supervised"): SVHN | dict(lr_milestones=(10, 20, 30), use_extra=True),
    ("svhn", "semi"): SVHN | dict(num_labels=1000),
    ("cifar10", "supervised"): CIFAR
    | dict(dataset="cifar10", lr_milestones=(50, 100, 130)),
    ("cifar10", "semi"): CIFAR | dict(dataset="cifar10", num_labels=4000),
    ("cifar100", "supervised"): CIFAR
    | dict(dataset="cifar100", lr_milestones=(50, 100, 130)),
}


@pytest.mark.parametrize(("name", "variant"), PAPER)
def test_the_settings_are_the_papers(name, variant):
    config = _config(name, variant)
    settings = EVERYWHERE | (SEMI if variant == "semi" else SUPERVISED)
    settings |= PAPER[name, variant]
    assert {key: config[key] for key in settings} == settings


# --- Two steps of each --------------------------------------------------------


def _write_images(config, root, *, side=28, channels=1, top=256, repeated=0):
    """Writes random images of the configuration's set, with values below ``top``.

    Of the training images the last ``repeated`` are the first ones again.
    """
    rng = np.random.default_rng(0)
    if config.dataset == "own_images":
        for i in range(TRAIN + TEST):
            folder = root / "train" / f"class {i % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, top, (side, side, channels), np.uint8)
            (folder / f"{i}.png").write_bytes(tfds_writer.png(pixels))
    elif config.dataset != "digits":
        name = config.dataset.removesuffix("_cropped")
        name += ":semi" if name == "svhn" and config.variant == "semi" else ""
        sizes = SIZES.get(name, {"train": TRAIN, "test": TEST})
        # Ten classes of each set, so that a batch has several images of one.
        spread = tfds_writer.NUM_CLASSES[config.dataset] // 10
        splits = {
            split: (
                rng.integers(
                    0, top, (n, *tfds_writer.SHAPES[config.dataset]), np.uint8
                ),
                np.arange(n) % 10 * spread,
            )
            for split, n in sizes.items()
        }
        images = splits["train"][0]
        images[len(images) - repeated :] = images[:repeated]
        tfds_writer.write_set(root, config.dataset, splits)


def _tiny(config, data_dir, **changes):
    """Returns the configuration, but for what makes its run small."""
    small = dict(width=0.05, num_epochs=1, batch_size=8)
    small |= dict(data_dir=str(data_dir), allow_partial_data=True)
    if config.num_labels:
        small["num_labels"] = 10
    if config.dataset == "digits":
        small["validation_fraction"] = 1 - TRAIN / 1437
    if config.dataset == "own_images":
        small["test_fraction"] = TEST / (TRAIN + TEST)
    return Config.from_mapping(config).replace(**small | changes)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_a_config_makes_a_step_of_its_data(name, variant, tmp_path):
    config = _tiny(_config(name, variant), tmp_path)
    _write_images(config, tmp_path)
    data = experiment.load_data(config)
    assert len(data.train_labels) == TRAIN
    assert data.partial == (config.dataset not in ("digits", "own_images"))
    rows = experiment._labelled_rows(None, config, data)
    assert len(rows) == (10 if variant == "semi" else TRAIN)
    made, key = compiled.compile_functions(config, data), jax.random.key(0)
    arrays = steps.TrainingData(data.train_images, data.train_labels, rows)
    state = jax.eval_shape(made.init, key, *made.channels)
    of_epoch = jax.eval_shape(made.draw_rows, arrays, key, np.int32(0))
    after, metrics = jax.eval_shape(
        made.train, state, arrays, of_epoch, key, np.int32(2)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert metrics["loss"].shape == (2,)


# Both networks, optimisers and settings.
@pytest.mark.parametrize(
    ("name", "variant"), [("mnist", "supervised"), ("svhn", "semi")]
)
def test_a_config_trains_for_two_steps(name, variant, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="kln_jax")
    config = _tiny(_config(name, variant), tmp_path / "data")
    _write_images(config, tmp_path / "data")
    workdir = tmp_path / "run"
    result = experiment.train_and_evaluate(config, str(workdir))
    assert (result["steps"], result["epochs"]) == (2, 1)
    assert (result["dataset"], result["variant"]) == (config.dataset, variant)
    assert 0 <= result["test_error_percent"] <= 100
    assert result["num_test_images"] == TEST
    (line,) = epoch_metrics.read_metrics(workdir)
    assert line.keys() >= {"loss", "cmmd", "reconstruction", "confidence", "accuracy"}
    assert all(math.isfinite(value) for value in line.values()), line
    messages = [r.getMessage() for r in caplog.records if r.name == "kln_jax"]
    assert messages[0].startswith("process 0 of 1, 8 local and 8 global devices, ")
    assert messages[1] == f"working directory: {workdir}"
    assert messages[2].startswith(f"data set {config.dataset}, version ")
    assert f": {TRAIN} train and " in messages[2]
    assert messages[3].startswith("train class counts: ")
    assert not [text for text in messages if "also among the training images" in text]
    part = f"Only a part of {config.dataset} is here; the result says so."
    assert messages.count(part) == 1 == result["partial_data"]


def test_own_images_train_in_colour_as_documented(tmp_path):
    in_colour = dict(image_size=32, network="conv_large")
    in_colour |= dict(normalise=True, crop_padding=2, flip=True)
    config = _tiny(_config("own_images"), tmp_path / "data", **in_colour)
    _write_images(config, tmp_path / "data", side=36, channels=3)
    result = experiment.train_and_evaluate(config, str(tmp_path / "run"))
    assert (result["steps"], result["num_test_images"]) == (2, TEST)


# --- What the data bring into a run -------------------------------------------


def test_evaluation_on_validation_images_some_of_which_are_trained_on(tmp_path, caplog):
    config = _tiny(_config("mnist"), tmp_path, evaluate_on="validation")
    _write_images(config, tmp_path, repeated=2)
    result = experiment.train_and_evaluate(config, str(tmp_path / "run"))
    assert result["num_validation_images"] == 3
    assert any(
        result["validation_error_percent"] == pytest.approx(100 * wrong / 3)
        for wrong in range(4)
    )
    assert not [key for key in result if "test" in key]
    assert "2 of 3 validation images are, pixel for pixel, also among" in caplog.text


def test_a_run_keeps_its_statistics_and_labelled_rows(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    workdir = tmp_path / "run"

    def config(data_dir):
        changes = dict(normalise=True, num_epochs=2, checkpoint_every=1)
        return _tiny(_config("mnist"), data_dir, **changes)

    def interrupt(*_):
        raise KeyboardInterrupt

    _write_images(config(first), first)
    with monkeypatch.context() as patch:
        patch.setattr(progress.ProgressReport, "epoch_ended", interrupt)
        with pytest.raises(KeyboardInterrupt):
            experiment.train_and_evaluate(config(first), str(workdir))
    written = (workdir / "labelled.npy").stat().st_mtime_ns
    # The statistics belong to the network: darker images do not change them.
    _write_images(config(second), second, top=100)
    result = experiment.train_and_evaluate(config(second), str(workdir))
    assert result["steps"] == 4
    assert (workdir / "labelled.npy").stat().st_mtime_ns == written

    images = datasets.load(
        "mnist", data_dir=first, validation_fraction=1 / 6, allow_partial_data=True
    ).train_images
    mean, std = (images / 255).mean(), (images / 255).std()
    run, data = learned.load_run(workdir)
    assert len(images) == len(data.train_images) == TRAIN
    assert data.train_images.max() < 100 < images.max()
    np.testing.assert_allclose(run.state.mean, [mean], rtol=1e-6)
    np.testing.assert_allclose(run.state.std, [std], rtol=1e-6)
    unit = augmentation.to_unit(data.eval_images)
    variables = {"params": run.state.params, "batch_stats": run.state.batch_stats}
    normalised = (unit - jnp.float32(mean)) / jnp.float32(std)
    np.testing.assert_allclose(
        jax.jit(functools.partial(steps.apply_trained, run.model))(
            run.state, unit
        ).logits,
        jax.jit(run.model.apply)(variables, normalised).logits,
        rtol=1e-4,
        atol=1e-5,
    )
