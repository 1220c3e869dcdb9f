"""A training step against its floor and against its plain form, in one run.

    python -m benchmarks.step [--network=mnist] [--rounds=5]

The floor is the time that the step's products take at the rate of a large matrix
product, measured in the same run. The plain form is the same network of linen's
convolutions, with a compiled step called from a Python loop.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from kln_jax import kernels, layers, networks, objectives, optim, parallel, steps

BATCH_SIZE = 100
SHAPES = {"mnist": (28, 28, 1), "conv_large": (32, 32, 3)}
KERNEL = kernels.gaussian_mixture()


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run a training step.

    Attributes:
      name: What it is called in the table.
      run: Makes some steps and waits for them.
      num_steps: How many.
    """

    name: str
    run: Callable[[], Any]
    num_steps: int


def train_form(name: str, network: str, *, num_steps: int, loop: bool) -> Form:
    """Makes a form of ``num_steps`` steps: one compiled loop, or calls of one step."""
    shape = SHAPES[network]
    model = networks.build(
        network, image_shape=shape, num_classes=10, axis_name=steps.AXIS
    )
    optimizer = optim.optimiser(
        "sgd",
        optim.step_schedule(0.02, warmup_steps=100),
        weight_decay=5e-4,
        clip_norm=10.0,
    )
    train_step = steps.make_train_step(
        model,
        optimizer,
        functools.partial(
            objectives.kln_objective,
            kernel=KERNEL,
            label_kernel=kernels.linear,
            ridge=0.1,
            reconstruction_weight=0.1,
            confidence_weight=0.0,
        ),
        objectives.reconstruction_error,
        kernel=KERNEL,
        diagnostics=functools.partial(
            objectives.gram_diagnostics, kernel=KERNEL, ridge=0.1
        ),
        diagnose_every=num_steps,
    )
    train_steps = steps.make_train_steps(train_step, steps_per_epoch=num_steps)
    train = parallel.data_parallel(
        train_steps if loop else train_step, axis_name=steps.AXIS, donate=True
    )
    key = jax.random.key(0)
    init = functools.partial(
        steps.init_state,
        model,
        optimizer,
        mean=np.zeros(shape[-1]),
        std=np.ones(shape[-1]),
        image_shape=shape,
    )
    rng = np.random.default_rng(0)
    replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
    data = replicate(
        steps.TrainingData(
            jnp.asarray(rng.integers(0, 256, (1000, *shape), np.uint8)),
            jnp.asarray(rng.integers(0, 10, 1000, np.int32)),
            jnp.arange(1000, dtype=jnp.int32),
        )
    )
    epoch = np.arange(num_steps * BATCH_SIZE, dtype=np.int32) % 1000
    order = jnp.asarray(epoch.reshape(num_steps, BATCH_SIZE))
    rows = replicate(steps.Rows(order, order))
    rows_of_one_step = jax.tree.map(lambda array: array[0], rows)
    states = [replicate(jax.jit(init)(key))]

    def run() -> None:
        state = states.pop()
        if loop:
            state, _ = train(state, data, rows, key, np.int32(num_steps))
        else:
            for _ in range(num_steps):
                state, _ = train(state, data, rows_of_one_step, key)
        states.append(jax.block_until_ready(state))

    run()  # Compiled now, with the layers of now.
    return Form(name, run, num_steps)


def plain_layers() -> contextlib.AbstractContextManager[Any]:
    """Builds networks of linen's convolutions instead of ours."""
    return mock.patch.multiple(layers, Conv=nn.Conv, ConvTranspose=nn.ConvTranspose)


def multiplications(network: str) -> int:
    """Counts the multiplications of convolutions for one image, forward."""
    total = 0

    def count(
        call: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> jax.Array:
        nonlocal total
        result = call(*args, **kwargs)
        layer = context.module
        if isinstance(layer, (layers.Conv, layers.ConvTranspose)):
            image = result if isinstance(layer, layers.Conv) else args[0]
            pixels = image.shape[1] * image.shape[2]
            total += pixels * int(np.prod(layer.variables["params"]["kernel"].shape))
        return result

    shape = SHAPES[network]
    model = networks.build(network, image_shape=shape, num_classes=10)
    with nn.intercept_methods(count):
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *shape)))
    return total


def matmul_form(size: int = 2048) -> tuple[Form, float]:
    """A large matrix product, and its floating-point operations."""
    a = jnp.ones((size, size))
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    return Form("matmul", lambda: product(a).block_until_ready(), 1), 2.0 * size**3


def measure(forms: list[Form], rounds: int) -> dict[str, list[float]]:
    """Times the forms in turns, so that a busy moment meets all of them.

    Returns:
      Seconds a step of each round, by the name of the form.
    """
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            start = time.perf_counter()
            form.run()
            elapsed = time.perf_counter() - start
            seconds[form.name].append(elapsed / form.num_steps)
    return seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=SHAPES, default="mnist")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    network = arguments.network

    matmul, matmul_flops = matmul_form()
    ours = train_form("kln_jax", network, num_steps=5, loop=True)
    with plain_layers():
        plain = train_form("plain", network, num_steps=1, loop=False)
    seconds = measure([matmul, ours, plain], arguments.rounds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rate = matmul_flops / median["matmul"]
    # A product forward, one for the gradient of each factor; two batches.
    flops = 3 * 2 * multiplications(network) * 2 * BATCH_SIZE
    floor = flops / rate

    print(f"{parallel.describe()}, JAX {jax.__version__}")
    print(
        f"{network}: {BATCH_SIZE} + {BATCH_SIZE} images, {flops / 1e9:.1f} GFLOP a "
        f"step; matmul {rate / 1e9:.0f} GFLOP/s"
    )
    print(f"{'form':10} {'ms/step':>9} {'images/s':>9} {'x floor':>8}")
    for name, value in [("floor", floor), *list(median.items())[1:]]:
        print(
            f"{name:10} {value * 1e3:9.1f} {2 * BATCH_SIZE / value:9.0f} "
            f"{value / floor:8.2f}"
        )
    print(
        f"kln_jax is {median['plain'] / median['kln_jax']:.1f} times as fast as plain"
    )


if __name__ == "__main__":
    main()
