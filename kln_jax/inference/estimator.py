"""KLN as an estimator of scikit-learn."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.typing import ArrayLike
from ml_collections import ConfigDict
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from kln_jax.datasets import Dataset, resized
from kln_jax.inference import trained_network
from kln_jax.networks import models
from kln_jax.storage import whole_files
from kln_jax.training import experiment, steps

# Keys of a configuration that have no meaning here, and those that have no choice.
_RUN = dict(
    evaluate_on="training",
    num_labels=0,
    split_seed=0,
    profile=0,
    checkpoint_every=1,
    checkpoint_every_steps=0,
    keep_last=1,
    keep_best=0,
    num_seeds=1,
    on_nonfinite="stop",
    max_skipped_steps=10,
    divergence_bound=1e6,
)

_NOT_OF_CONFIG = ("image_shape", "random_state", "verbose")
_FORMAT = "kln_jax.KLNClassifier/1"


class KLNClassifier(
    ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator
):
    r"""KLN: an autoencoder and a softmax classifier, trained together with the CMMD.

    The objective is

    .. math::
      \mathrm{CMMD}(Z_s, Y_s; Z_t, \hat Y_t) + \beta_1 \, \mathrm{reconstruction}
          + \beta_2 \, \mathrm{confidence}(\hat Y_t)

    of a labelled batch s and a batch t, whose labels are predicted. Training is that of
    ``train.py``, and the parameters are the keys of its configuration, with the same
    defaults: the paper's for MNIST. Semi-supervised, where `fit` is given labels of
    -1, the paper's are ``confidence_weight=1``, ``optimizer="adam"``,
    ``learning_rate=1e-3``, ``weight_decay=0`` and ``lr_milestones=()``.

    X is an array of images, shape ``(n, h, w)`` or ``(n, h, w, channels)``, or of
    features, shape ``(n, p)``. Features are the pixels of an image, row by row, and
    the channels of a pixel next to each other; ``image_shape`` says of which. If
    it is None, they fill a square grey image, whose rest stays at the smallest value.
    Images must be square, and are resized, bilinearly, to the network's side.

    Pixels of dtype uint8 are taken as they are. Of any other dtype, the smallest value
    of the training images becomes black and the largest white, what is outside them
    in other images is clipped, and values are rounded to 1/255 of that range:
    images lie on the device as uint8. To predict takes images of the same kind as
    those of `fit`: uint8, or not.

    Args:
      network: ``"mnist"`` or ``"mlp"`` (28x28), or ``"conv_large"`` (32x32).
      width: Channels of hidden layers relative to the paper's.
      latent_dim: Dimensions of Z.
      normalise_z: Whether Z is batch-normalised after all.
      dtype: Of the networks' computation: ``"float32"`` or ``"bfloat16"``.
      objective: ``"cmmd"``, or ``"cross_entropy"`` or ``"reconstruction"`` alone in
        its place, the baselines.
      kernel_on: What the kernel acts on: ``"z"``, which is KLN, or something that is
        not learned with it: ``"pixels"``, ``"pca"`` or ``"autoencoder"``.
      bandwidths: Variances of the Gaussian kernels there.
      kernel_reduction: Their ``"mean"`` or ``"sum"``, and that of those on labels.
      label_kernel: Kernel on labels: ``"linear"`` or ``"gaussian"``.
      label_bandwidths: Variances of the latter.
      ridge: The paper's lambda.
      pairing: Whether batch t has images of its own (``"independent"``) or those of s
        (``"shared"``).
      reconstruction_weight: The paper's beta (supervised), or beta 1.
      reconstruction_reduction: ``"sum"`` over pixels, as in Equation 6, or ``"mean"``.
      confidence_weight: The paper's beta 2 (semi-supervised).
      num_epochs: Passes over all images.
      batch_size: Images of s, and of t, in a step; a multiple of the number of
        devices.
      optimizer: ``"sgd"`` or ``"adam"``.
      learning_rate: Its step size.
      momentum: Of SGD.
      b1: Of Adam.
      b2: Of Adam.
      weight_decay: L2 penalty on every parameter.
      lr_milestones: Epochs at which the learning rate is multiplied by ``lr_decay``.
      lr_decay: That factor.
      warmup_steps: Steps over which the learning rate rises to its value; 0 for none.
      clip_norm: Largest global norm of the gradients; 0 for none.
      crop_padding: Random crops after padding by so many pixels; 0 for none.
      flip: Whether images are mirrored at random.
      normalise: Whether channels are normalised by the statistics of the training
        images.
      image_shape: Height and width, or height, width and channels, of images that are
        given as rows of features.
      random_state: Seed of initialisation, order, augmentation and dropout, as in
        scikit-learn. With an integer, fits are equal.
      verbose: Whether `fit` shows each epoch, on a bar in a terminal, else as a line.

    Attributes:
      classes_: The class labels, sorted, shape ``(C,)``.
      n_features_in_: Number of pixels times channels of an image of X.
      image_shape_: Height, width and channels of an image of X.
      pixel_range_: The values of X that are black and white; None of dtype uint8.
      config_: The configuration that was trained.
      state_: The trained state, of NumPy arrays.

    Examples:
      >>> images = np.zeros((40, 8, 8), np.uint8)
      >>> images[20:, :4] = 255
      >>> y = np.repeat(["dark", "half"], 20)
      >>> classifier = KLNClassifier(
      ...     width=0.05, latent_dim=4, num_epochs=10, batch_size=40,
      ...     lr_milestones=(), random_state=0
      ... )
      >>> classifier.fit(images, y).score(images, y)
      1.0
      >>> classifier.transform(images).shape
      (40, 4)

    References:
      Equations 6 and 7 of arXiv 2008.10165.
    """

    def __init__(
        self,
        *,
        network: str = "mnist",
        width: float = 1.0,
        latent_dim: int = 128,
        normalise_z: bool = False,
        dtype: str = "float32",
        objective: str = "cmmd",
        kernel_on: str = "z",
        bandwidths: Sequence[float] = (1.0, 3.0, 5.0, 7.0, 9.0),
        kernel_reduction: str = "mean",
        label_kernel: str = "linear",
        label_bandwidths: Sequence[float] = (1.0, 3.0, 5.0, 7.0, 9.0),
        ridge: float = 0.1,
        pairing: str = "independent",
        reconstruction_weight: float = 0.1,
        reconstruction_reduction: str = "sum",
        confidence_weight: float = 0.0,
        num_epochs: int = 150,
        batch_size: int = 100,
        optimizer: str = "sgd",
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        b1: float = 0.9,
        b2: float = 0.99,
        weight_decay: float = 5e-4,
        lr_milestones: Sequence[int] = (50, 100, 130),
        lr_decay: float = 0.2,
        warmup_steps: int = 0,
        clip_norm: float = 10.0,
        crop_padding: int = 0,
        flip: bool = False,
        normalise: bool = False,
        image_shape: tuple[int, ...] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.network = network
        self.width = width
        self.latent_dim = latent_dim
        self.normalise_z = normalise_z
        self.dtype = dtype
        self.objective = objective
        self.kernel_on = kernel_on
        self.bandwidths = bandwidths
        self.kernel_reduction = kernel_reduction
        self.label_kernel = label_kernel
        self.label_bandwidths = label_bandwidths
        self.ridge = ridge
        self.pairing = pairing
        self.reconstruction_weight = reconstruction_weight
        self.reconstruction_reduction = reconstruction_reduction
        self.confidence_weight = confidence_weight
        self.num_epochs = num_epochs
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.b1 = b1
        self.b2 = b2
        self.weight_decay = weight_decay
        self.lr_milestones = lr_milestones
        self.lr_decay = lr_decay
        self.warmup_steps = warmup_steps
        self.clip_norm = clip_norm
        self.crop_padding = crop_padding
        self.flip = flip
        self.normalise = normalise
        self.image_shape = image_shape
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Trains from the start.

        At its end JAX's caches of compiled functions are cleared, the caller's among
        them.

        Args:
          X: Images or features, shape ``(n, h, w)``, ``(n, h, w, c)`` or ``(n, p)``.
          y: A class label for each, of any type; -1 for images without a label, as in
            ``sklearn.semi_supervised``. Strings must then be of dtype object.

        Returns:
          The estimator.

        Raises:
          ValueError: If the parameters or the data will not do.
          kln_jax.training.experiment.DivergenceError: If training diverges.
        """
        # What fails below is then not fitted, rather than a mixture of two fits.
        self.__dict__.pop("state_", None)
        if self.network not in list(models.SIDES):  # Of what has no hash, too.
            raise ValueError(
                f"network={self.network!r} must be one of {sorted(models.SIDES)}."
            )
        flat, shape = _rows(X)
        if getattr(getattr(y, "dtype", None), "kind", "") == "T":
            y = np.asarray(y, object)  # scikit-learn does not know StringDType.
        flat, target = validate_data(self, flat, y)
        labelled = _is_labelled(target)
        check_classification_targets(target[labelled])
        self.classes_, numbers = np.unique(target[labelled], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has {len(self.classes_)} class(es), {self.classes_.tolist()}, "
                "beside -1 for no label; at least 2 are needed."
            )
        self.image_shape_ = _image_shape(self.image_shape, shape, flat.shape[1])
        self.pixel_range_ = (
            None if flat.dtype == np.uint8 else (float(flat.min()), float(flat.max()))
        )
        seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
        config = {**_RUN, **self.get_params(deep=False), "seed": seed}
        for name in _NOT_OF_CONFIG:
            del config[name]
        self.config_ = {name: _plain(name, value) for name, value in config.items()}

        images = self._images(flat)
        rows = np.flatnonzero(labelled).astype(np.int32)
        num_labels = 0 if labelled.all() else len(rows)
        labels = np.zeros(len(flat), np.int32)
        labels[labelled] = numbers
        data = Dataset(
            name="",
            version="",
            train_images=images,
            train_labels=labels,
            # Nothing is held out, but training evaluates on something.
            eval_images=images[:1],
            eval_labels=labels[:1],
            class_names=tuple(map(str, self.classes_)),
        )
        with _shown() if self.verbose else contextlib.nullcontext():
            run = experiment.train_in_memory(
                ConfigDict({**self.config_, "num_labels": num_labels}),
                data,
                rows,
                show=bool(self.verbose),
            )
        self.state_ = steps.without_optimizer(run.state)
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predicts classes.

        Args:
          X: Images or features, as in `fit`.

        Returns:
          A label of ``classes_`` for each, shape ``(n,)``.

        Raises:
          ValueError: If X has another shape than that of `fit`, or only one of both is
            of dtype uint8.
        """
        best = np.argmax(self.predict_proba(X), axis=1)
        return self.classes_[best]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Predicts the probabilities of classes.

        Args:
          X: Images or features, as in `fit`.

        Returns:
          Probabilities in the order of ``classes_``, shape ``(n, C)``, float32.

        Raises:
          ValueError: If X has another shape than that of `fit`, or only one of both is
            of dtype uint8.
        """
        return self._predict(X).probabilities

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Embeds images.

        Args:
          X: Images or features, as in `fit`.

        Returns:
          Z, on which the kernel separates the classes, shape ``(n, latent_dim)``,
          float32.

        Raises:
          ValueError: If X has another shape than that of `fit`, or only one of both is
            of dtype uint8.
        """
        return self._predict(X).z

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator to a file, which holds no code.

        A ``random_state`` that is a generator is not kept: None is.

        Args:
          path: Name of the file, by custom ending in .npz.

        Raises:
          ValueError: If the class labels are neither numbers nor strings.
        """
        check_is_fitted(self, "state_")
        # Without pickle there are no arrays of objects.
        classes = np.array(self.classes_.tolist())
        if (
            classes.dtype.kind not in "biufU"
            or classes.tolist() != self.classes_.tolist()
        ):
            raise ValueError(
                f"Class labels {self.classes_.tolist()} must be numbers or strings."
            )
        params = self.get_params(deep=False)
        if isinstance(self.random_state, np.random.RandomState):
            params["random_state"] = None
        about = {
            "format": _FORMAT,
            "params": params,
            "classes_dtype": self.classes_.dtype.str,
            "fitted": {
                name: value
                for name, value in vars(self).items()
                if name.endswith("_") and name not in ("classes_", "state_")
            },
        }
        content = io.BytesIO()
        np.savez(
            content,
            about=np.array(json.dumps(about, default=_as_json)),
            classes=classes,
            **traverse_util.flatten_dict(_arrays(self.state_), sep="/"),
        )
        whole_files.write_whole(pathlib.Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads an estimator that `save` wrote; no code in the file is run.

        Args:
          path: Name of the file.

        Returns:
          The fitted estimator.

        Raises:
          OSError: If there is no such file.
          ValueError: If the file is damaged, or something else.
        """
        with open(path, "rb") as file:
            try:
                with np.load(file, allow_pickle=False) as stored:
                    arrays = dict(stored)
                about = json.loads(str(arrays.pop("about")))
                if about["format"] != _FORMAT:
                    raise ValueError(f"format {about['format']!r}, not {_FORMAT!r}")
                estimator = cls(**{k: _tuple(v) for k, v in about["params"].items()})
                for name, value in about["fitted"].items():
                    setattr(estimator, name, _tuple(value))
                if hasattr(estimator, "feature_names_in_"):
                    names = np.array(estimator.feature_names_in_, object)
                    estimator.feature_names_in_ = names
                classes = arrays.pop("classes")
                estimator.classes_ = classes.astype(about["classes_dtype"])
                estimator._restore(traverse_util.unflatten_dict(arrays, sep="/"))
            # What a damaged file raises depends on its damage.
            except Exception as error:
                raise ValueError(
                    f"{os.fspath(path)} is no file of KLNClassifier.save, or it is "
                    f"damaged: {whole_files.one_line(error)}"
                ) from error
        return estimator

    def __sklearn_tags__(self) -> Tags:
        """Returns what scikit-learn needs to know."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.config_["latent_dim"]

    def _restore(self, tree: dict[str, Any]) -> None:
        """Takes over a state, if it is one of this network."""
        model = self._model()
        like = jax.eval_shape(
            lambda: _arrays(
                steps.init_state(
                    model,
                    optax.identity(),
                    jax.random.key(0),
                    mean=np.zeros(self.image_shape_[2]),
                    std=np.ones(self.image_shape_[2]),
                    image_shape=self._network_shape(),
                )
            )
        )
        if jax.tree.map(np.shape, tree) != jax.tree.map(np.shape, like):
            raise ValueError("its arrays are not those of its network")
        self.state_ = steps.TrainState(**tree, opt_state=())

    def _predict(self, X: ArrayLike) -> trained_network.Prediction:
        check_is_fitted(self, "state_")
        flat, shape = _rows(X)
        flat = validate_data(self, flat, reset=False)
        if shape not in (None, self.image_shape_):
            raise ValueError(
                f"X has images of shape {shape}, but those of fit were of "
                f"{self.image_shape_}."
            )
        if (flat.dtype == np.uint8) != (self.pixel_range_ is None):
            fitted = "uint8" if self.pixel_range_ is None else "another dtype"
            raise ValueError(
                f"X is of {flat.dtype.name}, but the images of fit were of {fitted}: "
                "what is black and what is white depends on it. Convert them alike."
            )
        return trained_network.predict_in_batches(
            self._model(),
            self.state_,
            self._images(flat),
            reconstruction_reduction=self.config_["reconstruction_reduction"],
        )

    def _network_shape(self) -> tuple[int, int, int]:
        side = models.SIDES[self.config_["network"]]
        return side, side, self.image_shape_[2]

    def _model(self) -> models.KLN:
        return models.build(
            self.config_["network"],
            image_shape=self._network_shape(),
            num_classes=len(self.classes_),
            latent_dim=self.config_["latent_dim"],
            normalise_z=self.config_["normalise_z"],
            width=self.config_["width"],
            dtype=jnp.dtype(self.config_["dtype"]),
        )

    def _images(self, X: np.ndarray) -> np.ndarray:
        """Returns the images of rows of features, as the network takes them."""
        if self.pixel_range_ is not None:
            low, high = self.pixel_range_
            # Where all are the same, they are black.
            unit = (X.astype(np.float64) - low) / ((high - low) or 1.0)
            X = np.rint(255 * np.clip(unit, 0, 1)).astype(np.uint8)
        height, width, channels = self.image_shape_
        missing = height * width * channels - X.shape[1]
        images = np.pad(X, [(0, 0), (0, missing)]).reshape(-1, height, width, channels)
        side = self._network_shape()[0]
        return images if side == height else resized(images, side)


def _rows(X: Any) -> tuple[Any, tuple[int, int, int] | None]:
    """Returns images as rows of features, with their shape; features as they are."""
    array = X if hasattr(X, "shape") else np.asarray(X)
    if getattr(array, "dtype", None) == jnp.bfloat16:
        X = array = np.asarray(array, np.float32)  # scikit-learn does not know it.
    if len(array.shape) not in (3, 4):
        return X, None
    shape = tuple(array.shape)
    flat = np.asarray(array).reshape(shape[0], math.prod(shape[1:]))
    return flat, (*shape[1:], 1)[:3]


def _is_labelled(y: np.ndarray) -> np.ndarray:
    labels = y.tolist()
    if None in labels:
        raise ValueError("y has None. Images without a label have the label -1.")
    if "-1" in labels:
        raise ValueError(
            "y is of strings, and one is '-1'. For images without a label use an array "
            "of dtype object with the number -1."
        )
    labelled = [label for label in labels if label != -1]
    strings = [label for label in labelled if isinstance(label, str)]
    if 0 < len(strings) < len(labelled):
        other = next(label for label in labelled if not isinstance(label, str))
        raise ValueError(
            f"y has strings, such as {strings[0]!r}, beside {other!r}. Give labels of "
            "one type, and -1 to images without one."
        )
    return np.array([label != -1 for label in labels], bool)


def _image_shape(
    given: Sequence[int] | None, shape: tuple[int, int, int] | None, features: int
) -> tuple[int, int, int]:
    """Returns height, width and channels, from a parameter, images or features."""
    if given is not None:
        sides = np.asarray(given)
        if (
            sides.shape not in ((2,), (3,))
            or sides.dtype.kind not in "iu"
            or sides.min() < 1
        ):
            raise ValueError(
                f"image_shape={given!r} must be height and width, or these and "
                "channels, as whole numbers from 1 on, such as (28, 28)."
            )
        height, width, channels = (*sides.tolist(), 1)[:3]
        wanted = height, width, channels
        if shape not in (None, wanted) or math.prod(wanted) != features:
            raise ValueError(
                f"image_shape={given} has {math.prod(wanted)} values, but X has "
                f"{features}{f' of shape {shape}' if shape else ''}."
            )
        shape = wanted
    if shape is None:
        side = math.isqrt(features - 1) + 1
        return side, side, 1
    if shape[0] != shape[1]:
        raise ValueError(
            f"Images of {shape[0]}x{shape[1]} pixels are not square; crop or pad them."
        )
    return shape


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Prints the lines of training where no logging is set up, as in a notebook."""
    logger = logging.getLogger("kln_jax")
    if logger.isEnabledFor(logging.INFO):
        yield
        return
    level, propagate = logger.level, logger.propagate
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _arrays(state: steps.TrainState) -> dict[str, Any]:
    """Returns what of a state is saved, by name."""
    return {name: value for name, value in vars(state).items() if name != "opt_state"}


def _plain(name: str, value: Any) -> Any:
    """Returns a parameter as a configuration holds it, of Python's own types."""
    try:
        return json.loads(json.dumps(value, default=_as_json))
    except TypeError:
        raise ValueError(
            f"{name}={value!r} must be a number, a string or a sequence of them."
        ) from None


def _as_json(value: Any) -> Any:
    """Returns NumPy's numbers and arrays as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} cannot be saved")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
