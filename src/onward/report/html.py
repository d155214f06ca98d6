"""A page that stands by itself: one file, nothing loaded from anywhere, readable on a phone, in light and in dark.

Every string is escaped on its way in; only :data:`Markup`, which the functions here and in ``charts`` return, is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from onward.report.charts import Markup

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --card: #fff; --ink: #1d2430; --soft: #5d6675; --edge: #e2e0d9;
  --quiet: #b9c2cf; --main: #1f5fbf; --second: #c2571a; --good: #1b7f4b; --bad: #c02b37; }
@media (prefers-color-scheme: dark) { :root { --paper: #12151b; --card: #1a1f28; --ink: #e6e9ee; --soft: #9aa4b2;
  --edge: #2c3340; --quiet: #566172; --main: #78adff; --second: #f0995a; --good: #55c98c; --bad: #ff7a83; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 16px; }
main { max-width: 940px; margin: 0 auto; padding: 2.2rem 1rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 0 0 .3rem; }
p { margin: .3rem 0 .8rem; } .lead, .note { color: var(--soft); } .lead { font-size: 1.05rem; max-width: 46rem; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 1.1rem 1.2rem;
  margin-top: 1.1rem; }
.verdict { display: inline-block; font-weight: 600; padding: .2rem .8rem; border-radius: 99px; margin: .3rem 0 0;
  border: 1.5px solid currentColor; }
.verdict.good, td.good { color: var(--good); } .verdict.bad, td.bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
th, td { text-align: left; vertical-align: top; padding: .45rem .7rem .45rem 0; border-top: 1px solid var(--edge);
  overflow-wrap: anywhere; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: .85rem; }
tbody th { font-weight: 500; width: 26%; } td.good, td.bad { font-weight: 600; }
pre { background: var(--paper); border: 1px solid var(--edge); border-radius: 8px; padding: .7rem .8rem;
  margin: .5rem 0; font-size: .84rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.chart { width: 100%; height: auto; display: block; } .chart text { font-size: 13px;
  fill: var(--soft); stroke: var(--card); stroke-width: 3px; paint-order: stroke; }
.chart.narrow { display: none; max-width: 460px; margin: 0 auto; } .chart.narrow text { font-size: 12px; }
.tone-quiet { color: var(--quiet); } .tone-main { color: var(--main); } .tone-second { color: var(--second); }
.tone-good { color: var(--good); } .tone-bad { color: var(--bad); }
.grid { stroke: var(--edge); } .marker { stroke: currentColor; stroke-dasharray: 4 4; }
.line { fill: none; stroke: currentColor; stroke-linejoin: round; }
.line.broad { stroke-width: 6; stroke-linecap: round; }
.line.fine { stroke-width: 1.6; } .bar { fill: currentColor; opacity: .55; }
.mark { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.cross { stroke: currentColor; stroke-width: 3.5; stroke-linecap: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .5rem 0 0;
  font-size: .9rem; color: var(--soft); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 3px; background: currentColor;
  margin-right: .45em; }
@media (min-width: 701px) { td.good, td.bad { white-space: nowrap; padding-right: 1.4rem; } }
@media (max-width: 700px) {
  .chart.wide { display: none; } .chart.narrow { display: block; }
  section { padding: .9rem .9rem; border-radius: 10px; }
  table.stacked thead { display: none; } table.stacked tr { display: block; border-top: 1px solid var(--edge);
    padding: .5rem 0; }
  table.stacked tr:first-child { border-top: 0; }
  table.stacked th, table.stacked td { display: block; width: auto; border: 0; padding: .08rem 0; }
  table.stacked td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); font-weight: 400; }
}
"""


@dataclass(frozen=True)
class Section:
    """A card on the page: a heading, a sentence of explanation, and its content."""

    heading: str
    body: Markup
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A cell that says whether something holds: the word is coloured, and reads the same without colour."""

    good: bool
    text: str


Cell = str | Verdict


def page(*, title: str, lead: str, verdict: Verdict, sections: Sequence[Section]) -> str:
    """The whole document."""
    cards = "\n".join(
        f"<section><h2>{escape(section.heading)}</h2>"
        + (f'<p class="note">{escape(section.note)}</p>' if section.note else "")
        + f"{section.body}</section>"
        for section in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>'
        f'<p class="verdict {_tone(verdict)}">{escape(verdict.text)}</p></header>\n'
        f"{cards}\n</main>\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Markup:
    """A table whose first column names the row; on a narrow screen each row becomes a block."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{_word(row[0])}</th>'
        + "".join(_cell(name, cell) for name, cell in zip(header[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    return Markup(f'<table class="stacked"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def facts(items: Mapping[str, str]) -> Markup:
    """Names and values, one a line."""
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in items.items())
    return Markup(f'<table class="stacked"><tbody>{rows}</tbody></table>')


def listing(text: str) -> Markup:
    """What a command printed, or a command; long lines are broken."""
    return Markup(f"<pre>{escape(text)}</pre>")


def join(*parts: Markup) -> Markup:
    """One piece of content below the other."""
    return Markup("".join(parts))


def _cell(name: str, cell: Cell) -> str:
    style = f' class="{_tone(cell)}"' if isinstance(cell, Verdict) else ""
    return f'<td{style} data-label="{escape(name)}">{_word(cell)}</td>'


def _word(cell: Cell) -> str:
    return escape(cell.text if isinstance(cell, Verdict) else cell)


def _tone(verdict: Verdict) -> str:
    return "good" if verdict.good else "bad"
