"""Real runs of the small suite, made once for all tests of this folder."""

import json
import shutil

import jax
import numpy as np
import pytest

from kln_jax.analysis import figures, runs
from kln_jax.storage import working_directory
from kln_jax.training import experiment
from kln_jax.training.loop import DivergenceError
from tests.analysis.small_suite import DIVERGES, EPOCHS, SUITE


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The milestones of optax need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """Two seeds of a method, and one that diverged, which is made of the second."""
    directory = tmp_path_factory.mktemp("runs")
    client = jax.devices()[0].client
    with jax.numpy_dtype_promotion("standard"):
        made = runs.make(SUITE, directory, seeds=2, epochs=EPOCHS)
        first, second = (len(client.live_executables()) for _ in made)
        assert first == second  # Programs of some hundred runs would be too many.
        failing = SUITE._replace(entries=(DIVERGES,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiment, "train_and_evaluate", _diverges)
            (line,) = runs.make(failing, directory, epochs=EPOCHS)
    assert "diverges" not in line  # It is named by its keys, which say what it is.
    assert f"learning_rate=1e+09,epochs={EPOCHS}/0: diverged, cmmd is 1e9" in line
    return directory


def _diverges(config, directory, **options):
    (earlier,) = directory.parents[1].glob("*width=0.05,epochs=3/1")
    about = json.loads((earlier / "data.json").read_text())
    directory.mkdir(parents=True)
    labelled = np.load(earlier / "labelled.npy")
    working_directory.prepare(directory, config.to_dict(), about, labelled)
    working_directory.write_failure(directory, "cmmd is 1e9")
    raise DivergenceError("cmmd is 1e9")


@pytest.fixture
def copied(out, tmp_path):
    """The run of one seed by itself."""
    (run,) = out.glob("digits/supervised,*width=0.05,epochs=3/1")
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def quick_map(monkeypatch):
    """A map of the first two values of Z: t-SNE takes seconds."""

    class FirstTwo:
        def __init__(self, **options):
            pass

        def fit_transform(self, z):
            return z[:, :2]

    monkeypatch.setattr(figures, "TSNE", FirstTwo)
