"""Kernels, the CMMD and what belongs to it; this room needs JAX alone."""
