"""Whether there is room, decided before anything is written."""

from __future__ import annotations

from onward.errors import NoCapacity

METADATA_BYTES = 16 * 1024 * 1024
"""Room for indexes, records, manifests and receipts beside the tensors."""
SAFETY = 1.02
"""Blocks, directories and journals of the filesystem itself."""
MEMORY_MARGIN = 256 * 1024 * 1024
"""Memory that a save must leave for everything else."""


def human(count: int) -> str:
    """Bytes as a person reads them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.95 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def require_space(payload: int, free: int | None, place: str) -> None:
    """Refuses a save that the tier cannot hold.

    Args:
        payload: Bytes of the captured state.
        free: Free bytes in the tier; None when it cannot say.
        place: The tier, for the message.

    Raises:
        NoCapacity: With both numbers.
    """
    need = int(payload * SAFETY) + METADATA_BYTES
    if free is not None and free < need:
        raise NoCapacity(
            f"{place} has {human(free)} free; this checkpoint needs {human(need)}, so {human(need - free)} are missing"
        )


def require_memory(wanted: int, available: int | None, limit_from: str) -> None:
    """Refuses a capture that would call the OOM killer.

    Args:
        wanted: Bytes of staging memory still to be taken; memory already held does not count.
        available: Bytes that can be had; None when the machine does not say.
        limit_from: Which limit that is (MemAvailable, cgroup), for the message.

    Raises:
        NoCapacity: With both numbers.
    """
    if wanted > 0 and available is not None and available < wanted + MEMORY_MARGIN:
        raise NoCapacity(
            f"capturing the state needs {human(wanted)} of memory and a margin of {human(MEMORY_MARGIN)}; "
            f"{limit_from} leaves {human(available)}",
            next_step="give the job more memory, or free some before the save",
        )


SMALLEST_WINDOW = 16 * 1024 * 1024
LARGEST_WINDOW = 256 * 1024 * 1024


def window_bytes(available: int | None, limit_from: str) -> int:
    """How many bytes may be copied at a time when there is no room for a full copy.

    Args:
        available: Bytes that can be had; None when the machine does not say.
        limit_from: Which limit that is, for the message.

    Raises:
        NoCapacity: Not even the smallest window fits.
    """
    if available is None:
        return LARGEST_WINDOW
    if available < 2 * SMALLEST_WINDOW:
        raise NoCapacity(
            f"saving needs a window of at least {human(SMALLEST_WINDOW)}; {limit_from} leaves {human(available)}",
            next_step="give the job more memory, or free some before the save",
        )
    return max(SMALLEST_WINDOW, min(LARGEST_WINDOW, available // 4))
