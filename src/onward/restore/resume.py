"""Resume: choose the newest checkpoint that verifies, check everything, and only then change the live state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import Catalog, list_runs, read_catalog
from onward.catalog.quarantine import quarantine
from onward.catalog.reader import DamagedFile, OpenCheckpoint, as_findings, open_checkpoint
from onward.catalog.receipts import write_receipt
from onward.errors import Damaged, FormatError, NothingRecoverable, StorageError
from onward.format.names import STATE, RunPlaces, rank_folder
from onward.policy.capacity import MEMORY_MARGIN
from onward.policy.compatibility import Difference
from onward.records import AttemptOutcome, CheckpointInfo, Description, Finding, JsonTree, Key, Rejection
from onward.restore.fit import Fit, check_components, check_counters, check_fit, check_world
from onward.restore.load import CheckpointSource
from onward.restore.settings import Mode, ResumeSettings
from onward.runtime import memory
from onward.state.component import Component
from onward.state.scheduler import SchedulerComponent
from onward.state.snapshot import rebuild, tensor_keys
from onward.storage.base import NotFound


@dataclass(frozen=True)
class Start:
    """Where training goes on, and how that was decided.

    Attributes:
        next_step: The index of the first step to train; equals the number of completed steps.
        checkpoint: What was loaded; None at a first start.
        mode: ``first-start``, ``strict`` or ``warm-start``.
        rejected: Newer checkpoints that were not used, each with its reasons.
        findings: What is wrong with the ledger or the receipts.
        recovered: Attempts of earlier incarnations that were rolled back or kept.
        differences: Configuration differences that were let through.
        seconds: Phase → wall seconds.
    """

    next_step: int
    checkpoint: CheckpointInfo | None
    mode: Literal["first-start", "strict", "warm-start"]
    rejected: tuple[Rejection, ...] = ()
    findings: tuple[Finding, ...] = ()
    recovered: tuple[AttemptOutcome, ...] = ()
    differences: tuple[Difference, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Ready:
    """A checkpoint that was found whole and fitting; tensors are None when memory allows only one part at a time."""

    info: CheckpointInfo
    opened: OpenCheckpoint
    source: CheckpointSource
    trees: Mapping[str, JsonTree]
    components: list[Component]
    fit: Fit
    tensors: dict[Key, torch.Tensor] | None


def resume(
    incarnation: Incarnation,
    components: Sequence[Component],
    description: Description,
    settings: ResumeSettings,
    *,
    mode: Mode = "strict",
    source_run: str | None = None,
    checkpoint: str = "newest",
    allow_fresh_start: bool = False,
    rank: int = 0,
    world_size: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Start:
    """Loads the newest checkpoint that verifies; an incarnation must have taken over before.

    Args:
        incarnation: The run that was taken over.
        components: What is registered.
        description: What the user says the run is now.
        settings: Policies and waivers.
        mode: ``strict`` continues the run; ``warm-start`` takes the weights only, and begins at step 0.
        source_run: Warm start from another run of the same store; used only while this run has no commit of its own.
        checkpoint: ``newest``, a step, ``seq:N`` or a folder name; anything but ``newest`` allows no fallback.
        allow_fresh_start: Begin at step 0 although commits exist or existed.
        rank: This process.
        world_size: All processes.
        say: Told of everything that a person should know: what is damaged, and what was not used.

    Raises:
        NothingRecoverable: Commits exist or existed, and none can be used.
        IncompatibleState, IncompatibleConfiguration, IncompleteState, TopologyMismatch: The checkpoint is whole, but
            does not fit this program; falling back to an older one would only hide that.
    """
    clock = time.perf_counter()
    places = incarnation.places
    catalog = read_catalog(incarnation.store, places, incarnation.tier, incarnation.view)
    warm = mode == "warm-start"
    if warm and source_run is not None:
        if catalog.view.checkpoints():
            warm = False  # this run has gone on since: starting it over from the other's weights would lose that
        else:
            places = RunPlaces(source_run)
            catalog = read_catalog(incarnation.store, places, incarnation.tier)
    for finding in catalog.findings:
        say(f"{finding.file}: {finding.message}")
    if not warm and _is_first_start(catalog):
        # A misspelt name of a run must not train for days from zero in silence.
        others = [run for run in list_runs(incarnation.store) if run != places.run]
        if others:
            say(
                f"nothing was ever committed in the run {places.run!r}, so it begins at step 0; this store also has "
                f"the runs {', '.join(others[:10])}"
            )
        return Start(next_step=0, checkpoint=None, mode="first-start", recovered=incarnation.recovered)
    rejected: list[Rejection] = []
    ready: _Ready | None = None
    for info in _candidates(catalog, checkpoint):
        try:
            ready = _prepare(incarnation, places, info, components, description, settings, warm, rank, world_size)
            break
        except (Damaged, StorageError) as error:
            rejection = _reject(incarnation, places, info, error, say)
            if rejection is not None:
                rejected.append(rejection)
                say(f"rejected {info.folder}: {rejection.reasons[0].file} {rejection.reasons[0].message}")
    if ready is None:
        if allow_fresh_start:
            say("nothing can be loaded; beginning again from step 0, as was asked")
            return Start(
                next_step=0,
                checkpoint=None,
                mode="first-start",
                rejected=tuple(rejected),
                findings=catalog.findings,
                recovered=incarnation.recovered,
            )
        raise NothingRecoverable(_explain(catalog, places, rejected, checkpoint))
    prepared = time.perf_counter()
    _apply(ready)
    if not warm:
        check_counters(ready.opened, ready.components)
    done = time.perf_counter()
    seconds = {"select-and-verify": round(prepared - clock, 6), "apply": round(done - prepared, 6)}
    details = {
        "mode": "warm-start" if warm else "strict",
        "incarnation": incarnation.ledger.incarnation,
        "seconds": seconds,
        "rejected": [r.folder for r in rejected],
        "differences": [d.field for d in ready.fit.differences],
    }
    try:
        write_receipt(
            incarnation.store,
            places,
            kind="loaded",
            sequence=ready.info.sequence,
            folder=ready.info.folder,
            tier=incarnation.tier,
            details=details,
        )
    except StorageError as error:  # the state was loaded; that a store takes no receipt does not undo it
        say(f"the receipt of this load could not be written: {error.message}")
    return Start(
        next_step=0 if warm else ready.info.step,
        checkpoint=ready.info,
        mode="warm-start" if warm else "strict",
        rejected=tuple(rejected),
        findings=catalog.findings,
        recovered=incarnation.recovered,
        differences=ready.fit.differences,
        seconds=seconds,
    )


def _is_first_start(catalog: Catalog) -> bool:
    """Nothing was ever committed here: no commit, no entry that cannot be read, no folder that could be adopted."""
    adoptable = any(item.kind == "adoptable" for item in catalog.foreign)
    return not (catalog.view.checkpoints() or catalog.view.findings or adoptable)


def _candidates(catalog: Catalog, which: str) -> list[CheckpointInfo]:
    if which == "newest":
        return catalog.offered()
    found = catalog.find(which)
    return [found] if found is not None and found.status == "committed" else []


def _prepare(
    incarnation: Incarnation,
    places: RunPlaces,
    info: CheckpointInfo,
    components: Sequence[Component],
    description: Description,
    settings: ResumeSettings,
    warm: bool,
    rank: int,
    world_size: int,
) -> _Ready:
    opened = open_checkpoint(incarnation.store, places, info)
    source = CheckpointSource(opened, threads=settings.threads)
    wanted = check_components(opened, components, settings.waive, model_only=warm)
    if not warm:
        check_world(opened, world_size)
    rank = rank if rank < opened.manifest.world_size else 0
    trees = {**opened.state(0), **opened.state(rank)}
    if missing := [component.name for component in wanted if component.name not in trees]:
        where = f"{rank_folder(rank)}/{STATE}"
        raise DamagedFile(opened.place.finding(where, f"it lacks the component {', '.join(missing)}", rank))
    saved = opened.manifest.description
    if warm:
        saved = msgspec.structs.replace(saved, hyperparameters=None, dataset=None, code=None, environment=None)
        description = msgspec.structs.replace(
            description, hyperparameters=None, dataset=None, code=None, environment=None
        )
    try:
        fit = check_fit(source, trees, saved, description, wanted, settings.policies())
    except FormatError as error:
        where = f"{rank_folder(rank)}/{STATE}"
        raise DamagedFile(opened.place.finding(where, error.message, rank)) from error
    room, _ = memory.available()
    if room is None or room > source.tensor_bytes() + MEMORY_MARGIN:
        tensors: dict[Key, torch.Tensor] | None = source.fetch_all()
    else:
        source.verify()
        tensors = None
    return _Ready(info=info, opened=opened, source=source, trees=trees, components=wanted, fit=fit, tensors=tensors)


def _apply(ready: _Ready) -> None:
    """Puts the state in place, random state last. Everything was checked; what fails here is told as what it is."""
    for component in sorted(ready.components, key=lambda c: c.order):
        tree = ready.trees[component.name]
        held = ready.tensors
        if held is None:
            held = ready.source.fetch(tensor_keys(tree))
        # The tensors belong to nobody else: optimizers keep the very tensors they are given.
        value = rebuild(tree, held.__getitem__)
        if isinstance(component, SchedulerComponent):
            component.load(value, keep=ready.fit.keep.get(component.name, frozenset()))
        else:
            component.load(value)


def _reject(
    incarnation: Incarnation,
    places: RunPlaces,
    info: CheckpointInfo,
    error: Damaged | StorageError,
    say: Callable[[str], None],
) -> Rejection | None:
    """Takes a checkpoint out of the choice; None when it turns out to have been deleted meanwhile."""
    view = read_ledger(incarnation.store, places)
    if not any(entry.sequence == info.sequence for entry in view.live()):
        return None
    findings = as_findings(error, incarnation.tier, info.folder)
    damaged = isinstance(error, DamagedFile) or (isinstance(error, Damaged) and not isinstance(error, NotFound))
    if damaged:
        try:
            quarantine(incarnation.store, places, info, findings, tier=incarnation.tier)
        except StorageError as failure:  # it is found damaged again at the next start
            damaged = False
            say(f"{info.folder} could not be quarantined: {failure.message}")
    return Rejection(sequence=info.sequence, step=info.step, folder=info.folder, reasons=findings, quarantined=damaged)


def _explain(catalog: Catalog, places: RunPlaces, rejected: Sequence[Rejection], which: str) -> str:
    lines = [f"the run {places.run!r} has no checkpoint that can be loaded" + f" as {which!r}" * (which != "newest")]
    lines += [f"  {r.folder}: {f.file}: {f.message}" for r in rejected for f in r.reasons[:3]]
    seen = {r.folder for r in rejected}
    lines += [
        f"  {c.folder}: {c.status}{': ' + c.reason if c.reason else ''}"
        for c in catalog.checkpoints
        if c.folder not in seen and (c.status != "committed" or which == "newest")
    ]
    lines += [f"  {f.file}: {f.message}" for f in catalog.view.findings]
    lines += [f"  {item.name}: not in the ledger; adoptable" for item in catalog.foreign if item.kind == "adoptable"]
    return "\n".join(lines)
