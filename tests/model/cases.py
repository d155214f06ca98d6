"""Which rule prevents what: the smallest configurations in which the search finds out.

The numbers in brackets are those of the counterexamples that shaped the protocol:
[1] commit into nothing  [2] fork  [3] create after a removal  [4] name used again  [5] successor's folder touched
[6] folder made again  [7] effect behind an error  [8] entry not durable when believed  [9] nor when others are deleted
[10] empty entry  [11] stale LIST  [12] superseded writer deletes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .checker import Result, explore
from .invariants import ALL, DISCIPLINE, HARM, Invariants
from .objects import Objects
from .posix import Posix
from .protocol import Protocol
from .rules import Config
from .world import State, initial

WORLDS: dict[str, Callable[[Config], Protocol]] = {"posix": Posix, "objects": Objects}
MAX_STATES = 2_000_000


def invariants(watch: str) -> Invariants:
    """`all`, `harm`, `discipline`, or one by its name."""
    return {"all": ALL, "harm": HARM, "discipline": DISCIPLINE}.get(watch) or {watch: ALL[watch]}


def search(world: str, config: Config, watch: str = "all", extra: Invariants | None = None) -> Result:
    watched = {**invariants(watch), **(extra or {})}
    return explore(initial(config), WORLDS[world](config).successors, watched, MAX_STATES)


def age_is_told_by_sequence(state: State) -> bool:
    """With my open entry m, another's attempt of sequence s is that of a younger incarnation iff s > m."""
    opened = {entry.owner: entry.n for entry in state.ledger if entry.kind == "open"}
    return all(
        (found.seq > writer.fence) == (found.owner == i or opened.get(found.owner, 0) > writer.fence)
        for i, writer in enumerate(state.writers)
        if writer.fence
        for found in state.attempts
    )


@dataclass(frozen=True)
class Break:
    """Without `rule` the first broken invariant among those watched is `broken`."""

    world: str
    rule: str
    broken: str
    config: Config
    watch: str = "harm"

    def __str__(self) -> str:
        return f"{self.world}-{self.rule}-{self.broken}"

    def search(self) -> Result:
        return search(self.world, replace(self.config, rules=self.config.rules.without(self.rule)), self.watch)


_TWO = Config()
_CUT = Config(writers=1, cuts=1)
_CUT2 = Config(cuts=1)
_UNSURE = Config(writers=1, ambiguous=True)
_FAILS = Config(writers=1, saves=2, failed_saves=1, cuts=1)
_OLD = Config(history="uncommitted")
_DELETES = Config(history="two", saves=0, deletes=1)
_DELETES_UNSURE = Config(deletes=1, ambiguous=True)
_DELETES_READ = Config(history="one", writers=1, deletes=1, reader=True)


def _both(rule: str, broken: str, config: Config, watch: str = "harm") -> Iterator[Break]:
    for world in WORLDS:
        yield Break(world, rule, broken, config, watch)


