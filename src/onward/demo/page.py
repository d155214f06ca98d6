"""The page that stays: the same evidence as in the terminal, with the curves and the time line."""

from __future__ import annotations

import platform
from datetime import datetime

import numpy as np
import torch

from onward.demo.evidence import Evidence
from onward.demo.process import Life
from onward.demo.proof import DemoResult
from onward.report.charts import Lane, Mark, Marker, Markup, Series, Tone, line_chart, timeline
from onward.report.html import Section, Verdict, facts, join, listing, page, table

LEAD = (
    "A small GPT was trained on the Python standard library's sources, once without interruption and once with "
    "checkpoints. The second run was killed inside a save and resumed. Every number below was measured in this run."
)


def render(result: DemoResult) -> str:
    """The whole page."""
    seen = result.evidence
    holding = sum(proof.holds for proof in result.proofs)
    return page(
        title="Killed inside a save, resumed: the same run",
        lead=LEAD,
        verdict=Verdict(result.ok, f"{holding} of {len(result.proofs)} claims proven"),
        sections=[
            Section("What was proven", _proofs(result)),
            Section("Loss", _losses(seen), "The lines lie on each other; every bit was compared, see above."),
            Section(
                "Distance from the reference",
                _distances(seen),
                "The resumed run stays at exactly zero. The negative control resumed from the same checkpoint without "
                "the random state: a comparison that cannot fail would prove nothing.",
            ),
            Section("Time line", _times(seen), "Dots are commits; the cross is the kill inside a save."),
            Section("The kill and the way back", _way_back(seen)),
            Section("The flipped bit", _flip(seen)),
            Section("Checked by other programs", _other_programs(seen)),
            Section("Conditions", _conditions(result)),
        ],
    )


def _proofs(result: DemoResult) -> Markup:
    rows = [(proof.claim, Verdict(proof.holds, proof.answer), proof.evidence) for proof in result.proofs]
    return table(("claim", "verdict", "evidence"), rows)


def _losses(seen: Evidence) -> Markup:
    return line_chart(
        [
            Series("reference, never interrupted", seen.reference.losses, "quiet", broad=True),
            Series("until the kill", seen.first.losses, "second"),
            Series("after the resume", seen.second.losses, "main"),
        ],
        title="Loss of both runs over each other",
        x_label="step",
        y_label="loss",
        markers=[Marker(seen.newest.step, "resumed", "main"), Marker(seen.kill.steps, "killed", "bad")],
    )


def _distances(seen: Evidence) -> Markup:
    return line_chart(
        [
            Series("control: random state not restored", _distance(seen.control, seen.reference), "second"),
            Series("resumed run", _distance(seen.second, seen.reference), "good"),
        ],
        title="Absolute difference of the loss from the reference's",
        x_label="step",
        y_label="|difference of loss|",
        height=220,
    )


def _distance(life: Life, reference: Life) -> list[tuple[float, float]]:
    expected = dict(reference.losses)
    return [(step, abs(loss - expected[step])) for step, loss in life.losses if step in expected]


def _times(seen: Evidence) -> Markup:
    def lane(life: Life, label: str, tone: Tone, marks: list[Mark]) -> Lane:
        return Lane(label, life.started - seen.started, life.ended - seen.started, tone, marks)

    commits = [
        Mark(datetime.fromisoformat(entry.committed).timestamp() - seen.started, "good", f"committed {entry.folder}")
        for entry in seen.commits
    ]
    died = seen.first.ended - seen.started
    cross = Mark(died, "bad", f"killed inside the save of step {seen.kill.save.step}", "cross")
    return timeline(
        [
            lane(seen.reference, "reference", "quiet", []),
            lane(seen.first, "with checkpoints, killed", "second", [*(m for m in commits if m.at <= died), cross]),
            lane(seen.second, "restarted", "main", [mark for mark in commits if mark.at > died]),
            lane(seen.control, "negative control", "quiet", []),
            lane(seen.fallback, "restart on the damaged copy", "quiet", []),
        ],
        title="What ran when, with commits and the kill",
        legend=[("commit", "good"), ("kill", "bad")],
    )


def _way_back(seen: Evidence) -> Markup:
    kill, resumed = seen.kill, seen.second.resumed or {}
    phase = "complete and renamed, not yet in the ledger" if kill.save.renamed else "files being written"
    told = [f"{o['outcome']}: {o['reason']}" for o in resumed.get("recovered", [])]
    return facts(
        {
            "save that was cut off": f"step {kill.save.step}, {kill.save.folder.name}",
            "found on disk": f"{kill.files} files, {kill.bytes / 1e6:.1f} MB, no ledger entry {kill.save.sequence}",
            "phase": phase,
            "instant": f"{kill.delay * 1e3:.1f} ms into a save that usually takes {kill.usual * 1e3:.0f} ms, at random",
            "instants that came too late": f"{kill.misses} (the process went on, the next save was tried)",
            "what became of the attempt": "; ".join(told) or "nothing was found",
            "chosen": f"{resumed.get('checkpoint')}, next step {resumed.get('next_step')}",
            "steps done twice": str(kill.steps - seen.newest.step),
        }
    )


def _flip(seen: Evidence) -> Markup:
    rows = [(f"{f.tier}: {f.file}", f.tensor, f.message) for f in seen.verified.findings]
    resumed = seen.fallback.resumed or {}
    refused = [f"{item['folder']}: {'; '.join(item['reasons'])}" for item in resumed.get("rejected", [])]
    return join(
        facts(
            {
                "bit": f"bit {seen.flip.bit} of byte {seen.flip.offset} in {seen.flip.file}",
                "checkpoint": seen.damaged.folder,
                "verified": f"{seen.verified.coverage.bytes} of {seen.verified.coverage.bytes_total} bytes "
                f"in {seen.verified.seconds:.2f} s",
                "refused by the resume": " | ".join(refused) or f"{seen.damaged.folder}, quarantined before",
                "used instead": str(resumed.get("checkpoint")),
            }
        ),
        table(("found in", "tensor", "message"), rows),
    )


def _other_programs(seen: Evidence) -> Markup:
    return join(
        listing(f"$ {seen.after_kill.command}"),
        listing(f"$ {seen.sums.command}\n{seen.sums.output.rstrip()}"),
    )


def _conditions(result: DemoResult) -> Markup:
    return facts(
        {
            "took": f"{result.seconds:.0f} s",
            "seed of the kill and of the flip": str(result.seed),
            "python": platform.python_version(),
            "torch, numpy": f"{torch.__version__}, {np.__version__}",
            "machine": f"{platform.system()} {platform.release()}, {platform.machine()}",
        }
    )
