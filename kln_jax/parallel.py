"""Mapping a step over devices: the only module that knows how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


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
    reduce its results over that axis.

    Args:
      step: The function of one device.
      axis_name: Its name for the axis of devices.
      donate: Whether the memory of the state may be used for the result.
      devices: The devices of one process; all devices of all processes if None.

    Returns:
      The mapped, compiled function of the same arguments.
    """
    mapped = jax.pmap(
        lambda _, state, args: step(state, *args),
        axis_name=axis_name,
        in_axes=(0, None, None),
        out_axes=None,
        devices=devices,
        # With several processes a donated state is lost: "Array has been deleted".
        donate_argnums=(1,) if donate and jax.process_count() == 1 else (),
    )
    # pmap takes the number of devices from an argument with an axis.
    local = jax.local_device_count() if devices is None else len(devices)
    index = np.arange(local, dtype=np.int32)
    return lambda state, *args: mapped(index, state, args)


def replicate(tree: Any, *, axis_name: str) -> Any:
    """Puts a copy of each array on every device, as `data_parallel` does.

    Args:
      tree: Arrays.
      axis_name: The name of the axis of devices. With another one the mapped function
        would be compiled again for its own results.

    Returns:
      The same arrays, on all devices.
    """
    mesh = jax.make_mesh(
        (jax.device_count(),), (axis_name,), (jax.sharding.AxisType.Auto,)
    )
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(tree, sharding)


def choose_platform(platform: str) -> None:
    """Starts JAX on a platform.

    Args:
      platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or ``""`` for JAX's own choice.

    Raises:
      ValueError: If there is no such device.
    """
    if platform:
        jax.config.update("jax_platforms", platform)
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise ValueError(f"platform={platform!r} is not to be had: {error}") from error
    if platform and found != platform:
        raise ValueError(
            f"platform={platform!r} is not to be had: JAX already runs on {found}."
        )


def check_batch_size(batch_size: int) -> None:
    """Refuses a batch that does not divide over the devices.

    Args:
      batch_size: Images in a global batch.

    Raises:
      ValueError: If it is not a multiple of the number of devices.
    """
    devices = jax.device_count()
    if batch_size < 1 or batch_size % devices:
        below = batch_size // devices * devices
        raise ValueError(
            f"batch_size={batch_size} does not divide over {devices} devices; use "
            f"{max(below, devices)} or {below + devices}."
        )


def describe() -> str:
    """Says which process this is and on what it runs."""
    return (
        f"process {jax.process_index()} of {jax.process_count()}, "
        f"{jax.local_device_count()} local and {jax.device_count()} global devices, "
        f"platform {jax.default_backend()} ({jax.devices()[0].device_kind})"
    )
