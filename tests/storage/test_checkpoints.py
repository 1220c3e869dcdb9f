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

from kln_jax.storage.checkpoints import CheckpointError, Checkpoints


def _state(value):
    return {
        "params": {"w": jnp.full((3, 4), value)},
        "step": jnp.asarray(int(value), jnp.int32),
    }


def _save(directory, *steps):
    with Checkpoints(directory) as checkpoints:
        for step in steps:
            checkpoints.save(step, _state(float(step)))


def _restore(directory, like=None):
    with Checkpoints(directory, read_only=True) as checkpoints:
        return checkpoints.restore(like or _state(0.0))


def _steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


def test_the_newest_checkpoint_is_restored_with_its_history(tmp_path):
    assert _restore(tmp_path) is None
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            history = {"loss": np.arange(3.0) + step}
            checkpoints.save(step, _state(float(step)), history)
    restored = _restore(tmp_path)
    assert not logging.getLogger("absl").filters
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


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(bytes(content))


def test_damage_to_any_file_gives_way_to_the_checkpoint_before(tmp_path, caplog):
    _save(tmp_path, 1, 2)
    newest = tmp_path / "2"
    names = sorted(json.loads((newest / "checksums.json").read_text()))
    assert len(names) > 5
    damages = [(_flip, name) for name in names]
    damages += [(damage, names[0]) for damage in (_truncate, pathlib.Path.unlink)]
    damages += [(pathlib.Path.unlink, "checksums.json")]
    for damage, name in damages:
        content = (newest / name).read_bytes()
        damage(newest / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kln_jax"):
            assert _restore(tmp_path).step == 1
        (record,) = caplog.records
        assert f"{newest} is damaged ({name} " in record.getMessage()
        assert "trying that of step 1" in record.getMessage()
        (newest / name).write_bytes(content)
    assert _restore(tmp_path).step == 2


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_checkpoint_is_written_again_where_one_is_damaged(is_empty, tmp_path, caplog):
    """A crash leaves an empty one where a file system does not rename as a whole."""
    _save(tmp_path, 1, 2)
    if is_empty:
        shutil.rmtree(tmp_path / "2")
        (tmp_path / "2").mkdir()
    else:
        _flip(tmp_path / "2" / "default" / "_METADATA")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(_state(0.0)).step == 1
        reason = "checksums.json is missing" if is_empty else "has another checksum"
        assert reason in caplog.text
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
