import dataclasses

import jax
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from configs import digits
from kln_jax.analysis import __main__ as command
from kln_jax.analysis import figures
from kln_jax.networks import models
from kln_jax.training import compiled, experiment, optimizers, steps


@pytest.fixture(scope="module")
def run():
    """A run of a small network that was not trained."""
    config = digits.get_config()
    config.update(width=0.05, latent_dim=4)
    data = experiment._load(config)
    model = compiled.make_model(config, data)
    state = jax.jit(
        lambda key: steps.init_state(
            model,
            optimizers.optimizer("sgd", optimizers.step_schedule(0.1)),
            key,
            mean=np.zeros(1),
            std=np.ones(1),
            image_shape=(28, 28, 1),
        )
    )(jax.random.key(0))
    rows = np.arange(len(data.train_labels), dtype=np.int32)
    return experiment.Run(config, data, rows, model, state)


def test_overview_shows_both_kernels_and_the_images(run, tmp_path):
    figure = figures.overview(run, num_images=40)
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


@pytest.mark.parametrize("variant", ["ce", "identity"])
def test_a_kernel_that_no_loss_acts_on_is_not_called_learned(run, variant):
    other = run._replace(config=digits.get_config(variant))
    titles = [axes.get_title() for axes in figures.overview(other, num_images=40).axes]
    assert titles[1] == "kernel on Z"


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


def test_histograms_say_how_far_the_classes_are_apart(run):
    titles = [a.get_title() for a in figures.histograms(run, num_images=60).axes]
    assert [title.split(":")[0] for title in titles] == [
        "kernel on raw pixels",
        "kernel on Z",
    ]
    assert all("overlap 0." in title and "AUC 0." in title for title in titles)


def test_images_that_are_sorted_by_class_are_drawn_all_the_same(run):
    order = np.argsort(run.data.eval_labels)
    data = dataclasses.replace(
        run.data,
        eval_images=run.data.eval_images[order],
        eval_labels=run.data.eval_labels[order],
    )
    # Fewer than the images of a class.
    titles = [
        axes.get_title()
        for axes in figures.histograms(run._replace(data=data), num_images=30).axes
    ]
    assert titles[0].startswith("kernel on raw pixels: overlap ")


def test_images_without_a_pair_of_a_class_are_said_to_be():
    with pytest.raises(ValueError, match="no pair of one class"):
        figures.separation(*figures.pair_values(np.eye(3), np.arange(3)))


def test_heat_maps_are_of_the_weight_matrix_of_all_classes_and_of_one(run):
    figure = figures.heatmaps(run, num_images=30)
    shown = {}
    for axes in filter(lambda axes: axes.images, figure.axes):
        what, colours = axes.get_title().split("\n")
        (shown[what],) = axes.images
        least, largest = shown[what].get_clim()
        assert (colours, least) == (f"colours to ±{largest:.2g}", -largest)
    labels = run.data.eval_labels
    rows = figures.some_rows(len(labels), 30)
    images = run.data.eval_images[rows[np.argsort(labels[rows], kind="stable")]]
    pixels = images.reshape(30, -1) / 255
    squares = ((pixels[:, None] - pixels[None]) ** 2).sum(axis=2)
    K = np.mean([np.exp(-squares / (2 * v)) for v in (1, 3, 5, 7, 9)], axis=0)
    inverse = np.linalg.inv(K + 0.1 * np.eye(30))
    H = shown["H on raw pixels, all classes, sorted"].get_array()
    np.testing.assert_allclose(H, inverse @ K @ inverse, atol=1e-4)
    of_single = f"class {run.data.class_names[labels[0]]}"
    single = shown[f"H on raw pixels, {of_single}"].get_array()
    assert len(single) == min(30, (labels == labels[0]).sum())
    assert {"H on Z, all classes, sorted", f"H on Z, {of_single}"} <= shown.keys()


def test_a_map_has_each_image_in_the_colour_of_its_class(run):
    (axes,) = figures.latent_map(run, num_images=40).axes
    counts = [len(group.get_offsets()) for group in axes.collections]
    labels = run.data.eval_labels[figures.some_rows(len(run.data.eval_labels), 40)]
    assert counts == np.bincount(labels, minlength=10).tolist()
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == list("0123456789")


@pytest.fixture
def embedded(monkeypatch):
    """Takes pixels of the middle for Z, as many as it is told; nothing compiles."""

    def as_wide_as(latent_dim):
        def embed(run, images):
            z = images[:, 14, 10 : 10 + latent_dim, 0].astype(np.float32)
            return models.Outputs(z, reconstruction=None, logits=None)

        monkeypatch.setattr(figures, "embed", embed)

    return as_wide_as


@pytest.mark.parametrize("count", [2, 30])
def test_a_map_takes_few_images(run, embedded, count):
    embedded(4)
    (axes,) = figures.latent_map(run, num_images=count).axes
    points = np.concatenate([group.get_offsets() for group in axes.collections])
    assert points.shape == (count, 2)
    assert np.isfinite(points).all()


