"""All that needs a GPU, in one run of a few minutes: correct, fast, and learning.

    benchmarks/gpu_check.sh pack DATA_DIR    # with a network and Fashion-MNIST
    benchmarks/gpu_check.sh run OUT          # on the machine with the GPU

`pack` puts into .gpu/ what the second machine may lack and cannot fetch: wheels, and
Fashion-MNIST as one file. `run` writes OUT/gpu.md and OUT/gpu.json. A part that fails
is reported and does not take the others with it.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import step
from configs import fashion_mnist
from kln_jax import cmmd, datasets
from kln_jax.analysis import runs
from kln_jax.storage import epoch_metrics, whole_files
from kln_jax.training import experiment, parallel, steps
from kln_jax.training.configuration import Config

# Steps of an epoch, and the paper's seconds for one on a Titan X.
EPOCHS = {
    "MNIST": ("mnist", 500, 62.68),
    "CIFAR-10": ("conv_large", 500, 75.20),
    "SVHN + extra": ("conv_large", 6043, 907.32),
}
VARIANTS = ("supervised", "ce", "cgmmn")
FASHION = pathlib.Path(".gpu/fashion_mnist.npz")


def pack(data_dir: str) -> None:
    """Writes Fashion-MNIST as one file."""
    data = datasets.load("fashion_mnist", data_dir=data_dir)
    FASHION.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        FASHION,
        images=data.train_images,
        labels=data.train_labels,
        test_images=data.eval_images,
        test_labels=data.eval_labels,
        class_names=np.array(data.class_names),
    )


def agreement(*, small: bool) -> dict[str, Any]:
    """Compares CMMD and a step of each network with those of the CPU.

    Products of the networks are of the device's default precision, TF32 on a GPU; the
    algebra of kernels must not be.
    """
    found: dict[str, Any] = {}
    for n in (20,) if small else (100, 1000):
        keys = jax.random.split(jax.random.key(n), 4)
        z_s, z_t = (np.array(jax.random.normal(key, (n, 128))) for key in keys[:2])
        y_s, y_t = (
            np.array(jax.nn.softmax(3 * jax.random.normal(key, (n, 10))))
            for key in keys[2:]
        )
        both = jax.jit(jax.value_and_grad(cmmd, argnums=(0, 2, 3)))
        # Scaled, so that kernel values are as in training.
        arrays = (0.2 * z_s, y_s, 0.2 * z_t, y_t)
        (value, expected), errors = _on_both(both, arrays)
        found[f"cmmd, n = {n}"] = dict(gpu=value, cpu=expected, **errors)
        # Not >, so that NaN differs as well.
        if not (abs(value / expected - 1) <= 1e-4 and errors["gradient_error"] <= 1e-3):
            raise AssertionError(f"CMMD differs: {found}")
    for network in step.SHAPES:
        setup = step.build(network, 8 if small else 100)
        state = jax.device_get(setup.init(jax.random.key(0)))
        data = jax.device_get(setup.data)
        order = jnp.arange(setup.batch_size, dtype=jnp.int32)
        method = step.make_method(setup, steps_per_epoch=1)
        one = functools.partial(steps.train_step, method)
        values = {}
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            run = parallel.data_parallel(one, axis_name=steps.AXIS, devices=[device])
            _, got = run(state, data, steps.Rows(order, order), jax.random.key(0))
            names = ("loss", "cmmd", "reconstruction", "gradient_norm")
            values[device.platform] = {name: float(got[name]) for name in names}
        found[f"step, {network}"] = values
        here, cpu = values[jax.devices()[0].platform], values["cpu"]
        for name in cpu:
            # TF32 has three digits, and the inverse of K multiplies what they leave.
            if not abs(here[name] / cpu[name] - 1) <= 0.2:
                raise AssertionError(f"{name} of a step differs: {found}")
    return found


def _on_both(
    function: Callable[..., Any], arrays: tuple[np.ndarray, ...]
) -> tuple[tuple[float, float], dict[str, float]]:
    """Returns the values on GPU and CPU, and how far their gradients differ."""
    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            results.append(jax.device_get(function(*map(jnp.asarray, arrays))))
    (value, gradient), (expected, expected_gradient) = results
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(gradient, expected_gradient, strict=True)
    ]
    return (float(value), float(expected)), {"gradient_error": max(errors)}


def speed(*, small: bool) -> dict[str, Any]:
    """Measures steps beside their floor and PyTorch, and what an epoch takes."""
    options: dict[str, Any] = dict(batch_size=100, num_steps=200, matmul_size=8192)
    if small:
        options = dict(batch_size=8, num_steps=2, matmul_size=256, rounds=1)
    found: dict[str, Any] = {}
    for network in step.SHAPES:
        for dtype in ("float32", "bfloat16"):
            measured = step.report(
                network, dtype=dtype, others=dtype == "float32", **options
            )
            found[f"{network}, {dtype}"] = dict(
                table=step.table(network, measured, options["batch_size"]),
                ms_a_step={
                    name: 1e3 * timing.seconds
                    for name, timing in measured.forms.items()
                },
                tflops_of_matmul=measured.rate / 1e12,
                times_the_floor=measured.forms["kln_jax"].seconds
                * measured.rate
                / measured.flops,
            )
    found["seconds an epoch"] = {
        name: {
            **{
                dtype: count
                * found[f"{network}, {dtype}"]["ms_a_step"]["kln_jax"]
                / 1e3
                for dtype in ("float32", "bfloat16")
            },
            "paper, Titan X": paper,
        }
        for name, (network, count, paper) in EPOCHS.items()
    }
    return found


def learning(out: pathlib.Path, seconds: float, *, small: bool) -> dict[str, Any]:
    """Trains KLN, cross-entropy and CGMMN on Fashion-MNIST, in a given time.

    As many epochs as fit, at most the configuration's 150, with the milestones of the
    learning rate at the same parts of them.
    """
    if not FASHION.exists():
        raise FileNotFoundError(f"{FASHION}: benchmarks/gpu_check.sh pack makes it")
    data = FASHION
    if small:
        data = out / "small.npz"
        out.mkdir(parents=True, exist_ok=True)
        with np.load(FASHION) as whole:
            np.savez(data, **{name: array[:500] for name, array in whole.items()})
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        start = time.perf_counter()
        probe = _train(variant, 3, data, out, small=small)  # It compiles, and is timed.
        epoch = probe[-1]["wall_seconds"] - probe[-2]["wall_seconds"]
        left = seconds / len(VARIANTS) - (time.perf_counter() - start)
        # The second start takes some of it, too.
        epochs = 2 if small else int(np.clip(0.8 * left / epoch, 2, 150))
        lines = _train(variant, epochs, data, out, small=small)
        errors = [line["test_error_percent"] for line in lines]
        found[variant] = dict(
            epochs=epochs,
            test_error_percent=errors[-1],
            late_error_percent=float(np.median(errors[-10:])),
            seconds=time.perf_counter() - start,
        )
    return found


def _train(
    variant: str, epochs: int, data: pathlib.Path, out: pathlib.Path, *, small: bool
) -> list[dict[str, Any]]:
    config = fashion_mnist.get_config(variant)
    runs.set_epochs(config, epochs)
    config.update(dataset="own_images", data_dir=str(data))
    if small:
        config.update(width=0.05, latent_dim=8)
    workdir = out / f"{variant}-{epochs}"
    experiment.train_and_evaluate(Config.from_mapping(config), workdir)
    return epoch_metrics.read_metrics(workdir)


def run(out: pathlib.Path, *, seconds: float, small: bool) -> bool:
    """Runs all parts and writes the report after each; True if none failed."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    report: dict[str, Any] = {
        "device": parallel.describe(),
        "kind": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "small": small,
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "agreement": functools.partial(agreement, small=small),
        "speed": functools.partial(speed, small=small),
        "learning": lambda: learning(
            out / "runs", seconds - (time.perf_counter() - start), small=small
        ),
    }
    failed = False
    for name, part in parts.items():
        try:
            report[name] = part()
        except Exception:  # A part that fails does not take the others with it.
            failed = True
            report[name] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        report["seconds"] = round(time.perf_counter() - start, 1)
        whole_files.write_json(out / "gpu.json", report)
        (out / "gpu.md").write_text(_markdown(report))
    return not failed


def _markdown(report: dict[str, Any]) -> str:
    lines = ["# kln_jax on a GPU", "", "| | |", "|---|---|"]
    lines += [
        f"| {name} | {value} |"
        for name, value in report.items()
        if not isinstance(value, dict)
    ]
    for name in ("agreement", "speed", "learning"):
        for key, value in report.get(name, {}).items():
            lines += ["", f"## {name}: {key}", ""]
            if isinstance(value, dict):
                value = dict(value)
                text = value.pop("table", "")
                text += json.dumps(value, indent=2)
            else:
                text = str(value)
            lines += ["```", text, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Packs, or runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("pack")
    command.add_argument("data_dir")
    command = commands.add_parser("run")
    command.add_argument("out", type=pathlib.Path)
    command.add_argument("--seconds", type=float, default=420.0)
    command.add_argument("--small", action="store_true", help="a trial on a CPU")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.data_dir)
    else:
        done = run(arguments.out, seconds=arguments.seconds, small=arguments.small)
        sys.exit(not done)


if __name__ == "__main__":
    main()
