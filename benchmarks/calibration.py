"""Level and power of the conditional two-sample test, beside other schemes.

    python -m benchmarks.calibration

prints the level of each scheme in each null scenario (equal P(Y|X), different P(X)),
the power against a shift of P(Y|X), and writes docs/calibration.png. `--sets=50
--figure=""` is a quick look. All schemes see the same data sets, drawn from seed 0.

The schemes:

- cmmd_test: the function of this package, density ratio estimated;
- known: the same, density ratio given;
- raw: conditional permutation as in cmmd_test, but of the CMMD of y itself;
- exchange: CMMD of y, groups exchanged freely, as for equal marginals;
- local: CMMD of y, groups exchanged within neighbourhoods of about 20 points
  (Kim, Neykov, Balakrishnan and Wasserman 2022);
- wild: CMMD of the residuals, whose signs are drawn anew while x and groups stay
  (a bootstrap of the pooled kernel ridge regression);
- ecmmd: Chatterjee, Niu and Bhattacharya 2024, arXiv 2407.16550, with its normal
  approximation. It takes a y of either set at each x, so the sets are matched first:
  nearest pairs, each point once, and the closer half of the pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.linalg import solve
from scipy.stats import binom

from kln_jax import gaussian_mixture, squared_distances
from kln_jax.discrepancies import two_sample
from kln_jax.discrepancies.float_arrays import matmul

LEVEL = 0.05
RESAMPLES = 199
SHIFTS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
KERNEL = gaussian_mixture((1, 3, 5, 7, 9))


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Normal features of two sets and a common law of y given x and a shift."""

    n: tuple[int, int]
    means: tuple[tuple[float, ...], tuple[float, ...]]
    scales: tuple[float, float]
    draw_y: Callable[[Array, Array, Array], Array]

    def draw(self, key: Array, shift: Array) -> tuple[Array, Array, Array, Array]:
        """One data set; P(Y|X) of set t is shifted."""
        keys = random.split(key, 4)
        x_s, x_t = (
            jnp.array(mean) + scale * random.normal(k, (n, len(mean)))
            for k, n, mean, scale in zip(
                keys[:2], self.n, self.means, self.scales, strict=True
            )
        )
        y_s = self.draw_y(keys[2], x_s, jnp.zeros(()))
        return x_s, y_s, x_t, self.draw_y(keys[3], x_t, shift)

    def log_density_ratio(self, x: Array) -> Array:
        """Of s over t, up to a constant."""
        logs = [
            -0.5 * jnp.sum((x - jnp.array(mean)) ** 2, axis=1) / scale**2
            for mean, scale in zip(self.means, self.scales, strict=True)
        ]
        return logs[0] - logs[1]


def _labels(key: Array, logits: Array) -> Array:
    return jax.nn.one_hot(random.categorical(key, logits), logits.shape[1])


