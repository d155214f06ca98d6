"""How a resume decides; without torch, so that the command line can read a configuration anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onward.errors import ConfigurationError
from onward.policy.compatibility import Policy, check_policies

Mode = Literal["strict", "warm-start"]
DEFAULT_THREADS = 4


@dataclass(frozen=True)
class ResumeSettings:
    """How a resume decides.

    Attributes:
        policy: Field pattern → ``must``, ``warn`` or ``ignore``; see ``policy/compatibility.py`` for the defaults.
        waive: Components that may be missing, on either side.
        threads: Files that are read at once.
    """

    policy: Mapping[str, str] = field(default_factory=dict)
    waive: tuple[str, ...] = ()
    threads: int = DEFAULT_THREADS

    def __post_init__(self) -> None:
        check_policies(self.policy)
        if self.threads < 1:
            raise ConfigurationError(f"resume.threads is {self.threads}; at least one thread must read")

    def policies(self) -> dict[str, Policy]:
        """The user's policies, checked."""
        return check_policies(self.policy)
