"""One tree of errors, grouped by what the one who catches them does next.

Every error has a stable ``code`` (never renamed once released), the ``exit_code`` with which the command line
ends, and ``next_step``: one sentence that says what to do now. ``cli/main.py`` is the only place that exits.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_FINDING = 3
EXIT_NOTHING_RECOVERABLE = 4
EXIT_BUSY = 5
EXIT_NO_CAPACITY = 69
EXIT_REQUEUE = 75
EXIT_CONFIGURATION = 78
EXIT_DO_NOT_RESTART = 93


class OnwardError(Exception):
    """The root of the tree; never raised itself.

    Args:
        message: What went wrong, and where (file, tensor, rank, tier) in one sentence.
        next_step: What to do now; defaults to the class's own advice.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = EXIT_ERROR
    advice: ClassVar[str] = ""

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = self.advice if next_step is None else next_step

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}" + (f"\n  next: {self.next_step}" if self.next_step else "")


# --- The configuration or the call is wrong: change it; a retry does not help ---------------------------------


class ConfigurationError(OnwardError):
    """onward.toml, an environment variable or an argument is wrong."""

    code = "configuration"
    exit_code = EXIT_CONFIGURATION
    advice = "correct the named setting"


class StoreMissing(ConfigurationError):
    """There is no store at the place: not mounted, or never initialised. Never taken for a first start."""

    code = "store-missing"
    advice = "mount the filesystem, correct the URL, or create the store with `onward init URL`"


class StoreUnsuitable(ConfigurationError):
    """The probe found that the place cannot keep the promises of a home."""

    code = "store-unsuitable"
    advice = "choose another place for the home; this one may hold replicas only"


class InvalidName(ConfigurationError):
    """A run, component or label name that cannot be used."""

    code = "invalid-name"
    advice = "use letters, digits, '.', '_' and '-', beginning with a letter or a digit"


class UnsupportedState(ConfigurationError):
    """The state holds something that cannot be saved exactly; names its path."""

    code = "unsupported-state"
    advice = "convert the named value to plain data or tensors, or leave it out of the component's state"


class IncompleteState(ConfigurationError):
    """A component, key or half of an optimizer state is missing."""

    code = "incomplete-state"
    advice = "register the same components as when the checkpoint was saved, or waive the named one"


class MidStep(ConfigurationError):
    """A save was asked for in the middle of a step."""

    code = "mid-step"
    advice = "save at a step boundary: call `ckpt.step(...)`, or `ckpt.request_save()` from a hook"


# --- The checkpoint does not fit this program: change one of the two -----------------------------------------


class IncompatibleState(OnwardError):
    """Keys, shapes, dtypes or counters of the live state and of the checkpoint disagree."""

    code = "incompatible-state"
    exit_code = EXIT_CONFIGURATION
    advice = "build the model and optimizer as they were when the checkpoint was saved"


class IncompatibleConfiguration(OnwardError):
    """The described configuration differs in a field that must match."""

    code = "incompatible-configuration"
    exit_code = EXIT_CONFIGURATION
    advice = "restore the named fields, or relax their policy in [resume.policy]"


class TopologyMismatch(OnwardError):
    """The checkpoint was saved on another number of ranks or layout."""

    code = "topology-mismatch"
    exit_code = EXIT_CONFIGURATION
    advice = "start on the saved topology, or ask for resharding with allow_reshard"


# --- Bytes are not what they were: use another copy or an older checkpoint -----------------------------------


class Damaged(OnwardError):
    """Stored bytes are missing, cut, altered or not of the format."""

    code = "damaged"
    exit_code = EXIT_FINDING
    advice = "use another copy, or the checkpoint before; `onward verify --full` lists every damaged file"


class FormatError(Damaged):
    """A file does not follow the format: hostile, cut, or of another program."""

    code = "format"


class UnknownFormat(OnwardError):
    """A file of a newer format version than this program reads."""

    code = "unknown-format"
    exit_code = EXIT_CONFIGURATION
    advice = "upgrade onward"


class NothingRecoverable(OnwardError):
    """Commits exist or existed, but none can be used. Never answered by starting from step 0."""

    code = "nothing-recoverable"
    exit_code = EXIT_NOTHING_RECOVERABLE
    advice = (
        "look at the reasons above; `onward verify` shows the state of each checkpoint, `onward adopt` takes in a "
        "copied folder; only to begin again from step 0 on purpose, pass allow_fresh_start=True"
    )


# --- Somebody else is at work: wait, or stop -------------------------------------------------------------------


class Busy(OnwardError):
    """Another live process holds the run."""

    code = "busy"
    exit_code = EXIT_BUSY
    advice = "wait for it to end, or end it; its lease is taken over once it is dead"


class Superseded(OnwardError):
    """A newer incarnation of the run has taken over: this one must stop writing, for good."""

    code = "superseded"
    exit_code = EXIT_DO_NOT_RESTART
    advice = "end this process; the newer incarnation goes on with the run"


class DeadlineExceeded(OnwardError):
    """A bounded wait ran out; names who is missing."""

    code = "deadline"
    advice = "look at the named rank or process"


# --- The machine refuses: free something, then try again -------------------------------------------------------


class NoCapacity(OnwardError):
    """Not enough space or memory; says how much is needed and how much is there."""

    code = "no-capacity"
    exit_code = EXIT_NO_CAPACITY
    advice = "free the named amount, or thin old checkpoints"


class StorageError(OnwardError):
    """The store answered with an error (EIO, ENOSPC, a stuck mount)."""

    code = "storage"
    advice = "look at the named file and the system's log; the save is tried again at the next trigger"


class SaveFailed(OnwardError):
    """One or more saves failed; names the step and the cause."""

    code = "save-failed"
    advice = "the step is recorded in attempts/; mend the cause, the next trigger saves again"


class UsageError(OnwardError):
    """A command line that makes no sense; also a misuse of the library's own calls."""

    code = "usage"
    exit_code = EXIT_USAGE
    advice = "see `onward COMMAND --help`, or the docstring of the call"