BREAKS: tuple[Break, ...] = (
    # Taking over
    *_both("fence_before_resume", "live_commit_incomplete", _TWO),  # [1]
    *_both("fence_before_resume", "fork", _TWO, "fork"),  # [2]
    *_both("append_at_own_last_plus_one", "live_commit_incomplete", _TWO),
    *_both("append_at_own_last_plus_one", "fork", _TWO, "fork"),  # [2]
    *_both("append_at_own_last_plus_one", "superseded_deletes", _DELETES, "all"),  # [12]
    Break("objects", "recovery_gets_every_number", "live_commit_incomplete", Config(stale=True)),  # [11]
    Break("objects", "recovery_gets_every_number", "fork", Config(stale=True), "fork"),
    # Names and folders
    *_both("nothing_removed_from_ledger", "live_commit_incomplete", _DELETES_UNSURE),  # [3]
    *_both("nothing_removed_from_ledger", "number_used_twice", replace(_DELETES, saves=1), "number_used_twice"),
    *_both("names_carry_sequence", "live_commit_incomplete", _OLD),  # [4]
    *_both("names_carry_sequence", "name_used_twice", _OLD, "all"),
    *_both("touch_only_older_attempts", "live_commit_incomplete", _TWO),  # [5]
    *_both("touch_only_older_attempts", "younger_touched", _TWO, "all"),
    Break("posix", "attempt_folder_never_recreated", "name_used_twice", _TWO, "all"),  # [6]
    Break("posix", "failed_name_is_voided", "name_used_twice", _FAILS, "all"),
    # Committing
    Break("posix", "entry_via_temp_and_link", "empty_entry_seen", _TWO),  # [10]
    *_both("read_back_on_error", "live_commit_incomplete", _UNSURE),  # [7]
    Break("objects", "give_up_only_after_void", "live_commit_incomplete", _UNSURE),  # [7]
    Break("objects", "every_object_read_back", "live_commit_incomplete", _UNSURE),
    # Deleting and reading
    *_both("delete_decision_is_an_entry", "superseded_deletes", _DELETES, "all"),  # [12]
    *_both("look_again_when_missing", "false_damage", _DELETES_READ),
    Break("objects", "reader_gets_when_missing", "false_damage", replace(_DELETES_READ, stale=True)),
    # Syncs
    Break("posix", "fsync_first_listing", "ledger_hole", _CUT2, "all"),
    Break("posix", "fsync_taken_number", "ledger_hole", _CUT2, "all"),
    Break("posix", "fsync_ledger_before_believing", "believed_vanished", replace(_CUT, reader=True)),  # [8]
    Break("posix", "fsync_shards", "live_commit_incomplete", _CUT),
    Break("posix", "failed_fsync_not_retried", "live_commit_incomplete", replace(_CUT, failed_saves=1)),
    Break("posix", "fsync_manifest", "live_commit_incomplete", _CUT),
    Break("posix", "fsync_attempt_folder", "live_commit_incomplete", _CUT),
    Break("posix", "fsync_checkpoints_after_rename", "live_commit_incomplete", _CUT),
    Break("posix", "fsync_entry", "acknowledged_lost", _CUT),
    Break("posix", "fsync_entry", "empty_entry_seen", _CUT2),
    Break("posix", "fsync_ledger_after_commit", "acknowledged_lost", _CUT),
    Break("posix", "fsync_ledger_after_delete", "live_commit_incomplete", replace(_DELETES, writers=1, cuts=1)),
    Break("posix", "fsync_ledger_after_void", "ledger_hole", _FAILS, "all"),
)


@dataclass(frozen=True)
class Nothing:
    """Alone, removing `rule` breaks nothing: `cover` does its work. Without both, `broken` breaks."""

    world: str
    rule: str
    cover: tuple[str, ...]
    broken: str
    config: Config
    why: str

    def __str__(self) -> str:
        return f"{self.world}-{self.rule}"

    def search(self, *removed: str) -> Result:
        return search(self.world, replace(self.config, rules=self.config.rules.without(*removed)), self.broken)


_SYNC = ("fsync_fence", "fsync_ledger_before_resuming")
_ONE_SYNC = "one sync between creating `open` and the first folder is enough: of its own create, or of the next listing"
_OLD_READ = replace(_OLD, reader=True)
_DELETES_CUT = Config(history="one", deletes=1, cuts=1)

