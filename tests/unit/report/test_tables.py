"""Tables: what they say of records, and that they fit the screen that there is."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onward.records import CheckpointInfo, Coverage, Finding, Receipt, ReceiptKind
from onward.report.checkpoints import (
    Row,
    checkpoint_row,
    checkpoint_table,
    coverage_line,
    finding_lines,
    receipt_table,
    receipts_summary,
)
from onward.report.tables import Column, Table, age, ago, counted, facts, flat, flattened, plain, size

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def screened(table: Table, width: int) -> list[str]:
    """The lines of a table on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(table.rich(width), crop=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def receipt(kind: ReceiptKind, **details: Any) -> Receipt:
    folder = "step-000000010000-42"
    time = "2026-03-01T11:00:00.000000Z"
    return Receipt(
        format=1, run="r", sequence=42, folder=folder, kind=kind, time=time, actor="a@h:1", tier="home", details=details
    )


def info(**changes: Any) -> CheckpointInfo:
    fields: dict[str, Any] = {
        "run": "r",
        "sequence": 42,
        "step": 10000,
        "folder": "step-000000010000-42",
        "tier": "home",
        "status": "committed",
        "verified": "full",
        "committed": "2026-03-01T11:00:00.000000Z",
        "incarnation": "i",
        "attempt": "a",
        "manifest_sha256": "0",
        "sums_sha256": "0",
    }
    return CheckpointInfo(**{**fields, **changes})


# --- words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (None, "?"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (77258, "77.3 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (83_600_000_000, "83.6 GB"),
        (999_999_999_999, "1.0 TB"),
        (123_456_000_000_000_000, "123456.0 TB"),
    ],
)
def test_sizes(count: int | None, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (99, "99 s"),
        (100, "2 min"),
        (3600, "60 min"),
        (6000, "2 h"),
        (47 * 3600, "47 h"),
        (48 * 3600, "2 d"),
        (400 * 86400, "400 d"),
        (-0.4, "0 s"),
        (-300, "in 5 min"),
    ],
)
def test_ages(seconds: float, said: str) -> None:
    assert age((NOW - timedelta(seconds=seconds)).isoformat(), NOW) == said


@pytest.mark.parametrize("time", ["", "yesterday", "t", "2026-13-01"])
def test_what_is_no_time_has_no_age(time: str) -> None:
    assert age(time, NOW) == "?"
    assert ago(time, NOW) == f"{time} (?)"


def test_a_time_without_a_zone_is_taken_as_utc_and_a_z_is_understood() -> None:
    assert age("2026-03-01T11:00:00", NOW) == age("2026-03-01T11:00:00.000000Z", NOW) == "60 min"
    assert ago("2026-03-01T11:00:00Z", NOW) == "2026-03-01T11:00:00Z (60 min ago)"
    assert ago("2026-03-01T12:05:00Z", NOW) == "2026-03-01T12:05:00Z (in 5 min)"


def test_plain_leaves_nothing_that_a_terminal_obeys() -> None:
    assert plain("ev\x1b[31mil\n\x9b\u202e") == r"ev\x1b[31mil\n\x9b\u202e"
    assert plain("no\udcfftext") == r"no\udcfftext"
    assert plain('["model","größe 模型"]') == '["model","größe 模型"]'


@given(st.text())
def test_plain_text_is_printable_and_stays_itself_if_it_was(text: str) -> None:
    said = plain(text)
    assert said.isprintable()
    assert said == text or not text.isprintable()


def test_counts_and_trees() -> None:
    assert (counted(1, "file"), counted(2, "file"), counted(1200, "byte")) == ("1 file", "2 files", "1,200 bytes")
    tree = {"a": {"b": 1, "c": [1, {"d": 2}]}, "e": None, "f": "text", "g": {}}
    assert flattened(tree) == {"a.b": "1", "a.c": '[1, {"d": 2}]', "e": "null", "f": "text"}
    assert flat({"method": "full", "ok": True}) == "method full, ok true"
    assert flat("text") == "text"
    assert flat({}) == ""


# --- tables ------------------------------------------------------------------------------------------------------


def wide(rows: int = 3) -> Table:
    columns = (
        Column("step", right=True),
        Column("class", rank=1, least=4),
        Column("receipts", rank=2, least=6),
        Column("folder", least=10),
    )
    cells = tuple((str(10**n), "pre-change", "verified, loaded ×2", "x" * 30) for n in range(rows))
    return Table(columns, cells)


def test_everything_is_shown_where_there_is_room() -> None:
    lines = screened(wide(), 100)
    assert lines[0].split() == ["step", "class", "receipts", "folder"]
    assert lines[3] == f" 100  pre-change  verified, loaded ×2  {'x' * 30}"


def test_the_highest_rank_goes_first_then_columns_are_cut_with_an_ellipsis() -> None:
    names = [screened(wide(), width)[0].split() for width in (44, 30, 26, 20)]
    assert names[0] == ["step", "class", "receipts", "folder"]
    assert names[2] == ["step", "class", "folder"]
    assert names[3] == ["step", "folder"]
    cut = screened(wide(), 20)[1]
    assert cut.endswith("…")
    assert len(cut) <= 20


