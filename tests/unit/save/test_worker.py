"""The writer's own loop, spoken to over its socket: one save after another, errors told, an end when nobody is left."""

from __future__ import annotations

import errno
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from writerside import holds, laid_out

from onward.catalog.attempts import read_outcomes
from onward.catalog.incarnation import Incarnation
from onward.catalog.ledger import read_ledger
from onward.catalog.listing import read_catalog
from onward.errors import NoCapacity, SaveFailed, StorageError, StoreMissing, Superseded
from onward.records import FORMAT, Layout, TensorLayout
from onward.save import wire, worker
from onward.save.captured import Captured
from onward.save.plan import plan
from onward.save.wire import Done, Failed, Memory, Ready, Reply, Save, Setup, receive, send
from onward.storage.memory import MemoryStore
from onward.storage.registry import open_store
from support import PLACES, RUN, TIER, context, furnish, start, verified


class Writer:
    """The writer's loop in a thread, and the trainer's end of the socket."""

    def __init__(self, home: Incarnation, **setup: Any) -> None:
        self.home = home
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(30)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(theirs.detach(),), daemon=True)
        self.thread.start()
        values = {
            "store": home.store.url,
            "run": RUN,
            "tier": TIER,
            "epoch": home.ledger.epoch,
            "incarnation": home.ledger.incarnation,
            "threads": 2,
            "verify_after_save": "full",
        }
        send(self.socket, Setup(**(values | setup)))

    def _serve(self, fd: int) -> None:
        try:
            worker.main(fd, os.getppid())
        except BaseException as error:
            self.error = error

    def answer(self) -> Any:
        return receive(self.socket, Reply)[0]

    def give(self, state: Captured, size: int = 1 << 16) -> None:
        """Puts the state into new shared memory, and hands it over."""
        fd = os.memfd_create("test")
        os.ftruncate(fd, size)
        for file in state.plan.files:
            os.pwrite(fd, state.region(file), file.start)
        send(self.socket, Memory(size=size), (fd,))
        os.close(fd)

    def save(self, step: int) -> Any:
        state = laid_out(step)
        self.give(state)
        send(self.socket, Save.of(state, context()))
        return self.answer()

    def ended(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Incarnation]:
    monkeypatch.setattr(worker, "_step_back", lambda: None)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    furnish(store)
    incarnation = start(store)
    yield incarnation
    incarnation.end()


@pytest.fixture
def writer(home: Incarnation) -> Iterator[Writer]:
    writer = Writer(home)
    assert writer.answer() == Ready()
    yield writer
    writer.socket.close()
    assert writer.ended()


def steps(store: Any) -> list[int]:
    return [info.step for info in read_catalog(store, PLACES, TIER).offered()]


def test_saves_come_out_committed_and_verified_one_after_another(writer: Writer) -> None:
    for step in (10, 20, 30):
        done = writer.save(step)
        assert isinstance(done, Done) and done.entry.step == step
        assert done.report is not None and done.report.ok and done.report.method == "full"
        assert set(done.seconds) == {"capture", "write", "commit", "verify"}
        assert verified(writer.home.store, done.entry.folder).ok
        assert holds(writer.home.store, done.entry.folder, step)
    offered = read_catalog(writer.home.store, PLACES, TIER).offered()
    assert [(info.step, info.verified) for info in offered] == [(30, "full"), (20, "full"), (10, "full")]


def test_memory_that_is_sent_once_serves_many_saves(writer: Writer) -> None:
    state = laid_out(10)
    writer.give(state)
    for _ in range(3):
        send(writer.socket, Save.of(state, context()))
        assert isinstance(writer.answer(), Done)


def test_the_plan_is_followed_with_as_many_threads_as_were_set(home: Incarnation) -> None:
    before = {thread.name for thread in threading.enumerate()}
    writer = Writer(home, threads=3, verify_after_save="sizes")
    assert writer.answer() == Ready()
    done = writer.save(10)
    assert isinstance(done, Done) and done.report is not None and done.report.method == "quick"
    writer.socket.close()
    assert writer.ended()
    assert not {t.name for t in threading.enumerate() if t.name.startswith("onward-shard")} - before


def test_a_place_that_is_no_store_is_said_at_once(home: Incarnation) -> None:
    writer = Writer(home, store="memory://nowhere")
    answer = writer.answer()
    assert isinstance(answer, Failed) and type(answer.error()) is StoreMissing
    assert writer.ended() and writer.error is None


def test_a_fence_of_another_incarnation_is_refused_at_once(home: Incarnation) -> None:
    writer = Writer(home, incarnation="0" * 32)
    assert type(writer.answer().error()) is Superseded
    assert writer.ended()


def test_a_newer_incarnation_is_noticed_at_the_commit_and_nothing_is_deleted(writer: Writer, home: Incarnation) -> None:
    newer = start_again(home)
    answer = writer.save(10)
    assert isinstance(answer, Failed) and type(answer.error()) is Superseded
    assert steps(home.store) == []
    assert [story.outcome for story in read_outcomes(home.store, PLACES)] == ["superseded"]
    newer.end()


