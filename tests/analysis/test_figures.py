import jax
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from configs import digits
from kln_jax import optim, steps, training
from kln_jax.analysis import __main__ as command
from kln_jax.analysis import figures


@pytest.fixture(scope="module")
def run():
    """A run of a small network that was not trained."""
    config = digits.get_config()
    config.update(width=0.05, latent_dim=4)
    data = training._load(config)
    model = training._model(config, data)
    state = jax.jit(
        lambda key: steps.init_state(
            model,
            optim.optimiser("sgd", optim.step_schedule(0.1)),
            key,
            mean=np.zeros(1),
            std=np.ones(1),
            image_shape=(28, 28, 1),
        )
    )(jax.random.key(0))
    rows = np.arange(len(data.train_labels), dtype=np.int32)
    return training.Run(config, data, rows, model, state)


def test_overview_shows_both_kernels_and_the_images(run, tmp_path):
    figure = figures.overview(run, num_images=40)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "kernel on pixels",
        "kernel on Z, learned",
        "test images, and from Z",
    ]
    figure.savefig(tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 10_000


def test_kernel_histogram_counts_each_pair_once():
    axes = Figure().subplots()
    gram = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
    figures.kernel_histogram(axes, gram, np.array([0, 0, 1]))
    different, same = axes.containers[::-1]
    heights = {bar.get_x(): bar.get_height() for bar in same}
    assert max(heights.values()) == sum(heights.values()) == 100.0
    assert sorted(bar.get_height() for bar in different)[-2:] == [50.0, 50.0]


def test_one_look_does_not_change_the_settings_of_others(run):
    before = dict(mpl.rcParams)
    figures.overview(run, num_images=10)
    assert dict(mpl.rcParams) == before


def test_a_directory_without_a_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["analysis", "figures", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"error: .* holds no run"):
        command.main()