@given(st.integers(min_value=18, max_value=200))
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert all(Console(width=300).measure(line).maximum <= width for line in screened(wide(), width) if line)


def test_folded_text_goes_on_in_the_next_line_and_loses_nothing() -> None:
    table = facts({"path": "a" * 100, "none": "", "kind": "full"})
    assert [row[0] for row in table.rows] == ["path", "kind"]
    lines = screened(table, 40)
    assert "".join("".join(line.split()) for line in lines) == "path" + "a" * 100 + "kindfull"
    assert max(map(len, lines)) <= 40


def test_wide_characters_are_counted_as_the_terminal_does() -> None:
    table = Table((Column("name"), Column("n", right=True)), (("模型", "1"), ("ab", "2")))
    assert screened(table, 80)[1:] == ["模型  1", "ab    2"]
    assert table.fitted(80) == {0: 4, 1: 1}


def test_markdown_holds_all_columns_and_escapes_what_would_be_markup() -> None:
    table = Table((Column("name"), Column("size", right=True)), (("a|b <i> *x* \x1b[0m", "1"),), heading="h|1")
    assert table.markdown() == (
        "**h\\|1**\n\n| name | size |\n| --- | ---: |\n| a\\|b \\<i\\> \\*x\\* \\x1b\\[0m | 1 |\n"
    )


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_a_listing_is_in_the_order_of_the_ledger_not_of_text_or_steps() -> None:
    rows = [
        Row(step=900, sequence=None, since="", status="adoptable", folder="a"),
        checkpoint_row(info(sequence=100, step=500), None),
        checkpoint_row(info(sequence=9, step=2500), None),
        checkpoint_row(info(sequence=10, step=1000), None),
    ]
    table = checkpoint_table(rows, NOW)
    assert [(row[1], row[0]) for row in table.rows] == [("9", "2500"), ("10", "1000"), ("100", "500"), ("-", "900")]
    assert table.rows[0][2:6] == ("60 min", "?", "?", "committed")


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_a_listing_keeps_what_matters_at_every_width(width: int) -> None:
    rows = [checkpoint_row(info(status=status), None) for status in ("committed", "quarantined", "deleting")]
    rows.append(Row(step=10500, sequence=43, since="", status="in progress", folder=f"{'s' * 30}.writing-{'a' * 32}"))
    lines = screened(checkpoint_table(rows, NOW), width)
    assert len(lines) == 5
    assert max(map(len, lines)) <= width
    head = lines[0].split()
    assert {"step", "seq", "age", "status", "verified", "folder"} <= set(head)
    assert all("step-000000010000-42" in line for line in lines[1:4])
    assert ("receipts" in head) == (width >= 100)


def test_receipts_are_counted_by_kind_and_a_reason_is_their_gist() -> None:
    receipts = [
        receipt("verified", ok=True, method="full", seconds=0.5, coverage={"files": 8}),
        receipt("verified", ok=True, method="quick"),
        receipt("quarantined", reason="rank-00000/000.safetensors: it is cut", findings=[{}]),
    ]
    assert receipts_summary(receipts) == "verified ×2, quarantined"
    assert receipts_summary([]) == ""
    table = receipt_table(receipts, NOW)
    assert [row[-1] for row in table.rows] == [
        "method full, seconds 0.5",
        "method quick",
        "rank-00000/000.safetensors: it is cut",
    ]
    assert receipt_table([receipt("labelled")], NOW).rows[0][-1] == ""


def test_a_finding_says_where_and_what() -> None:
    found = Finding(
        code="damaged-file",
        message="it does not match its SHA-256",
        tier="hot",
        checkpoint="step-000000010000-42",
        file="rank-00003/000.safetensors",
        tensor='["model","wte"]',
        rank=3,
    )
    where = '  hot: step-000000010000-42/rank-00003/000.safetensors, tensor ["model","wte"], rank 3'
    assert finding_lines([found]) == [where, "    damaged-file: it does not match its SHA-256"]


def test_a_finding_does_not_name_its_file_twice() -> None:
    path = "runs/r/receipts/step-000000010000-42/x.json"
    found = Finding(code="receipt-damaged", message=f"{path}: cut\x1b", checkpoint="step-000000010000-42", file=path)
    assert finding_lines([found]) == [f"  {path}", "    receipt-damaged: cut\\x1b"]


def test_very_many_findings_are_counted() -> None:
    lines = finding_lines([Finding(code="c", message="m", file=str(n)) for n in range(1051)])
    assert len(lines) == 101
    assert lines[-1] == "  and 1,001 more; --json lists all"


def test_coverage_tells_what_was_not_looked_at() -> None:
    coverage = Coverage(files=9, files_total=10, bytes=2000, bytes_total=80000, method="sizes and headers")
    assert coverage_line(coverage) == "looked at 9 of 10 files, 2,000 of 80,000 bytes (sizes and headers)"
