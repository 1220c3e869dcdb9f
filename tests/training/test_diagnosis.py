"""What is said of runs that diverge or collapse."""

import math

import numpy as np
import pytest

from kln_jax.training import diagnosis
from tests.small_run import config_of_digits

NAN, INF = math.nan, math.inf
STEP_SIZE = "Turn learning_rate (lower it) or clip_norm (set it) in a new run"
RIDGE = "Turn ridge (raise it) in a new run"
EITHER = "Turn ridge (raise it) or learning_rate (lower it) in a new run"
PIVOTS = (
    "(pivots of the Gram matrices 0.1 to 1.1, so their condition number is at least 11)"
)
HEALTHY = dict(
    cmmd=1.0,
    reconstruction=2.0,
    loss=3.0,
    gradient_norm=4.0,
    pivot_smallest=0.1,
    pivot_largest=1.1,
)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            dict(cmmd=NAN, loss=NAN, gradient_norm=NAN),
            f"cmmd is nan at step 8 {PIVOTS}. {RIDGE}",
        ),
        (
            dict(reconstruction=1e9, loss=1e8),
            f"reconstruction is 1e+09 at step 8 {PIVOTS}. {STEP_SIZE}",
        ),
        (dict(loss=-INF), f"loss is -inf at step 8 {PIVOTS}. {STEP_SIZE}"),
        # A term beyond the bound, but with hardly a weight in the loss.
        (
            dict(reconstruction=1e9, gradient_norm=INF),
            f"gradient_norm is inf at step 8 {PIVOTS}. {EITHER}",
        ),
        (
            dict(cmmd=NAN, loss=NAN, pivot_smallest=NAN, pivot_largest=NAN),
            f"cmmd is nan at step 8 (the features are not finite). {STEP_SIZE}",
        ),
        (
            dict(gradient_norm=1e7, pivot_largest=INF),
            f"gradient_norm is 1e+07 at step 8 (the features are not finite). "
            f"{STEP_SIZE}",
        ),
    ],
)
def test_a_divergence_is_explained_by_the_first_metric_at_fault(metrics, said):
    explained = diagnosis.explain_divergence(
        config_of_digits(), HEALTHY | metrics, step=8, bound=1e6
    )
    assert explained == said


def test_without_a_gram_matrix_in_the_loss_the_ridge_is_not_blamed():
    metrics = HEALTHY | dict(cross_entropy=1.0, gradient_norm=INF)
    explained = diagnosis.explain_divergence(
        config_of_digits(objective="cross_entropy"), metrics, step=8, bound=1e6
    )
    assert explained == f"gradient_norm is inf at step 8. {STEP_SIZE}"


NAMES = ("cat", "dog", "owl")
# By class and prediction.
ALL = np.eye(3, dtype=int)
NO_DOG = np.array([[3, 0, 1], [2, 0, 0], [0, 0, 4]])
ONLY_OWL = np.array([[0, 0, 4], [0, 0, 2], [0, 0, 4]])


def _said(confusion, *, epoch, same=0.9, different=0.1, **changes):
    config = config_of_digits(num_epochs=30, **changes)
    scalars = dict(epoch=epoch, kernel_same=same, kernel_different=different)
    return diagnosis.find_collapse(config, scalars, confusion, NAMES)


def test_of_a_healthy_run_nothing_is_said():
    assert _said(ALL, epoch=30) == ""
    # A class without images need not be predicted.
    assert _said(np.diag([4, 0, 4]), epoch=30) == ""


@pytest.mark.parametrize(
    ("confusion", "first", "said"),
    [
        (ONLY_OWL, 3, "all evaluated images are predicted as class owl."),
        (NO_DOG, 10, "never predicted: class dog. If this lasts, the classes have"),
    ],
)
def test_classes_that_are_never_predicted_are_said_after_the_first_epochs(
    confusion, first, said
):
    assert _said(confusion, epoch=first - 1) == ""
    assert _said(confusion, epoch=first).startswith(f"epoch {first}: {said}")


def test_a_kernel_that_does_not_separate_is_said_where_it_is_in_the_loss():
    collapsed = dict(same=0.981, different=0.98)
    assert _said(ALL, epoch=2, **collapsed) == ""
    assert _said(ALL, epoch=3, **collapsed).startswith(
        "epoch 3: the kernel has collapsed: its mean is 0.981 for images of the same "
        "class and 0.980 for others. "
    )
    for changes in (
        dict(same=0.98, different=0.9),
        dict(same=0.02, different=0.01),  # Far apart, as all images are at first.
        dict(same=None, different=0.98),  # No pair of the same class.
        dict(collapsed, objective="cross_entropy"),
    ):
        assert _said(ALL, epoch=3, **changes) == ""


def test_an_autoencoder_knows_of_no_classes():
    assert _said(ONLY_OWL, epoch=30, objective="reconstruction") == ""


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (dict(clip_norm=0.0), "clip_norm=10"),
        (dict(), "z_distance=25 or a smaller ridge"),
        (dict(z_distance=25.0), "a smaller ridge"),
        (dict(z_distance=25.0, ridge=0.01), "a smaller learning_rate"),
        (dict(objective="cross_entropy"), "a smaller learning_rate"),
    ],
)
def test_what_is_advised_against_a_collapse_is_not_done_already(changes, advice):
    said = _said(ONLY_OWL, epoch=30, **changes)
    assert said.endswith(f"class owl. Try {advice} in a new run.")
