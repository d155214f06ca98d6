"""Any order of saving, failing, crashing, taking over, recovering, adopting, deleting and damaging, against a model."""

from __future__ import annotations

import json

import pytest
from faulty_store import Crashed
from histories import Done, Histories, Known, Pending
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from onward.catalog.deletion import delete_checkpoint
from onward.catalog.ledger import read_ledger
from onward.catalog.quarantine import record_verification
from onward.errors import Damaged, NothingRecoverable, OnwardError, Superseded
from onward.format.names import checkpoint_folder
from onward.upkeep.adopt import adopt
from onward.upkeep.verify import verify
from recorder import load_into
from support import PLACES, RUN, TIER, commit, content, die, place_of, start

STEPS = st.integers(1, 40)
POINTS = st.integers(1, 90)
WHICH = st.integers(0, 1000)


class Machine(Histories):
    # --- rules --------------------------------------------------------------------------------------------------

    @initialize(saves=st.integers(0, 3))
    def begin_with_some_commits(self, saves: int) -> None:
        """Otherwise most histories would end before they have something to lose."""
        self.run = self.begin()
        for number in range(saves):
            pending = self.new_pending(10 * (number + 1))
            commit(self.run, pending.step, pending.salt)
            self.learn(pending)

    @rule()
    def take_over(self) -> None:
        self.run = self.begin()
        Done["take over"] += 1
        self.learn(Pending())

    @rule(at=POINTS, after=st.booleans())
    def crash_while_taking_over(self, at: int, after: bool) -> None:
        """Only the new ``open`` entry fences the one before: until it is there, the one before is in its right."""
        before, highest = self.run, len(self.ledger)
        self.leave()
        self.store.arm(at % 30, "crash", after=after)
        try:
            self.run = start(self.store, lease_seconds=1e6)
        except Crashed:
            Done["crash in take over"] += 1
            self.the_ledger_only_grows()
            if before is not None and len(self.ledger) == highest:
                self.old.remove(before)
                self.run = before
        self.store.disarm()
        self.learn(Pending())

    @precondition(Histories.running)
    @rule(step=STEPS)
    def save(self, step: int) -> None:
        assert self.run is not None
        pending = self.new_pending(step)
        taken = checkpoint_folder(step, self.run.ledger.next) in self.strangers
        entry = commit(self.run, step, pending.salt)
        self.learn(pending)
        assert self.known[entry.sequence].salt == pending.salt
        Done["save beside a taken name" if taken else "save"] += 1

    @precondition(Histories.running)
    @rule(step=STEPS, at=POINTS, after=st.booleans())
    def failing_save(self, step: int, at: int, after: bool) -> None:
        """One change in the middle is refused by the store, or takes effect and is reported as refused."""
        assert self.run is not None
        pending = self.new_pending(step)
        self.store.arm(at, "error", after=after)
        try:
            commit(self.run, step, pending.salt)
        except Superseded:
            raise AssertionError("a failed save made the incarnation take itself for superseded") from None
        except OnwardError:
            Done["failed save"] += 1
        self.store.disarm()
        self.learn(pending)

    @precondition(Histories.running)
    @rule(step=STEPS, at=POINTS, after=st.booleans())
    def crash_while_saving(self, step: int, at: int, after: bool) -> None:
        assert self.run is not None
        pending = self.new_pending(step)
        self.store.arm(at, "crash", after=after)
        try:
            commit(self.run, step, pending.salt)
        except Crashed:
            Done["crash in save"] += 1
            self.store.disarm()
            die(self.run)
            self.run = None
        self.store.disarm()
        self.learn(pending)

    @precondition(lambda self: bool(self.old))
    @rule(step=STEPS, which=WHICH)
    def superseded_save(self, step: int, which: int) -> None:
        """An incarnation that was only paused wakes up and goes on saving."""
        live = {n for n, known in self.known.items() if not known.deleted}
        with pytest.raises(OnwardError) as stopped:
            commit(self.old[which % len(self.old)], step, 0)
        Done[f"superseded save: {stopped.value.code}"] += 1
        self.learn(Pending())
        assert live == {n for n, known in self.known.items() if not known.deleted}

    @precondition(Histories.running)
    @rule(which=WHICH, at=POINTS, how=st.sampled_from(["error", "crash", "nothing"]), after=st.booleans())
    def delete(self, which: int, at: int, how: str, after: bool) -> None:
        chosen = self.pick(which)
        if chosen is None or self.run is None:
            return
        number, known = chosen
        view = read_ledger(self.disk, PLACES)
        entry = next(e for e in view.checkpoints() if e.sequence == number)
        if how in ("error", "crash"):
            self.store.arm(at % 40, "crash" if how == "crash" else "error", after=after)
        try:
            delete_checkpoint(self.run.ledger, view, entry, tier=TIER, reason="test")
            assert self.files_of(known.folder) == {}
            Done["delete"] += 1
        except Crashed:
            Done["crash in delete"] += 1
            self.store.disarm()
            die(self.run)
            self.run = None
        except OnwardError:
            Done["failed delete"] += 1
        self.store.disarm()
        self.learn(Pending(victim=number))

    @rule(which=WHICH, file=WHICH, at=WHICH, bit=st.integers(0, 7))
    def damage(self, which: int, file: int, at: int, bit: int) -> None:
        """Any live one, but as often as not the newest, which is what a resume looks at first."""
        chosen = self.pick(which if which % 2 else -1)
        if chosen is None:
            return
        _, known = chosen
        name = sorted(known.files)[file % len(known.files)]
        data = bytearray(known.files[name])
        data[at * len(data) // 1001] ^= 1 << bit
        known.files[name] = bytes(data)
        self.disk.files[f"{PLACES.checkpoint(known.folder)}/{name}"] = bytes(data)
        Done["damage"] += 1

    @rule(which=WHICH)
    def mend(self, which: int) -> None:
        """The bytes come back from another copy; a full verification is what lets the checkpoint in again."""
        chosen = self.pick(which)
        if chosen is not None:
            _, known = chosen
            known.files = dict(known.whole)
            for name, data in known.whole.items():
                self.disk.files[f"{PLACES.checkpoint(known.folder)}/{name}"] = data

    @rule(which=WHICH)
    def verify(self, which: int) -> None:
        chosen = self.pick(which)
        if chosen is None:
            return
        number, known = chosen
        info = next(c for c in self.offered_or_not() if c.sequence == number)
        report = verify(place_of(self.disk, known.folder), info, run=RUN, threads=1)
        assert report.ok == (not known.damaged)
        record_verification(self.disk, PLACES, info, report, tier=TIER)
        known.quarantined = known.damaged
        Done[f"verify: {'ok' if report.ok else 'damage found'}"] += 1

    @rule(which=WHICH, file=WHICH, at=WHICH, bit=st.integers(0, 7))
    def resume_after_damage(self, which: int, file: int, at: int, bit: int) -> None:
        self.damage(which, file, at, bit)
        self.resume()

    @rule()
    def resume(self) -> None:
        """Takes over and loads: the newest whole one; every damaged one above it is told and quarantined."""
        self.run = self.begin()
        self.learn(Pending())
        choice = sorted((n for n, known in self.known.items() if known.offered), reverse=True)
        whole = next((n for n in choice if not self.known[n].damaged), None)
        if whole is None:
            self.resume_from_nothing()
        else:
            begun, part = load_into(self.run)
            assert begun.checkpoint is not None
            assert begun.checkpoint.sequence == whole
            assert begun.next_step == self.known[whole].step
            assert part.bytes() == content(self.known[whole].step, self.known[whole].salt)
            assert [rejection.sequence for rejection in begun.rejected] == [n for n in choice if n > whole]
            Done["load" if not begun.rejected else "load after a fallback"] += 1
        for number in choice:
            if whole is None or number > whole:
                self.known[number].quarantined = True

    def resume_from_nothing(self) -> None:
        assert self.run is not None
        adoptable = any("manifest.json" in files for files in self.strangers.values())
        if self.known or adoptable:
            with pytest.raises(NothingRecoverable):
                load_into(self.run)
            Done["nothing recoverable"] += 1
        else:
            begun, part = load_into(self.run)
            assert (begun.mode, begun.next_step, part.loaded) == ("first-start", 0, None)
            Done["first start"] += 1

    @rule(which=WHICH, name=st.sampled_from(["copied", "next", "later", "link-to-latest"]), step=STEPS)
    def plant(self, which: int, name: str, step: int) -> None:
        """A folder is copied in by hand, perhaps under the very name that the next save is going to take."""
        chosen = self.pick(which)
        if chosen is None:
            return
        _, known = chosen
        number = len(self.ledger)
        names = {"next": checkpoint_folder(step, number + 1), "later": checkpoint_folder(step, number + 7)}
        self.copy_by_hand(known, names.get(name, f"{name}-{len(self.strangers)}"))
        Done["plant"] += 1
        if name == "next" and self.run is not None:
            self.save(step)  # takes another number; the stranger is not touched

    @precondition(Histories.running)
    @rule(which=WHICH)
    def adopt(self, which: int) -> None:
        """A stranger that is whole becomes the newest checkpoint; one that is not is refused and stays as it is."""
        assert self.run is not None
        choice = [name for name, files in sorted(self.strangers.items()) if "manifest.json" in files]
        if not choice:
            return
        name = choice[which % len(choice)]
        files = self.strangers[name]
        source = next((k for k in self.known.values() if k.whole == files), None)
        whole = source is not None or verify(place_of(self.disk, name), None, run=RUN, threads=1).ok
        if not whole:
            with pytest.raises(Damaged):
                adopt(self.run, name)
            Done["adopt: refused"] += 1
            return
        manifest = int(json.loads(files["manifest.json"])["global_step"])
        adopted = adopt(self.run, name)
        Done["adopt"] += 1
        pending = Pending(step=manifest, source=source, folders=[name])
        if source is None:
            pending.salt = -1  # of an attempt that never was a checkpoint: its content is its own reference
        self.learn(pending)
        assert self.files_of(adopted.entry.folder) == files
        if source is None:
            del self.known[adopted.entry.sequence]
            view = read_ledger(self.disk, PLACES)
            entry = next(e for e in view.checkpoints() if e.sequence == adopted.entry.sequence)
            delete_checkpoint(self.run.ledger, view, entry, tier=TIER, reason="of unknown content")
            self.known[entry.sequence] = Known(entry.step, -1, entry.folder, {}, {}, deleted=True)


def explore(examples: int, steps: int, *, derandomize: bool) -> None:
    Done.clear()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for name, times in sorted(Done.items()):
        print(f"{name:40} {times:6}")
    print(f"{sum(Done.values())} operations in {examples} histories agree with the model")


def test_histories_agree_with_the_model() -> None:
    explore(70, 40, derandomize=True)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_many_more_histories_agree_with_the_model() -> None:
    explore(600, 60, derandomize=False)
