"""The progress of a run, in a log and on a bar."""

import io
import logging
import sys

import pytest

from kln_jax.training import progress
from kln_jax.training.progress import ProgressReport

logger = logging.getLogger("kln_jax.test")

SCALARS = dict(epoch=2, loss=1.0, cmmd=2.0, reconstruction=3.0, confidence=4.0)


@pytest.fixture
def clock(monkeypatch):
    """What the time is; tests turn it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def _report(**changes):
    options = dict(num_epochs=6, steps_per_epoch=10, step=10) | changes
    return ProgressReport(logger, **options)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_an_epoch_is_a_line_where_there_is_no_terminal(part, clock, caplog):
    with caplog.at_level(logging.INFO), _report() as report:
        clock[0] += 5.0
        report.steps_made(20)
        report.epoch_ended(SCALARS | {f"{part}_error_percent": 5.0})
    assert caplog.messages == [
        f"epoch 2/6: loss 1, cmmd 2, reconstruction 3, confidence 4, {part} error 5 %, "
        "2 steps/s, 20 s left"
    ]


def test_a_minute_inside_an_epoch_is_a_line(clock, caplog):
    with caplog.at_level(logging.INFO), _report() as report:
        for step, seconds in (12, 50.0), (14, 11.0), (16, 59.0), (20, 2.0), (23, 0.0):
            clock[0] += seconds
            report.steps_made(step)
        report.epoch_ended(dict(epoch=3, loss=1.5))
        clock[0] += 50.0  # The line of the epoch came less than a minute ago.
        report.steps_made(25)
    assert caplog.messages == [
        "epoch 2/6: step 4 of 10, 0.0656 steps/s, 702 s left",
        "epoch 3/6: step 3 of 10, 0.107 steps/s, 347 s left",
        "epoch 3/6: loss 1.5, 0.107 steps/s, 347 s left",
    ]


def test_a_start_without_a_step_has_no_pace(caplog):
    with caplog.at_level(logging.INFO), _report(step=20) as report:
        report.epoch_ended(SCALARS)
    assert caplog.messages[0].endswith("confidence 4, no step by this start")


def test_a_terminal_has_a_bar_of_steps_and_no_lines(clock, monkeypatch, caplog):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO), _report() as report:
        clock[0] += 100.0
        report.steps_made(15)
        report.epoch_ended(SCALARS)
    shown = terminal.getvalue()
    assert "10/60" in shown
    assert "15/60" in shown
    assert "loss=1, cmmd=2, reconstruction=3, confidence=4" in shown
    assert not caplog.messages


def test_without_a_standard_error_nothing_is_drawn(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", None)
    with caplog.at_level(logging.INFO), _report() as report:
        report.epoch_ended(SCALARS)
    assert len(caplog.messages) == 1
