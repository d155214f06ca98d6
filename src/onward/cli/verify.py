"""``onward verify``: whether the bytes are still those that were saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from onward.catalog.listing import Catalog
from onward.catalog.manifests import manifest_in
from onward.catalog.reader import Place
from onward.cli.options import ConfigOption, Home, JsonOption, RunOption, StoreOption, choose, closing, find_home
from onward.cli.screen import Answer, Shown, progress, say
from onward.errors import (
    EXIT_ERROR,
    EXIT_FINDING,
    EXIT_NOTHING_RECOVERABLE,
    EXIT_OK,
    Damaged,
    NothingRecoverable,
    OnwardError,
    StorageError,
    UsageError,
)
from onward.format.names import INTENT, LAYOUT, MANIFEST, SUMS, RunPlaces
from onward.records import CheckpointInfo, VerifyReport
from onward.report.checkpoints import coverage_line, finding_lines
from onward.report.tables import plain
from onward.storage.base import NotFound, Store, walk_files
from onward.storage.posix import PosixStore
from onward.storage.wrappers import ReadOnlyStore
from onward.upkeep.check import Checked, Verdict, check, verdict_of
from onward.upkeep.verify import Method, verify

EPILOG = closing(
    "onward verify newest --store file:///data/ckpt",
    {
        0: "everything that was looked at is right",
        3: "damage was found",
        4: "there is nothing to verify",
    },
    78,
)
_LONE = "lone"
_MARKS = (MANIFEST, SUMS, LAYOUT, INTENT)
"""A folder with one of these is a checkpoint's, perhaps a damaged one."""
_THREADS = 4


def command(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT|PATH",
            help="newest (the default), a step, seq:N, a folder's name; or the path of a checkpoint folder anywhere.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint that is not deleted.")] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Every byte; or sizes, headers and the small files only.")
    ] = True,
    receipt: Annotated[
        bool, typer.Option("--receipt/--no-receipt", help="Leave the outcome in the store, as a receipt.")
    ] = True,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Files read at once.")] = _THREADS,
    config: ConfigOption = None,
    store: StoreOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> Answer:
    """Verify checkpoints, and name what is damaged.

    Every damaged file is named, with its tensor and rank. What is damaged is quarantined: no longer offered to a
    resume, its bytes kept (not with --no-receipt). A full verification that finds nothing lifts a quarantine. A run
    may be verified while it is trained. A PATH is looked at alone, without any store; nothing is written then.
    """
    method: Method = "full" if full else "quick"
    if everything and checkpoint is not None:
        raise UsageError("both --all and a checkpoint are given", next_step="choose one")
    named = [option for option in (config, store, run) if option is not None]
    if checkpoint is not None and _is_path(checkpoint, store_is_named=bool(named)):
        if named:
            raise UsageError("a PATH is looked at without any store", next_step="leave --store, --config and --run out")
        return _verify_lone(Path(checkpoint), method, threads)
    home = find_home(config, store, run)
    places = home.place()
    outcomes = [
        _verify_one(home, places, info, method, receipt, threads)
        for info in _chosen(home.catalog(places), checkpoint or "newest", everything)
    ]
    document = {
        "store": home.store.url,
        "tier": home.tier,
        "run": places.run,
        "ok": all(outcome.verdict in ("verified", "deleted") for outcome in outcomes),
        "checkpoints": [_as_dict(outcome) for outcome in outcomes],
    }
    shown: list[Shown] = [line for outcome in outcomes for line in _shown(outcome)]
    if len(outcomes) > 1:
        good = sum(outcome.verdict == "verified" for outcome in outcomes)
        shown.append(f"{good} of {len(outcomes)} checkpoints verified")
    return Answer(document, shown, _exit_code([outcome.verdict for outcome in outcomes]))


def _is_path(text: str, *, store_is_named: bool) -> bool:
    """A path has a slash; a plain name is one only where no store is named and a checkpoint folder lies there."""
    if "/" in text or text in (".", ".."):
        return True
    return not store_is_named and any(os.path.lexists(Path(text, name)) for name in _MARKS)


def _exit_code(verdicts: Sequence[str]) -> int:
    if "damaged" in verdicts:
        return EXIT_FINDING
    if "not read" in verdicts:
        return EXIT_ERROR
    return EXIT_OK if "verified" in verdicts else EXIT_NOTHING_RECOVERABLE


