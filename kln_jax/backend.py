"""The backend that JAX runs on; the only module that asks for it."""

from __future__ import annotations

import jax


def is_cpu() -> bool:
    """Whether JAX runs on CPU, where some equal programs are much faster."""
    return jax.default_backend() == "cpu"
