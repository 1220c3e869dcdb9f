"""Error, time and memory of the low-rank CMMD against the number of landmarks.

    python -m benchmarks.nystroem [--landmarks 20 50 ...] [--figure=docs/nystroem.png]

The error is that of sets small enough for the exact value, by the number of features;
time and memory are those of sets that are not. The ridge is n / 1000, that of the
paper's batches of 100 being 0.1 here. Each number of landmarks is measured in a process
of its own, for the peak of a process never falls.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kln_jax import cmmd, cmmd_nystroem
from kln_jax.analysis import figures

SMALL, LARGE = 2_000, 20_000
FEATURES = (2, 4, 16)
COLOURS = (figures.SAME, figures.DIFFERENT, "#009e73")
CLASSES = 10
LANDMARKS = (20, 50, 100, 200, 500)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one number of landmarks.

    Attributes:
      num_landmarks: The number m.
      errors: Median relative error against the exact value over draws of landmarks,
        for each number of features.
      milliseconds: Median time of a call on the large sets.
      peak_mib: Most memory that the process held.
    """

    num_landmarks: int
    errors: list[float]
    milliseconds: float
    peak_mib: float


def problem(n: int, features: int) -> tuple[jax.Array, ...]:
    """Makes two sets of n points whose labels follow two different rules.

    A class is the largest of ten linear scores; those of t are shifted. The mean
    squared distance of points is 4, whatever the number of features.
    """
    keys = iter(jax.random.split(jax.random.key(0), 4))
    weights = jax.random.normal(next(keys), (features, CLASSES))
    bias = 0.5 * jax.random.normal(next(keys), (1, CLASSES))
    sets: list[jax.Array] = []
    for shift in (0.0, 1.0):
        x = jax.random.normal(next(keys), (n, features)) * (2 / features) ** 0.5
        scores = x @ weights + shift * bias
        sets += [x, jax.nn.one_hot(scores.argmax(axis=1), CLASSES)]
    return tuple(sets)


def peak_mib() -> float:
    """Reads this process's peak of resident memory, on Linux."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(num_landmarks: int, rounds: int) -> Result:
    """Measures one number of landmarks in this process."""
    keys = jax.random.split(jax.random.key(0), rounds)
    approximate = functools.partial(cmmd_nystroem, num_landmarks=num_landmarks)
    large = problem(LARGE, FEATURES[-1])
    seconds = []
    for key in [keys[0], *keys]:  # The first call compiles.
        start = time.perf_counter()
        approximate(*large, key=key, ridge=LARGE / 1000).block_until_ready()
        seconds.append(time.perf_counter() - start)
    peak = peak_mib()  # Before the exact value, which takes more.
    errors = []
    for features in FEATURES:
        small, ridge = problem(SMALL, features), SMALL / 1000
        exact = float(cmmd(*small, ridge=ridge))
        values = [float(approximate(*small, key=key, ridge=ridge)) for key in keys]
        errors.append(statistics.median(abs(value / exact - 1) for value in values))
    return Result(num_landmarks, errors, 1e3 * statistics.median(seconds[1:]), peak)


def draw(results: Sequence[Result]) -> Figure:
    """Draws error and memory against the number of landmarks."""
    m = [result.num_landmarks for result in results]
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(7.4, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        for i, features in enumerate(FEATURES):
            errors = [result.errors[i] for result in results]
            left.plot(m, errors, "o-", color=COLOURS[i], label=f"{features} features")
        left.set(yscale="log", title=f"relative error, {SMALL:,} points a set")
        left.legend(frameon=False, loc="lower left")

        peaks = [result.peak_mib for result in results]
        right.plot(m, peaks, "o-", color=figures.SAME, label="the whole process")
        right.axhline(
            gram_mib(LARGE),
            color="0.4",
            linestyle="--",
            label="the exact value's Gram matrix",
        )
        right.set(
            yscale="log",
            ylim=(100, 20_000),
            title=f"peak memory in MiB, {LARGE:,} points a set",
        )
        right.legend(frameon=False, loc="center")
        for axes in (left, right):
            axes.set(xscale="log", xlabel="landmarks m")
            axes.set_xticks(m, labels=[str(number) for number in m])
            axes.xaxis.set_minor_locator(NullLocator())
    return figure


def gram_mib(n: int) -> float:
    """Counts the MiB of a float32 Gram matrix of two sets of n points."""
    return (2 * n) ** 2 * 4 / 2**20


def main() -> None:
    """Prints the table and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--landmarks", type=int, nargs="+", default=LANDMARKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figure", default="docs/nystroem.png")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        result = measure(arguments.worker, arguments.rounds)
        print(json.dumps(dataclasses.asdict(result)))
        return

    print(
        f"JAX {jax.__version__}, {jax.default_backend()}; error on {SMALL:,} points a "
        f"set, time and memory on {LARGE:,} of {FEATURES[-1]} features"
    )
    heads = " ".join(f"{f'error, d={features}':>12}" for features in FEATURES)
    print(f"{'m':>6} {heads} {'ms':>7} {'peak MiB':>9}")
    results = []
    for num_landmarks in arguments.landmarks:
        command = [sys.executable, "-m", "benchmarks.nystroem"]
        command += [f"--worker={num_landmarks}", f"--rounds={arguments.rounds}"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        result = Result(**json.loads(output))
        results.append(result)
        errors = " ".join(f"{error:12.1e}" for error in result.errors)
        print(
            f"{num_landmarks:6} {errors} {result.milliseconds:7.0f} "
            f"{result.peak_mib:9.0f}",
            flush=True,
        )
    print(f"The exact value's Gram matrix alone: {gram_mib(LARGE):.0f} MiB")
    figures.save(draw(results), pathlib.Path(arguments.figure))


if __name__ == "__main__":
    main()
