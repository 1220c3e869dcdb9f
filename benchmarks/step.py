"""A training step against its floor and against other forms of it, in one run.

    python -m benchmarks.step [--networks mnist conv_large] [--widths 1 0.25 0.1]
        [--rounds 5]

The floor is the time that the step's products take at the rate of a large matrix
product, measured in the same run. The plain form is the same network of linen's
convolutions, with a compiled step called from a Python loop. If PyTorch is installed
(pip install '.[bench]'), its step is measured too. Below them stand the parts of the
step, each compiled by itself. Times are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from kln_jax import cmmd
from kln_jax.discrepancies import kernels
from kln_jax.networks import layers, models
from kln_jax.training import augmentation, objectives, optimizers, parallel, steps

SHAPES = {"mnist": (28, 28, 1), "conv_large": (32, 32, 3)}
# Crop and flip of the configurations.
AUGMENTATION: dict[str, dict[str, Any]] = {
    "mnist": {},
    "conv_large": dict(crop_padding=2, flip=True),
}
KERNEL = kernels.gaussian_mixture()


@dataclasses.dataclass
class Form:
    """One way to run a training step, or a part of one.

    Attributes:
      name: What it is called in the table.
      run: Makes some steps and waits for them.
      num_steps: How many.
      first: Seconds of its first run, which compiles.
    """

    name: str
    run: Callable[[], Any]
    num_steps: int = 1
    first: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Runs it once."""
        self.first = self.seconds() * self.num_steps

    def seconds(self) -> float:
        """Seconds a step of one run."""
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) / self.num_steps


class Timing(NamedTuple):
    """What was measured of a form.

    Attributes:
      seconds: Median of a step.
      first: Seconds of its first run, which compiles.
    """

    seconds: float
    first: float


class Setup(NamedTuple):
    """What the forms of a network have in common."""

    network: str
    batch_size: int
    model: models.KLN
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array], steps.TrainState]
    data: steps.TrainingData


def build(
    network: str, batch_size: int, dtype: str = "float32", *, width: float = 1.0
) -> Setup:
    """Makes a network, its optimiser and random images."""
    shape = SHAPES[network]
    model = models.build(
        network,
        image_shape=shape,
        num_classes=10,
        width=width,
        axis_name=steps.AXIS,
        dtype=jnp.dtype(dtype),
    )
    optimizer = optimizers.optimizer(
        "sgd",
        optimizers.step_schedule(0.02),
        weight_decay=5e-4,
        clip_norm=10.0,
    )
    init = functools.partial(
        steps.init_state,
        model,
        optimizer,
        mean=np.zeros(shape[-1]),
        std=np.ones(shape[-1]),
        image_shape=shape,
    )
    rng = np.random.default_rng(0)
    data = steps.TrainingData(
        jnp.asarray(rng.integers(0, 256, (1000, *shape), np.uint8)),
        jnp.asarray(rng.integers(0, 10, 1000, np.int32)),
        jnp.arange(1000, dtype=jnp.int32),
    )
    return Setup(network, batch_size, model, optimizer, jax.jit(init), data)


def make_method(setup: Setup, *, steps_per_epoch: int) -> steps.Method:
    """Makes the step of KLN with its defaults."""
    return steps.Method(
        model=setup.model,
        optimizer=setup.optimizer,
        objective=functools.partial(
            objectives.kln_objective,
            kernel=KERNEL,
            label_kernel=kernels.linear,
            ridge=0.1,
            reconstruction_weight=0.1,
            confidence_weight=0.0,
        ),
        reconstruction_error=objectives.reconstruction_error,
        kernel=KERNEL,
        ridge=0.1,
        batch_size=setup.batch_size,
        steps_per_epoch=steps_per_epoch,
        **AUGMENTATION[setup.network],
    )


def train_form(name: str, setup: Setup, *, num_steps: int, loop: bool) -> Form:
    """Makes a form of ``num_steps`` steps: one compiled loop, or calls of one step."""
    method = make_method(setup, steps_per_epoch=num_steps)
    train = parallel.data_parallel(
        functools.partial(steps.train_steps if loop else steps.train_step, method),
        axis_name=steps.AXIS,
        donate=True,
    )
    key = jax.random.key(0)
    replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
    data = replicate(setup.data)
    epoch = np.arange(num_steps * setup.batch_size, dtype=np.int32) % 1000
    order = jnp.asarray(epoch.reshape(num_steps, setup.batch_size))
    rows = replicate(steps.Rows(order, order))
    rows_of_one_step = jax.tree.map(lambda array: array[0], rows)
    states = [replicate(setup.init(key))]

    def run() -> None:
        state = states.pop()
        if loop:
            state, _ = train(state, data, rows, key, np.int32(num_steps))
        else:
            for _ in range(num_steps):
                state, _ = train(state, data, rows_of_one_step, key)
        states.append(jax.block_until_ready(state))

    return Form(name, run, num_steps)


