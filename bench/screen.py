"""A result file as tables for people: ``python -m bench.screen bench/results/save.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.parts import BLOCKING, COMMITTED, LOAD, OVERLAPPED, STALL, WARM, WHOLE

Row = Mapping[str, Any]
_OURS = ((STALL, BLOCKING), (WHOLE, COMMITTED), (LOAD, WARM))


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Prints the figures with bars, the others, the libraries side by side, and what must be known to read them."""
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    console.print(f"\n[bold]{document['benchmark']}[/bold] {document['date']}: {escape(where)}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in document["versions"].items()), highlight=False)
    figures: list[Row] = [row for row in document["figures"] if row["note"]]
    barred = [row for row in figures if row["bar"] is not None]
    rest = [row for row in figures if row["bar"] is None]
    for title, rows in (("Bars", barred), ("Beside them", rest)):
        if rows:
            console.print(_table(f"{title} (medians; ratios are medians over pairs)", rows))
    if any(row["figure"].endswith(f": {STALL}") for row in document["figures"]):
        console.print(_libraries(document["figures"], document["libraries"]))
    for row in barred + rest:
        console.print(f"[dim]{escape(row['figure'])}: {escape(row['note'])}[/dim]", highlight=False)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("figure", "value", "reference", "against", "ratio", "bar", "", "ratios"):
        right = name in ("value", "reference", "ratio", "bar", "ratios")
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        verdict = {None: "", True: "[green]ok[/green]", False: "[red]missed[/red]"}[row["ok"]]
        table.add_row(
            escape(row["figure"]),
            _number(row["value"], row["unit"]),
            _number(row["reference"], row["unit"]),
            escape(row["against"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "" if row["bar"] is None else f"{row['bar']:.2f}",
            verdict,
            _range(row["samples"], row["reference_samples"]),
        )
    return table


def _libraries(figures: Sequence[Row], facts: Mapping[str, Mapping[str, str]]) -> Table:
    values = {row["figure"]: row for row in figures}
    ours = {f"onward: {name}": values[own] for name, own in _OURS if own in values}
    overlapped = values.get(OVERLAPPED)
    found = {**values, **ours}
    table = Table(title="Libraries side by side", title_justify="left")
    for name in ("library", "stall", "saved", "loaded", "durable", "hashed", "how"):
        table.add_column(name, justify="right" if name in ("stall", "saved", "loaded") else "left")
    for name, fact in facts.items():
        rows = [found.get(f"{name}: {what}") for what in (STALL, WHOLE, LOAD)]
        if not any(rows):
            continue
        cells = [_number(row["value"], row["unit"]) if row else "" for row in rows]
        if name == "onward" and overlapped is not None:
            cells[0] += f"; overlapped {_number(overlapped['value'], overlapped['unit'])}"
        table.add_row(name, *cells, *(escape(fact[key]) for key in ("syncs", "hashes", "setting")))
    return table


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3f} {unit}"


def _range(samples: Sequence[float], reference_samples: Sequence[float]) -> str:
    if len(samples) < 2 or len(samples) != len(reference_samples):
        return ""
    ratios = [one / other for one, other in zip(samples, reference_samples, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def console() -> Console:
    """A console wide enough for the tables, also where the output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else 150)


if __name__ == "__main__":
    show(console(), json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
