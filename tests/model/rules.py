"""The rules of the protocol, each a switch; and what a model is given to play with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Rules:
    """All on: the protocol. A rule switched off makes the writers really behave as if it had never been written."""

    # Taking over
    fence_before_resume: bool = True  # `open` first; only then look for a resume point, clean, or write
    resume_at_or_below_fence: bool = True  # entries above one's own `open` are neither resumed from nor acted on
    append_at_own_last_plus_one: bool = True  # off: at the highest number in the ledger + 1
    recovery_gets_every_number: bool = True  # object store; off: recovery believes LIST
    # Names and folders
    nothing_removed_from_ledger: bool = True  # off: a finished deletion tidies away its two entries
    names_carry_sequence: bool = True  # off: a folder is named by its step alone
    touch_only_older_attempts: bool = True  # off: recovery touches every attempt that no entry names
    attempt_folder_never_recreated: bool = True  # off: files are written with makedirs(exist_ok=True)
    # Committing
    entry_via_temp_and_link: bool = True  # off: exclusive creation, written afterwards
    read_back_on_error: bool = True  # off: an error from the create is taken for a failure
    give_up_only_after_void: bool = True  # object store; off: "absent" is enough to give up
    losers_delete_nothing: bool = True  # off: who finds itself superseded clears its own files away
    failed_name_is_voided: bool = True  # off: a save that failed after its rename leaves its number to the next one
    every_object_read_back: bool = True  # object store; off: an upload that answered is believed
    # Deleting
    delete_decision_is_an_entry: bool = True  # off: a tombstone beside the ledger, which no successor can refuse
    # Reading
    look_again_when_missing: bool = True  # off: a file that is missing is called damage at once
    reader_gets_when_missing: bool = True  # object store; off: the second look believes LIST
    reader_checks_digests: bool = True  # off: a reader takes whatever it finds under the name
    # Syncs, each named for the failure it is there to prevent
    fsync_first_listing: bool = True  # before choosing a number for `open`
    fsync_taken_number: bool = True  # before walking up past a number that turned out to be taken
    fsync_fence: bool = True  # after creating `open`
    fsync_ledger_before_resuming: bool = True  # a writer, after listing, before it resumes from what it saw
    fsync_ledger_before_believing: bool = True  # a reader, after listing, before it reads what it saw
    fsync_before_choosing_victims: bool = True  # after listing, before choosing what to delete
    fsync_shards: bool = True
    failed_fsync_not_retried: bool = True  # off: a second fsync of the same file, which answers "ok", is believed
    fsync_manifest: bool = True
    fsync_attempt_folder: bool = True  # the names of the files inside it
    fsync_checkpoints_after_rename: bool = True
    fsync_entry: bool = True  # the content of an entry, before it gets its name
    fsync_ledger_after_commit: bool = True
    fsync_ledger_after_delete: bool = True
    fsync_ledger_after_void: bool = True

    def without(self, *names: str) -> Rules:
        """The same protocol with these rules removed."""
        return replace(self, **dict.fromkeys(names, False))


RULE_NAMES: tuple[str, ...] = tuple(field.name for field in fields(Rules))


@dataclass(frozen=True)
class Config:
    """How much is allowed to happen. Small numbers: traces are short, and every order of them is tried."""

    rules: Rules = Rules()
    history: str = "empty"  # what dead incarnations left behind: see `world.HISTORIES`
    writers: int = 2
    saves: int = 1  # by each writer
    deletes: int = 0  # by each writer
    failed_saves: int = 0  # by each writer: saves that fail on their own, before or after the rename
    reader: bool = False
    cuts: int = 0  # power cuts; on one, every writer and reader that runs is dead
    ambiguous: bool = False  # a create may report an error, whether or not it took effect
    stale: bool = False  # object store: LIST may answer as of any earlier moment
