"""KLN as an estimator of scikit-learn."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import math
import os
import pathlib
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.typing import ArrayLike
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils import Tags, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    validate_data,
)

from kln_jax.datasets import Dataset, resized
from kln_jax.inference import trained_network
from kln_jax.networks import models
from kln_jax.storage import whole_files
from kln_jax.training import experiment, steps
from kln_jax.training.configuration import FIELDS, Config

# The keys that are parameters. The others are of data on disk, of the process, or have
# another name here.
_KEYS = {k: key for k, key in FIELDS.items() if key.group not in ("Data", "Run")}
# Parts of the range of pixels that hold too little of it to tell images apart.
_FEW_LEVELS = 1 / 8
_FORMAT = "kln_jax.KLNClassifier/2"


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
      {keys}
      class_weight: Weights of the classes, by label, ``"balanced"`` for the inverse of
        their frequencies, or None for equal ones. They multiply `fit`'s
        ``sample_weight``.
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
      Equations 9 and 10 of arXiv 2008.10165.
    """

    def __init__(
        self,
        *,
        class_weight: Mapping[Any, float] | str | None = None,
        image_shape: tuple[int, ...] | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
        **keys: Any,
    ) -> None:
        if unknown := keys.keys() - _KEYS.keys():
            raise TypeError(f"KLNClassifier has no parameters {sorted(unknown)}.")
        for name, key in _KEYS.items():
            setattr(self, name, keys.get(name, key.default))
        self.class_weight = class_weight
        self.image_shape = image_shape
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Trains from the start.

        Fits of equal settings on data of equal shapes share their compiled programs.

        A weight says how often a labelled image is in batches s, beside the others: in
        the mean that is training on images repeated so, whatever the objective.

        Args:
          X: Images or features, shape ``(n, h, w)``, ``(n, h, w, c)`` or ``(n, p)``.
          y: A class label for each, of any type; -1 for images without a label, as in
            ``sklearn.semi_supervised``. Strings must then be of dtype object.
          sample_weight: Weights of the images, at least 0, shape ``(n,)``; None for
            equal ones. Only their ratios count, and those of labelled images.

        Returns:
          The estimator.

        Raises:
          ValueError: If the parameters or the data will not do.
          kln_jax.training.loop.DivergenceError: If training diverges.
        """
        # What fails below is then not fitted, rather than a mixture of two fits.
        self.__dict__.pop("state_", None)
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
        keys = {name: _plain(name, getattr(self, name)) for name in _KEYS}
        num_labels = 0 if labelled.all() else int(labelled.sum())
        config = Config(**keys, seed=seed, num_labels=num_labels)
        values = config.to_dict()
        self.config_ = {name: values[name] for name in (*_KEYS, "seed")}

        weights = self._weights(sample_weight, flat, target, labelled)
        images = self._images(flat)
        rows = np.flatnonzero(labelled).astype(np.int32)
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
            evaluate_on="training",
        )
        with _shown() if self.verbose else contextlib.nullcontext():
            state = experiment.train_in_memory(
                config, data, rows, weights=weights, show=bool(self.verbose)
            )
        self.state_ = steps.without_optimizer(state)
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
        labels: np.ndarray = self.classes_[best]
        return labels

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
        probabilities: np.ndarray = self._predict(X).probabilities
        return probabilities

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
        z: np.ndarray = self._predict(X).z
        return z

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
        if isinstance(self.class_weight, Mapping):  # JSON has keys of strings alone.
            params["class_weight"] = {"of": list(self.class_weight.items())}
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
                if isinstance(estimator.class_weight, dict):
                    estimator.class_weight = dict(estimator.class_weight["of"])
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
        return int(self.config_["latent_dim"])

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

    def _weights(
        self,
        sample_weight: ArrayLike | None,
        X: np.ndarray,
        target: np.ndarray,
        labelled: np.ndarray,
    ) -> np.ndarray | None:
        """Returns the weights of the labelled images, of mean 1; None if all are."""
        if sample_weight is None and self.class_weight is None:
            return None
        weights = _check_sample_weight(
            sample_weight, X, dtype=np.float64, ensure_non_negative=True
        )[labelled]
        weights *= compute_sample_weight(self.class_weight, target[labelled])
        if not weights.sum() > 0:
            raise ValueError("All labelled images have weight 0: give some a weight.")
        weights = (weights / weights.mean()).astype(np.float32)
        return None if (weights == 1).all() else weights

    def _network_shape(self) -> tuple[int, int, int]:
        side = models.SIDES[self.config_["network"]]
        return side, side, self.image_shape_[2]

    def _model(self) -> models.KLN:
        return models.build(
            self.config_["network"],
            image_shape=self._network_shape(),
            num_classes=len(self.classes_),
            latent_dim=self.config_["latent_dim"],
            z_distance=self.config_["z_distance"],
            width=self.config_["width"],
            dtype=jnp.dtype(self.config_["dtype"]),
        )

    def _images(self, X: np.ndarray) -> np.ndarray:
        """Returns the images of rows of features, as the network takes them."""
        if self.pixel_range_ is not None:
            low, high = self.pixel_range_
            # Where all are the same, they are black.
            unit = (X.astype(np.float64) - low) / ((high - low) or 1.0)
            _warn_of_scale(unit, self.pixel_range_)
            X = np.rint(255 * np.clip(unit, 0, 1)).astype(np.uint8)
        height, width, channels = self.image_shape_
        missing = height * width * channels - X.shape[1]
        images = np.pad(X, [(0, 0), (0, missing)]).reshape(-1, height, width, channels)
        side = self._network_shape()[0]
        return images if side == height else resized(images, side)


def _warn_of_scale(unit: np.ndarray, pixel_range: tuple[float, float]) -> None:
    """Warns of values that the range of `fit` does not suit.

    Args:
      unit: Values, 0 and 1 being the ends of that range.
      pixel_range: The range.
    """
    clipped = np.mean((unit < 0) | (unit > 1))
    low, high = np.quantile(unit, (0.005, 0.995))
    low, high = max(low, 0.0), min(high, 1.0)
    trouble = ""
    if clipped > 0.5:
        trouble = f"{clipped:.0%} of the values are outside of it and are clipped"
    elif np.ptp(unit) > 0 and high - low < _FEW_LEVELS:
        trouble = "99 % of the values fall in less than an eighth of it"
    if trouble:
        warnings.warn(
            f"Images were fitted on values from {pixel_range[0]:g} to "
            f"{pixel_range[1]:g}, but {trouble}. Scale X alike for fit and predict, "
            "and remove outliers.",
            stacklevel=4,
        )


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
        if side * side != features:
            warnings.warn(
                f"X has {features} features, which are no square image: they fill one "
                f"of {side}x{side} pixels from its first row on. Give image_shape, or "
                "another classifier if they are no pixels.",
                stacklevel=3,
            )
        return side, side, 1
    if shape[0] != shape[1]:
        raise ValueError(
            f"Images of {shape[0]}x{shape[1]} pixels are not square; crop or pad them."
        )
    return shape


def _declare_parameters() -> None:
    """Gives the class the parameters of `_KEYS`, in its signature and docstring."""
    signature = inspect.signature(KLNClassifier.__init__)
    itself, *own, _ = signature.parameters.values()
    declared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=key.default)
        for name, key in _KEYS.items()
    ]
    # scikit-learn reads the names of the parameters from it.
    KLNClassifier.__init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *declared, *own]
    )
    indents: dict[str, Any] = dict(initial_indent=" " * 6, subsequent_indent=" " * 8)
    args = "\n".join(
        textwrap.fill(f"{name}: {key.description}", 88, **indents)
        for name, key in _KEYS.items()
    )
    KLNClassifier.__doc__ = (KLNClassifier.__doc__ or "").replace("      {keys}", args)


_declare_parameters()


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
