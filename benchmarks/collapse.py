"""Why classes collapse: the first steps of the network for 32x32 images, and its Z.

    python -m benchmarks.collapse [--steps 60] [--figure docs/collapse.png]

trains it, at an eighth of its width, on scikit-learn's digits with all labels, and
prints for each choice after how many steps what is so:

- the norm of the gradient of all parameters by the CMMD, through the kernel on Z and
  through the predicted labels, and by the weighted reconstruction error;
- the mean of the kernel between different images: at 1 all are alike, at 0 none is;
- the mean of the largest class probability, and the norm of the gradient by the logits:
  where predictions are sure of one class, none is left;
- the number of classes that batch t is predicted to have.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from configs import digits
from kln_jax import cmmd, datasets
from kln_jax.analysis import figures
from kln_jax.discrepancies import kernels
from kln_jax.networks import models
from kln_jax.training import augmentation, objectives, optimizers

_AS_PRINTED = dict(ridge=1e-3, clip_norm=0.0)
CHOICES: dict[str, dict[str, Any]] = {
    "as printed, ridge 0.001": {},
    "ridge 0.1": dict(ridge=0.1),
    "warm-up": dict(warmup_steps=100),
    "clipping": dict(clip_norm=10.0),
    "normalised Z": dict(normalise_z=True),
}
NUMBERS = (
    *("kernel", "labels", "reconstruction", "cmmd"),
    *("kernel mean", "surest", "by logits", "classes"),
)
SHOWN = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 40, 60)

# (state, rows of s, rows of t, number of the step) -> the next state, numbers
_Step = Callable[[Any, Array, Array, int], tuple[Any, dict[str, Array]]]


def configure(**changes: Any) -> ConfigDict:
    """Returns the configuration of a choice."""
    config = digits.get_config()
    config.update(network="conv_large", image_size=32, width=0.125)
    config.update(_AS_PRINTED | changes)
    return config


def _make_step(config: ConfigDict, data: datasets.Dataset) -> tuple[Any, _Step]:
    """Returns the first parameters, and a step that measures what it does."""
    images, labels = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    model = models.build(
        config.network,
        image_shape=data.train_images.shape[1:],
        num_classes=len(data.class_names),
        width=config.width,
        normalise_z=config.normalise_z,
    )
    optimizer = optimizers.optimizer(
        config.optimizer,
        optimizers.step_schedule(
            config.learning_rate, warmup_steps=config.warmup_steps
        ),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
    )
    kernel = kernels.gaussian_mixture(config.bandwidths)
    variables = model.init(
        jax.random.key(config.seed), augmentation.to_unit(images[:1])
    )
    first = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(
        state: Any, rows_s: Array, rows_t: Array, number: int
    ) -> tuple[Any, dict[str, Array]]:
        params, batch_stats, opt_state = state
        x = augmentation.to_unit(images[jnp.concatenate([rows_s, rows_t])])
        y_s = jax.nn.one_hot(labels[rows_s], model.num_classes)
        n = len(rows_s)

        def forward(params: Any) -> tuple[models.Outputs, Any]:
            outputs, updated = model.apply(
                {"params": params, "batch_stats": batch_stats},
                x,
                train=True,
                rngs={"dropout": jax.random.key(number)},
                mutable=["batch_stats"],
            )
            return outputs, updated["batch_stats"]

        def discrepancy(z: Array, logits: Array) -> Array:
            return cmmd(
                *(z[:n], y_s, z[n:], jax.nn.softmax(logits[n:])),
                kernel=kernel,
                ridge=config.ridge,
            )

        outputs, pullback, updated = jax.vjp(forward, params, has_aux=True)
        z, reconstruction, logits = outputs
        value, (by_z, by_logits) = jax.value_and_grad(discrepancy, (0, 1))(z, logits)
        by_reconstruction = config.reconstruction_weight * jax.grad(
            functools.partial(objectives.reconstruction_error, x)
        )(reconstruction)
        nothing = jax.tree.map(jnp.zeros_like, outputs)
        by = {
            "kernel": nothing._replace(z=by_z),
            "labels": nothing._replace(logits=by_logits),
            "reconstruction": nothing._replace(reconstruction=by_reconstruction),
        }
        gradients = {part: pullback(one)[0] for part, one in by.items()}
        total = jax.tree.map(lambda *parts: sum(parts), *gradients.values())
        updates, opt_state = optimizer.update(total, opt_state, params)
        K = kernel(z, z)
        pairs = K[jnp.triu_indices(len(z), 1)]
        p = jax.nn.softmax(logits[n:])
        predicted = jnp.zeros(model.num_classes).at[jnp.argmax(p, axis=1)].set(1.0)
        numbers = {part: optax.tree.norm(one) for part, one in gradients.items()}
        numbers |= {
            "cmmd": value,
            "kernel mean": jnp.mean(pairs),
            "surest": jnp.mean(jnp.max(p, axis=1)),
            "by logits": jnp.linalg.norm(by_logits),
            "classes": jnp.sum(predicted),
        }
        return (optax.apply_updates(params, updates), updated, opt_state), numbers

    return (*first, optimizer.init(first[0])), step


def measure(
    config: ConfigDict, data: datasets.Dataset, *, num_steps: int
) -> dict[str, np.ndarray]:
    """Returns each number after 0, 1, ... steps."""
    state, step = _make_step(config, data)
    rng, history = np.random.default_rng(config.seed), []
    for number in range(num_steps + 1):
        rows_s, rows_t = (
            rng.choice(len(data.train_images), config.batch_size, replace=False)
            for _ in range(2)
        )
        state, numbers = step(state, rows_s, rows_t, number)
        history.append(jax.device_get(numbers))
    return {name: np.stack([one[name] for one in history]) for name in NUMBERS}


def main() -> None:
    """Prints the tables and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--figure", default="docs/collapse.png")
    arguments = parser.parse_args()
    data = datasets.load("digits", image_size=32)
    found = {}
    for choice, changes in CHOICES.items():
        history = measure(configure(**changes), data, num_steps=arguments.steps)
        print(f"{choice}\n{'step':>4}", *(f"{name:>14}" for name in history))
        for number in [i for i in SHOWN if i <= arguments.steps]:
            cells = (f"{values[number]:14.4g}" for values in history.values())
            print(f"{number:4}", *cells, flush=True)
        found[choice] = history
    if arguments.figure:
        figures.save(_figure(found), pathlib.Path(arguments.figure))


def _figure(found: dict[str, dict[str, np.ndarray]]) -> Figure:
    with mpl.rc_context(figures.STYLE):
        figure = Figure(figsize=(9.0, 2.9), layout="constrained")
        panels = figure.subplots(1, 3)
        for choice, history in found.items():
            for axes, name in zip(
                panels, ("kernel", "kernel mean", "by logits"), strict=True
            ):
                # Zero has no place on a logarithmic axis.
                axes.plot(np.maximum(history[name], 1e-4), label=choice)
        titles = (
            "gradient of the parameters\nthrough the kernel, norm",
            "kernel between different\nimages, mean (0.0001: or less)",
            "gradient by the logits,\nnorm (0.0001: or less)",
        )
        for axes, title in zip(panels, titles, strict=True):
            axes.set(yscale="log", xlabel="steps", title=title)
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            frameon=False,
            loc="outside right center",
        )
    return figure


if __name__ == "__main__":
    main()
