"""What holds for every test: CPU with eight devices, strict dtypes and ranks."""

import importlib.metadata
import os
import shutil
import tempfile

# Before JAX looks for devices: tests of parallelism need several, and the others
# run on the first of them. Compiling takes most of the time of these tests, on small
# arrays; without LLVM's optimisation it takes a third.
os.environ["JAX_PLATFORMS"] = "cpu"
# KLN_JAX_TEST_OPTIMISED=1 leaves it on: make test-optimised.
flags = ["--xla_force_host_platform_device_count=8"]
if not os.environ.get("KLN_JAX_TEST_OPTIMISED"):
    flags.append("--xla_backend_optimization_level=0")
    if importlib.metadata.version("jax").startswith("0.10."):
        # Halves the time once more; JAX 0.12 has neither the flag nor the need.
        flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
# More threads than cores, as kln_jax gives to forced devices if it starts JAX itself:
# all that wait for each other hold one.
os.environ["NPROC"] = "32"
# What several tests compile is compiled once, also by processes that they start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kln_jax-tests-")

import jax  # noqa: E402

# A silent promotion is how float64 or a transposed vector gets in unseen.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionfinish():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
