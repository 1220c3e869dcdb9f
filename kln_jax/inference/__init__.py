"""Trained networks: KLN for scikit-learn, and commands that predict and export."""

from kln_jax import _extras

_extras.require("train", "flax", "optax", "orbax", "PIL")
