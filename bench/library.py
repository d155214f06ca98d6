"""What is asked of every library that is compared."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch

from bench.state import Trainee


class Rival(ABC):
    """A library that saves and loads the state.

    Attributes:
        name: In the table.
        syncs: Which of its bytes are durable when it says that they are saved.
        hashes: What it could later check the bytes against.
        setting: How it is used.
        background: Whether it goes on while training does.
    """

    name: ClassVar[str]
    syncs: ClassVar[str] = "no"
    hashes: ClassVar[str] = "none"
    setting: ClassVar[str] = ""
    background: ClassVar[bool] = False

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee

    @abstractmethod
    def save(self, path: Path) -> None:
        """Saves; what may go on in the background goes on after this returns."""

    def wait(self) -> None:  # noqa: B027  (most are over when save returns)
        """Returns when the save is over."""

    @property
    def busy(self) -> bool:
        """Whether a save goes on in the background."""
        return False

    def update(self) -> AbstractContextManager[object]:
        """What must be held while the state changes."""
        return nullcontext()

    @abstractmethod
    def load(self, path: Path) -> None:
        """Loads into the live state."""

    def close(self) -> None:  # noqa: B027  (most start nothing)
        """Ends what it started."""


def sync(path: Path) -> None:
    """Makes a file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Removes what a rival wrote, and lets the filesystem settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def into(found: Any, live: Any) -> None:
    """Copies loaded values into the live tensors."""
    with torch.no_grad():
        if isinstance(live, torch.Tensor):
            live.copy_(found)
        elif isinstance(live, dict):
            for key, value in live.items():
                into(found[key], value)
