"""Tables of runs that are made up here, so that each case is there."""

import dataclasses

import numpy as np
import pytest

from kln_jax.analysis import tables
from kln_jax.analysis.suites import SUITES
from tests.analysis.made_up import record as _record


def _rows(records, suite="table1", method="KLN"):
    table = tables.rows(SUITES[suite], records)
    return [row for row in table if row["method"] == method]


def test_full_runs_stand_beside_the_paper():
    (row,) = _rows([_record(0.4), _record(0.6, seed=1)])
    assert row == {
        "data": "mnist",
        "method": "KLN",
        "paper": "0.39",
        "ours": "0.50 ± 0.14",
        "ours - paper": "+0.11",
        "last ten epochs": "0.60 ± 0.14",
        "runs": "2",
        "epochs": "150",
        "remarks": "1 x cpu",
    }


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        (dict(epochs=5), "5 of 150 epochs"),
        (dict(partial=True), "part of the data"),
        (dict(partial=True, epochs=5), "part of the data; 5 of 150 epochs"),
        (dict(epochs=600), "600 of 150 epochs"),
        (
            dict(partial=True, num_train_images=9),
            "part of the data; 9 images to train",
        ),
        (dict(evaluate_on="validation"), "error on validation images"),
    ],
)
def test_reduced_runs_are_marked_and_have_a_row_of_their_own(changes, mark):
    reduced, full = _record(3.0, **changes), _record(0.4)
    rows = _rows([full, reduced])
    row, other = sorted(rows, key=lambda row: row["ours - paper"])
    # Where both are of the whole set, the longer come first.
    assert (other == rows[0]) == (changes != dict(epochs=600))
    assert (row["ours"], row["ours - paper"]) == ("3.00", "")
    assert row["remarks"] == f"{mark}; 1 x cpu"
    assert (other["ours"], other["ours - paper"]) == ("0.40", "+0.01")


def test_diverged_runs_are_counted():
    (row,) = _rows([_record(0.4), _record(None, seed=1)])
    assert (row["ours"], row["runs"]) == ("0.40", "2")
    assert row["remarks"] == "1 diverged; 1 x cpu"
    (row,) = _rows([_record(None)])
    assert (row["ours"], row["ours - paper"]) == ("", "")


@pytest.mark.parametrize(
    ("same", "different", "objective", "remark"),
    [
        (0.995, 0.994, "cmmd", "1 with a collapsed kernel; 1 x cpu"),
        (0.94, 0.1, "cmmd", "1 x cpu"),
        (0.995, 0.994, "cross_entropy", "1 x cpu"),
    ],
)
def test_a_collapsed_kernel_is_marked(same, different, objective, remark):
    run = _record(85.0)
    kernel = {"kernel_same": [0.5, same], "kernel_different": [0.1, different]}
    run = dataclasses.replace(
        run,
        metrics=run.metrics
        | {name: np.array(values) for name, values in kernel.items()},
        config=run.config | {"objective": objective},
    )
    (row,) = _rows([run])
    assert row["remarks"] == remark


def test_a_diverged_run_is_counted_among_those_on_its_data():
    part = dict(partial=True, epochs=6)
    records = [_record(2.0, **part), _record(None, seed=1, **part)]
    (row,) = _rows(records)
    assert (row["ours"], row["runs"]) == ("2.00", "2")
    assert row["remarks"] == "part of the data; 6 of 150 epochs; 1 diverged; 1 x cpu"


def test_runs_on_other_images_are_not_averaged():
    cats, planes = (
        _record(error, name="own_images", version=f"crc32 {i}")
        for i, error in enumerate((1.0, 21.0))
    )
    rows = _rows([cats, planes], "ablations")
    assert [row["ours"] for row in rows if row["data"] == "own_images"] == [
        "1.00",
        "21.00",
    ]
    assert [row["remarks"] for row in rows if row["data"] == "own_images"] == [
        f"images of crc32 {i}; 1 x cpu" for i in (0, 1)
    ]


def test_runs_of_two_defaults_are_two_rows_that_say_which():
    earlier, later = _record(0.4), _record(0.8)
    later.config["ridge"] = 0.5  # Which had become the default.
    rows = _rows([earlier, later])
    assert [(row["ours"], row["remarks"]) for row in rows] == [
        ("0.40", "ridge=0.1; 1 x cpu"),
        ("0.80", "ridge=0.5; 1 x cpu"),
    ]


def test_no_difference_is_written_without_a_sign_of_its_own():
    (row,) = _rows([_record(0.389)])
    assert row["ours - paper"] == "+0.00"


def test_what_was_not_run_says_so_and_others_have_the_papers_values_alone():
    (row,) = _rows([])
    assert (row["paper"], row["ours"]) == ("0.39", "not measured")
    (row,) = _rows([], method="Maxout")
    assert (row["paper"], row["ours"], row["runs"]) == ("0.45", "", "")
    (row,) = _rows([], suite="table4", method="Maxout")
    assert row["paper"] == "34.54"
    assert not _rows([], method="cross-entropy")  # Which the paper has not.


def test_other_data_sets_have_rows_for_what_was_measured():
    records = [_record(2.0, name="digits")]
    assert [r["data"] for r in _rows(records, "table6")] == [
        "mnist",
        "svhn",
        "cifar10",
        "digits",
    ]
    assert [r["data"] for r in _rows(records, "table6", "PCA")] == [
        "mnist",
        "svhn",
        "cifar10",
    ]
    assert [row["data"] for row in _rows(records)] == ["mnist"]


def test_accuracy_and_seconds_are_of_the_same_runs():
    records = [_record(0.4), _record(0.6, seed=1)]
    row = _rows(records, "table6")[0]
    assert (row["paper"], row["ours"]) == ("99.61", "99.50 ± 0.14")
    assert (row["ours - paper"], row["last ten epochs"]) == ("-0.11", "99.40 ± 0.14")
    row = _rows(records, "table5")[0]
    assert (row["paper"], row["ours"]) == ("62.68", "30.50 ± 0.71")
    assert row["last ten epochs"] == ""


def test_markdown_has_a_line_of_cells_for_each_row():
    rows = tables.rows(SUITES["table1"], [_record(0.4), _record(0.6, seed=1)])
    kln = next(row for row in rows if row["method"] == "KLN")
    lines = tables.markdown(rows).splitlines()
    assert f"| {' | '.join(kln[name] for name in tables.HEADER)} |" in lines
    assert all(line.count("|") == 10 for line in lines)
    assert len(lines) == len(rows) + 2
