"""Every key of a configuration, with its default; the other files override it."""

from typing import Any

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    # --- Data ---
    # digits, mnist, fashion_mnist, svhn_cropped, cifar10, cifar100, own_images.
    config.dataset = "digits"
    # Where prepared data sets lie; "" is TFDS's own default, ~/tensorflow_datasets.
    # Of own_images: their folder or .npz file.
    config.data_dir = ""
    # Whether a set with other sizes than the known ones is taken, with a warning.
    config.allow_partial_data = False
    # Part of the training set that is held out for validation, from its end.
    config.validation_fraction = 0.0
    # What the error is measured on: "test" or "validation".
    config.evaluate_on = "test"
    # Whether SVHN's `extra` images belong to the training set.
    config.use_extra = False
    # Side of images in pixels: 28, or 32 for network "conv_large". Digits and
    # own_images are resized, sets of 28x28 get a black margin, and those of 32x32 stay
    # as they are. Own images become grey with 28 and RGB with 32.
    config.image_size = 28
    # Part of own_images that is held out where they have no test images.
    config.test_fraction = 0.2
    # Labelled images, drawn class-balanced; 0 for all (supervised).
    config.num_labels = 0
    # Seed of that draw.
    config.split_seed = 0

    # --- Augmentation, on the device ---
    # Random crop after padding by so many reflected pixels; 0 for none.
    config.crop_padding = 0
    # Random horizontal flip.
    config.flip = False
    # Whether channels are normalised to mean 0, standard deviation 1, those of the
    # training images.
    config.normalise = False

    # --- Network ---
    # "mnist" (28x28), "mlp" (28x28) or "conv_large" (32x32).
    config.network = "mnist"
    # Channels of hidden layers relative to the paper's; each has one at least.
    config.width = 1.0
    # Dimensions of Z.
    config.latent_dim = 128
    # Whether Z is batch-normalised after all, before kernel, classifier and decoder.
    config.normalise_z = False
    # Of the networks' computation: "float32" or "bfloat16".
    config.dtype = "float32"

    # --- Objective ---
    # "cmmd", or the baseline "cross_entropy" in its place; "reconstruction" is the
    # autoencoder alone.
    config.objective = "cmmd"
    # What the kernel of CMMD acts on: "z", which is KLN, or something fixed: "pixels",
    # "pca" (latent_dim principal components of the training images) or "autoencoder"
    # (Z of a network that is trained by its reconstruction first).
    config.kernel_on = "z"
    # Variances of the Gaussian kernels there.
    config.bandwidths = (1.0, 3.0, 5.0, 7.0, 9.0)
    # Their "mean" or "sum", and that of those on labels. The paper's histograms of
    # kernel values end at 1: mean.
    config.kernel_reduction = "mean"
    # Kernel on labels: "linear", or "gaussian", a mixture of these variances.
    config.label_kernel = "linear"
    config.label_bandwidths = (1.0, 3.0, 5.0, 7.0, 9.0)
    # The paper's lambda, which it does not give. With clip_norm values from 0.0001 to
    # 0.1 differ little, but 0.1 starts more slowly on "conv_large" with few labels; at
    # 1 the kernel separates little.
    config.ridge = 0.1
    # Whether batch t has images of its own ("independent") or those of s ("shared").
    config.pairing = "independent"
    # The paper's beta (supervised), beta 1 (semi-supervised).
    config.reconstruction_weight = 0.1
    # "sum" over pixels, as printed in Equation 6, or "mean".
    config.reconstruction_reduction = "sum"
    # The paper's beta 2 (semi-supervised).
    config.confidence_weight = 0.0

    # --- Optimisation ---
    # Passes over all images (of t).
    config.num_epochs = 150
    # Images of s, and of t, in a step, over all devices: the n of the estimator.
    config.batch_size = 100
    # "sgd" or "adam".
    config.optimizer = "sgd"
    # Its step size, before milestones and warm-up.
    config.learning_rate = 0.02
    # Of SGD.
    config.momentum = 0.9
    # Of Adam.
    config.b1 = 0.9
    config.b2 = 0.99
    # L2 penalty on every parameter.
    config.weight_decay = 5e-4
    # Epochs at which the learning rate is multiplied by lr_decay.
    config.lr_milestones = (50, 100, 130)
    config.lr_decay = 0.2
    # Steps over which the learning rate rises to its value; 0 for none.
    config.warmup_steps = 0
    # Largest global norm of the gradients. Not in the paper, whose first gradients
    # can cost the network "conv_large" its classes; 0 as printed.
    config.clip_norm = 10.0

    # --- Run ---
    # Of initialisation, order, augmentation and dropout.
    config.seed = 0
    # How many seeds one program trains, on one device: seed, seed + 1, ... with
    # split_seed, split_seed + 1, ... They take turns on CPU, and are one batch
    # elsewhere. Above 1, the working directory of each is a folder in that of the
    # command, named by the seed. Not with profile or kernel_on "autoencoder".
    config.num_seeds = 1
    # Epochs between checkpoints; there is always one at the end.
    config.checkpoint_every = 10
    # Steps between further ones, inside an epoch; 0 for none.
    config.checkpoint_every_steps = 0
    # How many of the newest checkpoints are kept, and how many of those with the
    # smallest validation error beside them (with evaluate_on = "validation").
    config.keep_last = 2
    config.keep_best = 0
    # What happens at a step whose loss or gradient is not finite or too large: "stop"
    # saves the state before it and ends the run; "skip" makes no update there, so many
    # times at most.
    config.on_nonfinite = "stop"
    config.max_skipped_steps = 10
    # Largest loss, and norm of the gradient before clipping. The first norms are 75 to
    # 349 on the network for MNIST, and 2,336 on the deeper one with ridge 0.001.
    config.divergence_bound = 1e6
    # "cpu", "gpu", "tpu", or "" for the best there is.
    config.platform = ""
    # Directory of compiled programs, with which the next start is faster; "" for none.
    config.compilation_cache = "~/.cache/kln_jax/xla"
    # So many first steps of a start are traced, but none beyond its first epoch or
    # checkpoint, into the folder profile of the working directory: tensorboard
    # --logdir=WORKDIR, with its profile plugin. 0 for none.
    config.profile = 0
    # Name of the variant of this configuration.
    config.variant = "supervised"
    return config.lock()  # A misspelt key is none.


