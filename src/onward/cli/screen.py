"""What a command answers, for a person or as one JSON document; and how it tells that it is at work."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from onward.errors import EXIT_OK
from onward.report.tables import Table, plain

_UNBOUNDED = 10_000
"""Cells in a line that goes to a file or a pipe: nothing is cut or wrapped there."""

Shown = str | Table


@dataclass(frozen=True)
class Answer:
    """What a command found: the document for ``--json``, the same for a person, and how the command ends."""

    document: Mapping[str, object]
    shown: Sequence[Shown] = field(default_factory=tuple)
    exit_code: int = EXIT_OK

    def json(self) -> str:
        """The document, in ASCII, so that no terminal or pipe can garble it."""
        return json.dumps(msgspec.to_builtins(self.document), indent=2) + "\n"

    def text(self) -> str:
        """What a person reads, laid out for the terminal that there is, in colour only if it is one."""
        console = screen()
        with console.capture() as captured:
            for item in self.shown:
                if isinstance(item, str):
                    console.print(wrapped(item, console.width), soft_wrap=True)
                elif item.rows:
                    console.print(item.rich(console.width), crop=False)
        return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def screen(*, aside: bool = False, markup: bool = False) -> Console:
    """The terminal on stdout; ``aside`` is the one on stderr, for progress and messages.

    Without ``markup`` text is printed as it is, whatever brackets are in it.
    """
    stream = sys.stderr if aside else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=markup, emoji=False)


def say(text: str) -> None:
    """A message that is not part of the answer."""
    console = screen(aside=True)
    console.print(Text(wrapped(plain(text), console.width), style="dim"), soft_wrap=True)


def wrapped(text: str, width: int) -> str:
    """``text`` with its words wrapped; a path or a command longer than a line stays whole, to be copied."""
    lines: list[str] = []
    for line in text.split("\n"):
        words = line.lstrip(" ")
        margin = " " * (len(line) - len(words))
        fill = textwrap.TextWrapper(
            width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
        )
        lines += fill.wrap(words) or [""]
    return "\n".join(lines)


def now() -> datetime:
    """The time to which ages refer."""
    return datetime.now(UTC)


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes are looked at; nothing where stderr is no terminal."""
    console = screen(aside=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(plain(label), total=total)
        yield lambda count: bar.advance(task, count)
