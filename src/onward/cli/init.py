"""``onward init``: create a store, after trying out what the place can do."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from onward.catalog.stores import init_store
from onward.cli.options import JsonOption, closing
from onward.cli.screen import Answer
from onward.report.tables import facts, size
from onward.storage.probe import Probe
from onward.storage.registry import open_store

EPILOG = closing(
    "onward init file:///data/ckpt --mode group",
    {
        2: "a command line that makes no sense",
        78: "a store is there already, or the place cannot keep what a store promises",
    },
    3,
)


class Mode(StrEnum):
    """Who may read the store."""

    PRIVATE = "private"
    GROUP = "group"
    UMASK = "umask"


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where: file:///path, or a plain path.")],
    mode: Annotated[
        Mode, typer.Option("--mode", help="Who may read: only you, your group, or as your umask says.")
    ] = Mode.PRIVATE,
    tier: Annotated[str, typer.Option("--tier", metavar="NAME", help="What to call this place in reports.")] = "home",
    as_json: JsonOption = False,
) -> Answer:
    """Create a store at URL, and show what the place can do.

    The place is tried out first: whether of two writers exactly one wins a name, whether folders can be made
    durable. Where it fails, no store is made. The folder is made when it is not there.
    """
    record, found = init_store(url, mode=mode.value, tier=tier)
    place = open_store(url).url
    document = {"store": place, "record": record, "probe": found.as_dict()}
    return Answer(
        document,
        [
            f"{place} is a store now (tier {record.tier}, mode {record.mode})",
            "",
            facts(_findings(found), heading="what the place can do"),
            "",
            "in onward.toml:",
            f'  store = "{place}"',
        ],
    )


def _findings(found: Probe) -> dict[str, str]:
    skew = found.clock_skew_seconds
    return {
        "one winner of a name": "yes" if found.create_if_absent else "NO",
        "names given by": {"link": "hard link", "rename": "no-replace rename"}.get(found.publish or "", "nothing"),
        "folders made durable": "yes" if found.folder_sync else "NO",
        "direct I/O": "yes" if found.direct_io else "no (it would only be faster)",
        "case kept apart": "yes" if found.case_sensitive else "no",
        "its clock": "cannot be told" if skew is None else "agrees" if skew == 0 else f"is {skew:+.1f} s off",
        "free space": size(found.free_bytes),
    }
