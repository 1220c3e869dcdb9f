"""KLN: learning kernel for conditional moment-matching image classification.

The names here need JAX alone: importing them starts no backend and changes no setting.
`KLNClassifier` needs the extra ``[sklearn]`` and is imported when it is asked for.
"""

from typing import TYPE_CHECKING

from kln_jax.discrepancies.cmmd import (
    ConditionalEmbedding,
    cmmd,
    cmmd_from_grams,
    conditional_embedding,
    weight_matrix,
)
from kln_jax.discrepancies.kernels import (
    ComposableKernel,
    Kernel,
    gaussian_mixture,
    laplacian,
    linear,
    median_bandwidth,
    polynomial,
    rational_quadratic,
    squared_distances,
)
from kln_jax.discrepancies.mmd import mmd
from kln_jax.discrepancies.nystroem import cmmd_nystroem
from kln_jax.discrepancies.two_sample import CMMDTestResult, cmmd_test

if TYPE_CHECKING:
    from kln_jax.inference.estimator import KLNClassifier as KLNClassifier

__all__ = [
    "CMMDTestResult",
    "ComposableKernel",
    "ConditionalEmbedding",
    "Kernel",
    "cmmd",
    "cmmd_from_grams",
    "cmmd_nystroem",
    "cmmd_test",
    "conditional_embedding",
    "gaussian_mixture",
    "laplacian",
    "linear",
    "median_bandwidth",
    "mmd",
    "polynomial",
    "rational_quadratic",
    "squared_distances",
    "weight_matrix",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports what needs more than JAX when it is asked for."""
    if name == "KLNClassifier":
        from kln_jax.inference.estimator import KLNClassifier

        return KLNClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