def _chosen(catalog: Catalog, which: str, everything: bool) -> list[CheckpointInfo]:
    if everything:
        chosen = [info for info in catalog.checkpoints if info.status in ("committed", "quarantined")]
        if not chosen:
            raise NothingRecoverable(f"the run {catalog.run!r} has no checkpoint to verify", next_step="see onward ls")
        return chosen
    found = choose(catalog, which, "verify")
    if found.status == "deleting":
        raise NothingRecoverable(f"{found.folder} is being deleted", next_step="verify another one; see onward ls")
    return [found]


def _verify_one(
    home: Home, places: RunPlaces, info: CheckpointInfo, method: Method, receipt: bool, threads: int
) -> Checked:
    total = _total_bytes(home.store, places.checkpoint(info.folder), method)
    with progress(f"step {info.step}", total) as advance:
        outcome = check(
            home.store, places, info, method=method, leave_receipt=receipt, threads=threads, progress=advance
        )
    if outcome.receipt_problem:
        say(f"no receipt could be left for {info.folder}: {outcome.receipt_problem}")
    return outcome


def _total_bytes(store: Store, folder: str, method: Method) -> int:
    """How much is going to be hashed, as far as it can be told; only the progress bar rests on it."""
    try:
        return sum(e.size for path, e in walk_files(store, folder) if method == "full" or "safetensors" not in path)
    except (StorageError, Damaged):
        return 0


def _shown(outcome: Checked) -> list[Shown]:
    info, report = outcome.info, outcome.report
    lines = [f"step {info.step} (seq:{info.sequence}) {info.folder}: {_word(outcome.verdict, report)}"]
    if outcome.verdict == "deleted":
        return [f"{lines[0]} while it was looked at"]
    shown: list[Shown] = [*lines, *_coverage(report), *finding_lines(report.findings)]
    if outcome.receipt == "quarantined":
        shown.append("  quarantined: a resume takes another one; the bytes are kept")
    elif outcome.receipt == "verified" and report.method == "full" and info.status == "quarantined":
        shown.append("  the quarantine is lifted")
    return shown


def _word(verdict: Verdict, report: VerifyReport) -> str:
    return f"{verdict} ({report.method})" if verdict == "verified" else verdict


def _coverage(report: VerifyReport) -> list[str]:
    return [f"  {coverage_line(report.coverage)}, {report.seconds:.1f} s"]


def _as_dict(outcome: Checked) -> dict[str, object]:
    return {
        "step": outcome.info.step,
        "sequence": outcome.info.sequence,
        "verdict": outcome.verdict,
        "receipt": outcome.receipt or None,
        "receipt_problem": outcome.receipt_problem or None,
        "report": outcome.report,
    }


# --- a folder by itself ----------------------------------------------------------------------------------------------


def _verify_lone(path: Path, method: Method, threads: int) -> Answer:
    folder = Path(os.path.realpath(path))  # links on the way are the user's choice; inside the folder none is followed
    store = ReadOnlyStore(PosixStore(folder.parent))
    try:
        names = {item.name for item in store.list(folder.name)}
    except (NotFound, Damaged):
        names = set()
    if names.isdisjoint(_MARKS):
        raise NothingRecoverable(
            f"{path} is not a checkpoint's folder: it has no {MANIFEST}", next_step="name the folder that holds it"
        )
    place = Place(store=store, root=folder.name, tier=_LONE, name=folder.name)
    try:
        run = manifest_in(place).run
    except OnwardError:
        run = ""  # verify names what is wrong with the manifest
    with progress(folder.name, _total_bytes(store, folder.name, method)) as advance:
        report = verify(place, None, run=run, method=method, threads=threads, progress=advance)
    verdict = verdict_of(report)
    document = {"path": str(folder), "ok": report.ok, "verdict": verdict, "report": report}
    shown: list[Shown] = [f"{plain(str(folder))}: {_word(verdict, report)}", *_coverage(report)]
    shown += finding_lines(report.findings)
    shown.append("  looked at alone: no ledger vouches for it, and no receipt is left")
    return Answer(document, shown, _exit_code([verdict]))
