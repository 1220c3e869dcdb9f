"""Real runs of the small suite, made once for all tests of this folder."""

import shutil

import jax
import pytest

from kln_jax.analysis import runs
from tests.analysis.small_suite import DIVERGES, EPOCHS, SUITE


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The milestones of optax need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """Two seeds of a method, and one that diverged."""
    directory = tmp_path_factory.mktemp("runs")
    client = jax.devices()[0].client
    with jax.numpy_dtype_promotion("standard"):
        made = runs.make(SUITE, directory, seeds=2, epochs=EPOCHS)
        first, second = (len(client.live_executables()) for _ in made)
        assert first == second  # Programs of some hundred runs would be too many.
        failing = SUITE._replace(entries=(DIVERGES,))
        (line,) = runs.make(failing, directory, epochs=EPOCHS)
    assert "diverges" not in line  # It is named by its keys, which say what it is.
    assert f"learning_rate=1e+09,epochs={EPOCHS}/0: diverged, " in line
    return directory


@pytest.fixture
def copied(out, tmp_path):
    """The run of one seed by itself."""
    (run,) = out.glob("digits/supervised,*width=0.05,epochs=3/1")
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"
