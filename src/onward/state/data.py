"""Where the training data stands: any resumable loader as a component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from onward.errors import ConfigurationError, IncompatibleState
from onward.state.component import Scope
from onward.state.loader import ResumableLoader

__all__ = ["DataComponent", "ResumableLoader"]


class DataComponent:
    """The data position of one rank as a component: anything with ``state_dict`` and ``load_state_dict``.

    A torchdata ``StatefulDataLoader`` is restored exactly as far as it goes: samples and order, but not the random
    draws that its workers' samples make. Its state is taken from the loader, at any time, an iterator live or not.
    """

    kind: str = "data"
    scope: Scope = "rank"
    order: int = 400

    def __init__(self, name: str, loader: Any) -> None:
        if not callable(getattr(loader, "state_dict", None)) or not callable(getattr(loader, "load_state_dict", None)):
            raise ConfigurationError(
                f"{name}: a {type(loader).__name__} has no state_dict, its position cannot be saved",
                next_step="use onward's ResumableLoader (map-style datasets) or torchdata's StatefulDataLoader instead",
            )
        self.name = name
        self._loader = loader

    def state(self) -> dict[str, object]:
        """The loader's class and state."""
        return {"class": _class_name(self._loader), "state": self._loader.state_dict()}

    def counters(self) -> dict[str, int | float]:
        """``epoch`` and ``samples_total``, where the loader knows them."""
        position = self.position() or {}
        return {key: position[key] for key in ("epoch", "samples_total") if key in position}

    def position(self) -> dict[str, int] | None:
        """The loader's position in plain numbers, for people; None where it has none."""
        # By its type: a user's loader may have a method of that name that means something else.
        return self._loader.position() if isinstance(self._loader, ResumableLoader) else None

    def progress(self) -> object:
        """Something that changes with every batch that is handed out, and is cheap to ask for."""
        if (position := self.position()) is not None:
            return position
        return getattr(getattr(self._loader, "_iterator", None), "_num_yielded", None)  # torchdata's own count

    def check(self, saved: object) -> list[str]:
        """Why this loader could not go on from ``saved``."""
        if not isinstance(saved, Mapping) or not {"class", "state"} <= saved.keys():
            return [f"{self.name}: the saved state is not that of a data loader"]
        if saved["class"] != (live := _class_name(self._loader)):
            return [f"{self.name}: saved from {saved['class']}, the live loader is {live}"]
        if isinstance(self._loader, ResumableLoader):
            found = self._loader.problems(saved["state"])
        else:
            found = _worker_problems(self._loader, saved["state"])
        return [f"{self.name}: {problem}" for problem in found]

    def load(self, saved: object) -> None:
        """Goes to the saved position."""
        if problems := self.check(saved):
            raise IncompatibleState("; ".join(problems))
        assert isinstance(saved, Mapping)
        loader: Any = self._loader
        loader.load_state_dict(saved["state"])
        if isinstance(self._loader, DataLoader):
            # A StatefulDataLoader makes its iterator when asked, and draws a seed from torch's global generator for
            # it. Asked now, it draws before random state is restored and not after, which would shift every later
            # dropout mask; it also raises here if it cannot go on.
            loader.state_dict()


def _worker_problems(loader: Any, state: Any) -> list[str]:
    """A StatefulDataLoader takes the state of another number of workers, and loses samples without a word."""
    of_torchdata = any(base.__module__.startswith("torchdata.") for base in type(loader).__mro__)
    if not of_torchdata or not isinstance(state, Mapping):
        return []
    saved = len(state.get("_snapshot", {}).get("_worker_snapshots", ()))
    if saved != loader.num_workers:
        return [f"the loader had {saved} workers when saved, it has {loader.num_workers} now"]
    return []


def _class_name(loader: object) -> str:
    return f"{type(loader).__module__}.{type(loader).__qualname__}"
