"""Messages between trainer and writer: whole or not at all, with the descriptor beside them; errors come back."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from onward import errors
from onward.errors import OnwardError, SaveFailed
from onward.records import FORMAT, CheckpointEntry, ComponentTag, Description, Layout, TensorLayout
from onward.save.captured import SaveContext
from onward.save.wire import Done, Failed, Memory, Ready, Reply, Request, Save, Setup, receive, send

SETUP = Setup(store="file:///x", run="r", tier="home", epoch=7, incarnation="i", threads=3, verify_after_save="full")
ENTRY = CheckpointEntry(
    format=FORMAT, run="r", sequence=8, previous="p", incarnation="i", epoch=7, attempt="a", folder="step-8", step=8,
    manifest_sha256="m", sums_sha256="s", time="t",
)  # fmt: skip


def save_message(**changes: Any) -> Save:
    values: dict[str, Any] = {
        "step": 3,
        "plan_digest": "p",
        "layout": Layout(
            format=FORMAT,
            meshes=(),
            tensors=(TensorLayout(key='["m","w"]', dtype="float32", shape=(4, 2), stored="F32"),),
        ),
        "state": {"m": {"w": {"$tensor": '["m","w"]'}, "n": 3}},
        "tags": (ComponentTag(name="m", kind="model", scope="global", step=3, counters={"n": 1, "f": 0.5}),),
        "started": "t",
        "seconds": 0.25,
        "epoch": None,
        "data_position": {"epoch": 1, "seen": [1, 2, None]},
        "description": Description(model_config={"deep": [{"x": 1.5}]}),
        "training_started": "t",
        "birth_class": "periodic",
        "reason": "due",
        "parent": None,
        "assets": {"vocabulary.txt": bytes(range(256))},
    }
    return Save(**(values | changes))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def over(pair: tuple[socket.socket, socket.socket], message: Any, kind: Any) -> Any:
    """A message after its way through the socket."""
    sender = threading.Thread(target=send, args=(pair[0], message))
    sender.start()
    received, fds = receive(pair[1], kind)
    sender.join()
    assert fds == []
    return received


def test_requests_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    for message in (SETUP, Memory(size=4096), save_message()):
        assert over(pair, message, Request) == message


def test_replies_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    for message in (Ready(), Done(entry=ENTRY, seconds={"write": 1.5}, report=None), Failed.of(SaveFailed("why"))):
        assert over(pair, message, Reply) == message


@pytest.mark.parametrize(
    "value",
    [2**53, -(2**53), 1e308, -0.0, math.inf, "\u0000", "é\U0001f600", "x" * 1_000_000, [[]] * 1000, {"": None}, True],
)
def test_state_of_any_kind_survives_exactly(pair: tuple[socket.socket, socket.socket], value: Any) -> None:
    got = over(pair, save_message(state={"m": {"v": value}}), Request).state["m"]["v"]
    assert got == value and type(got) is type(value)
    assert not isinstance(value, float) or math.copysign(1, got) == math.copysign(1, value)


def test_what_says_the_state_survives_a_generator_of_128_bits(pair: tuple[socket.socket, socket.socket]) -> None:
    """MessagePack has integers of 64 bits; the typed state writes larger ones as text."""
    import numpy as np

    from onward.format.typedstate import encode

    state = encode(np.random.PCG64(3).state, ("rng",), lambda value, path: None)
    assert over(pair, save_message(state={"rng": state}), Request).state["rng"] == state


def test_a_text_that_is_no_unicode_survives(pair: tuple[socket.socket, socket.socket]) -> None:
    """A file name from a foreign system, kept in a program's state, holds a lone surrogate."""
    from onward.format.typedstate import encode

    state = encode({"name": "caf\udce9"}, ("m",), lambda value, path: None)
    assert over(pair, save_message(state={"m": state}), Request).state["m"] == state


def test_megabytes_of_assets_go_through_a_small_socket_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    message = save_message(assets={"big": os.urandom(5_000_000)})
    assert over(pair, message, Request) == message


