"""Every claim falls when the evidence for it is taken away, and only then."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from onward.demo.checks import Comparison, Flip, Sums
from onward.demo.crash import Kill, OpenSave
from onward.demo.evidence import Evidence
from onward.demo.page import render
from onward.demo.process import Life
from onward.demo.proof import DemoResult, conclude
from onward.records import CheckpointInfo, Coverage, Finding, VerifyReport

START = 1_700_000_000.0


def life(name: str, first: int, last: int, at: tuple[float, float], **fields: Any) -> Life:
    losses = tuple((float(step), 4.5 - step / 60) for step in range(first, last))
    fields = {"killed": False, "resumed": None, "losses": losses, **fields}
    return Life(name=name, started=START + at[0], ended=START + at[1], **fields)


def info(sequence: int, step: int, second: int) -> CheckpointInfo:
    return CheckpointInfo(
        run="demo",
        sequence=sequence,
        step=step,
        folder=f"step-{step:012d}-{sequence}",
        tier="home",
        status="committed",
        verified="full",
        committed=f"2023-11-14T22:13:{20 + second:02d}Z",
        incarnation="a",
        attempt="b",
        manifest_sha256="0" * 64,
        sums_sha256="0" * 64,
    )


def comparison(first: int, last: int, *, state: bool = True, different: tuple[str, ...] = ()) -> Comparison:
    def part(name: str, **facts: Any) -> dict[str, Any]:
        bad = [f"step {first}: 0x1p+1 became 0x1p+2"] if name in different else []
        return {"equal": not bad, "compared": last - first, "differing": len(bad), "differences": bad, **facts}

    parts = {n: part(n, first_step=first, last_step=last - 1) for n in ("loss", "learning rate", "samples")}
    if state:
        parts |= {name: part(name, bytes=7_000_000) for name in ("parameters", "moments")}
        parts["random states"] = part("random states", names=["rng.torch"])
    return Comparison("python -I compare.py a b", parts)


@pytest.fixture
def evidence() -> Evidence:
    """Evidence as a flawless demonstration leaves it, for tests that take a part of it away."""
    commits = tuple(info(2 + n, step, 3 * n) for n, step in enumerate((20, 40, 60, 80, 100, 120), start=1))
    finding = Finding(code="damaged", message="<SHA-256>", tier="home", file="rank-00000/000.safetensors", tensor="w")
    attempt = {"attempt": "c", "step": 60, "outcome": "rolled-back", "reason": "its writer ended before the commit"}
    return Evidence(
        started=START,
        reference=life("reference", 0, 130, (0, 31)),
        first=life("run-1", 0, 60, (1, 15), killed=True),
        second=life(
            "run-2",
            40,
            130,
            (15.5, 38),
            resumed={"next_step": 40, "checkpoint": commits[1].folder, "rejected": [], "recovered": [attempt]},
        ),
        kill=Kill(OpenSave(Path("/x/step-000000000060-5.writing-00"), 60, 5, False), 3, 12_000_000, 0.02, 0.1, 0, 60),
        newest=commits[1],
        commits=commits,
        before_kill=comparison(0, 60, state=False),
        after_kill=comparison(40, 130),
        control=life("control", 40, 130, (38, 58)),
        control_comparison=comparison(40, 130, different=("loss", "parameters")),
        flip=Flip("rank-00000/000.safetensors", 4711, 3),
        damaged=commits[-1],
        healthy=commits[-2],
        verified=VerifyReport(
            run="demo",
            folder=commits[-1].folder,
            tier="home",
            ok=False,
            method="full",
            coverage=Coverage(files=9, files_total=9, bytes=22_000_000, bytes_total=22_000_000, method="every byte"),
            findings=(finding,),
            seconds=0.2,
        ),
        fallback=life(
            "fallback",
            100,
            105,
            (40, 46),
            resumed={
                "next_step": 100,
                "checkpoint": commits[-2].folder,
                "rejected": [{"folder": commits[-1].folder, "reasons": ["a tensor is damaged"]}],
                "recovered": [],
            },
        ),
        fallback_comparison=comparison(100, 105, state=False),
        sums=Sums("cd /x && sha256sum --strict -c manifest.sha256", True, 9, "rank-00000/000.safetensors: OK\n"),
    )


def failed(evidence: Evidence) -> set[str]:
    return {proof.claim for proof in conclude(evidence) if not proof.holds}


def result(evidence: Evidence) -> DemoResult:
    return DemoResult(Path("/out"), 7, 61.0, evidence, conclude(evidence))


def test_flawless_evidence_proves_everything(evidence: Evidence) -> None:
    assert failed(evidence) == set()
    assert result(evidence).ok
    assert result(evidence).exit_code == 0


def test_the_table_prints_the_lines_that_were_promised(evidence: Evidence) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(result(evidence).table())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    for part in ("loss", "learning rate", "samples", "parameters", "moments"):
        assert any(line.startswith(part) and "bit-identical: yes" in line for line in lines)
    assert any("control differs: yes" in line for line in lines)


def resumed_from(evidence: Evidence, folder: str) -> Evidence:
    answer = {**(evidence.second.resumed or {}), "checkpoint": folder}
    return replace(evidence, second=replace(evidence.second, resumed=answer))


@pytest.mark.parametrize(
    ("take_away", "claims"),
    [
        (lambda e: replace(e, first=replace(e.first, killed=False)), {"killed by SIGKILL"}),
        (lambda e: resumed_from(e, e.commits[0].folder), {"resumed from"}),
        (lambda e: resumed_from(e, e.kill.save.folder.name), {"that save", "resumed from"}),
        (
            lambda e: replace(e, second=replace(e.second, resumed={**(e.second.resumed or {}), "recovered": []})),
            {"that save"},
        ),
        *[
            (lambda e, part=part: replace(e, after_kill=comparison(40, 130, different=(part,))), {part})
            for part in ("loss", "learning rate", "samples", "parameters", "moments", "random states")
        ],
        (lambda e: replace(e, before_kill=comparison(0, 60, state=False, different=("loss",))), {"loss"}),
        (lambda e: replace(e, control_comparison=comparison(40, 130)), {"random state left out"}),
        (lambda e: replace(e, verified=msgspec.structs.replace(e.verified, findings=())), {"one flipped bit"}),
        (lambda e: replace(e, verified=msgspec.structs.replace(e.verified, ok=True)), {"one flipped bit"}),
        (lambda e: replace(e, flip=replace(e.flip, file="rank-00000/001.safetensors")), {"one flipped bit"}),
        (lambda e: replace(e, healthy=e.damaged), {"damaged checkpoint"}),
        (
            lambda e: replace(e, fallback_comparison=comparison(100, 105, state=False, different=("samples",))),
            {"damaged checkpoint"},
        ),
        (lambda e: replace(e, sums=replace(e.sums, ok=False)), {"sha256sum -c"}),
    ],
)
def test_a_claim_falls_with_its_evidence(
    evidence: Evidence, take_away: Callable[[Evidence], Evidence], claims: set[str]
) -> None:
    changed = take_away(evidence)
    assert failed(changed) == claims
    assert result(changed).exit_code == 3


def test_the_result_file_tells_each_answer(evidence: Evidence) -> None:
    found = json.loads(result(evidence).to_json())
    assert found["ok"] is True
    assert found["kill"]["step"] == 60
    assert {proof["answer"].rpartition(": ")[2] for proof in found["proofs"]} == {"yes"}


def test_the_page_shows_what_was_proven_and_escapes_what_it_shows(evidence: Evidence) -> None:
    text = render(result(evidence))
    assert text.count("bit-identical: yes") == 6
    assert "control differs: yes" in text
    assert "&lt;SHA-256&gt;" in text
    assert "<SHA-256>" not in text


def test_the_page_says_what_was_not_proven(evidence: Evidence) -> None:
    changed = result(replace(evidence, after_kill=comparison(40, 130, different=("loss",))))
    text = render(changed)
    assert "bit-identical: NO" in text
    assert "verdict bad" in text
