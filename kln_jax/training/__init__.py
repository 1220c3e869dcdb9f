"""Training: from a configuration to a finished run, over devices and processes."""

from kln_jax import _extras

_extras.require("train", "flax", "optax", "orbax", "chex", "tensorboardX", "tqdm")
