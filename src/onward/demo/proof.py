"""What the demonstration proved: claims, each with its verdict and its evidence."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from onward.demo.evidence import Evidence
from onward.errors import EXIT_FINDING, EXIT_OK


@dataclass(frozen=True)
class Proof:
    """One claim. ``question`` is answered by yes or no, as in ``bit-identical: yes``."""

    claim: str
    question: str
    holds: bool
    evidence: str

    @property
    def answer(self) -> str:
        """The verdict as it is printed."""
        return f"{self.question}: {'yes' if self.holds else 'NO'}"


@dataclass(frozen=True)
class DemoResult:
    """The outcome of the story; proven only if every claim holds."""

    out: Path
    seed: int
    seconds: float
    evidence: Evidence
    proofs: tuple[Proof, ...]

    @property
    def ok(self) -> bool:
        """Whether everything was proven."""
        return bool(self.proofs) and all(proof.holds for proof in self.proofs)

    @property
    def exit_code(self) -> int:
        """How the command ends."""
        return EXIT_OK if self.ok else EXIT_FINDING

    @property
    def report(self) -> Path:
        """The page."""
        return self.out / "report.html"

    def to_json(self) -> str:
        """The result as ``result.json`` holds it."""
        proofs = [{**asdict(proof), "answer": proof.answer} for proof in self.proofs]
        kill = {key: value for key, value in asdict(self.evidence.kill).items() if key != "save"}
        save = self.evidence.kill.save
        kill |= {"step": save.step, "sequence": save.sequence, "folder": save.folder.name, "renamed": save.renamed}
        fields = {"ok": self.ok, "seed": self.seed, "seconds": round(self.seconds, 1), "kill": kill, "proofs": proofs}
        return json.dumps(fields, indent=2) + "\n"

    def table(self) -> Table:
        """The closing table for the terminal."""
        table = Table(title="What was proven", title_justify="left", show_header=False, pad_edge=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(style="dim", overflow="fold")
        for proof in self.proofs:
            style = "green" if proof.holds else "bold red"
            table.add_row(proof.claim, Text(proof.answer, style=style), Text(proof.evidence))
        return table


def conclude(seen: Evidence) -> tuple[Proof, ...]:
    """Derives every claim from what was seen."""
    return (*_way_back(seen), *_identical(seen), _control(seen), *_damage(seen))


def _way_back(seen: Evidence) -> list[Proof]:
    resumed = seen.second.resumed or {}
    outcomes = [o for o in resumed.get("recovered", []) if o["step"] == seen.kill.save.step]
    told = ", ".join(f"{outcome['outcome']}: {outcome['reason']}" for outcome in outcomes) or "no attempt was found"
    return [
        Proof(
            "killed by SIGKILL",
            "inside a save",
            seen.first.killed,
            f"step {seen.kill.save.step}: intent and {seen.kill.bytes / 1e6:.1f} MB on disk, no ledger entry",
        ),
        Proof("that save", "refused", bool(outcomes) and resumed.get("checkpoint") != seen.kill.save.folder.name, told),
        Proof(
            "resumed from",
            "newest commit",
            resumed.get("checkpoint") == seen.newest.folder and resumed.get("next_step") == seen.newest.step,
            str(resumed.get("checkpoint")),
        ),
    ]


def _identical(seen: Evidence) -> list[Proof]:
    proofs = []
    for part, found in seen.after_kill.parts.items():
        holds = seen.after_kill.equal(part)
        what = f"{found['compared']} tensors, {found['bytes'] / 1e6:.1f} MB" if "bytes" in found else ""
        if "first_step" in found:
            # The steps before the kill count too: saving must not change the training.
            holds = holds and seen.before_kill.equal(part)
            first = seen.before_kill.parts[part]["first_step"]
            what = f"steps {first} to {found['last_step']}, resumed at {found['first_step']}"
        if part == "random states":
            what = "python, numpy, torch, and the script's own counters"
        proofs.append(Proof(part, "bit-identical", holds, "; ".join([what, *found["differences"][:1]])))
    return proofs


def _control(seen: Evidence) -> Proof:
    parts = seen.control_comparison.parts
    same = [part for part in ("learning rate", "samples") if parts[part]["equal"]]
    first = next(iter(parts["loss"]["differences"]), "no difference").partition(":")[0]
    return Proof(
        "random state left out",
        "control differs",
        not parts["loss"]["equal"] and not parts["parameters"]["equal"],
        f"loss from {first} on, {parts['parameters']['differing']} tensors (same: {', '.join(same) or 'nothing'})",
    )


def _damage(seen: Evidence) -> list[Proof]:
    named = [f for f in seen.verified.findings if f.file.endswith(seen.flip.file) and f.tier and f.tensor]
    resumed = seen.fallback.resumed or {}
    where = f"tier {named[0].tier}, {named[0].file}, tensor {named[0].tensor}" if named else "not named"
    return [
        Proof("one flipped bit", "found and named", bool(named) and not seen.verified.ok, where),
        Proof(
            "damaged checkpoint",
            "the one before used",
            resumed.get("checkpoint") == seen.healthy.folder and seen.fallback_comparison.all_equal,
            f"{resumed.get('checkpoint')} instead of {seen.damaged.folder}, and bit-identical from there",
        ),
        Proof("sha256sum -c", "passes", seen.sums.ok, f"{seen.sums.files} files of {seen.commits[-1].folder}"),
    ]
