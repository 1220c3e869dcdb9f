r"""The user's own images, grey at 28x28 or in colour at 32x32 pixels.

    python train.py --config=configs/own_images.py --config.data_dir=DIR
    python train.py --config=configs/own_images.py:semi --config.data_dir=DIR

DIR has a folder train with a folder of .png or .jpg files for each class, and a
folder test of the same form. Without the latter, a stratified part of the images,
test_fraction, is held out. Images must be square, and are resized. DIR may also be
an .npz file with arrays images, labels and, if given, test_images, test_labels and
class_names.

In colour, with the deeper network and its augmentation:

    python train.py --config=configs/own_images.py --config.data_dir=DIR \
        --config.image_size=32 --config.network=conv_large \
        --config.z_distance=25 --config.normalise=True \
        --config.crop_padding=2 --config.flip=True

Leave flip out where a mirrored image is of another class. The semi-supervised
variant uses the labels of 100 images; --config.num_labels sets another number.

Not in the paper: its settings for MNIST. With fewer images, fewer steps make an
epoch: 1,000 to train make 10. Time per epoch: not measured.

Departures from the paper: clip_norm (0 is as printed). Left open by it, and chosen
here: ridge, label_kernel, kernel_reduction.
"""

import ml_collections

from kln_jax.training import variants


def get_config(variant: str = "supervised") -> ml_collections.ConfigDict:
    config = variants.default_config()
    config.dataset = "own_images"
    return variants.with_variant(config, variant, num_labels=100)
