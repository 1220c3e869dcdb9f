import pytest

from kln_jax.datasets import _tfds


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    """Nothing is read from or written to the user's folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user_cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default_data"))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def no_decoding(monkeypatch):
    """Lets a test switch decoding off, so that only a cache can answer."""

    def refuse(*_):
        pytest.fail("decoded although it should have been cached")

    return lambda: monkeypatch.setattr(_tfds._Reader, "chunks", refuse)
