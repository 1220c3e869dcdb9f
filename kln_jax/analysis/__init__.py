"""What finished runs show: tables and figures from their working directories."""

from kln_jax import _extras

_extras.require("analysis", "matplotlib", "ml_collections", "sklearn")
