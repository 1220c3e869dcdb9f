"""The paper's networks, and the layers that they are made of."""

from kln_jax import _extras

_extras.require("train", "flax")
