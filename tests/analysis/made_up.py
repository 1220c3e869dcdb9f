"""Records that are made up, so that each case is there."""

import functools
import pathlib

import numpy as np

from kln_jax.analysis import runs
from kln_jax.analysis.records import Record
from kln_jax.training import variants


@functools.cache
def _config(name, variant):
    return runs.as_json(variants.named_config(name, variant))


def record(
    error,
    *,
    seed=0,
    name="mnist",
    variant="supervised",
    epochs=150,
    partial=False,
    evaluate_on="test",
    changes=(),
    num_train_images=None,
    version=None,
    learned_at=None,
):
    """A run whose last ten errors are 0.1 more, and whose epochs take 30 s + seed."""
    about = {"partial": partial, "num_train_images": num_train_images}
    about["version"] = version
    config = _config(name, variant) | dict(changes)
    config |= dict(seed=seed, split_seed=seed, num_epochs=epochs)
    result, metrics = None, {}
    if error is not None:
        result = {f"{evaluate_on}_error_percent": error, "partial_data": partial}
        result["device"] = "1 x cpu"
        errors = np.full(12, error + 0.1)
        errors[-1] = error
        metrics = {
            f"{evaluate_on}_error_percent": errors,
            "wall_seconds": (30.0 + seed) * np.arange(1, 13),
        }
    return Record(
        came_from=f"{name}/{variant}/{seed}",
        config=config | {"evaluate_on": evaluate_on},
        changed=tuple(sorted(dict(changes))),
        full_epochs=_config(name, variant)["num_epochs"],
        about={key: value for key, value in about.items() if value is not None},
        result=result,
        failure="" if result else "cmmd is 1e9",
        metrics=metrics,
        learned_at=pathlib.Path(learned_at) if learned_at else None,
    )
