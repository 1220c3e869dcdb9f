"""Error of CMMD in float32 against float64: far from zero, by the ridge, low-rank.

    python -m benchmarks.precision

Prints the two tables of errors in docs/numerics.md, and the losses that it names.
"""

import jax
import numpy as np

from kln_jax import cmmd, cmmd_nystroem, gaussian_mixture, squared_distances

RIDGES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
N, SEEDS = 100, 5
Problem = tuple[np.ndarray, ...]


def large() -> dict[str, Problem]:
    """Makes sets whose features, or whose distance, are many times the bandwidth."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2))
    y = np.eye(2)[(x[:, 0] > 0) * 1]
    pixels = rng.integers(256, size=(60, 784)).astype(float)
    y_s, y_t = np.eye(10)[rng.integers(10, size=(2, 60))]
    return {
        **{f"t is s + {shift}": (x, y, x + shift, y) for shift in (10, 100, 1000)},
        "pixels, 0 to 255": (pixels, y_s, pixels, y_t),
        "pixels in [0, 1]": (pixels / 255, y_s, pixels / 255, y_t),
    }


def groups(seed: int) -> dict[str, Problem]:
    """Makes ten tight groups in 128 dimensions, and three other sets to compare."""
    rng = np.random.default_rng(seed)
    group = np.arange(N) % 10
    centres = 0.08 * rng.normal(size=(10, 128))[group]
    x, other = (centres + 0.02 * rng.normal(size=(N, 128)) for _ in "st")
    changed = np.where(np.arange(N) < N // 10, (group + 1) % 10, group)
    y, y_changed = np.eye(10)[group], np.eye(10)[changed]
    return {
        "other labels": (x, y, other, y_changed),
        "other points": (x, y, other, y),
        "nearly equal": (x, y, x + 1e-3 * rng.normal(size=x.shape), y),
    }


def cloud(seed: int, features: int) -> Problem:
    """Makes two sets of normal points, of two classes by two thresholds."""
    rng = np.random.default_rng(seed)
    x, other = (rng.normal(size=(N, features)) for _ in "st")
    return x, np.eye(2)[(x[:, 0] > 0) * 1], other, np.eye(2)[(other[:, 0] > 1) * 1]


def in_both(problem: Problem) -> tuple[Problem, Problem]:
    """Returns a problem in float32, and the same numbers in float64."""
    narrow = tuple(array.astype(np.float32) for array in problem)
    return narrow, tuple(array.astype(np.float64) for array in narrow)


def error(problem: Problem, ridge: float, *, landmarks: int = 0) -> float:
    """Returns the relative error in float32, with landmarks or without."""
    narrow, wide = in_both(problem)
    exact = cmmd(*wide, ridge=ridge)
    if landmarks:
        key = jax.random.key(0)
        value = cmmd_nystroem(*narrow, num_landmarks=landmarks, key=key, ridge=ridge)
    else:
        value = cmmd(*narrow, ridge=ridge)
    return abs(float(value) / float(exact) - 1)


def condition(x: np.ndarray, ridge: float) -> float:
    """Returns the condition number of the Gram matrix with its ridge."""
    return float(np.linalg.cond(gaussian_mixture()(x, x) + ridge * np.eye(len(x))))


def main() -> None:
    """Measures all tables."""
    jax.config.update("jax_enable_x64", True)
    print(f"{'points':16}{'distances off by':>18}{'CMMD':>10}{'exact':>10}\n")
    for name, problem in large().items():
        narrow, wide = in_both(problem)
        found, exact = (squared_distances(*sets[::2]) for sets in (narrow, wide))
        off = np.abs(found - exact).max()
        print(f"{name:16}{off:>18.1g}{cmmd(*narrow):>10.3f}{cmmd(*wide):>10.3f}")
    print()
    problems = [groups(seed) for seed in range(SEEDS)]
    names = list(problems[0])
    print(f"Largest relative error of {SEEDS} draws, two sets of {N} points\n")
    print(f"{'ridge':>7}{'condition':>11}", *(f"{name:>14}" for name in names))
    for ridge in RIDGES:
        conditions = [condition(sets[names[0]][0], ridge) for sets in problems]
        largest = [max(error(sets[name], ridge) for sets in problems) for name in names]
        print(
            f"{ridge:>7g}{np.median(conditions):>11,.0f}",
            *(f"{value:>14.0e}" for value in largest),
        )
    print("\nThe same of all points as landmarks, smallest to largest\n")
    for features in (2, 5):
        for ridge in RIDGES[:-1]:
            errors = sorted(
                error(cloud(seed, features), ridge, landmarks=2 * N)
                for seed in range(SEEDS)
            )
            spread = f"{errors[0]:.0e} {errors[-1]:.0e}"
            print(f"{features} features, ridge {ridge:g}: {spread}")


if __name__ == "__main__":
    main()
