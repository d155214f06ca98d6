"""All that the story saw, as plain records: what is claimed and what the page shows is derived from this alone."""

from __future__ import annotations

from dataclasses import dataclass

from onward.demo.checks import Comparison, Flip, Sums
from onward.demo.crash import Kill
from onward.demo.process import Life
from onward.records import CheckpointInfo, VerifyReport


@dataclass(frozen=True)
class Evidence:
    """What was seen, act by act.

    Attributes:
        started: When the story began, in seconds since the epoch.
        reference: The run that was never interrupted.
        first: The same run, checkpointing, until it was killed; ``second`` is it after the restart.
        kill: Where the kill hit.
        newest: The newest commit when the first life ended.
        commits: All commits of the run at the end, oldest first.
        before_kill: The steps of the first life against the reference.
        after_kill: Every later step and the final state against the reference.
        control: A second life without its random state, and ``control_comparison`` of it.
        damaged: The commit a copy of which was damaged, by ``flip``; ``healthy`` is the one before it.
        verified: What verification of the damaged copy said.
        fallback: The process that resumed from the damaged copy, and ``fallback_comparison`` of it.
        sums: What coreutils said of the newest checkpoint.
    """

    started: float
    reference: Life
    first: Life
    second: Life
    kill: Kill
    newest: CheckpointInfo
    commits: tuple[CheckpointInfo, ...]
    before_kill: Comparison
    after_kill: Comparison
    control: Life
    control_comparison: Comparison
    flip: Flip
    damaged: CheckpointInfo
    healthy: CheckpointInfo
    verified: VerifyReport
    fallback: Life
    fallback_comparison: Comparison
    sums: Sums
