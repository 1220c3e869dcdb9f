"""What importing the library must not do, each checked in a fresh interpreter."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
NAMES = "cmmd, cmmd_from_grams, weight_matrix, gaussian_mixture, linear"
IMPORT = f"from kln_jax import {NAMES}, squared_distances\n"


def _run(code: str, **environment: str) -> None:
    """Runs code in a new interpreter at the root of the repository."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_import_has_no_effects():
    # No backend can start on this platform: the first that tries, fails.
    _run(
        """
import os, sys
from absl import flags
import jax
defined, before, environment = set(flags.FLAGS), dict(jax.config.values), {**os.environ}
assert len(before) > 50, "jax.config.values is no longer the table of settings"
loaded = {name.partition(".")[0] for name in sys.modules}
"""
        + IMPORT
        + """
gaussian_mixture((1, 3), reduction="sum")  # Settings alone need no backend either.
heavy = {"tensorflow", "tensorflow_datasets", "orbax", "flax", "optax", "sklearn"}
heavy |= {"ml_collections", "chex", "PIL", "matplotlib", "tensorboardX", "tqdm"}
heavy &= {name.partition(".")[0] for name in sys.modules} - loaded
assert not heavy, heavy
assert set(flags.FLAGS) == defined
after = jax.config.values
assert before.keys() <= after.keys()
changed = {name: after[name] for name in before if after[name] != before[name]}
assert not changed, changed
assert dict(os.environ) == environment
try:
    jax.devices()
except RuntimeError:
    pass
else:
    raise AssertionError("the trap does not work: a backend could start")
""",
        JAX_PLATFORMS="no_such_platform",
    )


def test_library_works_with_jax_alone():
    _run(
        """
import sys

class JaxAlone:
    \"\"\"Refuses all but the standard library, JAX and what JAX needs.\"\"\"

    allowed = {"kln_jax", "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum"}

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        # JAX itself asks whether this debugger is there.
        if top not in self.allowed and not standard and top != "web_pdb":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, JaxAlone())
try:
    import pytest
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("the blocker does not work")
"""
        + IMPORT
        + """
import numpy as np
x, y = np.array([[0.0], [4.0]]), np.eye(2)
K, L = gaussian_mixture()(x, x), linear(y, y)
assert squared_distances(x, x).max() == 16
assert weight_matrix(K, ridge=0.1).shape == (2, 2)
assert abs(cmmd(x, y, x, y)) < 1e-6
assert cmmd(x, y, x, y[::-1], label_kernel=gaussian_mixture()) > 0
assert abs(cmmd_from_grams(K, K, K, L, L, L, ridge=0.1)) < 1e-6
"""
    )


def test_predicting_loads_nothing_that_trains_and_no_module_is_shadowed():
    _run(
        """
import importlib, pkgutil, sys
import kln_jax.inference.classify, kln_jax.inference.export
import kln_jax.inference.__main__
training = {"kln_jax.training.experiment", "kln_jax.training.loop"}
training |= {"tensorboardX", "tqdm", "sklearn"}
assert not training & set(sys.modules), training & set(sys.modules)
for module in pkgutil.walk_packages(kln_jax.__path__, "kln_jax."):
    package, _, name = module.name.rpartition(".")
    importlib.import_module(module.name)
    assert getattr(sys.modules[package], name) is sys.modules[module.name], module.name
"""
    )
