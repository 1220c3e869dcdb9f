"""Packages that a part of kln_jax needs and ``pip install kln_jax`` does not bring."""

import importlib.util


def require(extra: str, *packages: str) -> None:
    """Checks that packages are installed, without importing them.

    Args:
      extra: The extra of kln_jax that brings them.
      *packages: Their names, as they are imported.

    Raises:
      ModuleNotFoundError: If one is missing.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"not installed: {', '.join(missing)}; this part of kln_jax needs them. "
            f"Run: pip install 'kln_jax[{extra}]'",
            name=missing[0],
        )
