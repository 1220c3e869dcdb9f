"""What is known of a run, from what it wrote."""

import json
import re

import numpy as np
import pytest

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import packed, records
from kln_jax.analysis.suites import Entry
from kln_jax.storage import epoch_metrics
from kln_jax.training import variants
from tests.analysis import made_up
from tests.analysis.small_suite import DIVERGES, EPOCHS, KLN, SMALL


def _read(directory):
    return records.of_directory(directory, directory.parent)


def _change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_record_has_what_the_run_wrote(out):
    found = records.matching(packed.read_all(out), "digits", KLN)
    assert [record.seed for record in found] == [0, 1]
    for record in found:
        lines = epoch_metrics.read_metrics(out / record.came_from)
        errors = [line["test_error_percent"] for line in lines]
        assert record.errors.tolist() == errors
        assert record.error == errors[-1]
        assert record.late_error is None  # There are no ten.
        times = [line["wall_seconds"] for line in lines]
        assert record.epoch_seconds == pytest.approx((times[2] - times[0]) / 2)
        assert (record.epochs, record.full_epochs) == (EPOCHS, 12)
        assert not record.partial_data
        assert (record.data, record.evaluate_on) == ("", "test")
        assert {k: record.config[k] for k in record.changed} == dict(SMALL)


def test_a_record_of_a_diverged_run_has_no_numbers(out):
    (record,) = records.matching(packed.read_all(out), "digits", DIVERGES)
    assert (record.error, record.late_error, record.epoch_seconds) == (None,) * 3
    assert record.failure


def test_the_late_error_is_the_median_of_the_last_ten_epochs(copied):
    lines = epoch_metrics.read_metrics(copied)
    errors = [50.0, 40.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    (copied / "metrics.jsonl").write_text(
        "".join(
            json.dumps(lines[0] | {"epoch": i + 1, "test_error_percent": error}) + "\n"
            for i, error in enumerate(errors)
        )
    )
    assert _read(copied).late_error == 5.5


def test_a_run_with_two_ends_is_one(copied):
    (copied / "diverged.json").write_text('"an earlier start"')
    (record,) = packed.read_all(copied)
    assert record.error is not None


def test_other_milestones_are_another_method(copied):
    assert "lr_milestones" not in _read(copied).changed
    _change(copied / "config.json", lr_milestones=[1])
    assert "lr_milestones" in _read(copied).changed


def test_a_key_of_another_version_makes_no_other_method(copied):
    expected = _read(copied).changed
    config = json.loads((copied / "config.json").read_text())
    config["a_key_of_old"] = config.pop("momentum")
    (copied / "config.json").write_text(json.dumps(config))
    assert _read(copied).changed == expected


def test_which_data_a_run_had_is_known_even_if_it_diverged(copied):
    assert json.loads((copied / "data.json").read_text())["partial"] is False
    _change(copied / "data.json", partial=True, num_train_images=7)
    (copied / "result.json").unlink()
    (copied / "diverged.json").write_text('"cmmd is 1e9"')
    _change(copied / "config.json", dataset="mnist", network="mnist")
    record = _read(copied)
    assert (record.partial_data, record.data) == (True, "7 images to train")
    _change(copied / "config.json", dataset="own_images")
    _change(copied / "data.json", partial=False, version="crc32 1")
    record = _read(copied)
    assert (record.partial_data, record.data) == (False, "images of crc32 1")


@pytest.mark.parametrize("content", [b'{"epoch":\n', b"null\n", b"\xff\n"])
@pytest.mark.parametrize(
    "name", ["config.json", "data.json", "result.json", "metrics.jsonl"]
)
def test_a_damaged_run_is_named_in_one_line(name, content, copied, monkeypatch, capsys):
    (copied / name).write_bytes(content)
    monkeypatch.setattr("sys.argv", ["analysis", "report", str(copied.parent)])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    message = rf"python -m kln_jax\.analysis: error: {copied / name} is damaged: .*\.\n"
    found = capsys.readouterr().err
    assert re.fullmatch(message, found)
    assert found.count("Restore it, ") == 1


@pytest.mark.parametrize("name", ["config.json", "data.json", "metrics.jsonl"])
def test_a_run_without_one_of_its_files_is_named(name, copied):
    (copied / name).unlink()
    with pytest.raises(ValueError, match=rf"{copied} is damaged: it has no {name}\. "):
        _read(copied)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("config.json", "'dataset'"), ("result.json", "'test_error_percent'")],
)
def test_a_run_without_one_of_its_values_is_named(name, missing, copied):
    (copied / name).write_text("{}\n")
    with pytest.raises(ValueError, match=rf"{copied} is damaged: it has no {missing}"):
        _read(copied)


def test_a_run_of_an_unknown_variant_is_named(copied):
    _change(copied / "config.json", variant="mine")
    with pytest.raises(ValueError, match=rf"{copied} is damaged: variant='mine' must"):
        _read(copied)


def test_runs_of_other_keys_are_other_methods(out):
    found = packed.read_all(out)
    other = Entry("", "supervised", (*SMALL, ("reconstruction_weight", 0.0)))
    assert records.matching(found, "digits", other) == []
    assert records.matching(found, "digits", Entry("", "supervised")) == []
    assert records.matching(found, "mnist", KLN) == []
    # A key of its default value is no change.
    same = Entry("", "supervised", (*SMALL, ("reconstruction_weight", 0.1)))
    assert len(records.matching(found, "digits", same)) == 2


def test_a_default_that_changes_moves_no_run_to_another_row(monkeypatch):
    """What defined it is its own, whatever the configurations say today."""
    swept = Entry("0.1", "supervised", (("ridge", 0.1),))
    plain, other = Entry("KLN", "supervised"), Entry("1", "supervised", (("ridge", 1),))
    earlier, later = made_up.record(1.0), made_up.record(2.0)
    # One that was read when the default had become 1.
    later.config["ridge"] = 1
    for named_config in (variants.named_config, None):
        monkeypatch.setattr(variants, "named_config", named_config)
        for record, of_entries in (
            (earlier, (True, True, False)),
            (later, (True, False, True)),
        ):
            entries = (plain, swept, other)
            assert tuple(map(record.is_of, entries)) == of_entries
    groups = records.alike([earlier, later])
    assert groups == [[earlier], [later]]  # They share a row, but no mean.
    assert records.distinctions(groups[0], groups) == ["ridge=0.1"]
    assert records.comparable([earlier, later]) == [[earlier, later]]


def test_runs_of_two_versions_are_alike_in_the_keys_that_both_have():
    earlier, later = made_up.record(1.0), made_up.record(2.0, seed=1)
    del later.config["momentum"]
    later.config["a_new_key"] = 1
    assert records.alike([earlier, later]) == [[earlier, later]]


def test_columns_have_no_number_where_an_epoch_has_none():
    columns = records._columns([{"epoch": 1, "k": 2.0}, {"epoch": 2}])
    np.testing.assert_array_equal(columns["k"], [2.0, np.nan])
