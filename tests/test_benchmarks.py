"""The benchmarks: what they take from the package is there."""

import importlib
import pathlib

import pytest

import benchmarks

MODULES = {path.stem for path in pathlib.Path(benchmarks.__path__[0]).glob("[a-z]*.py")}


@pytest.mark.parametrize("name", sorted(MODULES - {"torch_step"}))  # It needs PyTorch.
def test_a_benchmark_can_be_imported(name):
    assert importlib.import_module(f"benchmarks.{name}").__doc__