def _binary(logit: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    def draw_y(key: Array, x: Array, shift: Array) -> Array:
        column = logit(x) + shift
        return _labels(key, jnp.stack([column, jnp.zeros_like(column)], axis=1))

    return draw_y


def _four(logits: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    def draw_y(key: Array, x: Array, shift: Array) -> Array:
        return _labels(key, logits(x) + shift * jnp.array([1.0, 0.0, 0.0, -1.0]))

    return draw_y


def _real(
    mean: Callable[[Array], Array], scale: Callable[[Array], Array]
) -> Callable[[Array, Array, Array], Array]:
    def draw_y(key: Array, x: Array, shift: Array) -> Array:
        noise = random.normal(key, (len(x),))
        return (mean(x) + shift + scale(x) * noise)[:, None]

    return draw_y


def _heavy(key: Array, x: Array, shift: Array) -> Array:
    """Scenario 1 of Lee, Cha and Kim, arXiv 2410.16636: t noise of 2 degrees."""
    slope = jnp.array([1.0, -1.0, -1.0, 1.0] + [0.0] * 6)
    return (matmul(x, slope) + shift + random.t(key, 2.0, (len(x),)))[:, None]


_WEIGHTS = jnp.array(
    [[1.5, 0, -1.5, 0], [0, 1.5, 0, -1.5], [1, -1, 0, 0], [0, 0, 1, -1], [0, 0, 0, 0]]
)


def _bump(x: Array) -> Array:
    a = x[:, 0]
    return jnp.stack([2 * a, -2 * a, 1 - a**2, jnp.sin(3 * a)], axis=1)


def _of_features(d: int) -> Scenario:
    """Two classes by the first feature, means 1 apart along the second of d."""
    mean = (0.0, 0.5) + (0.0,) * (d - 2)
    other = (0.0, -0.5) + (0.0,) * (d - 2)
    return Scenario((100, 100), (mean, other), (1, 1), _binary(lambda x: 2 * x[:, 0]))


SCENARIOS = {
    "1-d binary, moderate": Scenario(
        (100, 100), ((-0.5,), (0.5,)), (1, 1), _binary(lambda x: 2 * x[:, 0])
    ),
    "1-d binary, strong": Scenario(
        (100, 100), ((-1.0,), (1.0,)), (1, 1), _binary(lambda x: 2 * x[:, 0])
    ),
    "1-d binary, wiggly": Scenario(
        (100, 100),
        ((-1.0,), (1.0,)),
        (1, 1),
        _binary(lambda x: 2 * jnp.sin(3 * x[:, 0])),
    ),
    "5-d binary, moderate": Scenario(
        (100, 100),
        ((0.5, 0, 0, 0, 0), (-0.5, 0, 0, 0, 0)),
        (1, 1),
        _binary(lambda x: 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3]),
    ),
    "5-d binary, strong": Scenario(
        (60, 120),
        ((0.7, -0.7, 0, 0, 0), (-0.5, 0.5, 0, 0, 0)),
        (1, 1),
        _binary(lambda x: 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3]),
    ),
    "1-d 4 classes, strong": Scenario(
        (50, 100), ((1.0,), (-0.5,)), (0.7, 1.2), _four(_bump)
    ),
    "5-d 4 classes, moderate": Scenario(
        (100, 100),
        ((0.5, 0, 0, 0, 0), (-0.5, 0, 0, 0, 0)),
        (1, 1),
        _four(lambda x: matmul(x, _WEIGHTS)),
    ),
    "3-d binary, moderate": _of_features(3),
    "10-d binary, moderate": _of_features(10),
    "200-d binary, moderate": _of_features(200),
    "1-d real, equal noise": Scenario(
        (100, 100),
        ((-0.5,), (0.5,)),
        (1, 1),
        _real(lambda x: jnp.sin(2 * x[:, 0]), lambda x: jnp.full(len(x), 0.5)),
    ),
    "5-d real, equal noise": Scenario(
        (100, 150),
        ((0.5, 0, 0, 0, 0), (-0.5, 0, 0, 0, 0)),
        (1, 1),
        _real(
            lambda x: x[:, 0] + jnp.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3],
            lambda x: jnp.full(len(x), 0.5),
        ),
    ),
    "1-d real, strong": Scenario(
        (100, 100),
        ((-1.0,), (1.0,)),
        (1, 1),
        _real(lambda x: jnp.sin(2 * x[:, 0]), lambda x: 0.2 + 0.5 * jnp.abs(x[:, 0])),
    ),
    "1-d real, scale": Scenario(
        (50, 150),
        ((0.0,), (0.0,)),
        (0.5, 1.5),
        _real(lambda x: jnp.sin(2 * x[:, 0]), lambda x: 0.2 + 0.5 * jnp.abs(x[:, 0])),
    ),
    "5-d real, moderate": Scenario(
        (100, 150),
        ((0.5, 0, 0, 0, 0), (-0.5, 0, 0, 0, 0)),
        (1, 1),
        _real(
            lambda x: x[:, 0] + jnp.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3],
            lambda x: 0.3 + 0.5 * jnp.abs(x[:, 0]),
        ),
    ),
}
PUBLISHED = Scenario((200, 200), ((1, 1, -1, -1) + (0,) * 6, (0,) * 10), (1, 1), _heavy)
POWER = (
    "1-d binary, strong",
    "5-d binary, moderate",
    "1-d real, strong",
    "3-d binary, moderate",
    "10-d binary, moderate",
    "200-d binary, moderate",
)


def ours(data: tuple[Array, ...], key: Array) -> dict[str, Array]:
    """p-value of `cmmd_test`."""
    x_s, y_s, x_t, y_t = data
    result = two_sample.cmmd_test(x_s, y_s, x_t, y_t, key=key, num_resamples=RESAMPLES)
    return {"cmmd_test": result.p_value}


