"""Records as tables: plain rows first, and from them rich or Markdown. Pure: ages are told what time it is.

Everything that comes from a disk passes ``plain``: a folder's name may hold anything, also what moves a cursor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from onward.records import JsonTree

_GAP = 2
_SPANS = ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h"))
_TONES = {
    "committed": "green",
    "full": "green",
    "yes": "green",
    "verified": "green",
    "quarantined": "bold red",
    "damaged": "bold red",
    "NO": "bold red",
    "no": "yellow",
    "not read": "yellow",
    "abandoned": "yellow",
    "deleting": "yellow",
    "in progress": "cyan",
    "in progress?": "cyan",
    "adoptable": "magenta",
    "deleted": "dim",
}
"""Words that mean the same in colour and without."""


# --- words -------------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """``text`` with everything that a terminal would obey rather than show written as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def size(count: int | None) -> str:
    """Bytes as a person reads them; ``?`` for None."""
    if count is None:
        return "?"
    figure = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if figure < 999.95 or (unit == "B" and count < 1000):
            return f"{count} B" if unit == "B" else f"{figure:.1f} {unit}"
        figure /= 1000
    return f"{figure:.1f} TB"


def age(since: str, now: datetime) -> str:
    """How long ago ``since`` (ISO 8601) was; ``in …`` for a time to come (a wrong clock), ``?`` for no time at all."""
    try:
        then = datetime.fromisoformat(since)
    except ValueError:
        return "?"
    seconds = (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    span = abs(seconds)
    unit, word = next(((unit, word) for limit, unit, word in _SPANS if span < limit), (86400, "d"))
    text = f"{span / unit:.0f} {word}"
    return f"in {text}" if seconds < 0 and not text.startswith("0 ") else text


def ago(since: str, now: datetime) -> str:
    """A time with its age: ``2026-01-31T12:00:00Z (5 min ago)``."""
    span = age(since, now)
    return f"{since} ({span})" if span == "?" or span.startswith("in ") else f"{since} ({span} ago)"


def counted(count: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


# --- tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column, and what may happen to it where the screen is narrow.

    Attributes:
        name: Its heading.
        right: Numbers stand to the right.
        rank: 0 for a column that always stays; of the others the highest goes first.
        least: To how many cells it may be narrowed; 0: never below its text.
        fold: Narrowed text goes on in the next line; else it is cut, with an ellipsis.
        toned: Its words have colours.
    """

    name: str
    right: bool = False
    rank: int = 0
    least: int = 0
    fold: bool = False
    toned: bool = False


@dataclass(frozen=True)
class Table:
    """Plain rows with their columns; ``heading`` stands above, ``bare`` leaves the columns' names away."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    heading: str = ""
    bare: bool = False

    def fitted(self, width: int) -> dict[int, int]:
        """The columns that fit into ``width`` cells, by position, and how wide each is."""
        natural = {
            at: max(cell_len(text) for text in ("" if self.bare else column.name, *(plain(r[at]) for r in self.rows)))
            for at, column in enumerate(self.columns)
        }
        least = {at: min(natural[at], self.columns[at].least or natural[at]) for at in natural}
        kept = set(natural)
        while sum(least[at] + _GAP for at in kept) - _GAP > width:
            droppable = [at for at in kept if self.columns[at].rank]
            if not droppable:
                break
            kept.remove(max(droppable, key=lambda at: self.columns[at].rank))
        spare = width - sum(least[at] + _GAP for at in kept) + _GAP
        widths: dict[int, int] = {}
        for at in sorted(kept):
            more = max(min(natural[at] - least[at], spare), 0)
            widths[at] = least[at] + more
            spare -= more
        return widths

    def rich(self, width: int) -> RichTable:
        """The table for a terminal of ``width`` cells."""
        table = RichTable(
            title=Text(self.heading, style="bold") if self.heading else None,
            title_justify="left",
            box=None,
            padding=(0, _GAP, 0, 0),
            pad_edge=False,
            collapse_padding=True,
            show_header=not self.bare,
            header_style="dim",
        )
        widths = self.fitted(width)
        for at, cells in widths.items():
            column = self.columns[at]
            table.add_column(
                column.name,
                justify="right" if column.right else "left",
                width=max(cells, 1),
                no_wrap=not column.fold,
                overflow="fold" if column.fold else "ellipsis",
            )
        for row in self.rows:
            table.add_row(*(Text(plain(row[at]), style=self._tone(at, row[at])) for at in widths))
        return table

    def _tone(self, at: int, text: str) -> str:
        return _TONES.get(text, "") if self.columns[at].toned else ""

    def markdown(self) -> str:
        """The table as Markdown, with all its columns."""
        head = [column.name for column in self.columns]
        rule = ["---:" if column.right else "---" for column in self.columns]
        lines = [head, rule, *([_markdown_cell(text) for text in row] for row in self.rows)]
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        return f"**{_markdown_cell(self.heading)}**\n\n{text}" if self.heading else text


def _markdown_cell(text: str) -> str:
    for character in "\\|<>`*_[]":
        text = text.replace(character, f"\\{character}")
    return plain(text)


def facts(items: Mapping[str, str], heading: str = "") -> Table:
    """Names and values, one a line; empty values are left away."""
    columns = (Column("", least=4), Column("", least=20, fold=True))
    return Table(columns, tuple((k, v) for k, v in items.items() if v), heading=heading, bare=True)


def flat(tree: JsonTree) -> str:
    """A small tree in one line: ``method full, coverage.files 8``."""
    return ", ".join(f"{name} {value}".strip() for name, value in flattened(tree).items())


def flattened(tree: JsonTree, prefix: str = "") -> dict[str, str]:
    """Every leaf of a tree by its dotted path; lists are leaves."""
    if not isinstance(tree, dict):
        return {prefix: tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False)}
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        leaves.update(flattened(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves
