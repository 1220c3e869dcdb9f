"""The suites: that they can be run, and hold the paper's numbers."""

import re

import pytest

from kln_jax.analysis import tables
from kln_jax.analysis.suites import SUITES
from kln_jax.training import variants

NAMES = {f"table{i}" for i in range(1, 8)} | {"beta", "beta1", "beta2"}
NAMES |= {"ablations", "semi_ablations"}


def test_the_suites_are_the_tables_and_figures_of_the_paper_and_those_beyond():
    assert SUITES.keys() == NAMES


@pytest.mark.parametrize("name", SUITES)
def test_each_method_has_a_configuration_for_each_data_set(name):
    suite = SUITES[name]
    assert suite.quantity in tables.QUANTITIES
    for entry in suite.entries:
        for dataset in suite.datasets:
            if entry.variant:
                config = variants.named_config(dataset, entry.variant)
                assert all(key in config for key, _ in entry.changes)


@pytest.mark.parametrize("name", SUITES)
def test_each_number_of_the_paper_has_a_row(name):
    suite = SUITES[name]
    methods = {entry.name for entry in suite.entries}
    assert {method for method, _ in suite.paper} <= methods
    assert {dataset for _, dataset in suite.paper} <= set(suite.datasets)
    shown = {method for method, _ in suite.paper}
    assert {entry.name for entry in suite.entries if not entry.variant} <= shown


@pytest.mark.parametrize(
    ("suite", "method", "dataset", "value"),
    [
        ("table1", "KLN", "mnist", (0.39,)),
        ("table1", "CGMMN-CNN", "mnist", (0.45,)),
        ("table1", "CGMMN-MLP", "mnist", (0.97,)),
        ("table1", "DSN", "mnist", (0.39,)),
        ("table2", "KLN", "svhn", (1.56,)),
        ("table2", "CNN", "svhn", (4.90,)),
        ("table2", "CVA + Pegasos", "svhn", (25.3,)),
        ("table3", "CGMMN-CNN", "cifar10", (6.61,)),
        ("table3", "ResNet-110", "cifar10", (6.43,)),
        ("table4", "KLN", "cifar100", (22.63,)),
        ("table4", "ALL-CNN", "cifar100", (33.71,)),
        ("table7", "KLN", "svhn", (5.51, 0.25)),
        ("table7", "CatGAN", "cifar10", (19.58, 0.58)),
        ("table7", "SDGM", "svhn", (16.61, 0.24)),
        ("table6", "identity", "svhn", (19.59,)),
        ("table6", "KLN", "cifar10", (94.85,)),
        ("table5", "CGMMN-CNN", "cifar100", (43.87,)),
        ("table5", "KLN", "svhn", (907.32,)),
    ],
)
def test_the_paper_has_this_number(suite, method, dataset, value):
    assert SUITES[suite].paper[method, dataset] == value


@pytest.mark.parametrize("name", sorted(NAMES - {f"table{i}" for i in range(1, 8)}))
def test_the_methods_of_a_study_differ_from_each_other(name):
    seen = set()
    for entry in SUITES[name].entries:
        config = variants.named_config("digits", entry.variant)
        config.update(dict(entry.changes))
        seen.add(config.to_json_best_effort(sort_keys=True))
    assert len(seen) == len(SUITES[name].entries)


def test_the_ablations_are_all_variants_of_a_configuration():
    with pytest.raises(ValueError, match="must be one of") as caught:
        variants.named_config("digits", "?")
    found = set(re.findall(r"'(\w+)'", str(caught.value)))
    suites = SUITES["ablations"], SUITES["semi_ablations"]
    assert {e.variant for suite in suites for e in suite.entries} == found


def test_no_number_of_another_data_set_slips_in():
    for method, dataset in [("CatGAN", "svhn"), ("ADGM", "cifar10")]:
        assert (method, dataset) not in SUITES["table7"].paper
    assert ("CNN", "mnist") not in SUITES["table1"].paper
    assert ("Maxout", "mnist") in SUITES["table1"].paper
    assert len(SUITES["table7"].paper) == 5 * 2 + 3 * 3
