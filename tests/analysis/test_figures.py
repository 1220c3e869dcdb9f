"""Figures, by what is drawn in them."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from kln_jax.analysis import figures
from kln_jax.analysis.learned import Learned


@pytest.fixture(scope="module")
def learned():
    """What a run that told ten classes apart may have learned."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 400)
    bright = 25 * labels[:, None, None, None]
    images = np.minimum(bright + rng.integers(0, 20, (400, 6, 6, 1)), 255)
    _, examples = np.unique(labels, return_index=True)
    return Learned(
        images=images.astype(np.uint8),
        labels=labels,
        z=(2 * np.eye(10)[labels] + rng.normal(0, 0.3, (400, 10))).astype(np.float32),
        examples=examples,
        reconstructions=images[examples] / 255.0,
        class_names=tuple("0123456789"),
        config=dict(
            bandwidths=(1, 3, 5, 7, 9),
            kernel_reduction="mean",
            ridge=0.1,
            objective="cmmd",
            kernel_on="z",
            evaluate_on="test",
        ),
    )


def _with(learned, **changes):
    return learned._replace(config={**learned.config, **changes})


def test_overview_shows_both_kernels_and_the_images(learned, tmp_path):
    figure = figures.overview(learned)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "kernel on pixels",
        "kernel on Z, learned",
        "test images, and from Z",
    ]
    figures.save(figure, tmp_path / "overview.png")
    pixels = mpl.image.imread(tmp_path / "overview.png")
    assert pixels.shape[:2] == (2.9 * 160, 8.4 * 160)
    assert pixels.std() > 0.1


@pytest.mark.parametrize(
    "changes", [dict(objective="cross_entropy"), dict(kernel_on="pixels")]
)
def test_a_kernel_that_no_loss_acts_on_is_not_called_learned(learned, changes):
    figure = figures.overview(_with(learned, **changes))
    assert figure.axes[1].get_title() == "kernel on Z"


def test_kernel_histogram_counts_each_pair_once():
    axes = Figure().subplots()
    gram = np.array([[1.0, 0.91, 0.11], [0.91, 1.0, 0.21], [0.11, 0.21, 1.0]])
    figures.kernel_histogram(axes, *figures.pair_values(gram, np.array([0, 0, 1])))
    same, different = (patch.get_data() for patch in axes.patches)
    for found, expected in ((same, {36: 100.0}), (different, {4: 50.0, 8: 50.0})):
        assert found.edges == pytest.approx(np.arange(41) / 40)
        assert {i: v for i, v in enumerate(found.values) if v} == expected


def test_separation_is_that_of_its_definitions():
    rng = np.random.default_rng(0)
    # Few values, so that there are ties.
    same, different = rng.integers(3, 20, 70) / 20, rng.integers(0, 12, 90) / 20
    overlap, auc = figures.separation(same, different)
    larger = [(a > b) + 0.5 * (a == b) for a in same for b in different]
    np.testing.assert_allclose(auc, np.mean(larger), rtol=1e-12)
    shared = [
        min(np.mean(abs(same - v) < 1e-9), np.mean(abs(different - v) < 1e-9))
        for v in np.arange(20) / 20
    ]
    np.testing.assert_allclose(overlap, sum(shared), rtol=1e-12)
    assert figures.separation(same + 1, different) == (0.0, 1.0)
    assert figures.separation(same, same) == (pytest.approx(1.0), pytest.approx(0.5))


def test_histograms_say_how_far_the_classes_are_apart(learned):
    titles = [axes.get_title() for axes in figures.histograms(learned).axes]
    for title, name, features in zip(
        titles, ("raw pixels", "Z"), (learned.pixels, learned.z), strict=True
    ):
        gram = np.asarray(learned.gram(features))
        pairs = figures.pair_values(gram, learned.labels)
        overlap, auc = figures.separation(*pairs)
        assert title == f"kernel on {name}: overlap {overlap:.2f}, AUC {auc:.3f}"


def test_images_without_a_pair_of_a_class_are_said_to_be():
    with pytest.raises(ValueError, match="no pair of one class"):
        figures.separation(*figures.pair_values(np.eye(3), np.arange(3)))


def test_heat_maps_are_of_the_weight_matrix_of_all_classes_and_of_one(learned):
    figure = figures.heatmaps(learned, num_images=30)
    shown = {}
    for axes in filter(lambda axes: axes.images, figure.axes):
        what, colours = axes.get_title().split("\n")
        (shown[what],) = axes.images
        least, largest = shown[what].get_clim()
        assert (colours, least) == (f"colours to ±{largest:.2g}", -largest)
    rows = np.argsort(learned.labels[:30], kind="stable")
    single = np.flatnonzero(learned.labels == 0)[:30]
    features = {
        "raw pixels": learned.images.reshape(400, -1) / 255,
        "Z": learned.z.astype(np.float64),
    }
    for name, of_name in features.items():
        for which, chosen in (("all classes, sorted", rows), ("class 0", single)):
            x = of_name[chosen]
            squares = ((x[:, None] - x[None]) ** 2).sum(axis=2)
            K = np.mean([np.exp(-squares / (2 * v)) for v in (1, 3, 5, 7, 9)], axis=0)
            inverse = np.linalg.inv(K + 0.1 * np.eye(len(x)))
            H = shown[f"H on {name}, {which}"].get_array()
            np.testing.assert_allclose(H, inverse @ K @ inverse, atol=2e-4)


def test_a_map_has_each_image_in_the_colour_of_its_class(learned):
    (axes,) = figures.latent_map(learned.first(40)).axes
    counts = [len(group.get_offsets()) for group in axes.collections]
    assert counts == np.bincount(learned.labels[:40], minlength=10).tolist()
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == list("0123456789")