def others(scenario: Scenario, data: tuple[Array, ...], key: Array) -> dict[str, Array]:
    """p-values of the test with known ratio, and of the schemes that were left."""
    x_s, y_s, x_t, y_t = data
    x, y = jnp.concatenate([x_s, x_t]), jnp.concatenate([y_s, y_t])
    n, n_s = len(x), len(x_s)
    K = KERNEL(x, x)
    lam = jnp.trace(K) / 10.0
    S = jnp.where(jnp.arange(n) < n_s, 1.0, -1.0)
    keys = random.split(key, 6)
    P_y, P_s = two_sample._smoothers(K, y - jnp.mean(y, axis=0), S)
    log_odds = two_sample._fit_log_odds(P_s, S)

    # Cells around random points; sorting within cells exchanges their groups.
    centres = random.choice(keys[0], x, (n // 20,), replace=False)
    cell = jnp.argmin(squared_distances(x, centres), axis=1)
    by_cell = S[jnp.argsort(cell)]

    def within_cells(k: Array) -> Array:
        order = jnp.argsort(cell + random.uniform(k, (n,)))
        return jnp.zeros(n).at[order].set(by_cell)

    draws = {
        "raw": two_sample._draw_groups(keys[1], log_odds, n_s, RESAMPLES),
        "exchange": two_sample._draw_groups(keys[2], jnp.zeros(n), n_s, RESAMPLES),
        "local": jax.vmap(within_cells)(random.split(keys[3], RESAMPLES)),
    }
    signs = jnp.vstack([S, *draws.values()])
    T = two_sample._statistics(K, y, signs, lam)
    pairs = zip(draws, jnp.split(T[1:], len(draws)), strict=True)
    found = {name: _p_value(T[0], drawn) for name, drawn in pairs}

    r = y - jnp.mean(y, axis=0)
    r -= matmul(P_y, r)
    ratio = scenario.log_density_ratio(x)
    drawn = two_sample._draw_groups(keys[5], ratio, n_s, RESAMPLES)
    T = two_sample._statistics(K, r, jnp.vstack([S, drawn]), lam)
    found["known"] = _p_value(T[0], T[1:])

    block = 0.5 * (K + S[:, None] * K * S) + lam * jnp.eye(n)
    A = S[:, None] * solve(block, jnp.eye(n), assume_a="pos")
    M = matmul(A.T, matmul(K, A)) * matmul(r, r.T)
    w = random.rademacher(keys[4], (RESAMPLES, n), dtype=x.dtype)
    found["wild"] = _p_value(jnp.sum(M), jnp.sum(matmul(w, M) * w, axis=1))
    return found


def _p_value(T: Array, drawn: Array) -> Array:
    return (1 + jnp.sum(drawn >= T * (1 - 1e-4))) / (1 + len(drawn))


def ecmmd(data: tuple[Array, ...], neighbours: int = 10) -> dict[str, Array]:
    """p-value of ECMMD on matched pairs, linear kernel on y."""
    x_s, y_s, x_t, y_t = data
    num = min(len(x_s), len(x_t)) // 2

    def match(D: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        i, j = jnp.unravel_index(jnp.argmin(D), D.shape)
        return D.at[i].set(jnp.inf).at[:, j].set(jnp.inf), (i, j)

    _, (i, j) = lax.scan(match, squared_distances(x_s, x_t), None, length=num)
    z, difference = 0.5 * (x_s[i] + x_t[j]), y_s[i] - y_t[j]
    apart = squared_distances(z, z).at[jnp.diag_indices(num)].set(jnp.inf)
    _, nearest = lax.top_k(-apart, neighbours)
    edge = jnp.zeros((num, num)).at[jnp.arange(num)[:, None], nearest].set(1.0)
    H = matmul(difference, difference.T)
    variance = jnp.sum(edge * (1 + edge.T) * H**2)
    score = jnp.sum(edge * H) / jnp.sqrt(variance + 1e-12)
    return {"ecmmd": 2 * jax.scipy.stats.norm.sf(jnp.abs(score))}


@functools.lru_cache
def _program(scenario: Scenario, everything: bool) -> Callable[..., dict[str, Array]]:
    """p-values of all schemes for each key: compiled once for all shifts."""

    def one(key: Array, shift: Array) -> dict[str, Array]:
        keys = random.split(key, 3)
        data = scenario.draw(keys[0], shift)
        found = ours(data, keys[1]) | ecmmd(data)
        return found | (others(scenario, data, keys[2]) if everything else {})

    return jax.jit(lambda keys, shift: lax.map(lambda key: one(key, shift), keys))


def rates(
    scenario: Scenario, shift: float, sets: int, *, everything: bool
) -> dict[str, float]:
    """Share of data sets in which each scheme rejects at the level."""
    keys = random.split(random.key(0), sets)
    p_values = _program(scenario, everything)(keys, jnp.asarray(shift))
    return {name: float(np.mean(p <= LEVEL)) for name, p in p_values.items()}


def interval(sets: int, confidence: float) -> tuple[float, float]:
    """Two-sided binomial interval of the rate of a test that has its level."""
    tail = (1 - confidence) / 2
    low, high = binom.ppf([tail, 1 - tail], sets, LEVEL) / sets
    return float(low), float(high)


def figure(
    levels: dict[str, dict[str, float]],
    powers: dict[str, list[dict[str, float]]],
    sets: int,
    path: str,
) -> None:
    """Level of each scenario beside the power curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(
        1, 2, figsize=(11, 5), width_ratios=(3, 2), layout="constrained"
    )
    styles = {"cmmd_test": "o", "known": "D", "ecmmd": "s", "exchange": "x"}
    rows = np.arange(len(levels))
    left.axvspan(*interval(sets, 0.99), color="0.9")
    left.axvline(LEVEL, color="0.5", linewidth=0.8)
    for name, marker in styles.items():
        values = [level[name] for level in levels.values()]
        left.plot(values, rows, marker, label=name, clip_on=False)
    left.set(
        yticks=rows,
        yticklabels=list(levels),
        xlabel=f"rejection rate under the null, {sets} data sets, level {LEVEL}",
        xlim=(0, 1),
    )
    left.set_xscale("symlog", linthresh=0.1)
    left.set_xticks([0, 0.05, 0.1, 0.5, 1], ["0", "0.05", "0.1", "0.5", "1"])
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=4, fontsize=8)
    for index, (name, curve) in enumerate(powers.items()):
        for scheme, line in (("cmmd_test", "-"), ("ecmmd", ":")):
            right.plot(
                SHIFTS,
                [point[scheme] for point in curve],
                line,
                color=f"C{index}",
                marker=styles[scheme],
                label=f"{name}: {scheme}",
            )
    right.axhline(LEVEL, color="0.5", linewidth=0.8)
    right.set(xlabel="shift of P(Y|X)", ylabel="rejection rate", ylim=(0, 1.02))
    right.legend(
        loc="upper center",
        bbox_to_anchor=(0.45, -0.14),
        ncols=2,
        fontsize=7,
        frameon=False,
    )
    fig.savefig(path, dpi=110)


def main() -> None:
    """Prints the tables and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=500, help="null sets a scenario")
    parser.add_argument("--figure", default="docs/calibration.png")
    parser.add_argument(
        "--short", action="store_true", help="cmmd_test and ECMMD, no curves"
    )
    options = parser.parse_args()
    sets, start = options.sets, time.perf_counter()
    for confidence in (0.95, 0.99):
        low, high = interval(sets, confidence)
        print(f"{confidence:.0%} binomial interval of {LEVEL}: {low:.3f} {high:.3f}")
    if options.short:
        for name, scenario in SCENARIOS.items():
            for kind, shift, num in (
                ("level", 0.0, sets),
                ("power 1.0", 1.0, sets // 2),
            ):
                _row(kind, name, rates(scenario, shift, num, everything=False), start)
        return
    levels, powers = {}, {}
    for name, scenario in SCENARIOS.items():
        levels[name] = rates(scenario, 0.0, sets, everything=True)
        _row("level", name, levels[name], start)
    for name in POWER:
        powers[name] = [
            rates(SCENARIOS[name], shift, max(sets // 5, 20), everything=False)
            for shift in SHIFTS
        ]
        for shift, point in zip(SHIFTS, powers[name], strict=True):
            _row(f"power {shift}", name, point, start)
    for shift in (0.0, 0.5):
        point = rates(PUBLISHED, shift, sets, everything=False)
        _row(f"shift {shift}", "Lee, Cha, Kim 1U", point, start)
    if options.figure:
        figure(levels, powers, sets, options.figure)


def _row(kind: str, name: str, found: dict[str, float], start: float) -> None:
    cells = " ".join(f"{scheme} {rate:.3f}" for scheme, rate in found.items())
    print(
        f"{time.perf_counter() - start:4.0f}s {kind:10} {name:24} {cells}", flush=True
    )


if __name__ == "__main__":
    main()
