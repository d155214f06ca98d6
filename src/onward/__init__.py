"""Onward keeps a training run recoverable: it saves the whole state, proves it, and brings the job back.

Importing this package does not import torch: listing, verifying and recovering work on a machine without it. The
names that need torch are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onward import errors
from onward._version import __version__
from onward.catalog.stores import init_store
from onward.config import Config, load_config
from onward.errors import OnwardError
from onward.policy.triggers import TriggerSettings
from onward.restore.settings import ResumeSettings
from onward.save.pipeline import SaveSettings

if TYPE_CHECKING:
    from onward.checkpointer import Checkpointer, StepOutcome
    from onward.restore.resume import Start
    from onward.state.data import ResumableLoader
    from onward.state.describe import describe

_NEEDS_TORCH = {
    "Checkpointer": "onward.checkpointer",
    "ResumableLoader": "onward.state.data",
    "Start": "onward.restore.resume",
    "StepOutcome": "onward.checkpointer",
    "describe": "onward.state.describe",
}

__all__ = [
    "Checkpointer",
    "Config",
    "OnwardError",
    "ResumableLoader",
    "ResumeSettings",
    "SaveSettings",
    "Start",
    "StepOutcome",
    "TriggerSettings",
    "__version__",
    "describe",
    "errors",
    "init_store",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'onward' has no attribute {name!r}")
