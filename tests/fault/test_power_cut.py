"""The power fails at every moment of a recorded life: nothing that was promised before is lost or mixed.

Each fsync of the code is then left out, one place at a time, and must break an invariant that has a name. An fsync
that breaks none would prevent nothing, and would have to go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from onward.save.plan import plan
from onward.storage.base import Barrier
from onward.testing.powercut import NAMES_ONLY, NOTHING, PLAIN_FATES, ZEROS, Disk, Fate, Tree, drawn_fates
from onward.testing.recorder import Operation
from onward.testing.seam import Call

from .aftermath import Promised, broken_after_cut, promised
from .harness import as_memory
from .powercut_life import Life, site_of

FEWER_FILES = 16384


@pytest.fixture(autouse=True)
def _another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut the machine has booted anew, so every lease is that of a dead process."""
    monkeypatch.setattr("onward.catalog.lease.boot_id", lambda: "the next boot")


def live(life: Life) -> list[Operation]:
    """Lives it, on the boot before the cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onward.catalog.lease.boot_id", lambda: "the boot before")
        patch.setitem(plan.__kwdefaults__, "smallest", FEWER_FILES)  # type: ignore[arg-type]
        life.live()
    return life.log


def record(root: Path, leave: Callable[[Call], bool] = lambda _: False) -> list[Operation]:
    root.mkdir()
    return live(Life(root, leave))


class Cuts:
    """Cuts the power at points of a log, and counts what it saw. Equal outcomes are checked once.

    ``broken`` has each broken invariant, with the first cut that shows it.
    """

    def __init__(self, log: list[Operation]) -> None:
        self.log = log
        self.points = self.outcomes = 0
        self.broken: dict[str, str] = {}
        self._seen: set[bytes] = set()
        self._rewind()

    def _rewind(self) -> None:
        self._disk, self._done, self._marks = Disk({}, []), 0, list[str]()

    def run(self, points: Iterable[int], fates: Callable[[int], Iterable[Fate]], *, thorough: bool = False) -> None:
        """Checks every fate at every point; a point ``n`` lies before operation ``n``."""
        for tree, marks, where in self._trees(sorted(points), fates):
            promise = promised(marks)
            if not self._is_new(tree, promise):
                continue
            self.outcomes += 1
            for broken in broken_after_cut(tree, promise, thorough=thorough):
                self.broken.setdefault(broken.invariant, f"{where}: {broken}")

    def _trees(
        self, points: list[int], fates: Callable[[int], Iterable[Fate]]
    ) -> Iterator[tuple[Tree, list[str], str]]:
        if points and points[0] < self._done:
            self._rewind()
        for point in points:
            for operation in self.log[self._done : point]:
                self._disk.apply(operation)
                if operation.name == "mark":
                    self._marks.append(operation.path)
            self._done = point
            self.points += 1
            at = self.log[point] if point < len(self.log) else None
            for fate in fates(point):
                where = f"cut before {point} ({at.name} {at.path})" if at else f"cut at the end ({point})"
                yield self._disk.after_cut(fate), self._marks, f"{where}, {fate.name}"

    def _is_new(self, tree: Tree, promise: Promised) -> bool:
        digest = hashlib.blake2b(repr((sorted(tree.folders), promise)).encode())
        for path, data in sorted(tree.files.items()):
            digest.update(f"{path} {len(data)} ".encode() + data)
        new = digest.digest() not in self._seen
        self._seen.add(digest.digest())
        return new


def decisive(log: list[Operation]) -> set[int]:
    """Points right before and after what decides: syncs and names of the ledger and of whole checkpoints, marks."""
    found: set[int] = set()
    for at, operation in enumerate(log):
        if operation.name in ("link", "rename", "mark") or (
            operation.name == "fsync" and "/rank-" not in operation.path
        ):
            found |= {at, at + 1}
    return found


def test_no_promise_is_broken_by_a_power_cut(place: Path) -> None:
    log = record(place / "s")
    cuts = Cuts(log)
    cuts.run(sorted(decisive(log))[::6], lambda point: (NOTHING, NAMES_ONLY, *drawn_fates(point * 100, 1)))
    cuts.run(range(0, len(log) + 1, 80), lambda point: PLAIN_FATES, thorough=True)
    assert cuts.broken == {}
    print(f"\npower cut, sampled: {len(log)} operations, {cuts.points} cuts, {cuts.outcomes} distinct outcomes")


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_no_promise_is_broken_by_a_power_cut_at_any_moment(place: Path, part: int) -> None:
    log = record(place / "s")
    cuts = Cuts(log)
    cuts.run(range(part, len(log) + 1, 4), lambda point: (*PLAIN_FATES, *drawn_fates(point * 100, 6)), thorough=True)
    assert cuts.broken == {}
    print(f"\npower cut, part {part}: {len(log)} operations, {cuts.points} cuts, {cuts.outcomes} distinct outcomes")


def test_what_the_model_leaves_after_the_last_sync_is_what_is_on_the_disk(place: Path) -> None:
    log = record(place / "s")
    disk = Disk({}, [])
    for operation in log:
        disk.apply(operation)
    real = as_memory(place / "s")
    found = Tree(real.files, frozenset(path for path in real.folders if path))
    files = {path for path in found.files if not path.endswith("lease.json")}  # a dead owner's lease was taken away
    model = disk.after_cut(Fate("everything", "all", ("written",)))
    assert {path: model.files[path] for path in files} == {path: found.files[path] for path in files}
    assert model.folders == found.folders
    assert [problem for problem in disk.forbids(found) if "lease.json" not in problem] == []


# --- every barrier is needed ----------------------------------------------------------------------------------------

EXPECTED: dict[Barrier, str] = {
    Barrier.SHARD: "intact",
    Barrier.META: "intact",
    Barrier.ATTEMPT_FOLDER: "intact",
    Barrier.PUBLISHED: "intact",
    Barrier.ENTRY: "acknowledged",
    Barrier.LEDGER_COMMIT: "acknowledged",
    Barrier.LEDGER_DELETE: "live",
    Barrier.LEDGER_BELIEVED: "believed",
    Barrier.RUN_FOLDER: "acknowledged",
    Barrier.ADOPTED: "intact",
    Barrier.RECEIPT: "readable",
    Barrier.DELETED_MANIFEST: "described",
}
"""What each barrier guards, by the name of the invariant that a power cut breaks when it is left out."""


def broken_without(
    root: Path, leave: Callable[[Call], bool], until: str | None = None, draws: int = 1
) -> dict[str, str]:
    """The invariants that a life without some fsyncs breaks at a power cut, each with the first cut that shows it.

    At each point ``draws`` fates are drawn, more where the ledger is touched. Ends as soon as ``until`` is broken
    (None: anything). Before the first fsync that is left out nothing is to be seen.
    """
    root.mkdir()
    life = Life(root)
    first: list[int] = []

    def leave_and_note(call: Call) -> bool:
        left = leave(call)
        if left:
            first.append(len(life.log))
        return left

    life.leave = leave_and_note
    live(life)
    cuts = Cuts(life.log)
    for point in sorted(at for at in decisive(life.log) if at >= first[0]):
        in_ledger = point < len(life.log) and "/ledger" in life.log[point].path
        count = 4 * draws if in_ledger else draws
        cuts.run([point], lambda at, n=count: (NOTHING, NAMES_ONLY, ZEROS, *drawn_fates(at * 100, n)))
        if until in cuts.broken or (until is None and cuts.broken):
            break
    return cuts.broken


@pytest.mark.parametrize("barrier", list(Barrier), ids=lambda barrier: barrier.name)
def test_without_a_barrier_a_power_cut_breaks_the_invariant_that_it_guards(place: Path, barrier: Barrier) -> None:
    broken = broken_without(place / "s", lambda call: call.barrier == barrier.name, until=EXPECTED[barrier])
    print(f"\nwithout {barrier.name}: {broken.get(EXPECTED[barrier])}")
    assert EXPECTED[barrier] in broken, f"without {barrier.name} only {sorted(broken)} is broken"


@pytest.mark.full
def test_every_single_fsync_of_the_code_guards_something(place: Path) -> None:
    sites: dict[str, int] = {}

    def note(call: Call) -> bool:
        site = site_of(call)
        sites[site] = sites.get(site, 0) + 1
        return False

    record(place / "all", note)
    useless: list[str] = []
    for number, site in enumerate(sorted(sites)):
        broken = broken_without(place / str(number), lambda call, site=site: site_of(call) == site, draws=3)
        print(f"\n{site} ({sites[site]} times): {', '.join(sorted(broken)) or 'nothing'}")
        if not broken:
            useless.append(site)
    print(f"\n{len(sites)} places with an fsync")
    assert useless == []
