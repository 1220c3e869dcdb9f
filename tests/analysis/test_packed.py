"""Packed runs are the runs, whatever is damaged, replaced or added twice."""

import dataclasses
import json
import lzma
import pathlib
import shutil

import numpy as np
import pytest

from kln_jax.analysis import learned, packed, records, report
from kln_jax.analysis.suites import SUITES
from tests.analysis.small_suite import KLN, SUITE

# What a report shows of the metrics, to the last digit.
DOUBLE = ("test_error_percent", "wall_seconds")
RESULTS = pathlib.Path(__file__).parents[2] / "results"


@pytest.fixture
def of_small(monkeypatch, quick_map):
    """The small runs are a suite, and those whose learned kernel is drawn."""
    again = KLN._replace(name="KLN once more")
    monkeypatch.setitem(SUITES, "small", SUITE._replace(entries=(KLN, again)))
    monkeypatch.setattr(packed, "KLN", KLN)


def _bytes(place):
    return {
        path.relative_to(place): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }


def test_packed_runs_are_the_runs(out, tmp_path):
    lines = list(packed.pack(out, tmp_path))
    assert lines == [f"{tmp_path} has 3 runs, 3 of them new."]
    found = packed.read(tmp_path)
    for record in found.values():
        original = records.of_directory(out / record.came_from, out)
        for field in dataclasses.fields(records.Record):
            ours, theirs = (getattr(one, field.name) for one in (record, original))
            if field.name == "metrics":
                assert ours.keys() == theirs.keys()
                for name, column in theirs.items():
                    rounded = column if name in DOUBLE else column.astype(np.float32)
                    np.testing.assert_array_equal(ours[name], rounded)
            elif field.name != "learned_at":
                assert ours == theirs
    assert [record.error is None for record in found.values()].count(True) == 1


def test_a_report_is_the_same_of_packed_runs(out, tmp_path, of_small):
    shutil.copytree(out, tmp_path / "out")
    list(packed.pack(tmp_path / "out", tmp_path / "packed"))
    for place in ("out", "packed"):
        list(report.write(tmp_path / place))
    drawn = sorted(path.name for path in tmp_path.glob("out/figures/*"))
    kinds = ("heatmaps", "histograms", "map", "reconstructions", "small")
    assert drawn == [f"digits-{kind}.png" for kind in kinds]
    for name in ("report.md", *(f"figures/{name}" for name in drawn)):
        ours, theirs = (tmp_path / place / name for place in ("packed", "out"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_packing_again_changes_no_byte(out, tmp_path, of_small):
    list(packed.pack(out, tmp_path / "a"))
    before = _bytes(tmp_path / "a")
    assert pathlib.Path("learned/digits.npz.xz") in before
    (summary,) = packed.pack(out, tmp_path / "a")
    assert summary.endswith("has 3 runs, 0 of them new.")
    assert _bytes(tmp_path / "a") == before
    list(packed.pack(out, tmp_path / "b"))
    assert _bytes(tmp_path / "b") == before


def test_a_run_that_was_made_again_replaces_the_earlier_one(copied, tmp_path):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    path = copied / "result.json"
    changed = json.loads(path.read_text()) | {"test_error_percent": 12.5}
    path.write_text(json.dumps(changed))
    list(packed.pack(copied.parent, results))
    (record,) = packed.read(results).values()
    assert (record.error, record.came_from) == (12.5, "run")


def test_another_seed_or_value_is_another_run(copied, tmp_path):
    for key, value in (("seed", 5), ("ridge", 0.5), ("num_epochs", 4)):
        shutil.copytree(copied, tmp_path / key)
        path = tmp_path / key / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {key: value}))
    (summary,) = packed.pack(tmp_path, tmp_path / "packed")
    assert summary.endswith("has 4 runs, 4 of them new.")


def test_a_run_of_another_version_has_the_keys_that_it_had(copied, tmp_path):
    list(packed.pack(copied, tmp_path / "packed"))
    path = copied / "config.json"
    config = json.loads(path.read_text()) | {"seed": 7, "a_new_key": 1}
    del config["momentum"]
    path.write_text(json.dumps(config))
    list(packed.pack(copied, tmp_path / "packed"))
    earlier, later = packed.read(tmp_path / "packed").values()
    assert later.config == config
    assert earlier.config["momentum"] == 0.9
    assert "a_new_key" not in earlier.config
    config["seed"] = earlier.seed  # The same run, but for keys that one has alone.
    assert dataclasses.replace(later, config=config).is_same_experiment(earlier)


def test_a_damaged_run_is_named_and_leaves_what_was_packed(out, tmp_path):
    shutil.copytree(out, tmp_path / "out")
    list(packed.pack(out, tmp_path / "packed"))
    before = _bytes(tmp_path / "packed")
    damaged = next(tmp_path.glob("out/digits/*/1")) / "config.json"
    damaged.write_text("{")
    with pytest.raises(ValueError, match=f"{damaged} is damaged: "):
        list(packed.pack(tmp_path / "out", tmp_path / "packed"))
    assert _bytes(tmp_path / "packed") == before


@pytest.mark.parametrize("name", ["runs.jsonl.xz", "metrics/x.npz.xz"])
@pytest.mark.parametrize("content", [b"{}\n", lzma.compress(b"{}\n")])
def test_a_damaged_file_is_named(name, content, copied, tmp_path):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    (results / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{results / name} is damaged: "):
        packed.read(results)


def test_a_run_without_its_metrics_is_named(copied, tmp_path):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    (results / "metrics" / "digits-supervised.npz.xz").unlink()
    with pytest.raises(ValueError, match=r"runs\.jsonl\.xz is damaged: KeyError 1"):
        packed.read(results)


def test_working_directories_beside_packed_runs_are_read_once(out, tmp_path):
    shutil.copytree(out, tmp_path / "out")
    list(packed.pack(out, tmp_path / "out"))
    assert len(packed.read_all(tmp_path / "out")) == 3
    shutil.rmtree(next(tmp_path.glob("out/digits/*/1")))
    assert len(packed.read_all(tmp_path / "out")) == 3


def test_a_run_whose_data_are_gone_is_packed_without_what_it_learned(
    out, tmp_path, monkeypatch, of_small
):
    def fails(*given):
        raise ValueError("its data are gone")

    monkeypatch.setattr(learned, "read", fails)
    first, summary = packed.pack(out, tmp_path)
    assert first.endswith("0: what it learned is not packed: its data are gone")
    assert summary.endswith("has 3 runs, 3 of them new.")


def test_the_committed_results_are_whole():
    found = packed.read(RESULTS)
    assert len(found) >= 2609
    for record in found.values():
        assert record.error == record.errors[-1]
        assert len(record.errors) == record.epochs
    shown = packed.most_complete([*found.values()])
    drawn = {f"{record.config_name}.npz.xz" for record in shown}
    files = {path.name for path in RESULTS.glob("learned/*")}
    assert files == drawn
