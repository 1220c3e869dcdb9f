import chex
import jax
import jax.numpy as jnp
import pytest

from kln_jax import parallel
from kln_jax.checkpoint import Checkpoints


def _state(value):
    return {
        "params": {"w": jnp.full((3, 4), value)},
        "step": jnp.asarray(int(value), jnp.int32),
    }


def test_the_newest_checkpoint_is_restored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(_state(0.0)) is None
        for step in (1, 2, 3):
            checkpoints.save(step, _state(float(step)))
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(_state(0.0))
    chex.assert_trees_all_equal(restored, _state(3.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_state_of_the_same_step_is_saved_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, _state(5.0))
        checkpoints.save(5, _state(5.0))
        chex.assert_trees_all_equal(
            checkpoints.restore_latest(_state(0.0)), _state(5.0)
        )


def test_a_checkpoint_does_not_know_how_many_devices_wrote_it(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, parallel.replicate(_state(1.0), axis_name="i"))
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore_latest(_state(0.0))
    chex.assert_trees_all_equal(restored, _state(1.0))
    assert len(restored["params"]["w"].sharding.device_set) == 1
    with Checkpoints(tmp_path) as checkpoints:
        like = parallel.replicate(_state(0.0), axis_name="i")
        restored = checkpoints.restore_latest(like)
    assert len(restored["params"]["w"].sharding.device_set) == jax.device_count()


def test_another_structure_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, _state(1.0))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="extra"),
    ):
        checkpoints.restore_latest({**_state(0.0), "extra": jnp.zeros(2)})
