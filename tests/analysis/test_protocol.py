"""Settings are chosen on validation images, and errors compared seed by seed."""

import numpy as np
import pytest
from scipy import stats

from kln_jax.analysis import protocol
from kln_jax.analysis.protocol import METHODS, Setup
from tests.analysis.made_up import record

KLN, CE = METHODS[:2]
SETUP = Setup("mnist", epochs=150, width=0.25)


def _tried(method, errors, **options):
    """A run on validation images of each setting, with its error."""
    return [
        record(
            error,
            variant=method.variant,
            changes=dict(setting.changes, width=0.25),
            evaluate_on="validation",
            **options,
        )
        for setting, error in zip(protocol.settings(method), errors, strict=True)
    ]


def _tested(method, setting, errors):
    """A run on test images of each seed, with its error."""
    changes = dict(protocol.settings(method)[setting].changes, width=0.25)
    return [
        record(error, seed=seed, variant=method.variant, changes=changes)
        for seed, error in enumerate(errors)
    ]


def test_a_method_has_the_keys_of_the_grid_that_act_in_it():
    found = {
        method.name: {
            key
            for setting in protocol.settings(method)
            for key, _ in setting.changes[len(method.changes) :]
        }
        for method in METHODS
    }
    everything = {"learning_rate", "reconstruction_weight", "ridge"}
    assert found["KLN"] == found["kernel on pixels"] == everything
    assert found["cross-entropy"] == everything - {"ridge"}
    assert found["CGMMN-CNN"] == everything - {"reconstruction_weight"}
    assert len(protocol.settings(KLN)) == 8


def test_the_setting_of_the_lowest_validation_error_is_chosen():
    tried = _tried(CE, [3.0, 1.0, None, 2.0])
    setting, error = protocol.choose(SETUP, CE, tried)
    assert (setting, error) == (protocol.settings(CE)[1], 1.0)
    # Errors on test images have no say, whatever they are.
    tested = _tested(CE, 0, [0.0])
    assert protocol.choose(SETUP, CE, tried + tested)[0] == setting


@pytest.mark.parametrize(
    "others", [{}, dict(epochs=30), dict(partial=True), dict(name="digits")]
)
def test_nothing_is_chosen_before_all_settings_are_tried(others):
    tried = _tried(CE, [3.0, 1.0, 4.0, 2.0], **others)
    if not others:
        del tried[2]
    assert protocol.choose(SETUP, CE, tried) is None


def test_the_interval_is_that_of_the_paired_t_test():
    errors, others = np.random.default_rng(0).normal(size=(2, 7))
    found = protocol.difference(dict(enumerate(errors)), dict(enumerate(others)))
    expected = stats.ttest_rel(errors, others).confidence_interval(0.95)
    np.testing.assert_allclose(found, (np.mean(errors - others), *expected))


def test_only_seeds_of_both_are_compared():
    found = protocol.difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 0.5, 1: 1.5, 3: 0.0})
    assert found == (0.5, 0.5, 0.5)
    assert protocol.difference({0: 1.0, 1: 2.0}, {1: 1.0, 2: 2.0}) is None


def test_the_report_has_choices_errors_and_differences():
    runs = _tried(KLN, [5.0, 4.0, 3.0, 2.0, 6.0, 7.0, 8.0, 9.0])
    runs += _tried(CE, [3.0, 1.0, 4.0, 2.0])
    runs += _tested(KLN, 3, [2.0, 2.2, 2.4]) + _tested(CE, 1, [1.5, 1.6, 1.7])
    assert protocol.report(runs) == (
        "### mnist, width 0.25, 150 epochs\n\n"
        "| method | chosen | validation error, % | seeds | test error, % "
        "| less that of KLN |\n"
        "|:---|:---|---:|---:|---:|---:|\n"
        "| KLN | learning_rate 0.02, reconstruction_weight 0.1, ridge 0.1 | 2.00 | 3 "
        "| 2.20 ± 0.20 |  |\n"
        "| cross-entropy | learning_rate 0.02, reconstruction_weight 0.1 | 1.00 | 3 "
        "| 1.60 ± 0.10 | -0.60 (-0.85 to -0.35) |\n"
    )
    assert protocol.report(runs[-6:]) == ""
    others = [run for run in runs if run.variant == "ce"]
    assert protocol.report(others).splitlines()[-1].endswith("| 1.60 ± 0.10 |  |")


def test_no_other_method_stands_in_for_kln():
    other = METHODS[5]
    runs = _tried(CE, [3.0, 1.0, 4.0, 2.0]) + _tested(CE, 1, [1.5, 1.6, 1.7])
    runs += _tried(other, [3.0, 1.0, 4.0, 2.0]) + _tested(other, 1, [2.5, 2.6, 2.8])
    rows = protocol.report(runs).splitlines()[-2:]
    assert [row.split("|")[-2].strip() for row in rows] == ["", ""]


def test_a_comparison_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "GRID", {"learning_rate": (0.02, 0.0)})
    # Of the tests' eight devices each takes its share.
    method = CE._replace(changes=(("batch_size", 120),))
    monkeypatch.setattr(protocol, "METHODS", (method,))
    setup = Setup("digits", epochs=1, width=0.05)
    options = dict(seeds=2)
    first = list(protocol.compare(setup, tmp_path, **options))
    assert [line.split(": ")[0] for line in first if "%" in line][2] == "cross-entropy"
    assert "learning_rate 0.02" in first[2]  # A rate of 0 learns nothing.
    made = sorted(tmp_path.rglob("result.json"))
    assert len(made) == 4
    times = [path.stat().st_mtime_ns for path in made]
    assert list(protocol.compare(setup, tmp_path, **options)) == first
    assert [path.stat().st_mtime_ns for path in made] == times


def test_a_part_of_a_data_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol.runs, "make", lambda *given, **options: iter(()))
    tried = _tried(CE, [3.0, 1.0, 4.0, 2.0], partial=True)
    monkeypatch.setattr(protocol.packed, "read_all", lambda place: tried)
    with pytest.raises(ValueError, match="mnist in data_dir='DIR' is a part"):
        list(
            protocol.compare(
                SETUP, tmp_path, data_dir="DIR", seeds=1, methods=["cross-entropy"]
            )
        )
