import json
import logging
import pathlib
import shutil
import subprocess
import sys
import textwrap

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import default
from kln_jax.storage.checkpoints import CheckpointError, Checkpoints
from kln_jax.training import experiment

EARLIER = pathlib.Path(__file__).parents[1] / "fixtures" / "earlier_layout"


def _state(value):
    return {
        "params": {"w": jnp.full((3, 4), value)},
        "step": jnp.asarray(int(value), jnp.int32),
    }


def _save(directory, *steps, **options):
    with Checkpoints(directory, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, _state(float(step)))


def _restore(directory, like=None, **options):
    with Checkpoints(directory, read_only=True) as checkpoints:
        return checkpoints.restore(like or _state(0.0), **options)


def _steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


def test_the_newest_checkpoint_is_restored_with_its_history(tmp_path):
    assert _restore(tmp_path) is None
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            history = {"loss": np.arange(3.0) + step}
            checkpoints.save(step, _state(float(step)), history)
    restored = _restore(tmp_path)
    assert restored.step == 3
    chex.assert_trees_all_equal(restored.state, _state(3.0))
    np.testing.assert_array_equal(restored.history["loss"], [3.0, 4.0, 5.0])
    assert _steps(tmp_path) == [2, 3]


def test_a_state_of_the_same_step_is_saved_once(tmp_path):
    _save(tmp_path, 5, 5)
    assert _restore(tmp_path).step == 5


def test_what_is_saved_does_not_change_with_the_array(tmp_path):
    array = np.zeros(1000, np.float32)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": array})
        array += 1.0
    np.testing.assert_array_equal(_restore(tmp_path, {"w": array}).state["w"], 0.0)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_checkpoint_of_four_devices_is_restored_on_any_number(devices, tmp_path):
    def on(count):
        mesh = jax.make_mesh(
            (count,),
            ("i",),
            (jax.sharding.AxisType.Auto,),
            devices=jax.devices()[:count],
        )
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, jax.device_put(_state(1.0), on(4)))
    state = jax.device_put(_restore(tmp_path).state, on(devices))
    chex.assert_trees_all_equal(state, _state(1.0))
    assert len(state["params"]["w"].sharding.device_set) == devices


def test_the_last_and_the_best_are_kept(tmp_path):
    errors = {1: 5.0, 2: 3.0, 3: None, 4: 4.0, 5: 6.0}
    with Checkpoints(tmp_path, keep_last=1, keep_best=2) as checkpoints:
        for step, error in errors.items():
            checkpoints.save(step, _state(float(step)), error=error)
    # The newest stays although it is the worst.
    assert _steps(tmp_path) == [2, 4, 5]
    # What is best is known to the next process as well.
    with Checkpoints(tmp_path, keep_last=1, keep_best=2) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 5
        assert checkpoints.restore(_state(0.0), best=True).step == 2
        checkpoints.save(6, _state(6.0), error=1.0)
    assert _steps(tmp_path) == [2, 6]


@pytest.mark.parametrize("keep_best", [0, 1])
def test_an_error_that_is_known_later_is_saved_with_its_state(keep_best, tmp_path):
    """A signal saves a state while its error is being measured."""
    with Checkpoints(tmp_path, keep_last=1, keep_best=keep_best) as checkpoints:
        checkpoints.save(1, _state(1.0), error=10.0)
        checkpoints.save(2, _state(2.0))
    path = tmp_path / "2" / "default" / "_METADATA"
    before = path.stat().st_mtime_ns
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        checkpoints.save(2, _state(2.0), error=5.0)
        checkpoints.save(2, _state(2.0), error=30.0)  # It has one.
        checkpoints.save(3, _state(3.0), error=20.0)
    assert _steps(tmp_path) == [2, 3]
    assert _restore(tmp_path, best=True).step == 2
    assert path.stat().st_mtime_ns == before  # A crash at any moment finds it.


