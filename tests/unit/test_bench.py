"""The benchmark harness: it runs, and what it writes follows from its samples. Timings are never tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
figures = import_module("bench.figures")

KEYS = {
    "figure",
    "value",
    "unit",
    "reference",
    "against",
    "ratio",
    "bar",
    "ok",
    "samples",
    "reference_samples",
    "note",
}


def figure(**changes):
    return figures.Figure(**{"figure": "stall", "unit": "s", "samples": [2.0, 9.0, 3.0], **changes})


def test_a_ratio_is_the_median_of_the_ratios_of_pairs():
    # The ratios are 2, 0.9 and 3; the ratio of the medians would be 3.
    assert figures.ratio_of([2.0, 9.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_there_is_no_ratio_without_a_reference():
    assert figures.ratio_of([1.0], []) is None


def test_samples_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="are not pairs"):
        figures.ratio_of([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("bar", "ok"), [(1.9, False), (2.0, True), (2.1, True), (None, None)])
def test_a_bar_is_the_highest_ratio_that_is_good_enough(bar, ok):
    row = figure(reference_samples=[1.0, 10.0, 1.0], bar=bar).as_dict()
    assert row["ok"] is ok
    assert (row["value"], row["reference"], row["ratio"]) == (3.0, 1.0, 2.0)
    assert set(row) == KEYS


def test_what_does_not_follow_from_the_samples_is_found():
    row = figure(reference_samples=[1.0, 10.0, 1.0], bar=1.0).as_dict()
    assert figures.differences({"figures": [row]}) == []
    for name, value in (("ratio", 0.9), ("ok", True), ("value", 1.0), ("reference", 9.0)):
        assert figures.differences({"figures": [row | {name: value}]}), name


def test_saves_are_due_inside_the_run():
    due = import_module("bench.training").due
    assert due(200, 5) == {20, 60, 100, 140, 180}
    assert len(due(10, 1)) == 1


def test_every_committed_result_follows_from_its_samples():
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        document = json.loads(path.read_text())
        assert figures.differences(document) == [], path.name


def test_the_harness_runs(tmp_path):
    out = tmp_path / "result.json"
    parts = ("--only", "overlapped", "--only", "many")
    places = ("--scratch", str(tmp_path / "scratch"), "--out", str(out))
    answer = subprocess.run(
        [sys.executable, "-m", "bench.save", "--quick", *parts, *places],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert not (tmp_path / "scratch").exists()
    document = json.loads(out.read_text())
    assert {"benchmark", "date", "machine", "versions", "figures"} <= set(document)
    assert figures.differences(document) == []
    overlapped, many = document["figures"]
    assert set(overlapped) == set(many) == KEYS
    assert (overlapped["bar"], many["bar"]) == (0.1, 1.0)
    assert overlapped["figure"] in answer.stdout


def test_an_unknown_part_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        import_module("bench.save").main(["--quick", "--only", "nothing"])
    assert "no part is called nothing" in capsys.readouterr().err


def test_a_failed_measurement_says_what_its_process_said(tmp_path):
    child = import_module("bench.child")
    size = import_module("bench.state").QUICK
    with pytest.raises(child.MeasurementFailed, match="nowhere"):
        child.run("nowhere:nothing", tmp_path / "folder", size)