@pytest.mark.parametrize("count", [2, 30])
def test_a_map_takes_few_images(learned, count):
    (axes,) = figures.latent_map(learned.first(count)).axes
    points = np.concatenate([group.get_offsets() for group in axes.collections])
    assert points.shape == (count, 2)
    assert np.isfinite(points).all()


@pytest.mark.parametrize(("count", "latent_dim"), [(1, 4), (5, 1)])
def test_a_map_of_one_image_or_dimension_is_refused(learned, count, latent_dim):
    few = learned.first(count)
    with pytest.raises(ValueError, match=f"of Z, not {count} and {latent_dim}"):
        figures.latent_map(few._replace(z=few.z[:, :latent_dim]))


def test_names_of_classes_stay_what_they_are(learned):
    names = (r"$\foo$", "_hidden", *learned.class_names[2:])
    few = learned.first(40)._replace(class_names=names)
    figure = figures.latent_map(few)
    figure.draw_without_rendering()
    texts = figure.axes[0].get_legend().get_texts()
    assert tuple(text.get_text() for text in texts) == names
    figures.heatmaps(few).draw_without_rendering()


def test_pictures_name_the_images_that_they_are_of(learned):
    other = _with(learned, evaluate_on="validation")
    for figure in (figures.reconstruction_grid(other), figures.overview(other)):
        assert figure.axes[-1].get_title() == "validation images, and from Z"


def test_curves_are_means_over_seeds_between_the_least_and_the_largest():
    errors = {"a": [[4.0, 2.0], [8.0, 6.0]], "b": [[1.0, 1.0]]}
    (axes,) = figures.curves(errors, "title").axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[6, 4], [1, 1]]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (2, 8)
    assert axes.get_title() == "title"


def test_curves_have_ranges_where_these_do_not_lie_upon_each_other():
    for count in (5, 6):
        errors = {str(i): [[4.0, 2.0], [8.0, 6.0]] for i in range(count)}
        (axes,) = figures.curves(errors, "title").axes
        assert len(axes.collections) == (5 if count == 5 else 0)
        assert axes.get_ylabel().endswith("mean, range" if count == 5 else "mean")
        first, *others = (line.get_linewidth() for line in axes.lines)
        assert first > max(others)


def test_a_curve_of_one_epoch_is_seen():
    (axes,) = figures.curves({"a": [[4.0]], "b": [[2.0]]}, "title").axes
    assert [line.get_marker() for line in axes.lines] == ["o", "o"]
    assert [tick for tick in axes.get_xticks() if 0.9 < tick < 1.1] == [1]


def test_each_curve_has_its_own_colour_or_style():
    errors = {str(i): [[4.0, 2.0]] for i in range(14)}
    (axes,) = figures.curves(errors, "title").axes
    seen = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(seen) == 14


def test_curves_show_no_error_at_all_and_a_method_without_runs():
    (axes,) = figures.curves({"a": [[4.0, 0.0]], "b": []}, "title").axes
    axes.figure.draw_without_rendering()
    least, _ = axes.get_ylim()
    drawn = axes.lines[0].get_ydata()
    assert least < drawn[1] < drawn[0] == 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


@pytest.mark.parametrize(
    "errors",
    [
        [0.5, 0.55, 0.6],
        [10.1, 13.0],
        [0.5, 8.0],
        [0.3, 90.0],
        [0.01, 90.0],
        [1e-9, 9.0],
    ],
)
def test_curves_have_several_labels_whatever_their_range(errors):
    figure = figures.curves({"a": [errors]}, "title")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    for axis, plotted in ((axes.yaxis, errors), (axes.xaxis, range(1, 4))):
        least, largest = axis.get_view_interval()
        texts = [text.get_text() for text in axis.get_ticklabels(which="both")]
        labels = [float(text.replace("\N{MINUS SIGN}", "-")) for text in texts if text]
        shown = [label for label in labels if least <= label <= largest]
        assert 2 <= len(shown) <= 12, (plotted, labels)
    epochs = [float(text.get_text()) for text in axes.get_xticklabels()]
    assert all(epoch.is_integer() for epoch in epochs)


def test_a_sweep_has_means_and_standard_deviations():
    (axes,) = figures.sweep({"0": [1.0, 3.0], "0.1": [2.0]}, "beta").axes
    line, _, (bars,) = axes.containers[0]
    assert line.get_ydata().tolist() == [2.0, 2.0]
    lengths = [np.ptp(segment[:, 1]) for segment in bars.get_segments()]
    np.testing.assert_allclose(lengths, [2 * np.sqrt(2), 0])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.1"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "weight",
        "test error, %: mean ± sd",
    )


def test_a_sweep_has_a_gap_where_all_runs_diverged():
    (axes,) = figures.sweep({"0": [1.0], "0.1": [], "1": [3.0]}, "").axes
    line, _, _ = axes.containers[0]
    drawn = np.asarray(line.get_ydata(), float)
    np.testing.assert_array_equal(drawn, [1.0, np.nan, 3.0])
    assert len(axes.get_xticklabels()) == 3


def test_reconstructions_are_below_their_images(learned):
    (axes,) = figures.reconstruction_grid(learned).axes
    shown = axes.images[0].get_array()
    # Two rows of five pairs of 8x8 pixels, with a margin of 2.
    assert shown.shape == (2 * 16 + 2, 5 * 8)
    first = learned.images[learned.examples[0]].squeeze() / 255
    np.testing.assert_allclose(shown[1:7, 1:7], first)
    np.testing.assert_allclose(shown[9:15, 1:7], learned.reconstructions[0].squeeze())


def test_one_look_does_not_change_the_settings_of_others(learned):
    before = dict(mpl.rcParams)
    figures.overview(learned)
    assert dict(mpl.rcParams) == before
