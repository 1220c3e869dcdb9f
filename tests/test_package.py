"""What pyproject.toml says of the package, and what is missing without its extras."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import kln_jax
from kln_jax import _extras
from kln_jax.training import variants

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = [path.parent for path in (ROOT / "kln_jax").rglob("__init__.py")]
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == found | {"kln_jax.configs"}


def _needed(extra):
    """The requirements of an extra, with those of the extras that it names."""
    found = set()
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        named = re.fullmatch(r"kln_jax\[(\w+)\]", line)
        found |= _needed(named[1]) if named else {line}
    return found


def test_the_list_of_requirements_is_that_of_the_extras():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    core = set(PROJECT["project"]["dependencies"])
    # JAX brings jaxlib of its own version.
    assert listed - {"jaxlib>=0.10.2"} == core | _needed("analysis")


@pytest.mark.parametrize("entry", sorted(PROJECT["project"]["scripts"].items()))
def test_a_command_without_its_extra_is_one_line(entry):
    command, target = entry
    module, function = target.split(":")
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *_: None if name != "chex" else find(name)
sys.argv = [{command!r}, "--help"]
from {module} import {function} as run
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    extra = "analysis" if command == "kln-report" else "train"
    assert line.startswith(f"{command}: error: not installed: ")
    assert line.endswith(f"Run: pip install 'kln_jax[{extra}]'")


def test_a_requirement_that_is_there_is_not_missed():
    assert _extras.require("train", "flax", "json") is None


def test_the_estimator_is_imported_when_it_is_asked_for():
    from kln_jax.inference.estimator import KLNClassifier

    assert kln_jax.KLNClassifier is KLNClassifier
    with pytest.raises(AttributeError, match="has no attribute 'KLNClasifier'"):
        _ = kln_jax.KLNClasifier


def test_a_configuration_is_found_by_its_name():
    assert variants.files()["digits"] == ROOT / "configs" / "digits.py"
    assert variants.named_config("digits", "semi").num_labels == 100
    with pytest.raises(ValueError, match=r"'digit' must be one of .*'digits'"):
        variants.named_config("digit")
