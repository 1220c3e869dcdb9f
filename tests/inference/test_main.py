"""python -m kln_jax.inference: errors of its commands, and how soon it answers."""

import subprocess
import sys

import jax
import pytest

from kln_jax.inference.__main__ import main
from tests import small_run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run.finished(tmp_path_factory)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["predict"], 2, "the following arguments are required: --workdir, IMAGE"),
        (["predict", "RUN"], 2, "the following arguments are required: IMAGE"),
        (["export", "RUN"], 2, "the following arguments are required: OUT"),
        (
            ["predict", "--workdir=~nobody.here/a", "b"],
            2,
            "argument --workdir: ~nobody.here/a: there is no such home directory; ",
        ),
        (["predict", "--workdir=a", "b"], 1, "a holds no run: config.json is missing."),
        (["export", "RUN", "--platforms=cpu,gpu", "a"], 1, "platforms='cpu,gpu' must"),
        (["export", "RUN", "--platforms=", "a"], 1, "platforms='' must be some of "),
        (["export", "RUN", "absent/a"], 1, "[Errno 2] No such file or directory"),
        (["export", "RUN", "folder"], 1, "[Errno 21] Is a directory"),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(
    arguments, status, message, small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("HOME", str(small.workdir.parent))
    run = f"--workdir=~/{small.workdir.name}"
    with pytest.raises(SystemExit) as caught:
        main([run if argument == "RUN" else argument for argument in arguments])
    assert caught.value.code == status
    out, err = capsys.readouterr()
    assert out == ""
    start = f"python -m kln_jax.inference {arguments[0]}: error: {message}"
    assert err.startswith(start)
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_device_that_is_not_there_is_one_line(small, monkeypatch, capsys):
    def no_device():
        raise RuntimeError("Unable to initialize backend 'foo'")

    monkeypatch.setattr(jax, "default_backend", no_device)
    with pytest.raises(SystemExit, match="1"):
        main(["predict", f"--workdir={small.workdir}", "image.png"])
    line = "platform='cpu' is not available: Unable to initialize backend 'foo'\n"
    assert capsys.readouterr().err.endswith(f"error: {line}")


def test_help_answers_before_anything_heavy_is_loaded():
    code = """
import atexit, sys
heavy = {"flax", "optax", "orbax", "sklearn", "PIL"}
atexit.register(lambda: print("loaded:", sorted(heavy & set(sys.modules))))
from kln_jax.inference.__main__ import main
main(["predict", "--help"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m kln_jax.inference predict" in done.stdout
    assert "loaded: []" in done.stdout
