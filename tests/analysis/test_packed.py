"""Packed runs are the runs, whatever is damaged, replaced or added twice."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from kln_jax.analysis import __main__ as command
from kln_jax.analysis import learned, packed, records, report
from kln_jax.analysis.suites import SUITES
from kln_jax.storage import whole_files
from tests.analysis.small_suite import KLN, SUITE

RESULTS = pathlib.Path(__file__).parents[2] / "results"


@pytest.fixture
def of_small(monkeypatch):
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
    assert lines == [f"3 of 3 runs packed; {tmp_path} has 3."]
    found = packed.read(tmp_path)
    for record in found.values():
        original = records.of_directory(out / record.came_from, out)
        for field in dataclasses.fields(records.Record):
            ours, theirs = (getattr(one, field.name) for one in (record, original))
            if field.name == "metrics":
                np.testing.assert_equal(ours, theirs)
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
    of_form = (f"report.{suffix}" for suffix in ("md", "csv", "tex"))
    for name in (*of_form, *(f"figures/{name}" for name in drawn)):
        ours, theirs = (tmp_path / place / name for place in ("packed", "out"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_packing_again_changes_no_byte(out, tmp_path, of_small):
    list(packed.pack(out, tmp_path / "a"))
    before = _bytes(tmp_path / "a")
    assert pathlib.Path("learned/digits.npz") in before
    *skipped, summary = packed.pack(out, tmp_path / "a")
    assert len(skipped) == 3
    assert all(line.endswith("skipped, for it is there already") for line in skipped)
    assert summary.startswith("0 of 3 runs packed")
    assert _bytes(tmp_path / "a") == before
    list(packed.pack(out, tmp_path / "b"))
    assert _bytes(tmp_path / "b") == before


def test_a_line_has_all_that_defines_a_run(out, tmp_path, of_small):
    list(packed.pack(out, tmp_path))
    shared = json.loads((tmp_path / "shared.json").read_text())
    rows = map(json.loads, (tmp_path / "runs.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["seed"] == 1)
    config = shared["configurations"][row["configuration"]] | row["keys"]
    written = json.loads((out / row["came_from"] / "config.json").read_text())
    assert config.items() <= written.items()
    assert written.keys() - config.keys() <= row.keys()
    assert row["methods"] == {"small": "KLN once more"}
    assert row["changed"] == sorted(dict(KLN.changes))
    about = json.loads((out / row["came_from"] / "data.json").read_text())
    assert shared["data"][row["data"]] == about
    columns = np.load(tmp_path / "metrics" / "digits-supervised.npz")
    errors = columns["test_error_percent"][columns["run"] == row["id"]]
    assert errors[-1] == row["result"]["test_error_percent"]


def test_a_run_that_was_made_again_replaces_the_earlier_one(copied, tmp_path):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    path = copied / "result.json"
    changed = json.loads(path.read_text()) | {"test_error_percent": 12.5}
    path.write_text(json.dumps(changed))
    lines = list(packed.pack(copied.parent, results))
    assert lines[0] == f"{copied}: replaces ."
    ((number, record),) = packed.read(results).items()
    assert (number, record.error, record.came_from) == (2, 12.5, "run")
    columns = np.load(results / "metrics" / "digits-supervised.npz")
    assert set(columns["run"]) == {2}


def test_another_seed_or_value_is_another_run(copied, tmp_path):
    for key, value in (("seed", 5), ("ridge", 0.5), ("num_epochs", 4)):
        shutil.copytree(copied, tmp_path / key)
        path = tmp_path / key / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {key: value}))
    *rest, summary = packed.pack(tmp_path, tmp_path / "packed")
    assert not rest
    assert summary.startswith("4 of 4 runs packed")


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


def test_damaged_runs_are_named_and_the_others_packed(
    out, tmp_path, monkeypatch, capsys
):
    shutil.copytree(out, tmp_path / "out")
    damaged = next(tmp_path.glob("out/digits/*/1")) / "config.json"
    damaged.write_text("{")
    results = str(tmp_path / "packed")
    arguments = ["analysis", "pack", str(tmp_path / "out"), results]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="1"):
        command.main()
    written = capsys.readouterr()
    assert "1 of 3 runs are damaged, as said above, and" in written.err
    first, last = written.out.splitlines()
    assert first.startswith(f"{damaged} is damaged: ")
    assert last == f"2 of 3 runs packed; {results} has 2."
    # What was packed of it before stays.
    list(packed.pack(out, tmp_path / "packed"))
    with pytest.raises(SystemExit):
        command.main()
    assert len(packed.read(tmp_path / "packed")) == 3


@pytest.mark.parametrize("name", ["runs.jsonl", "shared.json", "metrics/x.npz"])
@pytest.mark.parametrize("content", [b"{}\n", b"\xff\n"])
def test_a_damaged_file_is_named(name, content, copied, tmp_path):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    (results / name).write_bytes(content)
    named = "runs.jsonl" if name == "shared.json" and content == b"{}\n" else name
    with pytest.raises(ValueError, match=f"{results / named} is damaged: "):
        packed.read(results)


def test_what_cannot_be_written_leaves_what_was_packed(copied, tmp_path, monkeypatch):
    results = tmp_path / "packed"
    list(packed.pack(copied, results))
    path = copied / "result.json"
    changed = json.loads(path.read_text()) | {"test_error_percent": 12.5}
    path.write_text(json.dumps(changed))
    write_whole = whole_files.write_whole

    def fails_at_the_lines(path, content):
        if path.name == "runs.jsonl":
            raise OSError("no space")
        write_whole(path, content)

    monkeypatch.setattr(whole_files, "write_whole", fails_at_the_lines)
    with pytest.raises(OSError, match="no space"):
        list(packed.pack(copied, results))
    (record,) = packed.read(results).values()
    assert record.error == record.errors[-1] != 12.5


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
    assert summary.startswith("3 of 3 runs packed")


def test_the_committed_results_are_whole():
    found = packed.read(RESULTS)
    assert len(found) >= 2609
    rows = map(json.loads, (RESULTS / "runs.jsonl").read_text().splitlines())
    assert {row["id"]: row["methods"] for row in rows} == packed._methods(found)
    for record in found.values():
        assert record.error == record.errors[-1]
        assert len(record.errors) == record.epochs
    drawn = {record.config_name for record in packed.most_complete([*found.values()])}
    files = {path.stem for path in RESULTS.glob("learned/*.npz")}
    assert files == drawn
