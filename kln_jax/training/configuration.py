"""The keys of a configuration, declared once: types, defaults, bounds and meaning."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import pathlib
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, TypeVar

import jax.numpy as jnp

from kln_jax import datasets
from kln_jax.discrepancies.cmmd import check_ridge
from kln_jax.discrepancies.kernels import gaussian_mixture, largest_value
from kln_jax.networks import models
from kln_jax.storage import working_directory

T = TypeVar("T")

# What a key belongs to. Those of the experiment distinguish two runs in a report. Those
# of the run do not, but stay as they are when it is resumed. The whereabouts say where
# and how often a run computes and saves: a resumed run may have others.
Owner = Literal["experiment", "run", "whereabouts"]

_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
_COUNTS = 2**31  # Counts are int32.
_SEEDS = 2**32  # So many keys `jax.random.key` makes.


@dataclasses.dataclass(frozen=True)
class Key:
    """What is declared of a key.

    Attributes:
      name: Its name.
      kind: Type of its value, or of each value of a sequence.
      is_sequence: Whether its value is a tuple.
      default: Its default.
      group: The heading below which it is documented.
      doc: What it means.
      owner: What it belongs to: the experiment, the run, or its whereabouts.
      choices: The values that are allowed; () if there are others.
      bounds: What a number is held against, such as ``{"at_least": 0, "below": 1}``.
    """

    name: str
    kind: type
    is_sequence: bool
    default: Any
    group: str
    doc: str
    owner: Owner
    choices: tuple[Any, ...]
    bounds: Mapping[str, float]

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            *others, last = map(repr, self.choices)
            return f"{', '.join(others)} or {last}"
        if self.kind not in (int, float):
            return "True or False" if self.kind is bool else "a string"
        number = "whole number" if self.kind is int else "number"
        bounds = " and ".join(
            f"{_BOUNDS[bound][0]} {_written(limit)}"
            for bound, limit in self.bounds.items()
        )
        words = f"a sequence of {number}s" if self.is_sequence else f"a {number}"
        return f"{words} {bounds}"

    @property
    def description(self) -> str:
        """What the key means and which values are allowed, in sentences."""
        return f"{self.doc} It is {self.allowed}."

    def checked(self, value: Any) -> Any:
        """Returns a value in the type of the key.

        Args:
          value: The value; an int will do for a float, and a list for a tuple.

        Raises:
          ValueError: If the value is not allowed.
        """
        if not self.is_sequence:
            found = self._converted(value)
        elif isinstance(value, tuple | list):
            found = tuple(map(self._converted, value))
        else:
            found = None
        if found is None or (self.is_sequence and None in found):
            raise ValueError(
                f"{self.name}={value!r} must be {self.allowed}; its default is "
                f"{self.default!r}."
            )
        return found

    def _converted(self, value: Any) -> Any:
        """Returns one value in the type of the key; None if it is not allowed."""
        accepted = int | float if self.kind is float else self.kind
        is_bool = isinstance(value, bool)  # Which Python takes for a number.
        if not isinstance(value, accepted) or is_bool != (self.kind is bool):
            return None
        try:
            found = self.kind(value)
        except OverflowError:  # Of an int that no float holds.
            return None
        if self.choices:
            return found if found in self.choices else None
        if self.kind is float and not math.isfinite(found):
            return None
        within = (_BOUNDS[name][1](found, limit) for name, limit in self.bounds.items())
        return found if all(within) else None


def _written(limit: float) -> str:
    return {_COUNTS: "2**31", _SEEDS: "2**32"}.get(int(limit), f"{limit}")


def _key(
    default: T,
    group: str,
    doc: str,
    *,
    owner: Owner = "experiment",
    choices: Iterable[str] = (),
    **bounds: float,
) -> T:
    """Declares a key; a whole number without an upper bound is below 2**31."""
    metadata = dict(group=group, doc=doc, owner=owner, choices=choices, bounds=bounds)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All keys of a run. One that is not valid cannot be made.

    `FIELDS` says of each key what it means and what it may be.

    Raises:
      ValueError: If a value is not allowed, or some do not go together.

    Examples:
      >>> config = Config(dataset="mnist", ridge=1)
      >>> config.ridge, config.replace(batch_size=50).batch_size
      (1.0, 50)
      >>> Config(momentum=1.5)
      Traceback (most recent call last):
        ...
      ValueError: momentum=1.5 must be a number of at least 0 and below 1; its default \
is 0.9.
    """

    dataset: str = _key("digits", "Data", "The data set.", choices=datasets.NAMES)
    data_dir: str = _key(
        "",
        "Data",
        "Where prepared data sets lie. An empty string means the default of TFDS, "
        "~/tensorflow_datasets. For own_images, their folder or .npz file.",
        owner="whereabouts",
    )
    allow_partial_data: bool = _key(
        False,
        "Data",
        "Whether a data set may have other sizes than the known ones. A warning and "
        "the result then say so.",
        owner="run",
    )
    validation_fraction: float = _key(
        0.0,
        "Data",
        "The part of the training images that is held out for validation, from their "
        "end.",
        at_least=0,
        below=1,
    )
    evaluate_on: Literal["test", "validation"] = _key(
        "test", "Data", "The images on which the error is measured.", owner="run"
    )
    use_extra: bool = _key(
        False, "Data", "Whether the extra images of SVHN are training images."
    )
    image_size: Literal[28, 32] = _key(
        28,
        "Data",
        "Side of the images in pixels; the network conv_large needs 32. Digits and "
        "own images are resized, and own images become grey with 28 and RGB with 32. "
        "Data sets of 28x28 get a black margin. Those of 32x32 stay as they are.",
    )
    test_fraction: float = _key(
        0.2,
        "Data",
        "The part of own_images that is held out if they have no test images.",
        above=0,
        below=1,
    )
    num_labels: int = _key(
        0,
        "Data",
        "Number of labelled images, the same of each class. With 0 all are labelled.",
        at_least=0,
    )
    split_seed: int = _key(
        0,
        "Data",
        "Seed that chooses the labelled images.",
        owner="run",
        at_least=0,
        below=_SEEDS,
    )

    crop_padding: int = _key(
        0,
        "Augmentation",
        "By how many reflected pixels images are padded, to be cropped at random. With "
        "0 they are not cropped.",
        at_least=0,
    )
    flip: bool = _key(False, "Augmentation", "Whether images are mirrored at random.")
    normalise: bool = _key(
        False,
        "Augmentation",
        "Whether channels are shifted and scaled to mean 0 and standard deviation 1 "
        "of the training images.",
    )

    network: str = _key(
        "mnist",
        "Network",
        "The network. mnist and mlp take images of 28x28 pixels, conv_large of 32x32.",
        choices=models.SIDES,
    )
    width: float = _key(
        1.0,
        "Network",
        "Channels of the hidden layers relative to the paper's. Each layer has at "
        "least one.",
        above=0,
        at_most=100,
    )
    latent_dim: int = _key(128, "Network", "Dimensions of Z.", at_least=1)
    z_distance: float = _key(
        0.0,
        "Network",
        "Mean squared distance in a batch to which Z is standardised, without a "
        "learned scale. With 0 Z stays as it is. At a squared distance of 25 the "
        "kernel of the default bandwidths is 0.1.",
        at_least=0,
    )
    dtype: Literal["float32", "bfloat16"] = _key(
        "float32", "Network", "The type in which the network computes."
    )

    objective: Literal["cmmd", "cross_entropy", "reconstruction"] = _key(
        "cmmd",
        "Objective",
        "What is minimised. With cmmd it is KLN. With cross_entropy, a baseline, that "
        "takes the place of the CMMD. With reconstruction the autoencoder is trained "
        "alone.",
    )
    kernel_on: Literal["z", "pixels", "pca", "autoencoder"] = _key(
        "z",
        "Objective",
        "What the kernel of the CMMD acts on. With z it is KLN. The others are not "
        "learned with it: pixels, latent_dim principal components of the training "
        "images (pca), or the Z of an autoencoder that is trained first.",
    )
    bandwidths: tuple[float, ...] = _key(
        (1.0, 3.0, 5.0, 7.0, 9.0),
        "Objective",
        "Variances of the Gaussian kernels on features.",
        above=0,
    )
    kernel_reduction: Literal["mean", "sum"] = _key(
        "mean",
        "Objective",
        "Whether the Gaussian kernels are averaged or summed, on features and on "
        "labels. The paper's histograms of kernel values end at 1, as with mean.",
    )
    label_kernel: Literal["linear", "gaussian"] = _key(
        "linear",
        "Objective",
        "The kernel on labels. With gaussian it is the paper's mixture of variances 1, "
        "3, 5, 7 and 9.",
    )
    ridge: float = _key(
        0.1,
        "Objective",
        "The paper's lambda, which it does not give. With clip_norm, values from "
        "0.0001 to 0.1 differ little; at 1 the kernel separates little.",
        above=0,
    )
    pairing: Literal["independent", "shared", "symmetric"] = _key(
        "independent",
        "Objective",
        "The images of batch t: its own (independent), or those of batch s (shared). "
        "With symmetric they are its own, and the objective is the mean over both "
        "orders of the batches: it uses the labels of both, so all must be known.",
    )
    reconstruction_weight: float = _key(
        0.1,
        "Objective",
        "The paper's beta (supervised) or beta 1 (semi-supervised).",
        at_least=0,
    )
    reconstruction_reduction: Literal["sum", "mean"] = _key(
        "sum",
        "Objective",
        "Whether the reconstruction error is summed over pixels, as in Equation 6, or "
        "averaged.",
    )
    confidence_weight: float = _key(
        0.0, "Objective", "The paper's beta 2 (semi-supervised).", at_least=0
    )
    class_prior: str = _key(
        "uniform",
        "Objective",
        "The prior P(Y) of the confidence term: uniform, labelled for the class "
        "frequencies of the labelled images, or a probability for each class, such as "
        "0.9,0.1.",
    )

    num_epochs: int = _key(
        150,
        "Optimisation",
        "Passes over all images of batch t.",
        owner="run",
        at_least=1,
    )
    batch_size: int = _key(
        100,
        "Optimisation",
        "Images of batch s, and of batch t, in a step, over all devices: the n of the "
        "estimator. Matrices of n x n are factorised.",
        at_least=1,
        at_most=20_000,
    )
    optimizer: Literal["sgd", "adam"] = _key("sgd", "Optimisation", "The optimiser.")
    learning_rate: float = _key(
        0.02,
        "Optimisation",
        "The step size before milestones and warm-up.",
        at_least=0,
    )
    momentum: float = _key(
        0.9, "Optimisation", "The momentum of SGD.", at_least=0, below=1
    )
    weight_decay: float = _key(
        5e-4, "Optimisation", "The L2 penalty on every parameter.", at_least=0
    )
    lr_milestones: tuple[int, ...] = _key(
        (50, 100, 130),
        "Optimisation",
        "Epochs, in ascending order, at which the learning rate is multiplied by "
        "lr_decay.",
        at_least=1,
    )
    lr_decay: float = _key(
        0.2, "Optimisation", "The factor at each milestone.", at_least=0
    )
    warmup_steps: int = _key(
        0,
        "Optimisation",
        "Steps over which the learning rate rises to its value. With 0 it does not.",
        at_least=0,
    )
    clip_norm: float = _key(
        10.0,
        "Optimisation",
        "The largest global norm of the gradients. With 0 they are not clipped, as "
        "the paper prints it; the first steps can then cost conv_large its classes.",
        at_least=0,
    )

    seed: int = _key(
        0,
        "Run",
        "Seed of initialisation, order, augmentation and dropout.",
        owner="run",
        at_least=0,
        below=_SEEDS,
    )
    checkpoint_every: int = _key(
        10,
        "Run",
        "Epochs between checkpoints. There is always one at the end.",
        owner="whereabouts",
        at_least=1,
    )
    checkpoint_every_steps: int = _key(
        0,
        "Run",
        "Steps between further checkpoints inside an epoch. With 0 there are none.",
        owner="whereabouts",
        at_least=0,
    )
    platform: Literal["", "cpu", "gpu", "tpu"] = _key(
        "",
        "Run",
        "Where JAX computes. An empty string means the best there is.",
        owner="whereabouts",
    )
    variant: str = _key(
        "supervised",
        "Run",
        "The name of the variant of a file in configs/. It is given after a colon, as "
        "in --config=configs/digits.py:semi.",
        owner="run",
    )

    def __post_init__(self) -> None:
        """Checks and converts each value, and checks them together."""
        for name, key in FIELDS.items():
            object.__setattr__(self, name, key.checked(getattr(self, name)))
        _check_together(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Makes a configuration of the values of all keys.

        Args:
          mapping: From each key to its value; sequences may be lists.

        Raises:
          ValueError: If a key is unknown or missing, a value is not allowed, or some
            do not go together.
        """
        check_names(mapping)
        for name, key in FIELDS.items():
            if name not in mapping:
                raise ValueError(
                    f"configuration key {name!r} is missing; its default is "
                    f"{key.default!r}."
                )
        return cls(**mapping)

    def replace(self, **changes: Any) -> Self:
        """Returns the configuration with other values.

        Raises:
          ValueError: As `from_mapping`.
        """
        check_names(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values by key, as JSON has them: sequences are lists."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @staticmethod
    def keys_of(owner: Owner) -> tuple[str, ...]:
        """Returns the keys that belong to the experiment, the run, or its whereabouts.

        Examples:
          >>> Config.keys_of("whereabouts")
          ('data_dir', 'checkpoint_every', 'checkpoint_every_steps', 'platform')
        """
        return tuple(name for name, key in FIELDS.items() if key.owner == owner)


def _declared() -> dict[str, Key]:
    """Reads the fields of `Config`."""
    hints = typing.get_type_hints(Config)
    found = {}
    for field in dataclasses.fields(Config):
        hint = hints[field.name]
        default: Any = field.default
        is_sequence = typing.get_origin(hint) is tuple
        kind = type(default[0] if is_sequence else default)
        choices, bounds = field.metadata["choices"], dict(field.metadata["bounds"])
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
        elif kind is int and not bounds.keys() & {"at_most", "below"}:
            bounds["below"] = _COUNTS
        found[field.name] = Key(
            name=field.name,
            kind=kind,
            is_sequence=is_sequence,
            default=default,
            group=field.metadata["group"],
            doc=field.metadata["doc"],
            owner=field.metadata["owner"],
            choices=tuple(choices),
            bounds=bounds,
        )
    return found


# All keys, in their order.
FIELDS: Mapping[str, Key] = _declared()


def check_names(names: Iterable[str]) -> None:
    """Refuses a name that is no key.

    Args:
      names: Names of keys.

    Raises:
      ValueError: If one is unknown; the message has the key that resembles it.

    Examples:
      >>> check_names(["ridge", "rigde"])
      Traceback (most recent call last):
        ...
      ValueError: unknown configuration key 'rigde'; did you mean 'ridge'?
    """
    for name in names:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            fix = (
                f"did you mean {near[0]!r}?"
                if near
                else "kln_jax/training/configuration.py lists all keys."
            )
            raise ValueError(f"unknown configuration key {name!r}; {fix}")


def _check_together(config: Config) -> None:
    """Refuses values that are allowed alone, but not together."""
    if config.kernel_on != "z" and config.objective != "cmmd":
        raise ValueError(
            f"objective={config.objective!r} has no kernel to act on "
            f"{config.kernel_on!r}: set kernel_on='z', or objective='cmmd'."
        )
    if config.pairing == "symmetric" and config.num_labels:
        raise ValueError(
            f"pairing='symmetric' uses the labels of both batches, but num_labels="
            f"{config.num_labels} leaves some unknown: set pairing='independent'."
        )
    if list(config.lr_milestones) != sorted(config.lr_milestones):
        raise ValueError(
            f"lr_milestones={config.lr_milestones!r} must be in ascending order, such "
            f"as {tuple(sorted(config.lr_milestones))!r}."
        )
    if config.class_prior not in ("uniform", "labelled"):
        prior_numbers(config.class_prior)
    kernel = gaussian_mixture(config.bandwidths, reduction=config.kernel_reduction)
    check_ridge(
        config.ridge, config.batch_size, jnp.dtype(jnp.float32), largest_value(kernel)
    )


def prior_numbers(text: str) -> tuple[float, ...]:
    """Reads the numbers of ``class_prior``.

    Args:
      text: Probabilities, separated by commas.

    Raises:
      ValueError: If they are not positive numbers with the sum 1.

    Examples:
      >>> prior_numbers("0.9,0.1")
      (0.9, 0.1)
    """
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if (
        not numbers
        or min(numbers) <= 0
        or not math.isclose(sum(numbers), 1, rel_tol=1e-3)
    ):
        raise ValueError(
            f"class_prior={text!r} must be 'uniform', 'labelled', or a positive number "
            "for each class, with the sum 1, such as '0.9,0.1'."
        )
    return numbers


def read(directory: pathlib.Path) -> Config:
    """Reads the configuration of a run.

    Args:
      directory: Its working directory.

    Raises:
      ValueError: If there is none, or it is damaged or of another version.
    """
    values = working_directory.read_config(directory)
    try:
        return Config.from_mapping(values)
    except ValueError as error:
        raise ValueError(
            f"config.json of {directory} was written by another version of kln_jax: "
            f"{error}"
        ) from error
