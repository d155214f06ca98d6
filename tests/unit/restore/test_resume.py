"""Resume: which checkpoint is chosen, what must fit, and that nothing live is touched before all of it does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from onward.catalog.incarnation import Incarnation
from onward.catalog.listing import read_catalog
from onward.catalog.receipts import read_receipts
from onward.errors import (
    IncompatibleConfiguration,
    IncompatibleState,
    IncompleteState,
    NothingRecoverable,
    OnwardError,
    StorageError,
    TopologyMismatch,
)
from onward.records import ComponentTag, Description
from onward.restore.resume import Start, resume
from onward.restore.settings import ResumeSettings
from onward.save.pipeline import SaveSettings, save
from onward.storage.base import Barrier
from onward.storage.memory import MemoryStore
from recorder import LIVE, SETTINGS, Recorder, reasons
from support import PLACES, TIER, captured, commit, content, context, die, start


@dataclass
class Part(Recorder):
    """A component that notes the order of what happens to it."""

    log: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int | float] = field(default_factory=dict)

    def counters(self) -> dict[str, int | float]:
        return self.counts

    def check(self, saved: object) -> list[str]:
        self.log.append(f"check {self.name}")
        return self.problems or super().check(saved)

    def load(self, saved: object) -> None:
        self.log.append(f"load {self.name}")
        super().load(saved)


@pytest.fixture
def run(store: MemoryStore) -> Incarnation:
    """Commits at 10 and 20, taken over by a new incarnation."""
    first = start(store)
    for step in (10, 20):
        commit(first, step)
    first.end()
    incarnation = start(store)
    incarnation.end()
    return incarnation


def parts() -> list[Part]:
    log: list[str] = []
    return [Part(log=log, order=100), Part(name="own", scope="rank", order=1000, log=log)]


def again(run: Incarnation, components: list[Part] | None = None, **options: Any) -> tuple[Start, list[Part]]:
    components = components or parts()
    description, settings = options.pop("description", LIVE), options.pop("settings", SETTINGS)
    return resume(run, components, description, settings, **options), components


def damage(store: MemoryStore, step: int, file: str = "rank-00000/000.safetensors") -> None:
    path = next(p for p in store.files if f"/step-{step:012d}-" in p and p.endswith(file) and "/checkpoints/" in p)
    data = bytearray(store.files[path])
    data[-1] ^= 1
    store.files[path] = bytes(data)


def test_the_newest_is_loaded_and_leaves_a_receipt(run: Incarnation, store: MemoryStore) -> None:
    begun, (part, own) = again(run)
    assert (begun.next_step, begun.mode, begun.rejected) == (20, "strict", ())
    assert part.bytes() == content(20)
    assert own.loaded == {"rank": 0}
    assert begun.checkpoint is not None
    receipts, _ = read_receipts(store, PLACES, begun.checkpoint.folder)
    assert [r.kind for r in receipts] == ["verified", "loaded"]
    assert receipts[1].details["incarnation"] == run.ledger.incarnation


def test_all_is_checked_before_anything_is_loaded_and_random_state_comes_last(run: Incarnation) -> None:
    """T89: what is restored last can no longer be drawn from by the set-up of the others."""
    _, components = again(run, parts()[::-1])
    assert components[0].log == ["check own", "check part", "load part", "load own"]


def test_one_component_that_does_not_fit_keeps_all_of_them_as_they_are(run: Incarnation) -> None:
    components = parts()
    components[1].problems = ["own is of another kind"]
    with pytest.raises(IncompatibleState, match="own is of another kind"):
        again(run, components)
    assert not any(entry.startswith("load") for entry in components[0].log)


def test_a_damaged_newest_gives_way_and_the_reason_is_told(run: Incarnation, store: MemoryStore) -> None:
    damage(store, 20)
    said: list[str] = []
    begun, (part, _) = again(run, say=said.append)
    assert (begun.next_step, part.bytes()) == (10, content(10))
    assert reasons(begun) == ["step-000000000020-3/rank-00000/000.safetensors"]
    assert begun.rejected[0].quarantined
    assert any("rejected step-000000000020-3" in line for line in said)
    assert [c.status for c in read_catalog(store, PLACES, TIER).checkpoints] == ["committed", "quarantined"]


def test_a_checkpoint_that_was_asked_for_by_name_has_no_substitute(run: Incarnation, store: MemoryStore) -> None:
    damage(store, 20)
    for which in ("20", "seq:3", "step-000000000020-3", "30", "nonsense"):
        with pytest.raises(NothingRecoverable, match=which):
            again(run, checkpoint=which)
    begun, _ = again(run, checkpoint="10")
    assert begun.next_step == 10


def test_when_nothing_can_be_used_every_reason_is_given(run: Incarnation, store: MemoryStore) -> None:
    damage(store, 10, "state.json")
    damage(store, 20)
    with pytest.raises(NothingRecoverable) as caught:
        again(run)
    assert "step-000000000010-2: rank-00000/state.json" in caught.value.message
    assert "step-000000000020-3: rank-00000/000.safetensors" in caught.value.message
    begun, (part, _) = again(run, allow_fresh_start=True)
    assert (begun.mode, begun.next_step, part.loaded) == ("first-start", 0, None)


def test_a_store_that_refuses_one_checkpoint_is_no_reason_to_quarantine_it(
    run: Incarnation, store: MemoryStore
) -> None:
    """EIO says nothing about the bytes; the next start may read them."""
    read_into = store.read_into

    def failing(path: str, offset: int, view: memoryview) -> None:
        if "step-000000000020" in path:
            raise StorageError(f"read {path}: EIO")
        read_into(path, offset, view)

    store.read_into = failing  # type: ignore[method-assign]
    begun, _ = again(run)
    assert (begun.next_step, begun.rejected[0].quarantined) == (10, False)
    del store.read_into
    begun, _ = again(run)
    assert begun.next_step == 20


@pytest.mark.parametrize("broken", [False, True])
def test_a_store_that_takes_no_receipt_still_gives_its_checkpoints(
    run: Incarnation, store: MemoryStore, broken: bool
) -> None:
    """The receipt is a proof for people; a full disk must not stand between a run and its checkpoints."""
    if broken:
        damage(store, 20)
    create = store.create

    def full(path: str, data: bytes, *, content: Barrier, name: Barrier | None) -> None:
        if "/receipts/" in path:
            raise StorageError(f"create {path}: ENOSPC")
        create(path, data, content=content, name=name)

    store.create = full  # type: ignore[method-assign]
    begun, (part, _) = again(run)
    assert begun.next_step == (10 if broken else 20)
    assert part.bytes() == content(begun.next_step)


# --- what must fit ----------------------------------------------------------------------------------------------


def test_a_component_that_is_missing_on_either_side_is_refused_unless_waived(run: Incarnation) -> None:
    extra = [*parts(), Part(name="ema")]
    with pytest.raises(IncompleteState, match="'ema' is registered, but not in the checkpoint"):
        again(run, extra)
    with pytest.raises(IncompleteState, match=r"has a component 'own' \(object\) that is not registered"):
        again(run, parts()[:1])
    begun, components = again(run, extra, settings=ResumeSettings(threads=1, waive=("ema",)))
    assert (begun.next_step, components[2].loaded) == (20, None)
    begun, components = again(run, parts()[:1], settings=ResumeSettings(threads=1, waive=("own",)))
    assert components[0].bytes() == content(20)


def test_a_component_of_another_kind_is_refused(run: Incarnation) -> None:
    components = parts()
    components[0].kind = "optimizer"
    with pytest.raises(IncompleteState, match="is a optimizer here and a object in the checkpoint"):
        again(run, components)


def test_another_number_of_ranks_is_refused(run: Incarnation) -> None:
    with pytest.raises(TopologyMismatch, match="saved by 1 ranks; this job has 2"):
        again(run, world_size=2)


def test_a_counter_that_came_back_wrong_is_told(run: Incarnation) -> None:
    """A ``load_state_dict`` that forgets something shows in what its object counts."""
    components = parts()
    components[0].counts = {"steps": 3}
    with pytest.raises(IncompatibleState, match="the counters are not those of step 20") as caught:
        again(run, components)
    assert "must not go on" in caught.value.next_step


def test_a_configuration_that_must_match_is_refused_with_a_table_and_an_older_one_is_not_tried(
    run: Incarnation,
) -> None:
    """Heads cannot be seen in shapes; falling back to an older checkpoint would only hide the mistake."""
    components = parts()
    with pytest.raises(IncompatibleConfiguration, match=r"model_config\.n_heads") as caught:
        again(run, components, description=Description(model_config={"n_heads": 8}))
    assert "must" in caught.value.message
    assert components[0].log == []
    relaxed = ResumeSettings(threads=1, policy={"model_config.n_heads": "warn"})
    begun, _ = again(run, description=Description(model_config={"n_heads": 8}), settings=relaxed)
    assert [(d.field, d.saved, d.live) for d in begun.differences] == [("model_config.n_heads", "2", "8")]


# --- beginning --------------------------------------------------------------------------------------------------


def test_a_run_without_any_commit_is_a_first_start(store: MemoryStore) -> None:
    incarnation = start(store)
    begun, (part, _) = again(incarnation)
    assert (begun.mode, begun.next_step, part.loaded) == ("first-start", 0, None)
    incarnation.end()


def test_a_warm_start_takes_the_weights_of_another_run_and_begins_at_zero(store: MemoryStore) -> None:
    """Only weights, only until the run has a commit of its own, and the other run loses nothing."""
    first = start(store)
    state = captured(30)
    tags = (msgspec.structs.replace(state.tags[0], kind="model"), *state.tags[1:])
    save(first, replace(state, tags=tags), context(), SaveSettings(threads=1))
    first.end()
    fresh = start(store, "fresh")
    components = parts()
    components[0].kind = "model"
    begun, (part, own) = again(fresh, components, mode="warm-start", source_run="run")
    assert (begun.next_step, begun.mode) == (0, "warm-start")
    assert part.bytes() == content(30)
    assert own.loaded is None
    save(fresh, replace(captured(3), tags=tags_of_step(tags, 3)), context(), SaveSettings(threads=1))
    die(fresh)
    later = start(store, "fresh")
    begun, (part, _) = again(later, components, mode="warm-start", source_run="run")
    assert (begun.next_step, begun.mode, part.bytes()) == (3, "strict", content(3))
    assert [c.step for c in read_catalog(store, PLACES, TIER).offered()] == [30]
    later.end()


def tags_of_step(tags: tuple[ComponentTag, ...], step: int) -> tuple[ComponentTag, ...]:
    return tuple(msgspec.structs.replace(tag, step=step) for tag in tags)


def test_a_warm_start_from_a_run_without_weights_is_refused(run: Incarnation, store: MemoryStore) -> None:
    fresh = start(store, "fresh")
    with pytest.raises(IncompleteState, match="no weights called net"):
        again(fresh, [Part(name="net", kind="model")], mode="warm-start", source_run="run")
    fresh.end()


@pytest.mark.parametrize("source", ["nobody", "../run", "a/b", ""])
def test_a_warm_start_from_a_run_that_is_not_there_is_refused_by_name(
    run: Incarnation, store: MemoryStore, source: str
) -> None:
    fresh = start(store, "fresh")
    with pytest.raises(OnwardError) as caught:
        again(fresh, mode="warm-start", source_run=source)
    assert source in caught.value.message
    fresh.end()


def test_memory_for_only_one_part_at_a_time_loads_the_same(run: Incarnation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifying pass first, then one component after the other: still nothing live is touched before all is right."""
    monkeypatch.setattr("onward.restore.resume.memory.available", lambda: (1, "MemAvailable"))
    begun, (part, _) = again(run)
    assert (begun.next_step, part.bytes()) == (20, content(20))


def test_without_memory_damage_is_found_before_anything_is_loaded(
    run: Incarnation, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.restore.resume.memory.available", lambda: (1, "MemAvailable"))
    damage(store, 20)
    begun, (part, _) = again(run)
    assert (begun.next_step, part.bytes()) == (10, content(10))
    assert part.log.count("load part") == 1
