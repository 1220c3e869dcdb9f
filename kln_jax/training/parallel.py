"""Devices and processes: the only module that maps a step over them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from kln_jax.storage.whole_files import one_line

logger = logging.getLogger("kln_jax")

T = TypeVar("T")

# After so long without a sign of life a process counts as dead, and all end.
_HEARTBEAT_SECONDS = 30
# So long a process waits for the others at its start.
_JOIN_SECONDS = 300
_MIN_THREADS_FOR_FORCED_DEVICES = 32
# JAX aborts the others once process 0 is gone; an error of all they say before.
_LAST_WORDS_SECONDS = 1.0
# How errors of JAX begin that a lost process causes. The others, as of memory
# (RESOURCE_EXHAUSTED), would come again at the next start.
_LOST = re.compile(
    "(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|DEADLINE_EXCEEDED|CANCELLED): "
)


class LostProcessError(RuntimeError):
    """Another process has ended, or cannot be reached any more."""


def join_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins JAX's distributed runtime, if there are several processes.

    Without arguments it joins where the environment is that of a task of SLURM or
    Open MPI, of an indexed Kubernetes job or of a TPU machine; else it does nothing.
    ``num_processes=1`` alone trains in this process whatever the environment says.
    JAX's own detection is not enough: it raises outside of a cluster, and takes a shell
    in an allocation for one of its tasks.
    JAX finds the others there, under Open MPI if its launcher sets
    ``OMPI_MCA_orte_hnp_uri`` and under Kubernetes with the package ``kubernetes``.
    It must come before anything else of JAX. If the other processes do not come within
    five minutes, or cannot be reached, JAX aborts this one.

    Args:
      coordinator_address: Host and port of process 0, which every process can reach.
      num_processes: How many processes there are.
      process_id: The number of this one.

    Raises:
      ValueError: If the arguments are incomplete or wrong.
    """
    given = dict(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
    )
    missing = [name for name, value in given.items() if value is None]
    if num_processes == 1 and len(missing) == 2:
        return
    if 0 < len(missing) < len(given):
        raise ValueError(
            f"{' and '.join(missing)} missing: coordinator_address, num_processes and "
            "process_id belong together."
        )
    if coordinator_address and not re.search(r":\d+$", coordinator_address):
        raise ValueError(
            f"coordinator_address={coordinator_address!r} has no port; give HOST:PORT."
        )
    place = cluster(os.environ) if missing else "the command line"
    if place is None:
        return
    _give_threads_to_forced_devices()
    logger.info(
        "waiting for the other processes of %s, at most %d minutes; to train in this "
        "process alone, give --num_processes=1",
        place,
        _JOIN_SECONDS // 60,
    )
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        if place == "TPU" and re.search("coordinator.address", str(error)):
            return  # One machine of its own.
        raise ValueError(
            f"The processes of {place} cannot be joined: {error} Give "
            "--coordinator_address=HOST:PORT --num_processes=N --process_id=I."
        ) from error


