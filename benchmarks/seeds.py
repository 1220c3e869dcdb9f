"""Steps of several seeds: one by one, as `num_seeds` makes them, and as one batch.

    python -m benchmarks.seeds [--widths 0.05 0.25 1.0] [--seeds 10] [--rounds 5]

The compiled loop of the training step on random images of MNIST's size: as a run makes
it, called for one seed after the other; all seeds in one program, as `config.num_seeds`
makes it; and under `jax.vmap`, which is what `num_seeds` does where it is no CPU. Times
are medians.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import step
from kln_jax.training import parallel, steps


def forms(setup: step.Setup, *, num_seeds: int, num_steps: int) -> list[step.Form]:
    """Makes the three forms, of ``num_steps`` steps of each seed."""
    single = steps.make_train_steps(
        step.train_step(setup, diagnose_every=num_steps), steps_per_epoch=num_steps
    )
    data_parallel = functools.partial(
        parallel.data_parallel, axis_name=steps.AXIS, donate=True
    )
    replicate = functools.partial(parallel.replicate, axis_name=steps.AXIS)
    images = np.arange(num_steps * setup.batch_size, dtype=np.int32) % 1000
    order = images.reshape(num_steps, setup.batch_size)
    data, rows = replicate((setup.data, steps.Rows(*jnp.stack([order, order]))))
    keys = [jax.random.key(seed) for seed in range(num_seeds)]
    key = jnp.stack(keys)
    states = [replicate(setup.init(key)) for key in keys]
    train = data_parallel(single)

    def one_by_one() -> None:
        for seed, key in enumerate(keys):
            state, _ = train(states[seed], data, rows, key, np.int32(num_steps))
            states[seed] = jax.block_until_ready(state)

    def together(name: str, over_seeds: Callable[..., Any]) -> step.Form:
        train = data_parallel(over_seeds(single, (0, None, None, 0, None)))
        stacked = [replicate(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))]

        def run() -> None:
            state, _ = train(stacked.pop(), data, rows, key, np.int32(num_steps))
            stacked.append(jax.block_until_ready(state))

        return step.Form(name, run, num_steps)

    return [
        together("num_seeds", steps.over_seeds),
        together("one batch", jax.vmap),
        step.Form("one by one", one_by_one, num_steps),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=float, default=[0.05, 0.25, 1.0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{parallel.describe()}, JAX {jax.__version__}")
    print(f"ms for a step of each of {arguments.seeds} seeds, and s for the first call")
    print(f"{'width':>6} {'form':12} {'ms':>9} {'first, s':>9}")
    for width in arguments.widths:
        setup = step.build("mnist", arguments.batch_size, width=width)
        every = forms(setup, num_seeds=arguments.seeds, num_steps=5)
        for name, timing in step.measure(every, arguments.rounds).items():
            print(
                f"{width:6g} {name:12} {timing.seconds * 1e3:9.1f} {timing.first:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
