"""KLN: learning kernel for conditional moment-matching image classification.

The names here need JAX alone: importing them starts no backend and changes no setting.
"""

from kln_jax.cmmd import cmmd, cmmd_from_grams, weight_matrix
from kln_jax.kernels import Kernel, gaussian_mixture, linear, squared_distances

__all__ = [
    "Kernel",
    "cmmd",
    "cmmd_from_grams",
    "gaussian_mixture",
    "linear",
    "squared_distances",
    "weight_matrix",
]

__version__ = "0.1.0"
