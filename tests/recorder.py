"""A live state that remembers what was loaded into it, and a resume around it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from onward.catalog.incarnation import Incarnation
from onward.records import Description
from onward.restore.resume import Start, resume
from onward.restore.settings import ResumeSettings
from onward.state import tensors as exact
from onward.state.component import Scope
from onward.storage.base import Store
from support import COMPONENT, RUN, SHAPES, TIES, start

LIVE = Description(model_config={"n_heads": 2})
SETTINGS = ResumeSettings(threads=1)


@dataclass
class Recorder:
    """The live side of the test component: untouched until ``load``, which keeps the bytes of every tensor."""

    name: str = COMPONENT
    kind: str = "object"
    scope: Scope = "global"
    order: int = 300
    loaded: dict[str, Any] | None = None
    checked: list[str] = field(default_factory=list)

    def state(self) -> object:
        return {}

    def counters(self) -> dict[str, int | float]:
        return {}

    def check(self, saved: object) -> list[str]:
        """Names and shapes, as a real component looks at them before anything live changes."""
        if not isinstance(saved, dict):
            return [f"{self.name} is no table"]
        if self.name != COMPONENT:
            return []
        want = {name: SHAPES[TIES.get(name, name)] for name in (*SHAPES, *TIES)}
        have = {n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}
        self.checked = sorted(have)
        return [
            name
            for name, (dtype, shape) in want.items()
            if name not in have or tuple(have[name].shape) != shape or have[name].dtype != exact.torch_dtype(dtype)
        ]

    def load(self, saved: object) -> None:
        assert isinstance(saved, dict)
        self.loaded = saved

    def bytes(self) -> dict[str, bytes]:
        """Name → bytes of every tensor that was loaded."""
        found = self.loaded or {}
        return {n: bytes(exact.as_bytes(t)) for n, t in found.items() if isinstance(t, torch.Tensor)}


def load_into(incarnation: Incarnation, checkpoint: str = "newest", **options: Any) -> tuple[Start, Recorder]:
    """Resumes an incarnation that was taken over."""
    part, own = Recorder(), Recorder(name="own", scope="rank")
    begun = resume(incarnation, [part, own], LIVE, SETTINGS, checkpoint=checkpoint, **options)
    return begun, part


def resumed(store: Store, checkpoint: str = "newest", *, run: str = RUN, **options: Any) -> tuple[Start, Recorder]:
    """Takes a run over, loads from it, and gives it back."""
    incarnation = start(store, run, lease_seconds=0.05)
    try:
        return load_into(incarnation, checkpoint, **options)
    finally:
        incarnation.end()


def reasons(begun: Start) -> Collection[str]:
    """``folder/file`` of everything that was rejected, for assertions."""
    return [f"{r.folder}/{finding.file}" for r in begun.rejected for finding in r.reasons]