@pytest.mark.parametrize(("count", "latent_dim"), [(1, 4), (5, 1)])
def test_a_map_of_one_image_or_dimension_is_refused(run, embedded, count, latent_dim):
    embedded(latent_dim)
    with pytest.raises(ValueError, match=f"of Z, not {count} and {latent_dim}"):
        figures.latent_map(run, num_images=count)


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


def test_names_of_classes_stay_what_they_are(run, embedded):
    embedded(4)
    names = (r"$\foo$", "_hidden", *run.data.class_names[2:])
    changed = dataclasses.replace(run.data, class_names=names)
    figure = figures.latent_map(run._replace(data=changed), num_images=40)
    figure.draw_without_rendering()
    texts = figure.axes[0].get_legend().get_texts()
    assert tuple(text.get_text() for text in texts) == names


def test_pictures_name_the_images_that_they_are_of(run):
    changed = dataclasses.replace(run.data, evaluate_on="validation")
    run = run._replace(data=changed)
    for figure in (figures.reconstruction_grid(run), figures.overview(run)):
        assert figure.axes[-1].get_title() == "validation images, and from Z"


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


def test_a_sweep_shows_those_that_did_not_diverge():
    (axes,) = figures.sweep({"0": [1.0, None], "0.1": [None], "1": [3.0]}, "").axes
    line, _, _ = axes.containers[0]
    drawn = np.asarray(line.get_ydata(), float)
    np.testing.assert_array_equal(drawn, [1.0, np.nan, 3.0])
    assert len(axes.get_xticklabels()) == 3


def test_a_grid_has_a_panel_of_each_kind_and_says_what_diverged():
    errors = {
        "ridge 0.1, none, linear": [1.0, 3.0],
        "ridge 1, none, linear": [90.0, None],
        "ridge 1, clipping, linear": [None, None],
        "ridge 1, none, gaussian": [5.0],
        "ridge 1, none, laplacian": [],
    }
    figure = figures.grid(errors, "title")
    linear, gaussian, _ = figure.axes
    assert (linear.get_title(), gaussian.get_title()) == ("linear", "gaussian")
    np.testing.assert_array_equal(
        linear.images[0].get_array().filled(-1), [[2, 90], [-1, -1]]
    )
    assert gaussian.images[0].get_array().count() == 1
    texts = {text.get_position(): text.get_text() for text in linear.texts}
    assert texts == {
        (0, 0): "2.00\n± 1.41",
        (1, 0): "90.00\n1 diverged",
        (1, 1): "2 diverged",
    }
    names = [text.get_text() for text in linear.get_yticklabels()]
    assert names == ["none", "clipping"]
    assert linear.images[0].norm is gaussian.images[0].norm


def test_all_grids_have_one_colour_for_one_error():
    small, _ = figures.grid({"1, a, p": [1.0], "2, a, p": [3.0]}, "title").axes
    large, _ = figures.grid({"1, a, p": [3.0], "2, a, p": [90.0]}, "title").axes
    scales = [axes.images[0].norm for axes in (small, large)]
    assert scales[0](3.0) == scales[1](3.0)
    assert [scale(100.0) for scale in scales] == [1, 1]


def test_a_grid_of_some_runs_keeps_the_order_of_all():
    errors = {"1, a, p": [3.0], "2, a, p": [], "3, a, p": [2.0], "2, b, p": [4.0]}
    axes, _ = figures.grid(errors, "title").axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3"]
    np.testing.assert_array_equal(
        axes.images[0].get_array().filled(-1), [[3, -1, 2], [-1, 4, -1]]
    )


def test_a_grid_shows_no_error_at_all_and_nothing_but_divergence():
    zero, *_ = figures.grid({"a, b, c": [0.0], "d, b, c": [None]}, "t").axes
    (image,) = zero.images
    assert image.get_array().count() == 1
    coloured = image.norm(image.get_array())
    assert np.ma.getmaskarray(coloured).tolist() == [[False, True]]
    assert [patch.get_xy() for patch in zero.patches] == [(0.5, -0.5)]
    figures.grid({"a, b, c": [None], "d, b, e": [None]}, "t")


def test_reconstructions_are_of_one_image_a_class(run):
    (axes,) = figures.reconstruction_grid(run).axes
    # Two rows of five pairs of 30x30 pixels, with a margin of 2.
    assert axes.images[0].get_array().shape == (2 * 60 + 2, 5 * 30)


def test_one_look_does_not_change_the_settings_of_others(run):
    before = dict(mpl.rcParams)
    figures.overview(run, num_images=10)
    assert dict(mpl.rcParams) == before


def test_a_directory_without_a_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["analysis", "figures", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"error: .* holds no run"):
        command.main()
