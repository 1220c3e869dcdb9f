"""The command line, in processes of its own."""

import json
import re
import subprocess
import sys

import pytest

from tests.processes import DIGITS, ROOT, LoadedTrain, environment


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    loaded = LoadedTrain(tmp_path_factory.mktemp("said"))
    yield loaded
    loaded.close()


def _run(*command, cwd):
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config must have a value"),
        (["--config=configs/absent.py"], "absent.py"),
        (["--config=absent"], "'absent' must be one of the configurations ['cifar10'"),
        ([f"{DIGITS}:quarter"], "variant='quarter'"),
        ([DIGITS, "--config.variant=semi"], "--config=digits:semi"),
        (
            [DIGITS, "--config.rigde=0.1"],
            "unknown configuration key 'rigde'; did you mean 'ridge'?",
        ),
        ([DIGITS, "--config.foo.bar=1"], "unknown configuration key 'foo.bar'"),
        ([DIGITS, "--config.ridge.bar=1"], "'ridge.bar'; did you mean 'ridge'?"),
        ([DIGITS, "--config.flip=True\r"], "--config.flip=True"),
        # The file may come after its keys.
        (["--config.rigde=1", DIGITS], "did you mean 'ridge'?"),
        (["--config.ridge=0", "--config", DIGITS.partition("=")[2]], "ridge=0.0 must"),
        ([DIGITS, "--config.batch_size=10.5"], "--config.batch_size=10.5"),
        ([DIGITS, "--config.learning_rate=fast"], "--config.learning_rate=fast"),
        ([DIGITS, "--workdirs=a"], "workdirs"),
        ([DIGITS, "again"], "Unexpected arguments: again"),
        ([DIGITS, "--config.ridge=0"], "ridge=0.0 must be a number above 0"),
        ([DIGITS, "--config.platform=gpu"], "platform='gpu'"),
    ],
)
def test_an_error_is_one_line_and_makes_nothing(train, arguments, message, tmp_path):
    done = train(*arguments, cwd=tmp_path)
    assert done.returncode not in (0, None)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("train.py: error: ")
    assert message in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_with_a_closed_standard_error_it_ends_as_ever(tmp_path):
    command = f"{sys.executable} {ROOT / 'train.py'} {DIGITS} --config.ridge=0 2>&-"
    done = _run("sh", "-c", command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert not list(tmp_path.iterdir())


def test_a_function_misspelt_in_a_file_is_no_key(train, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from configs import digits\n\n\ndef get_config():\n"
        "    return digits.get_confg()\n"
    )
    done = train(f"--config={own}", cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "train.py: error: module 'configs.digits' has no attribute 'get_confg'"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def get_config(:", "SyntaxError: invalid syntax (own.py, line 1)"),
        ("import none", "own.py, line 1: ModuleNotFoundError: No module named 'none'"),
        ("x = 1\nx / 0", "own.py, line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_file_raises_is_one_line(train, code, message, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(code)
    done = train("--config=own.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"train.py: error: {message}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "config.learning_rte = 0.5",
            "unknown configuration key 'learning_rte'; did you mean 'learning_rate'?",
        ),
        (
            "config.update(learning_rte=0.5)",
            "unknown configuration key 'learning_rte'; did you mean 'learning_rate'?",
        ),
        (
            "with config.unlocked(): config.learning_rte = 0.5",
            "unknown configuration key 'learning_rte'; did you mean 'learning_rate'?",
        ),
        (
            "with config.unlocked(): del config.ridge",
            "configuration key 'ridge' is missing; its default is 0.1.",
        ),
        (
            "with config.ignore_type(): config.data_dir = None",
            "data_dir=None must be a string; its default is ''.",
        ),
        # An int for a float, and a list for a tuple, will do.
        (
            "config.update(clip_norm=5, ridge=0)\n"
            "    with config.ignore_type(): config.lr_milestones = [1]",
            "ridge=0.0 must be a number above 0; its default is 0.1.",
        ),
    ],
)
def test_the_keys_of_a_file_are_those_that_are_declared(train, code, message, tmp_path):
    (tmp_path / "own.py").write_text(
        "from configs import digits\n\n\ndef get_config():\n"
        f"    config = digits.get_config()\n    {code}\n    return config\n"
    )
    done = train("--config=own.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"train.py: error: {message}"
    assert "Traceback" not in done.stderr


PROGRAMS = """
import sys
import jax
from kln_jax.training import __main__ as train
from kln_jax.training import experiment

def show(config, workdir, *, interruption):
    print(type(config).__name__, jax.config.jax_compilation_cache_dir)

experiment.train_and_evaluate = show
train._parse_flags(["train.py", "--config=" + sys.argv[1]])
train._train(["train.py"])
"""


@pytest.mark.parametrize(
    ("given", "kept_in"),
    [
        ({}, "HOME/.cache/kln_jax/xla"),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, ""),
        ({"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
    ],
)
def test_compiled_programs_are_kept_unless_jax_is_told_otherwise(
    given, kept_in, tmp_path
):
    variables = environment(HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    del variables["JAX_COMPILATION_CACHE_DIR"]
    config = DIGITS.removeprefix("--config=")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS, config],
        cwd=tmp_path,
        env=variables | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"Config {kept_in.replace('HOME', str(tmp_path))}\n"


def test_a_run_ends_with_its_error_and_place(train, tmp_path):
    done = train(
        DIGITS,
        "--config.network=mlp",
        "--config.width=0.05",
        "--config.num_epochs=1",
        "--config.clip_norm=5",  # An int for a float.
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "process 0 of 1, 1 local and 1 global devices, platform cpu" in done.stderr
    assert "epoch 1/1: loss" in done.stderr
    (error,) = done.stdout.splitlines()
    (workdir,) = (tmp_path / "runs").iterdir()
    assert error.startswith("Test error ")
    assert "of 360 images) after 1 epochs" in error
    assert f"working directory: runs/{workdir.name}\n" in done.stderr
    assert (workdir / "result.json").exists()


def test_a_run_that_diverges_is_one_line(train, tmp_path):
    done = train(
        DIGITS,
        "--config.network=mlp",
        "--config.width=0.05",
        "--config.latent_dim=8",
        "--config.clip_norm=0",
        "--config.reconstruction_weight=1e9",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert re.match(r"train\.py: error: loss is \S+ at step 0 \(pivots", line)
    (reason,) = tmp_path.glob("runs/*/diverged.json")
    assert json.loads(reason.read_text()) in line


ENDS = """
import sys
from kln_jax import datasets
from kln_jax.storage import checkpoints
from kln_jax.training import __main__ as train
from kln_jax.training import interruption
from kln_jax.training import parallel
from kln_jax.training import experiment

config = sys.argv[1]
sys.argv[0] = "train.py"
train._parse_flags(["train.py", "--config=" + config])
for error in (
    ValueError("one\\ntwo"),
    datasets.DatasetError("one\\ntwo"),
    OSError("full"),
    checkpoints.CheckpointError("damaged"),
    experiment.DivergenceError("diverged"),
    parallel.LostProcessError("lost"),
    interruption.Interrupted("stopped"),
    RuntimeError("of ours"),
):
    def fail(*_, **__):
        raise error

    experiment.train_and_evaluate = fail
    try:
        train._train(["train.py"])
    except SystemExit as end:
        print("status", end.code, file=sys.stderr)
"""


def test_every_end_has_its_status_and_its_line():
    config = DIGITS.removeprefix("--config=")
    done = _run(sys.executable, "-c", ENDS, config, cwd=ROOT)
    said, traceback = done.stderr.split("Traceback")
    assert said.splitlines() == [
        "train.py: error: one two",
        "status 1",
        "train.py: error: one",  # A list of files keeps its lines.
        "two",
        "status 1",
        "train.py: error: full",
        "status 1",
        "train.py: error: damaged",
        "status 1",
        "train.py: error: diverged",
        "status 1",
        "train.py: error: lost",
        "status 75",
        "stopped",
        "status 75",
    ]
    # What is no error of the user's is not hidden.
    assert traceback.splitlines()[-2:] == ["RuntimeError: of ours", "status 1"]


def test_each_image_that_cannot_be_used_is_a_line(train, tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        (folder / "1.png").write_text("no image")
    config = f"--config={ROOT / 'configs' / 'own_images.py'}"
    done = train(config, f"--config.data_dir={tmp_path / 'data'}", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    first, *lines = done.stderr.splitlines()[-3:]
    assert first.startswith("train.py: error: 2 files or folders")
    assert ["cannot identify" in line for line in lines] == [True, True]


def test_too_little_memory_is_one_line(tmp_path):
    done = _run(
        # The step would take twice as much.
        *("sh", "-c", f'ulimit -v {2**25} && exec "$@"', "sh"),
        *(sys.executable, str(ROOT / "train.py"), DIGITS),
        "--config.network=mlp",
        "--config.width=0.02",
        "--config.latent_dim=4",
        "--config.num_epochs=1",
        "--config.batch_size=20000",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "train.py: error: batch_size=20000 and width=0.02 take more memory than there "
        "is; lower one of them (RESOURCE_EXHAUSTED: Out of memory"
    )
