"""What `cmmd` and its gradient cost, by the number of points and of classes.

    python -m benchmarks.cost [--figure docs/cost.png]

prints milliseconds (medians), the memory of the compiled program in Gram matrices of
all 2n points, and the exponent of n between the largest sizes.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import time

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from kln_jax import cmmd, gaussian_mixture
from kln_jax.analysis import figures
from kln_jax.training import parallel

SIZES = (50, 100, 200, 500, 1000, 2000, 4000)
CLASSES = (2, 10, 100, 1000)
DIMENSIONS = 128


def measure(n: int, classes: int, rounds: int) -> tuple[float, float]:
    """Median seconds of the value and gradient, and its memory in Gram matrices."""
    keys = jax.random.split(jax.random.key(0), 4)
    z_s, z_t = (0.2 * jax.random.normal(key, (n, DIMENSIONS)) for key in keys[:2])
    y_s, y_t = (
        jax.nn.softmax(jax.random.normal(key, (n, classes))) for key in keys[2:]
    )
    function = functools.partial(cmmd, kernel=gaussian_mixture(), ridge=0.1)
    program = jax.jit(jax.value_and_grad(function, argnums=(0, 2, 3)))
    compiled = program.lower(z_s, y_s, z_t, y_t).compile()
    memory = compiled.memory_analysis()
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(z_s, y_s, z_t, y_t))
        seconds.append(time.perf_counter() - start)
    grams = memory.temp_size_in_bytes / (4 * (2 * n) ** 2) if memory else float("nan")
    return statistics.median(seconds[1:]), grams


def main() -> None:
    """Prints the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", default="docs/cost.png")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{parallel.describe()}, JAX {jax.__version__}")
    print(f"{'n':>6} {'C':>5} {'ms':>9} {'memory':>7}")
    by_size = {n: _row(n, 10, arguments.rounds) for n in SIZES}
    by_classes = {c: _row(500, c, arguments.rounds) for c in CLASSES}
    exponents = np.diff(np.log(list(by_size.values()))) / np.diff(np.log(list(by_size)))
    print(f"exponent of n at the end: {exponents[-1]:.2f}")
    if arguments.figure:
        figure = _figure(by_size, by_classes, exponents[-1])
        figures.save(figure, pathlib.Path(arguments.figure))


def _row(n: int, classes: int, rounds: int) -> float:
    seconds, grams = measure(n, classes, rounds)
    print(f"{n:6} {classes:5} {seconds * 1e3:9.2f} {grams:7.1f}", flush=True)
    return seconds


def _figure(
    by_size: dict[int, float], by_classes: dict[int, float], exponent: float
) -> Figure:
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.loglog(list(by_size), [1e3 * s for s in by_size.values()], "o-")
        left.set(
            xlabel="points n of each set, 10 classes",
            ylabel="ms, value and gradient",
            title=f"exponent of n at the end: {exponent:.1f}",
        )
        right.loglog(list(by_classes), [1e3 * s for s in by_classes.values()], "o-")
        right.set(xlabel="classes, n = 500", ylabel="ms, value and gradient")
        figures.label_plainly(right.yaxis)
    return figure


if __name__ == "__main__":
    main()
