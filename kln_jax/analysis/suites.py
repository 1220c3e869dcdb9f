"""What the paper measured, and the runs that measure it again.

The numbers of the suites are those of this file; each says what of the paper it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# The paper's values: one number, or mean and standard deviation.
Value = tuple[float, ...]


class Entry(NamedTuple):
    """One method of a suite, run on each of its data sets.

    Attributes:
      name: What it is called in the tables.
      variant: Variant of the configuration; empty for a method of others, of which
        only the paper's values are shown.
      changes: Keys of the configuration in which it differs from the variant.
    """

    name: str
    variant: str = ""
    changes: tuple[tuple[str, Any], ...] = ()


class Suite(NamedTuple):
    """One table or figure of the paper, or one beyond it.

    Attributes:
      title: What it shows.
      quantity: What its numbers are: a key of ``tables.QUANTITIES``.
      datasets: Names of the data sets.
      entries: Its methods.
      paper: The paper's values by name of the method and data set.
      seeds: Number of runs of each method on each data set.
      figure: What shows its errors: ``"curves"``, ``"sweep"`` or ``""`` for nothing.
    """

    title: str
    quantity: str
    datasets: tuple[str, ...]
    entries: tuple[Entry, ...]
    paper: Mapping[tuple[str, str], Value] = {}
    seeds: int = 1
    figure: str = "curves"

    @property
    def is_of_one_set(self) -> bool:
        """Whether it is a table of the paper for one data set."""
        return len(self.datasets) == 1 and bool(self.paper)


KLN = Entry("KLN", "supervised")
CGMMN = Entry("CGMMN-CNN", "cgmmn")
_CGMMN_MLP = Entry("CGMMN-MLP", "cgmmn_mlp")
CE = Entry("cross-entropy", "ce")
_SEMI = Entry("KLN", "semi")
_EMBEDDINGS = (
    Entry("identity", "identity"),
    Entry("PCA", "pca"),
    Entry("autoencoder", "autoencoder"),
)
# What is changed in KLN, or is in its place, in both settings.
_PARTS = (
    CE,
    CGMMN,
    _CGMMN_MLP,
    *_EMBEDDINGS,
    Entry("no reconstruction", "no_reconstruction"),
    Entry("as printed", "as_printed"),
)

# Test errors in percent of MNIST, SVHN, CIFAR-10 and CIFAR-100.
_IN_TURN = ("mnist", "svhn", "cifar10", "cifar100")
_SUPERVISED: dict[str, tuple[float | None, ...]] = {
    "VA + Pegasos": (1.04,),
    "MMVA": (0.90,),
    "CVA + Pegasos": (1.35, 25.3),
    "CGMMN-MLP": (0.97,),
    "Stochastic Pooling": (0.47, 2.80),
    "Network in Network": (0.47, 2.47, 8.81, 35.68),
    "Maxout": (0.45, 2.35, 9.38, 34.54),
    "CMMVA": (0.45, 3.09),
    "CNN": (None, 4.90),
    "DSN": (0.39, 1.92, 7.97, 34.57),
    "ALL-CNN": (None, None, 7.25, 33.71),
    "FitNet4-LSUV": (None, None, 6.06, 27.66),
    "ResNet-110": (None, None, 6.43, 25.16),
    "CGMMN-CNN": (0.45, 2.01, 6.61, 24.84),
    "KLN": (0.39, 1.56, 5.15, 22.63),
}
_SEMI_SUPERVISED: dict[str, tuple[Value | None, ...]] = {
    "DGN": ((3.33, 0.14), (36.02, 0.10)),
    "CatGAN": ((1.39, 0.28), None, (19.58, 0.58)),
    "Ladder": ((1.06, 0.37), None, (20.40, 0.47)),
    "ADGM": ((0.96, 0.02), (22.86,)),
    "SDGM": ((1.32, 0.07), (16.61, 0.24)),
    "Improved-GAN": ((0.93, 0.07), (8.11, 1.3), (18.63, 2.32)),
    "Triple-GAN": ((0.91, 0.58), (5.77, 0.17), (16.99, 0.36)),
    "KLN": ((0.89, 0.05), (5.51, 0.25), (16.79, 0.17)),
}
_ACCURACY = {
    "identity": (81.62, 19.59, 14.25),
    "PCA": (88.64, 30.23, 27.75),
    "autoencoder": (89.32, 35.23, 33.12),
    "KLN": (99.61, 98.44, 94.85),
}
_SECONDS = {
    "CGMMN-CNN": (26.22, 453.90, 37.28, 43.87),
    "KLN": (62.68, 907.32, 75.20, 81.33),
}


def _paper(
    table: Mapping[str, tuple[float | Value | None, ...]],
) -> dict[tuple[str, str], Value]:
    return {
        (name, dataset): value if isinstance(value, tuple) else (value,)
        for name, values in table.items()
        for dataset, value in zip(_IN_TURN, values, strict=False)
        if value is not None
    }


def _supervised(dataset: str, title: str, *more: Entry) -> Suite:
    paper = {key: v for key, v in _paper(_SUPERVISED).items() if key[1] == dataset}
    ours = {entry.name: entry for entry in (KLN, CGMMN, *more)}
    others = [Entry(name) for name, _ in paper if name not in ours]
    entries = (*others, *ours.values(), CE)
    return Suite(f"{title}, all labels", "error", (dataset,), entries, paper)


def _sweep(
    key: str, values: tuple[float, ...], base: Entry, without: str, title: str
) -> Suite:
    """Returns the suite of a weight: 0, which is a variant, and other values."""
    others = tuple(Entry(f"{v:g}", base.variant, ((key, v),)) for v in values)
    entries = (Entry("0", without), *others)
    return Suite(title, "error", _IN_TURN[:3], entries, figure="sweep")


_WARM_UP = (("warmup_steps", 100),)

SUITES: dict[str, Suite] = {
    "table1": _supervised("mnist", "MNIST", _CGMMN_MLP),
    "table2": _supervised("svhn", "SVHN"),
    "table3": _supervised("cifar10", "CIFAR-10"),
    "table4": _supervised("cifar100", "CIFAR-100"),
    "table5": Suite(
        "Time of an epoch; the paper's on a Titan X",
        "seconds",
        _IN_TURN,
        (CGMMN, KLN),
        _paper(_SECONDS),
    ),
    "table6": Suite(
        "The kernel on fixed embeddings, and on Z",
        "accuracy",
        _IN_TURN[:3],
        (*_EMBEDDINGS, KLN),
        _paper(_ACCURACY),
    ),
    "table7": Suite(
        "Few labels",
        "error",
        _IN_TURN[:3],
        (
            *(Entry(name) for name in _SEMI_SUPERVISED if name != "KLN"),
            _SEMI,
            Entry("cross-entropy", "semi_ce"),
        ),
        _paper(_SEMI_SUPERVISED),
        seeds=10,
    ),
    "beta": _sweep(
        "reconstruction_weight",
        (0.001, 0.01, 0.1, 1.0, 10.0),
        KLN,
        "no_reconstruction",
        "Weight of the reconstruction, beta, all labels",
    ),
    "beta1": _sweep(
        "reconstruction_weight",
        (0.01, 0.1, 1.0, 10.0),
        _SEMI,
        "semi_no_reconstruction",
        "Weight of the reconstruction, beta 1, few labels",
    ),
    "beta2": _sweep(
        "confidence_weight",
        (0.01, 0.1, 1.0, 10.0),
        _SEMI,
        "semi_no_confidence",
        "Weight of the confidence, beta 2, few labels",
    ),
    # Beyond the paper.
    "ablations": Suite(
        "All labels: what each part does",
        "error",
        ("digits",),
        (
            KLN,
            *_PARTS,
            Entry("in bfloat16", "supervised", (("dtype", "bfloat16"),)),
            Entry("with warm-up", "supervised", _WARM_UP),
            Entry("CGMMN-MLP with warm-up", "cgmmn_mlp", _WARM_UP),
        ),
        seeds=5,
    ),
    "semi_ablations": Suite(
        "Few labels: what each part does",
        "error",
        ("digits",),
        (
            _SEMI,
            *(part._replace(variant=f"semi_{part.variant}") for part in _PARTS),
            Entry("no confidence", "semi_no_confidence"),
        ),
        seeds=5,
    ),
}