def plain_layers() -> contextlib.AbstractContextManager[Any]:
    """Builds networks of linen's convolutions instead of ours."""
    return mock.patch.multiple(layers, Conv=nn.Conv, ConvTranspose=nn.ConvTranspose)


def torch_form(setup: Setup) -> Form:
    """Makes the form of PyTorch."""
    from benchmarks import torch_step

    images, labels = np.asarray(setup.data.images), np.asarray(setup.data.labels)
    step = torch_step.make_step(setup.network, images, labels, setup.batch_size)

    def run() -> None:
        step()
        torch_step.wait()

    return Form("PyTorch", run)


def parts(setup: Setup) -> Iterator[Form]:
    """Makes the parts of a step, forward and backward where they have a gradient."""
    n, key = setup.batch_size, jax.random.key(0)
    model = setup.model.clone(
        encoder=setup.model.encoder.clone(axis_name=None),
        decoder=setup.model.decoder.clone(axis_name=None),
    )
    state = setup.init(key)
    rows = jnp.arange(2 * n, dtype=jnp.int32) % 1000
    keys = augmentation.example_keys(key, rows)

    def prepare(images: jax.Array) -> jax.Array:
        unit = augmentation.to_unit(images[rows])
        options = AUGMENTATION[setup.network]
        if padding := options.get("crop_padding"):
            unit = augmentation.random_crop(keys, unit, padding=padding)
        return augmentation.random_flip(keys, unit) if options.get("flip") else unit

    images = jax.jit(prepare)(setup.data.images)
    yield _part("augmentation", prepare, setup.data.images)

    def network(params: Any, images: jax.Array) -> jax.Array:
        outputs, _ = model.apply(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        error = objectives.reconstruction_error(images, outputs.reconstruction)
        return error + jnp.sum(outputs.logits**2)

    gradient = jax.value_and_grad(network)
    yield _part("autoencoder, classifier", gradient, state.params, images)

    z_s, z_t = jax.random.normal(key, (2, n, 128))
    y_s, y_t = jax.nn.softmax(jax.random.normal(key, (2, n, 10)))
    discrepancy = functools.partial(cmmd, kernel=KERNEL, ridge=0.1)
    both = jax.value_and_grad(discrepancy, argnums=(0, 2, 3))
    yield _part("CMMD", both, z_s, y_s, z_t, y_t)

    def update(params: Any, opt_state: Any) -> Any:
        updates, opt_state = setup.optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    train = jax.jit(update, donate_argnums=(0, 1))
    own = setup.init(key)  # It is used up.
    states = [(own.params, own.opt_state)]

    def run() -> None:
        states.append(jax.block_until_ready(train(*states.pop())))

    yield Form("optimiser", run)


def _part(name: str, function: Callable[..., Any], *arguments: Any) -> Form:
    compiled = jax.jit(function)
    return Form(name, lambda: jax.block_until_ready(compiled(*arguments)))


def peak_bytes(setup: Setup) -> int:
    """Bytes of a compiled step: state, data, and what it holds in between."""
    method = make_method(setup, steps_per_epoch=100)
    order = jnp.arange(setup.batch_size, dtype=jnp.int32)

    def of_one_device(state: Any, data: Any, key: jax.Array) -> Any:
        batched = jax.vmap(
            lambda _: steps.train_step(
                method, state, data, steps.Rows(order, order), key
            ),
            axis_name=steps.AXIS,
        )
        return batched(jnp.zeros(1))

    program = jax.jit(of_one_device, donate_argnums=0)
    arguments = jax.eval_shape(setup.init, jax.random.key(0)), setup.data
    compiled = program.lower(*arguments, jax.random.key(0)).compile()
    memory: Any = compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def step_flops(setup: Setup) -> float:
    """Counts the operations of the convolutions of a step.

    A product forward, and one for the gradient of each of its factors.
    """
    multiplications = 0

    def count(
        call: Callable[..., Any], args: Any, kwargs: Any, context: Any
    ) -> jax.Array:
        nonlocal multiplications
        result = call(*args, **kwargs)
        layer = context.module
        if isinstance(layer, (layers.Conv, layers.ConvTranspose)):
            image = result if isinstance(layer, layers.Conv) else args[0]
            pixels = image.shape[1] * image.shape[2]
            kernel = layer.variables["params"]["kernel"]
            multiplications += pixels * int(np.prod(kernel.shape))
        return result

    image = jnp.zeros((1, *SHAPES[setup.network]))
    with nn.intercept_methods(count):
        jax.eval_shape(setup.model.init, jax.random.key(0), image)
    return 3 * 2.0 * multiplications * 2 * setup.batch_size


def matmul_form(size: int = 2048, dtype: str = "float32") -> tuple[Form, float]:
    """A large matrix product, and its floating-point operations."""
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    name = f"matmul {dtype}"
    return Form(name, lambda: product(a).block_until_ready()), 2.0 * size**3


def measure(forms: Sequence[Form], rounds: int) -> dict[str, Timing]:
    """Times the forms in turns, so that a busy moment meets all of them."""
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            seconds[form.name].append(form.seconds())
    return {
        form.name: Timing(statistics.median(seconds[form.name]), form.first)
        for form in forms
    }


class Report(NamedTuple):
    """What was measured of a network.

    Attributes:
      flops: Operations of the convolutions of a step.
      rate: Operations a second of a large product.
      forms: Forms of the step.
      parts: Its parts.
      peak_bytes: Memory of the compiled step.
    """

    flops: float
    rate: float
    forms: dict[str, Timing]
    parts: dict[str, Timing]
    peak_bytes: int


def report(
    network: str,
    *,
    batch_size: int = 100,
    rounds: int = 5,
    num_steps: int = 5,
    matmul_size: int = 2048,
    dtype: str = "float32",
    width: float = 1.0,
    others: bool = True,
) -> Report:
    """Measures all of a network in one run.

    Args:
      network: ``"mnist"`` or ``"conv_large"``.
      batch_size: Images of s, and of t.
      rounds: Runs of each form.
      num_steps: Steps in a call of the compiled loop.
      matmul_size: Side of the matrices of the product that gives the floor.
      dtype: dtype of the networks, and of that product.
      width: Channels relative to the paper's; PyTorch's form has the paper's alone.
      others: Whether the plain form and PyTorch's are measured too.
    """
    setup = build(network, batch_size, dtype, width=width)
    matmul, matmul_flops = matmul_form(matmul_size, dtype)
    forms = [
        matmul,
        train_form("kln_jax", setup, num_steps=num_steps, loop=True),
    ]
    if others:
        with plain_layers():  # While it is built and compiled.
            plain = build(network, batch_size, width=width)
            forms.append(train_form("plain", plain, num_steps=1, loop=False))
        if width == 1 and importlib.util.find_spec("torch"):
            forms.append(torch_form(setup))
    timings = measure(forms, rounds)
    rate = matmul_flops / timings.pop(matmul.name).seconds
    return Report(
        step_flops(setup),
        rate,
        timings,
        measure(list(parts(setup)), rounds),
        peak_bytes(setup),
    )


def table(network: str, measured: Report, batch_size: int, width: float = 1.0) -> str:
    """Returns a report as text."""
    floor = measured.flops / measured.rate
    lines = [
        f"{network}, width {width:g}: {batch_size} + {batch_size} images, "
        f"{measured.flops / 1e9:.1f} GFLOP a step; matmul {measured.rate / 1e9:.0f} "
        f"GFLOP/s; memory of a step {measured.peak_bytes / 2**20:.0f} MiB",
        f"{'form':24} {'ms/step':>9} {'images/s':>9} {'x floor':>8} {'first, s':>9}",
    ]
    rows = {"floor": Timing(floor, 0.0), **measured.forms}
    for name, (seconds, first) in rows.items():
        lines.append(
            f"{name:24} {seconds * 1e3:9.1f} {2 * batch_size / seconds:9.0f} "
            f"{seconds / floor:8.2f} " + (f"{first:9.1f}" if first else "")
        )
    ours = measured.forms["kln_jax"].seconds
    lines.append(f"{'part':24} {'ms':>9} {'% of kln_jax':>13}")
    for name, (seconds, _) in measured.parts.items():
        lines.append(f"{name:24} {seconds * 1e3:9.1f} {100 * seconds / ours:13.1f}")
    lines += [
        f"kln_jax is {timing.seconds / ours:.2f} times as fast as {name}"
        for name, timing in measured.forms.items()
        if name != "kln_jax"
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--widths", nargs="+", type=float, default=[1.0, 0.25, 0.1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{parallel.describe()}, JAX {jax.__version__}")
    batch_size, rounds = arguments.batch_size, arguments.rounds
    for network, width in itertools.product(arguments.networks, arguments.widths):
        measured = report(network, batch_size=batch_size, rounds=rounds, width=width)
        print(f"\n{table(network, measured, batch_size, width)}", flush=True)


if __name__ == "__main__":
    main()
