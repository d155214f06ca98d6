"""What the trainer and the writer process say to each other, over a socket that both inherit.

A message is 8 bytes of length and MessagePack. The memory file travels as a descriptor beside the message that
announces it. A message that is cut off by the trainer's death is no message: that save was never handed over.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from onward import errors
from onward.errors import OnwardError
from onward.records import CheckpointEntry, ComponentTag, Description, JsonTree, Layout, VerifyReport
from onward.save.captured import Captured, SaveContext, staged
from onward.save.plan import plan

T = TypeVar("T")
_LENGTH = 8
_LARGEST = 1 << 36
_FDS = 4
NOT_A_MESSAGE = (msgspec.MsgspecError, MemoryError, OverflowError, RecursionError)
"""What ``receive`` raises for bytes that are no message: the stream is out of step and must be given up."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Setup(Message, frozen=True, kw_only=True):
    """The first message: where to write, and for which incarnation."""

    store: str
    run: str
    tier: str
    epoch: int
    incarnation: str
    threads: int
    verify_after_save: str


class Memory(Message, frozen=True, kw_only=True):
    """The staging memory from now on; its descriptor comes along."""

    size: int


class Save(Message, frozen=True, kw_only=True):
    """A captured state lies in the memory: save it. The plan follows from layout and threads."""

    step: int
    layout: Layout
    plan_digest: str
    state: dict[str, JsonTree]
    tags: tuple[ComponentTag, ...]
    started: str
    seconds: float
    epoch: int | None
    data_position: JsonTree
    description: Description
    training_started: str
    birth_class: str
    reason: str
    parent: int | None
    assets: dict[str, bytes]

    @classmethod
    def of(cls, captured: Captured, context: SaveContext) -> Save:
        """The message that hands a captured state over."""
        return cls(
            step=captured.step,
            layout=captured.layout,
            plan_digest=captured.plan.digest,
            state=captured.state,
            tags=captured.tags,
            started=captured.started,
            seconds=captured.seconds,
            epoch=captured.epoch,
            data_position=captured.data_position,
            description=context.description,
            training_started=context.training_started,
            birth_class=context.birth_class,
            reason=context.reason,
            parent=context.parent,
            assets=dict(context.assets),
        )

    def captured(self, memory: memoryview, threads: int) -> Captured:
        """The captured state, its bytes in the shared memory.

        Raises:
            SaveFailed: This process would look for the bytes elsewhere than the trainer put them.
        """
        planned = plan(self.layout.tensors, threads=threads)
        if planned.digest != self.plan_digest or planned.arena_bytes > len(memory):
            # As after an upgrade in place: the wrong bytes would be hashed, committed, and even verify.
            raise errors.SaveFailed(
                f"step {self.step}: the writer process lays the state out otherwise than the trainer",
                next_step="restart the job: onward was upgraded, or its files changed, while it ran",
            )
        return Captured(
            step=self.step,
            layout=self.layout,
            plan=planned,
            state=self.state,
            tags=self.tags,
            region=staged(memory),
            started=self.started,
            seconds=self.seconds,
            epoch=self.epoch,
            data_position=self.data_position,
        )

    def context(self) -> SaveContext:
        """What is said about the checkpoint beside its state."""
        return SaveContext(
            description=self.description,
            training_started=self.training_started,
            birth_class=self.birth_class,
            reason=self.reason,
            parent=self.parent,
            assets=self.assets,
        )


class Ready(Message, frozen=True, kw_only=True):
    """The writer has set up and waits for work."""


class Done(Message, frozen=True, kw_only=True):
    """The save is committed and was read back."""

    entry: CheckpointEntry
    seconds: dict[str, float]
    report: VerifyReport | None


class Failed(Message, frozen=True, kw_only=True):
    """The save failed."""

    code: str
    message: str
    next_step: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """The message that tells of an error."""
        if isinstance(error, OnwardError):
            return cls(code=error.code, message=error.message, next_step=error.next_step)
        return cls(code=errors.SaveFailed.code, message=f"{type(error).__name__}: {error}", next_step="")

    def error(self) -> OnwardError:
        """The error, as the trainer raises it."""
        kind = _BY_CODE.get(self.code, errors.SaveFailed)
        return kind(self.message, next_step=self.next_step or None)


Request = Setup | Memory | Save
Reply = Ready | Done | Failed

_BY_CODE: dict[str, type[OnwardError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OnwardError) and "code" in vars(kind)
}


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Sends one message, and descriptors beside it."""
    body = msgspec.msgpack.encode(message)
    head = len(body).to_bytes(_LENGTH, "big")
    if fds:
        sent = socket.send_fds(sock, [head], list(fds))
        head = head[sent:]
    sock.sendall(head)
    sock.sendall(body)


def receive(sock: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """The next message and the descriptors beside it.

    Raises:
        EOFError: The other side is gone, possibly in the middle of a message.
        TimeoutError: Nothing came within the socket's timeout.
    """
    fds: list[int] = []
    try:
        head = b""
        while len(head) < _LENGTH:
            part, more, _, _ = socket.recv_fds(sock, _LENGTH - len(head), _FDS)
            fds.extend(more)
            if not part:
                raise EOFError("the other side is gone")
            head += part
        size = int.from_bytes(head, "big")
        if size > _LARGEST:
            raise OverflowError(f"a message of {size} bytes")
        body = _exactly(sock, size)
        return msgspec.msgpack.decode(body, type=kind), fds
    except BaseException:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)
        raise


def _exactly(sock: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    view = memoryview(body)
    while view:
        try:
            count = sock.recv_into(view)
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error
        if count == 0:
            raise EOFError("the other side is gone in the middle of a message")
        view = view[count:]
    return body