NOTHING: tuple[Nothing, ...] = (
    Nothing("posix", _SYNC[0], _SYNC[1:], "name_used_twice", _CUT2, _ONE_SYNC),
    Nothing("posix", _SYNC[1], _SYNC[:1], "name_used_twice", _CUT2, _ONE_SYNC),
    Nothing(
        "posix",
        "fsync_before_choosing_victims",
        ("fsync_first_listing", "fsync_taken_number", *_SYNC),
        "nothing_left",
        _DELETES_CUT,
        "who deletes has taken over, and synced then; its own commits are synced too",  # [9]
    ),
    *(
        Nothing(
            world,
            "losers_delete_nothing",
            ("names_carry_sequence",),
            "live_commit_incomplete",
            _TWO,
            "who lost a number knows that its own commit can never be there, and its names are its own",
        )
        for world in WORLDS
    ),
    *(
        Nothing(
            world,
            "reader_checks_digests",
            ("names_carry_sequence",),
            "reader_mix",
            _OLD_READ,
            "under a name that is used once there is never anything else (bit rot is not in the model)",
        )
        for world in WORLDS
    ),
    *(
        Nothing(
            world,
            "resume_at_or_below_fence",
            (),
            "",
            _TWO,
            "what a superseded writer resumes from does not matter: it can commit no more",
        )
        for world in WORLDS
    ),
)

# Broken, these rules hurt a discipline, and no harm came of it in any configuration that was searched.
DISCIPLINE_ONLY: tuple[tuple[str, str], ...] = (
    ("posix", "attempt_folder_never_recreated"),  # with the fence, who finds its folder gone cannot commit any more
    ("posix", "failed_name_is_voided"),  # one number has one commit, whatever was tried under it before
    ("posix", "delete_decision_is_an_entry"),
    ("objects", "delete_decision_is_an_entry"),
    ("posix", "fsync_first_listing"),  # holes: a journal that keeps the order of creates never leaves one
    ("posix", "fsync_taken_number"),
    ("posix", "fsync_ledger_after_void"),
)

_ONLY_OBJECTS = {
    "recovery_gets_every_number",
    "give_up_only_after_void",
    "every_object_read_back",
    "reader_gets_when_missing",
}
_ONLY_POSIX = {"attempt_folder_never_recreated", "entry_via_temp_and_link", "failed_name_is_voided"}


def applies(world: str, rule: str) -> bool:
    if world == "posix":
        return rule not in _ONLY_OBJECTS
    return rule not in _ONLY_POSIX and "fsync" not in rule


# What is searched to the end, first with all rules on, then with each of the rules that prevent nothing removed.
SMALL: dict[str, tuple[Config, ...]] = {
    "posix": (
        Config(cuts=1, reader=True),
        Config(ambiguous=True, failed_saves=1),
        Config(history="uncommitted", cuts=2),
        Config(history="two", saves=0, deletes=1, cuts=1, reader=True),
    ),
    "objects": (
        Config(reader=True, ambiguous=True),
        Config(history="uncommitted", ambiguous=True, stale=True),
        Config(history="two", saves=0, deletes=1, reader=True, stale=True),
    ),
}
MEDIUM: dict[str, tuple[Config, ...]] = {
    "posix": (
        Config(cuts=1, reader=True, ambiguous=True),
        Config(saves=2, cuts=1),
        Config(history="one", deletes=1, cuts=1, reader=True),
    ),
    "objects": (
        Config(reader=True, ambiguous=True, stale=True),
        Config(saves=2, deletes=1, stale=True),
        Config(history="one", deletes=1, reader=True, stale=True),
    ),
}
LARGE: dict[str, tuple[Config, ...]] = {
    "posix": (
        Config(history="one", deletes=1, cuts=1, reader=True, ambiguous=True),
        Config(saves=2, failed_saves=1, cuts=2, reader=True, ambiguous=True),
        Config(saves=2, deletes=1, cuts=2, reader=True),
        Config(writers=3, cuts=1, reader=True),
        Config(writers=3, cuts=1, ambiguous=True),
        Config(writers=3, failed_saves=1),
        Config(writers=3, history="one", deletes=1, cuts=1),
    ),
    "objects": (
        Config(history="one", deletes=1, reader=True, ambiguous=True, stale=True),
        Config(saves=2, reader=True, ambiguous=True, stale=True),
        Config(writers=3, reader=True, stale=True),
        Config(writers=3, ambiguous=True, stale=True),
        Config(writers=3, history="one", deletes=1, stale=True),
    ),
}