def _give_threads_to_forced_devices() -> None:
    """Lets XLA have more threads than cores, before it starts, if devices are forced.

    It has a thread a core. A device that waits for others, or for its share of a
    batched factorisation, holds one, and with none left for the work all of them would
    wait for ever.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    forced = re.findall(r"xla_force_host_platform_device_count=(\d+)", flags)
    # The other way: JAX_NUM_CPU_DEVICES, or the option of that name; -1 if not given.
    devices = max(jax.config.jax_num_cpu_devices, *map(int, forced), 0)  # type: ignore[attr-defined]
    if devices > 1:
        threads = max(_MIN_THREADS_FOR_FORCED_DEVICES, 4 * devices, os.cpu_count() or 1)
        os.environ.setdefault("NPROC", str(threads))


@contextlib.contextmanager
def lost_processes_said() -> Iterator[None]:
    """Turns what JAX raises when another process is gone into one clear error."""
    try:
        yield
    # The second call of a compiled function, and all later ones, raise a ValueError.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not _LOST.match(str(error)) or jax.process_count() == 1:
            raise
        raise LostProcessError(
            "another process has ended, or cannot be reached: start all of them again; "
            f"they go on from the newest checkpoint ({one_line(error)})"
        ) from error


def leave(status: int) -> NoReturn:
    """Ends this process after an error, which the others may not have had.

    To leave in order would wait for them, and be aborted by JAX if they do not come.

    Args:
      status: The exit status.
    """
    if not jax.distributed.is_initialized():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    # Where there is no device, JAX cannot say which process this is.
    with contextlib.suppress(RuntimeError, AssertionError):
        if is_main():
            time.sleep(_LAST_WORDS_SECONDS)
    os._exit(status)


def cluster(environment: Mapping[str, str]) -> str | None:
    """Says by whom this process was started as one of several.

    Args:
      environment: Environment variables.

    Returns:
      A name, or None for a process of its own.

    Examples:
      >>> cluster({"OMPI_COMM_WORLD_SIZE": "4"})
      'Open MPI'
    """
    if "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS") != "1":
        return "SLURM"
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return "Open MPI"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return "Kubernetes"
    if importlib.util.find_spec("libtpu") and environment.get("JAX_PLATFORMS") != "cpu":
        return "TPU"
    return None


def is_main() -> bool:
    """Whether this process is the one that reads and writes the working directory."""
    return process_index() == 0


def process_index() -> int:
    """Returns the number of this process."""
    return jax.process_index()


def is_alone() -> bool:
    """Whether there is no other process."""
    return int(jax.process_count()) == 1


def is_told_by_this_process(record: logging.LogRecord) -> bool:
    """Filters a log: of several processes the first tells what all of them know.

    Args:
      record: What is to be logged.

    Returns:
      Whether it is: each process tells its errors, and which one it is.
    """
    return (
        record.levelno >= logging.ERROR
        or not jax.distributed.is_initialized()
        or is_main()
        or record.getMessage() == describe()
    )


@contextlib.contextmanager
def main_first() -> Iterator[None]:
    """Lets the main process go through a block before the others do."""
    if jax.process_count() > 1 and not is_main():
        multihost_utils.sync_global_devices("main first")
    yield
    if jax.process_count() > 1 and is_main():
        multihost_utils.sync_global_devices("main first")


def from_main(tree: T) -> T:
    """Returns what the main process has, in every process.

    Args:
      tree: NumPy arrays or numbers, of the same shapes in all processes.

    Returns:
      Those of the main process.
    """
    received: T = multihost_utils.broadcast_one_to_all(tree)
    return received


def gather(numbers: Sequence[int]) -> np.ndarray:
    """Returns the numbers that each process gives; all of them must ask.

    Args:
      numbers: As many in each process.

    Returns:
      An integer array, shape ``(processes, len(numbers))``.
    """
    own = np.asarray(numbers, np.int32)
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))


def data_parallel(
    step: Callable[..., T],
    *,
    axis_name: str,
    donate: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Callable[..., T]:
    """Maps ``step(state, *args)`` over devices.

    Every argument and result is the same on all devices, without a device axis:
    the step finds its share of the work by its index on the named axis, and must
    reduce its results over that axis. It is what `jax.pmap` does, by the function that
    pmap itself is made of today: pmap never frees its programs.

    Args:
      step: The function of one device.
      axis_name: Its name for the axis of devices.
      donate: Whether the memory of the state may be used for the result.
      devices: The devices of one process; all devices of all processes if None.

    Returns:
      The mapped, compiled function of the same arguments.
    """
    everywhere = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=_mesh(axis_name, devices),
        in_specs=everywhere,
        out_specs=everywhere,
        # Each device computes its own part of a sum that the step itself makes.
        check_vma=False,
    )
    # With several processes a donated state is lost: "Array has been deleted".
    return jax.jit(mapped, donate_argnums=(0,) if donate and is_alone() else ())


def _mesh(axis_name: str, devices: Sequence[jax.Device] | None) -> jax.sharding.Mesh:
    """Returns all devices of all processes, or some of one, along an axis."""
    # Not jax.make_mesh, which refuses GPUs of several machines.
    devices = devices or [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)
    ]
    return jax.sharding.Mesh(np.array(devices), (axis_name,))


def replicate(tree: Any, *, axis_name: str) -> Any:
    """Puts a copy of each array on every device, as `data_parallel` does.

    Args:
      tree: Arrays, the same in all processes.
      axis_name: The name of the axis of devices. With another one the mapped function
        would be compiled again for its own results.

    Returns:
      The same arrays, on all devices.
    """
    sharding = jax.sharding.NamedSharding(
        _mesh(axis_name, None), jax.sharding.PartitionSpec()
    )
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    # device_put would send every array around to compare it.
    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            sharding, np.asarray(array)
        ),
        tree,
    )


def choose_platform(platform: str) -> None:
    """Starts JAX on a platform.

    Args:
      platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""`` for JAX's own choice.

    Raises:
      ValueError: If there is no such device.
    """
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platform:
        jax.config.update("jax_platforms", platform)
    _give_threads_to_forced_devices()
    try:
        found = jax.default_backend()
        if platform and found != platform:
            raise RuntimeError(f"JAX already runs on {found}.")
    except (RuntimeError, AssertionError) as error:
        jax.config.update("jax_platforms", before)  # Another call may ask for another.
        wanted = platform or before
        # JAX names platforms of its own then, or says nothing at all.
        why = (
            "no GPU is visible to JAX, or JAX is installed without CUDA (pip install "
            "'jax[cuda12]'). With platform='' it takes what is there."
            if not str(error) or (wanted == "gpu" and "already runs" not in str(error))
            else one_line(error)
        )
        raise ValueError(f"platform={wanted!r} is not available: {why}") from error


def cache_compilations(directory: str) -> None:
    """Lets JAX keep compiled programs, so that the next start need not compile.

    Args:
      directory: Where they lie, made if it is absent. Without the home directory that
        it names nothing is kept, with a warning. What the user told JAX itself, as by
        JAX_COMPILATION_CACHE_DIR, goes before.
    """
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        try:
            path = str(pathlib.Path(directory).expanduser())
        except RuntimeError:  # As of a container's user whom it does not know.
            logger.warning(
                "programs are not kept in %s: there is no such home directory. Set "
                "JAX_COMPILATION_CACHE_DIR to another directory, or to nothing.",
                directory,
            )
            return
        jax.config.update("jax_compilation_cache_dir", path)
        # JAX leaves out what compiles within a second: all but the step, here.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def check_batch_size(batch_size: int) -> None:
    """Refuses a batch that does not divide over the devices.

    Args:
      batch_size: Images in a global batch.

    Raises:
      ValueError: If it is not a multiple of the number of devices.
    """
    devices = jax.device_count()
    if batch_size % devices:
        below = batch_size // devices * devices
        nearest = f"{below} or {below + devices}" if below else f"{devices}"
        raise ValueError(
            f"batch_size={batch_size} does not divide over {devices} devices; use "
            f"{nearest}."
        )


def describe_devices() -> str:
    """Returns the number and kind of all devices."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def describe() -> str:
    """Returns which process this is and on what it runs."""
    return (
        f"process {jax.process_index()} of {jax.process_count()}, "
        f"{jax.local_device_count()} local and {jax.device_count()} global devices, "
        f"platform {jax.default_backend()} ({jax.devices()[0].device_kind})"
    )