def test_the_message_carries_all_of_the_context() -> None:
    context = SaveContext(
        description=Description(tokenizer="t"), training_started="then", birth_class="requested", reason="why",
        parent=4, assets={"a": b"b"},
    )  # fmt: skip
    message = save_message(
        **{name: getattr(context, name) for name in
           ("description", "training_started", "birth_class", "reason", "parent")}, assets=dict(context.assets)
    )  # fmt: skip
    assert message.context() == context


def test_a_descriptor_travels_beside_its_message(pair: tuple[socket.socket, socket.socket]) -> None:
    fd = os.memfd_create("test")
    os.pwrite(fd, b"shared", 0)
    send(pair[0], Memory(size=6), (fd,))
    os.close(fd)
    message, fds = receive(pair[1], Request)
    assert message == Memory(size=6) and len(fds) == 1
    assert os.pread(fds[0], 6, 0) == b"shared"
    os.close(fds[0])


@pytest.mark.parametrize("rest", [b"", b"\x00" * 3, b"half", b"not msgpack at all.............."])
def test_a_descriptor_beside_a_bad_message_is_closed(pair: tuple[socket.socket, socket.socket], rest: bytes) -> None:
    before = open_files()
    fd = os.memfd_create("test")
    socket.send_fds(pair[0], [(31).to_bytes(8, "big")], [fd])
    os.close(fd)
    pair[0].sendall(rest)
    pair[0].close()
    with pytest.raises((EOFError, msgspec.MsgspecError)):
        receive(pair[1], Request)
    assert open_files() == before - 1, "only the closed end of the pair is gone"


def test_a_message_that_is_cut_off_anywhere_is_no_message() -> None:
    sink, source = socket.socketpair()
    with sink, source:
        send(sink, save_message())
        whole = source.recv(1 << 20)
    for cut in (*range(40), *range(40, len(whole), 97)):
        one, other = socket.socketpair()
        with other:
            one.sendall(whole[:cut])
            one.close()
            with pytest.raises(EOFError):
                receive(other, Request)


def test_a_reset_in_the_middle_of_a_message_is_the_same_as_its_end() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    one.sendall((100).to_bytes(8, "big") + b"xx")
    one.close()
    with other, server, pytest.raises(EOFError):
        receive(other, Request)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa5Setup", msgspec.msgpack.encode({"type": "Nothing"})]
)
def test_garbage_of_a_plausible_length_is_refused(pair: tuple[socket.socket, socket.socket], body: bytes) -> None:
    pair[0].sendall(len(body).to_bytes(8, "big") + body)
    with pytest.raises(msgspec.MsgspecError):
        receive(pair[1], Request)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**46])
def test_an_absurd_length_allocates_nothing(pair: tuple[socket.socket, socket.socket], length: int) -> None:
    pair[0].sendall(length.to_bytes(8, "big"))
    pair[0].close()
    with pytest.raises((EOFError, MemoryError, OverflowError)):
        receive(pair[1], Request)


def test_a_side_that_says_nothing_is_waited_for_no_longer_than_asked(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive(pair[1], Request)


ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnwardError)]


@pytest.mark.parametrize("kind", [kind for kind in ALL if "code" in vars(kind) and kind is not OnwardError])
def test_every_error_comes_back_as_itself(kind: type[OnwardError]) -> None:
    error = kind("step 3: the reason", next_step="do this")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(Failed.of(error)), type=Failed).error()
    assert (type(back), back.message, back.next_step) == (kind, "step 3: the reason", "do this")


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device"), KeyError("k"), ValueError()])
def test_an_error_of_another_kind_comes_back_as_a_failed_save_that_names_it(error: Exception) -> None:
    back = Failed.of(error).error()
    assert type(back) is SaveFailed and type(error).__name__ in back.message


def test_an_error_of_a_newer_kind_is_still_a_failed_save() -> None:
    assert type(Failed(code="from-the-future", message="m", next_step="").error()) is SaveFailed