def start_again(home: Incarnation) -> Incarnation:
    from support import die

    die(home)
    return start(home.store)


def breaking(real: Any, part: str, error: Exception) -> Any:
    def open_new(store: MemoryStore, path: str, **options: Any) -> Any:
        if part in path:
            raise error
        return real(store, path, **options)

    return open_new


ERRORS = (
    StorageError("EIO"),
    MemoryError(),
    OSError(errno.EMFILE, "Too many open files"),
    RuntimeError("can't start new thread"),
)


@pytest.mark.parametrize("part", ["intent.json", ".safetensors", "record.json", "/manifest.json"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_is_told_with_its_story_and_the_next_save_is_tried_all_the_same(
    writer: Writer, home: Incarnation, monkeypatch: pytest.MonkeyPatch, error: Exception, part: str
) -> None:
    reason = error.message if isinstance(error, StorageError) else type(error).__name__
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "open_new", breaking(MemoryStore.open_new, part, error))
        answer = writer.save(10)
    assert isinstance(answer, Failed) and type(answer.error()) is SaveFailed
    assert "step 10" in answer.message and reason in answer.message
    assert isinstance(writer.save(20), Done)
    assert steps(home.store) == [20]
    assert [story.outcome for story in read_outcomes(home.store, PLACES)] == ["failed"]
    assert not [item.name for item in home.store.list(PLACES.checkpoints) if "writing" in item.name]


def test_too_little_room_is_told_as_what_it_is(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "free_bytes", lambda self: 1000)
        assert type(writer.save(10).error()) is NoCapacity
    assert isinstance(writer.save(10), Done)


def test_the_writer_ends_when_the_trainer_is_gone(home: Incarnation) -> None:
    for words in (0, 1):
        writer = Writer(home)
        if words:
            assert writer.answer() == Ready()
        writer.socket.close()
        assert writer.ended() and writer.error is None


def test_what_was_handed_over_is_finished_though_nobody_is_left_to_hear_of_it(home: Incarnation) -> None:
    writer = Writer(home)
    assert writer.answer() == Ready()
    state = laid_out(10)
    writer.give(state)
    send(writer.socket, Save.of(state, context()))
    writer.socket.close()
    assert writer.ended() and writer.error is None
    assert steps(home.store) == [10]
    assert read_catalog(home.store, PLACES, TIER).offered()[0].verified == "full"


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.999])
def test_what_was_handed_over_in_part_is_not_begun(home: Incarnation, part: float) -> None:
    writer = Writer(home)
    assert writer.answer() == Ready()
    state = laid_out(10)
    writer.give(state)
    body = msgspec.msgpack.encode(Save.of(state, context()))
    whole = len(body).to_bytes(8, "big") + body
    writer.socket.sendall(whole[: int(len(whole) * part)])
    writer.socket.close()
    assert writer.ended() and writer.error is None
    assert steps(home.store) == [] and home.store.list(PLACES.checkpoints) == []


@pytest.mark.parametrize(
    "garbage", [b"\x00\x00\x00\x00\x00\x00\x00\x04junk", b"\xff" * 64, (5).to_bytes(8, "big") + b"\x85abcd"]
)
def test_garbage_ends_the_writer_without_a_trace_in_the_store(home: Incarnation, garbage: bytes) -> None:
    writer = Writer(home)
    assert writer.answer() == Ready()
    before = list(read_ledger(home.store, PLACES).entries)
    writer.socket.sendall(garbage)
    writer.socket.shutdown(socket.SHUT_WR)
    assert writer.ended()
    assert list(read_ledger(home.store, PLACES).entries) == before


def test_memory_that_is_smaller_than_the_plan_is_never_committed(writer: Writer, home: Incarnation) -> None:
    """Another version of the plan on the trainer's side must not turn into files with the wrong bytes in them."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    send(writer.socket, Memory(size=4096), (fd,))
    os.close(fd)
    state = laid_out(10)
    big = TensorLayout(key='["part","big"]', dtype="float32", shape=(100_000,), stored="F32")
    message = msgspec.structs.replace(
        Save.of(state, context()),
        layout=Layout(format=FORMAT, meshes=(), tensors=(big,)),
        plan_digest=plan([big], threads=2).digest,
        state={"part": {"big": {"$tensor": big.key}}, "own": {}},
    )
    send(writer.socket, message)
    assert isinstance(writer.answer(), Failed)
    assert not read_ledger(home.store, PLACES).checkpoints(), "it was committed, and only then found to be damaged"


def test_another_plan_than_the_trainers_is_refused(
    writer: Writer, home: Incarnation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package may be upgraded while a run goes on; a writer that is started again then is of another version."""
    state = laid_out(10)
    writer.give(state, 1 << 20)
    monkeypatch.setattr(wire, "plan", lambda tensors, *, threads: plan(tensors, threads=threads, smallest=64))
    send(writer.socket, Save.of(state, context()))
    assert isinstance(writer.answer(), Failed), "bytes from the wrong places were committed, and they verify"