def test_without_errors_there_is_no_best(tmp_path):
    _save(tmp_path, 1)
    with pytest.raises(ValueError, match="has no best checkpoint"):
        _restore(tmp_path, best=True)


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_truncate, _flip, pathlib.Path.unlink])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    damage, tmp_path, caplog
):
    _save(tmp_path, 1, 2)
    with (tmp_path / "2" / "checksums.json").open() as file:
        names = sorted(json.load(file))
    assert len(names) > 5
    good = tmp_path.with_name(f"{tmp_path.name}-good")
    shutil.copytree(tmp_path, good)
    for name in names:  # Whichever file it is.
        damage(tmp_path / "2" / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kln_jax"):
            assert _restore(tmp_path).step == 1
        (record,) = caplog.records
        assert f"{tmp_path / '2'} is damaged ({name} " in record.getMessage()
        assert "trying that of step 1" in record.getMessage()
        shutil.copy(good / "2" / name, tmp_path / "2" / name)
    assert _restore(tmp_path).step == 2


def test_an_empty_newest_checkpoint_gives_way_to_the_one_before(tmp_path, caplog):
    """A crash leaves one where a file system does not rename as a whole."""
    _save(tmp_path, 1)
    (tmp_path / "2").mkdir()
    with caplog.at_level(logging.WARNING, "kln_jax"):
        assert _restore(tmp_path).step == 1
    assert f"{tmp_path / '2'} is damaged (default is missing)" in caplog.text
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 1
        checkpoints.save(2, _state(2.0))
    assert _restore(tmp_path).step == 2


@pytest.mark.parametrize("content", ['{"err', "", "[]", "{}"])
def test_a_damaged_error_of_a_checkpoint_is_named(content, tmp_path):
    options = dict(keep_last=1, keep_best=1)
    with Checkpoints(tmp_path, **options) as checkpoints:
        checkpoints.save(1, _state(1.0), error=1.0)
        checkpoints.save(2, _state(2.0), error=2.0)
    path = tmp_path / "2" / "metrics" / "metrics"
    path.write_text(content)
    for changes in (options, dict(read_only=True)):
        with pytest.raises(CheckpointError, match=rf"{path} is damaged .* Remove it: "):
            Checkpoints(tmp_path, **changes)
    path.unlink()
    with Checkpoints(tmp_path, **options) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 2
        assert checkpoints.restore(_state(0.0), best=True).step == 1
        checkpoints.save(3, _state(3.0), error=3.0)
    assert _steps(tmp_path) == [1, 3]


def test_a_checkpoint_is_written_again_where_one_was_damaged(tmp_path):
    _save(tmp_path, 1, 2)
    _flip(tmp_path / "2" / "default" / "_METADATA")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 1
        checkpoints.save(2, _state(2.0))
    assert _restore(tmp_path).step == 2


def test_without_a_whole_checkpoint_nothing_starts_from_zero(tmp_path):
    _save(tmp_path, 1, 2)
    for step in (1, 2):
        _truncate(tmp_path / str(step) / "default" / "_METADATA")
    with pytest.raises(
        CheckpointError, match=r"No checkpoint can be used: .*/2 is damaged.*/1 is dam"
    ):
        _restore(tmp_path)


def test_a_half_written_checkpoint_is_not_there(tmp_path):
    _save(tmp_path, 1, 2)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    assert _restore(tmp_path).step == 1
    # It may be that of a run under way: whoever reads leaves it alone.
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 1
        # Orbax cleans up in the background, and waits for that before it saves.
        checkpoints.save(2, _state(2.0))
    assert _steps(tmp_path) == [1, 2]


def test_reading_makes_nothing(tmp_path):
    assert _restore(tmp_path / "absent") is None
    assert not list(tmp_path.iterdir())


def test_another_layout_is_named_field_by_field(tmp_path):
    _save(tmp_path, 1)
    like = {
        "params": {"w": jnp.zeros((3, 5)), "b": jnp.zeros(2)},
        "count": jnp.zeros(()),
    }
    with pytest.raises(ValueError, match="is of another layout") as caught:
        _restore(tmp_path, like)
    for text in (
        "count (absent there, float32[] here)",
        "params.b (absent there, float32[2] here)",
        "params.w (float32[3, 4] there, float32[3, 5] here)",
        "step (int32[] there, absent here)",
    ):
        assert text in str(caught.value)


def test_a_run_of_an_earlier_version_names_what_it_lacks(tmp_path):
    """The fixture was written before there were checksums and skipped steps."""
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"another version.*has no divergence_bound\."):
        experiment.load_run(tmp_path)
    earlier = json.loads((tmp_path / "config.json").read_text())
    now = json.loads(default.get_config().to_json())
    (tmp_path / "config.json").write_text(json.dumps({**now, **earlier}))
    with pytest.raises(ValueError, match=r"another layout: skipped \(absent there"):
        experiment.load_run(tmp_path)


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(tmp_path):
    """A limit on the size of files fails a write as a full disk does."""
    _save(tmp_path, 1)
    program = textwrap.dedent(
        f"""
        import pathlib, resource, signal, sys
        import numpy as np
        from kln_jax.storage.checkpoints import CheckpointError, Checkpoints
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        noise = np.random.default_rng(0).normal(size=1_000_000)
        try:
            with Checkpoints(pathlib.Path({str(tmp_path)!r})) as checkpoints:
                checkpoints.save(2, {{"w": noise}})
        except CheckpointError as error:
            sys.exit(f"error: {{error}}")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()  # And no traceback of a thread.
    assert line.startswith(f"error: A checkpoint could not be written to {tmp_path} (")
    assert "File too large" in line
    assert "That of step 1 is whole." in line
    assert _restore(tmp_path).step == 1
