import logging
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kln_jax.training import parallel


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_data_parallel_has_no_device_axis(devices):
    def step(state, x):
        shard = len(x) // lax.axis_size("i")
        own = lax.dynamic_slice_in_dim(x, shard * lax.axis_index("i"), shard)
        return state + lax.psum(jnp.sum(own), "i"), lax.axis_size("i")

    mapped = parallel.data_parallel(
        step, axis_name="i", devices=jax.devices()[:devices]
    )
    total, size = mapped(jnp.float32(1.0), jnp.arange(8.0))
    assert (float(total), int(size)) == (29.0, devices)
    assert total.shape == ()


def test_a_donated_state_is_used_up():
    mapped = parallel.data_parallel(
        lambda state: {"a": state["a"] + 1.0}, axis_name="i", donate=True
    )
    state = parallel.replicate({"a": jnp.zeros(3)}, axis_name="i")
    after = mapped(state)
    assert state["a"].is_deleted()
    np.testing.assert_array_equal(mapped(after)["a"], 2.0)


def test_replicate_puts_everything_on_every_device():
    (x,) = parallel.replicate((np.arange(3),), axis_name="i")
    assert x.sharding.is_fully_replicated
    assert len(x.sharding.device_set) == 8


def test_replicate_has_the_order_of_the_mapped_function(monkeypatch):
    def refuses(*given):  # As it does the GPUs of several machines.
        raise ValueError("`jax.make_mesh` does not support multi-slice topologies.")

    monkeypatch.setattr(jax, "make_mesh", refuses)
    x = parallel.replicate(jnp.arange(3), axis_name="i")
    y = parallel.data_parallel(lambda x: x + 1, axis_name="i")(x)
    orders = [array.sharding.mesh.devices.tolist() for array in (x, y)]
    assert orders == [jax.devices()] * 2


def test_a_mapped_function_is_compiled_once_for_its_own_results():
    traces = []

    def step(state):
        traces.append(state)
        return {"a": state["a"] + lax.psum(1.0, "i")}

    mapped = parallel.data_parallel(step, axis_name="i")
    state = parallel.replicate({"a": jnp.zeros(3)}, axis_name="i")
    for _ in range(3):
        state = mapped(state)
    assert len(traces) == 1
    np.testing.assert_array_equal(state["a"], 24.0)


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers():
    parallel.check_batch_size(96)
    with pytest.raises(ValueError, match=r"batch_size=100 .* 8 devices; use 96 or 104"):
        parallel.check_batch_size(100)
    with pytest.raises(ValueError, match=r"batch_size=3 .*use 8\.$"):
        parallel.check_batch_size(3)


def test_an_absent_platform_is_named():
    before = jax.config.jax_platforms
    with pytest.raises(ValueError, match="platform='gpu'"):
        parallel.choose_platform("gpu")
    assert jax.config.jax_platforms == before
    parallel.choose_platform("cpu")


def test_a_gpu_that_jax_was_told_to_take_is_missed_in_words(monkeypatch):
    def no_gpu():
        raise AssertionError  # As JAX does.

    monkeypatch.setattr(jax, "default_backend", no_gpu)
    with pytest.raises(ValueError, match=r"platform='cpu' .* no GPU is visible"):
        parallel.choose_platform("")
    with pytest.raises(ValueError, match=r"platform='gpu' .* no GPU is visible"):
        parallel.choose_platform("gpu")
    assert jax.config.jax_platforms == "cpu"


def test_describe_gives_processes_devices_and_platform():
    assert parallel.describe_devices() == "8 x cpu"
    assert parallel.describe().startswith(
        "process 0 of 1, 8 local and 8 global devices, platform cpu"
    )


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("UNKNOWN: Gloo AllGather failed: Connection reset by peer", True),
        ("UNAVAILABLE: Socket closed", True),
        ("INTERNAL: NCCL operation failed", True),
        ("ABORTED: Aborted by another task", True),
        ("DEADLINE_EXCEEDED: Barrier timed out", True),
        ("CANCELLED: The task is shutting down", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", False),
        ("INVALID_ARGUMENT: Executable expected 2 arguments", False),
        ("ridge=0.0 must be positive, UNKNOWN: or not", False),
    ],
)
def test_what_a_lost_process_causes_is_told_from_what_would_come_again(
    text, is_lost, kind, monkeypatch
):
    expected = parallel.LostProcessError if is_lost else kind
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(expected, match=text), parallel.lost_processes_said():
        raise kind(text)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    with pytest.raises(kind, match=text), parallel.lost_processes_said():
        raise kind(text)


def test_an_error_ends_one_of_several_processes_at_once(monkeypatch):
    calls = []
    monkeypatch.setattr(time, "sleep", calls.append)
    monkeypatch.setattr(os, "_exit", calls.append)
    with pytest.raises(SystemExit, match="1"):
        parallel.leave(1)
    assert not calls
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    parallel.leave(75)  # The first one lets the others have their say.
    assert calls == [1.0, 75]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    parallel.leave(1)
    assert calls == [1.0, 75, 1]


def test_the_compilation_cache_is_set_unless_the_user_has_set_one(caplog):
    theirs = jax.config.jax_compilation_cache_dir
    assert theirs  # By conftest, as a user would.
    try:
        parallel.cache_compilations("/nowhere")
        assert jax.config.jax_compilation_cache_dir == theirs
        jax.config.update("jax_compilation_cache_dir", None)
        parallel.cache_compilations("~nobody.here/somewhere")
        assert "not kept in ~nobody.here/somewhere: " in caplog.text
        assert jax.config.jax_compilation_cache_dir is None
        parallel.cache_compilations("~/somewhere")
        assert jax.config.jax_compilation_cache_dir == os.path.expanduser("~/somewhere")
    finally:
        jax.config.update("jax_compilation_cache_dir", theirs)


@pytest.mark.parametrize(
    ("level", "is_initialized", "is_main", "is_told"),
    [
        (logging.INFO, False, False, True),
        (logging.INFO, True, True, True),
        (logging.WARNING, True, False, False),
        (logging.ERROR, True, False, True),
    ],
)
def test_of_several_processes_the_first_tells_what_all_know(
    level, is_initialized, is_main, is_told, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(parallel, "is_main", lambda: is_main)

    def told(text):
        return parallel.is_told_by_this_process(
            logging.LogRecord("kln_jax", level, "", 0, text, (), None)
        )

    assert told("epoch 1") == is_told
    assert told(parallel.describe())  # Each says which one it is.
