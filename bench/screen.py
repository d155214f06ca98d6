"""A result file as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Prints the figures with bars first, then the others, then what must be known to read them."""
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    console.print(f"\n[bold]{document['benchmark']}[/bold] {document['date']}  {escape(where)}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in document["versions"].items()), highlight=False)
    figures = document["figures"]
    barred = [figure for figure in figures if figure["bar"] is not None]
    rest = [figure for figure in figures if figure["bar"] is None]
    for title, rows in (("Bars (medians; ratios are medians of pairs)", barred), ("Beside them", rest)):
        if rows:
            console.print(_table(title, rows))
    for number, figure in enumerate(barred + rest, 1):
        if figure["note"]:
            console.print(f"[dim]{number}. {escape(figure['figure'])}: {escape(figure['note'])}[/dim]", highlight=False)


def _table(title: str, rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("figure", "value", "reference", "against", "ratio", "bar", "", "range of ratios"):
        right = name in ("value", "reference", "ratio", "bar", "range of ratios")
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


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3f} {unit}"


def _range(samples: list[float], reference_samples: list[float]) -> str:
    if len(samples) < 2 or len(samples) != len(reference_samples):
        return ""
    ratios = [one / other for one, other in zip(samples, reference_samples, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
