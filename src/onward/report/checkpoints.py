"""What is shown of checkpoints: each table is made from records alone, and is told what time it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from onward.records import AttemptOutcome, CheckpointInfo, Coverage, Finding, JsonTree, Layout, Manifest, Receipt
from onward.report.tables import Column, Table, age, ago, counted, facts, flat, flattened, plain, size

_SHOWN_FINDINGS = 50
_FROM_ROOT = "runs/"


def receipts_summary(receipts: Sequence[Receipt]) -> str:
    """Which kinds of receipts there are, and how many: ``verified ×2, loaded``."""
    kinds = Counter(receipt.kind for receipt in receipts)
    return ", ".join(kind if count == 1 else f"{kind} ×{count}" for kind, count in kinds.items())


def coverage_line(coverage: Coverage) -> str:
    """How much was really looked at."""
    return (
        f"looked at {coverage.files:,} of {counted(coverage.files_total, 'file')}, "
        f"{coverage.bytes:,} of {counted(coverage.bytes_total, 'byte')} ({coverage.method})"
    )


@dataclass(frozen=True)
class Row:
    """One line of a listing; ``sequence`` is None for what the ledger does not know."""

    step: int | None
    sequence: int | None
    since: str
    status: str
    folder: str
    birth_class: str = "?"
    bytes: int | None = None
    verified: str = ""
    receipts: str = ""


def checkpoint_row(info: CheckpointInfo, manifest: Manifest | None) -> Row:
    """A checkpoint of the ledger; without its manifest, size and class are not known."""
    return Row(
        step=info.step,
        sequence=info.sequence,
        since=info.committed,
        status=info.status,
        folder=info.folder,
        birth_class=manifest.birth_class if manifest else "?",
        bytes=manifest.total_bytes if manifest else None,
        verified=info.verified,
        receipts=receipts_summary(info.receipts),
    )


def checkpoint_table(rows: Sequence[Row], now: datetime) -> Table:
    """A listing, in the order of the ledger; what the ledger does not know comes last."""
    columns = (
        Column("step", right=True),
        Column("seq", right=True),
        Column("age", right=True, rank=1),
        Column("class", rank=3, least=8),
        Column("size", right=True, rank=2),
        Column("status", toned=True),
        Column("verified", toned=True),
        Column("receipts", rank=4, least=16),
        Column("folder", least=21),
    )
    ordered = sorted(rows, key=lambda row: (row.sequence is None, row.sequence or 0, row.folder))
    cells = tuple(
        (
            "?" if row.step is None else str(row.step),
            "-" if row.sequence is None else str(row.sequence),
            age(row.since, now),
            row.birth_class,
            size(row.bytes),
            row.status,
            row.verified,
            row.receipts,
            row.folder,
        )
        for row in ordered
    )
    return Table(columns, cells)


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """What is wrong, two lines each: where it is (tier, file, tensor, rank, as far as known), and what it is."""
    lines: list[str] = []
    for finding in findings[:_SHOWN_FINDINGS]:
        place = "/".join(part for part in (finding.checkpoint, finding.file) if part)
        if finding.file.startswith(_FROM_ROOT):
            place = finding.file
        where = [f"{finding.tier}: {place}" if finding.tier else place]
        where += [f"tensor {finding.tensor}"] * bool(finding.tensor)
        where += [f"rank {finding.rank}"] * (finding.rank is not None)
        lines.append(f"  {', '.join(where)}")
        lines.append(f"    {finding.code}: {finding.message.removeprefix(f'{finding.file}: ')}")
    if len(findings) > _SHOWN_FINDINGS:
        lines.append(f"  and {len(findings) - _SHOWN_FINDINGS:,} more; --json lists all")
    return [plain(line) for line in lines]


def outcome_table(outcomes: Sequence[AttemptOutcome], heading: str = "") -> Table:
    """How attempts ended that did not become checkpoints."""
    columns = (
        Column("step", right=True),
        Column("seq", right=True),
        Column("outcome"),
        Column("why", fold=True, least=24),
    )
    return Table(columns, tuple((str(o.step), str(o.sequence), o.outcome, o.reason) for o in outcomes), heading)


def receipt_table(receipts: Sequence[Receipt], now: datetime) -> Table:
    """The receipts of one checkpoint, oldest first."""
    columns = (
        Column("age", right=True),
        Column("receipt"),
        Column("tier", rank=2),
        Column("by", rank=1, least=12),
        Column("details", fold=True, least=20),
    )
    rows = tuple((age(r.time, now), r.kind, r.tier, r.actor, _gist(r.details)) for r in receipts)
    return Table(columns, rows, heading="receipts")


def _gist(details: JsonTree) -> str:
    """What a receipt says in short: its reason where it has one, else its plain values."""
    if not isinstance(details, dict):
        return flat(details)
    if details.get("reason"):
        return str(details["reason"])
    return flat({k: v for k, v in details.items() if v and isinstance(v, str | int | float) and v is not True})


# --- one checkpoint ----------------------------------------------------------------------------------------------


def manifest_facts(manifest: Manifest, state: Mapping[str, str], now: datetime) -> Table:
    """A manifest as a person reads it, after what is known beside it (``state``); the rest has tables of its own."""
    return facts(
        {
            **state,
            "run": manifest.run,
            "checkpoint": manifest.checkpoint,
            "step": f"{manifest.global_step:,} completed" + (f", epoch {manifest.epoch}" if manifest.epoch else ""),
            "sequence": f"{manifest.sequence}" + (f", after {manifest.parent}" if manifest.parent else ", the first"),
            "class": f"{manifest.birth_class} ({manifest.reason})" if manifest.reason else manifest.birth_class,
            "kind": manifest.kind,
            "size": f"{size(manifest.total_bytes)} in {counted(manifest.actual_files, 'shard file')}",
            "ranks": f"{manifest.actual_ranks} of {manifest.expected_ranks}",
            "captured": ago(manifest.capture_started, now),
            "training began": manifest.training_started,
            "data position": "" if manifest.data_position is None else flat(manifest.data_position),
        }
    )


def description_table(manifest: Manifest) -> Table:
    """What the user said the run is."""
    names = ("model_config", "tokenizer", "dataset", "hyperparameters", "code", "environment")
    tree = {name: value for name in names if (value := getattr(manifest.description, name)) is not None}
    return facts(flattened(tree), heading="description") if tree else facts({})


def component_table(manifest: Manifest) -> Table:
    """The components with their counters."""
    columns = (Column("component"), Column("kind"), Column("scope", rank=1), Column("counters", fold=True, least=20))
    rows = tuple((tag.name, tag.kind, tag.scope, flat(dict(tag.counters))) for tag in manifest.components)
    return Table(columns, rows, heading="components")


def tensor_table(layout: Layout, sizes: Mapping[str, int]) -> Table:
    """Every tensor; a tied one names the tensor that holds its bytes."""
    columns = (
        Column("tensor", least=24, fold=True),
        Column("dtype"),
        Column("shape"),
        Column("bytes", right=True),
        Column("tied to", rank=1, least=12, fold=True),
    )
    rows = tuple(
        (t.key, t.dtype, "×".join(map(str, t.shape)) or "scalar", f"{sizes[t.key]:,}", t.tie or "")
        for t in layout.tensors
    )
    used = len(columns) if any(tensor.tie for tensor in layout.tensors) else len(columns) - 1
    return Table(columns[:used], tuple(row[:used] for row in rows), heading="tensors")


def rank_table(manifest: Manifest) -> Table:
    """What each rank wrote."""
    columns = (Column("rank", right=True), Column("files", right=True), Column("size", right=True), Column("record"))
    rows = tuple((str(r.rank), str(r.files), size(r.bytes), r.path) for r in manifest.ranks)
    return Table(columns, rows, heading="ranks")


def asset_table(manifest: Manifest) -> Table:
    """The files that are stored with the state."""
    columns = (Column("file", least=24, fold=True), Column("size", right=True))
    return Table(columns, tuple((a.path, size(a.size)) for a in manifest.assets), heading="assets")