# What a variant changes: the paper's baselines and ablations.
_CGMMN: dict[str, Any] = dict(
    kernel_on="pixels",
    pairing="shared",
    # As its published code has it.
    bandwidths=(1.0, 9.0, 20.0, 40.0, 80.0),
    kernel_reduction="sum",
    label_kernel="gaussian",
    ridge=1e-3,
    reconstruction_weight=0.0,
)
_ABLATIONS: dict[str, dict[str, Any]] = {
    "ce": dict(objective="cross_entropy"),
    "cgmmn": _CGMMN,
    "cgmmn_mlp": dict(_CGMMN, network="mlp"),
    "identity": dict(kernel_on="pixels"),
    "pca": dict(kernel_on="pca"),
    "autoencoder": dict(kernel_on="autoencoder"),
    "no_reconstruction": dict(reconstruction_weight=0.0),
    "no_confidence": dict(confidence_weight=0.0),
    # The ridge is that of CGMMN, for the paper gives none.
    "as_printed": dict(clip_norm=0.0, ridge=1e-3),
}


def with_variant(
    config: ml_collections.ConfigDict, variant: str, *, num_labels: int = 0
) -> ml_collections.ConfigDict:
    """Returns a variant of a supervised configuration.

    Args:
      config: The supervised configuration.
      variant: ``"supervised"``, or ``"semi"`` for the paper's semi-supervised setting;
        or the paper's baselines and ablations: ``"ce"``, ``"cgmmn"``, ``"cgmmn_mlp"``
        (28x28 pixels), ``"identity"``, ``"pca"``, ``"autoencoder"``,
        ``"no_reconstruction"``, ``"as_printed"``; or one of these in the
        semi-supervised setting, such as ``"semi_ce"``, and ``"semi_no_confidence"``.
      num_labels: Labelled images in that setting; 0 where the paper has none.

    Raises:
      ValueError: If there is no such variant.
    """
    ablations = set(_ABLATIONS)
    if config.network != "mnist":
        ablations -= {"cgmmn_mlp"}
    variants = {"supervised", *ablations} - {"no_confidence"}
    if num_labels:
        variants |= {"semi", *(f"semi_{name}" for name in ablations)}
    if variant not in variants:
        raise ValueError(f"variant={variant!r} must be one of {sorted(variants)}.")
    config.variant = variant
    # The number of epochs stays: the paper gives none for this setting.
    if variant.startswith("semi"):
        config.num_labels = num_labels
        config.confidence_weight = 1.0
        config.optimizer = "adam"
        config.learning_rate = 1e-3
        config.weight_decay = 0.0
        config.lr_milestones = ()
    config.update(_ABLATIONS.get(variant.removeprefix("semi_"), {}))
    return config
