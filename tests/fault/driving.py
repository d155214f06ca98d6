"""A run with a writer process that a test drives step by step, and that knows when a save was handed over."""

from __future__ import annotations

import select
import socket
from typing import Any

import pytest

import onward
from onward.save import remote
from onward.save.wire import Save

from .writers import State, stop, wait_for

HANDED: list[int] = []
"""The steps whose hand-over has ended."""


@pytest.fixture(autouse=True)
def handing(monkeypatch: pytest.MonkeyPatch) -> None:
    send = remote.send

    def note(sock: Any, message: Any, fds: tuple[int, ...] = ()) -> None:
        send(sock, message, fds)
        if isinstance(message, Save):
            HANDED.append(message.step)

    monkeypatch.setattr(remote, "send", note)


class Run:
    """A run with a writer process, driven by hand; a save at every step."""

    def __init__(self, ckpt: onward.Checkpointer, state: State) -> None:
        self.ckpt, self.state, self.at = ckpt, state, 0
        HANDED.clear()

    @property
    def pid(self) -> int:
        assert self.ckpt.writer_pid is not None
        return self.ckpt.writer_pid

    def step_into(self, stopped: int) -> None:
        """A step whose save was handed over to a writer that stands still."""
        writer: Any = self.ckpt._saver._writer
        peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
        if not writer._ready and select.select([writer._socket], [], [], 30)[0]:
            wait_for(lambda: len(writer._socket.recv(64, peek)) > 8, "the writer says that it is ready")
        stop(stopped)
        self.step()
        wait_for(lambda: self.at in HANDED, "the hand-over")

    def step(self, *, wait: bool = False) -> onward.StepOutcome:
        self.state.go_to(self.at + 1)
        outcome = self.ckpt.step(self.at)
        self.at += 1
        if wait:
            self.ckpt.wait()
        return outcome
