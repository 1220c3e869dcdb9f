import json

import numpy as np
import pytest

from kln_jax.storage import epoch_metrics, whole_files


def test_epoch_means_divide_sums_by_counts_and_leave_out_what_no_step_gave():
    stacked = {
        "loss": np.array([1.0, 3.0]),
        "k_sum": np.array([1.0, 5.0]),
        "k_count": np.array([1, 3]),
        "none_sum": np.zeros(2),
        "none_count": np.zeros(2, int),
        "no_steps": np.zeros(0),
    }
    assert epoch_metrics.epoch_means(stacked) == {"loss": 2.0, "k": 1.5}


def _epoch(epoch):
    terms = dict(loss=1.0, cmmd=2.0, reconstruction=3.0, confidence=4.0)
    return dict(epoch=epoch, **terms, test_error_percent=5.0, wall_seconds=10.0 * epoch)


def test_metric_writer_goes_on_after_the_last_epoch_that_was_saved(tmp_path):
    with epoch_metrics.MetricWriter(tmp_path, last_epoch=0) as writer:
        assert writer.last == {}
        for epoch in (1, 2, 3):
            writer.write(10 * epoch, _epoch(epoch))
    # Interrupted while a line was being written.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "lo')
    with epoch_metrics.MetricWriter(tmp_path, last_epoch=2) as writer:
        assert writer.last["wall_seconds"] == 20.0
        assert writer.last["step"] == 20
        writer.write(30, _epoch(3))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    events = [path.read_bytes() for path in (tmp_path / "tensorboard").iterdir()]
    assert sum(event.count(b"test_error_percent") for event in events) == 4


@pytest.mark.parametrize(
    "line", [b"{", b"\xff", b"{}", b"[]", b'{"epoch": "2"}', b'{"epoch": 2.5}']
)
def test_a_line_that_is_no_epoch_is_named(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 1}\n%b\n' % line)
    with pytest.raises(whole_files.DamagedError, match=r"\.jsonl is damaged: line 2: "):
        epoch_metrics.read_metrics(tmp_path)


def test_of_lines_that_two_processes_wrote_the_last_of_an_epoch_counts(tmp_path):
    epochs = [1, 3, 4, 2, 3]
    lines = [dict(epoch=epoch, step=i) for i, epoch in enumerate(epochs)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    kept = [lines[0], lines[3], lines[4], lines[2]]
    assert epoch_metrics.read_metrics(tmp_path) == kept
    with epoch_metrics.MetricWriter(tmp_path, last_epoch=3) as writer:
        assert writer.last == lines[4]
    assert epoch_metrics.read_metrics(tmp_path) == kept[:3]
