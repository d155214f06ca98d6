"""Charts as inline SVG, without any dependency: lines over each other, and a time line.

A chart is drawn twice, wide and narrow, and the page's style shows the one that fits: text in an SVG that is merely
scaled down to a phone's width could not be read. Colours are classes (``tone-…``) that the page defines for light and
dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal, NewType

Markup = NewType("Markup", str)
"""Text that is already HTML; everything else is escaped on its way into a page."""

Tone = Literal["quiet", "main", "second", "good", "bad"]

WIDE, NARROW = 860, 350
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40
LANE = 54
LETTER = 7


@dataclass(frozen=True)
class Series:
    """A line: its points in order of x. A ``broad`` line is a band that another can lie upon and still be seen."""

    label: str
    points: Sequence[tuple[float, float]]
    tone: Tone
    broad: bool = False


@dataclass(frozen=True)
class Marker:
    """A vertical line at ``at``, with a word."""

    at: float
    label: str
    tone: Tone


@dataclass(frozen=True)
class Mark:
    """An event on a lane: a dot, or a cross for what was broken off."""

    at: float
    tone: Tone
    title: str
    shape: Literal["dot", "cross"] = "dot"


@dataclass(frozen=True)
class Lane:
    """A row of a time line: something that lasted from ``start`` to ``end``, and the events on it."""

    label: str
    start: float
    end: float
    tone: Tone
    marks: Sequence[Mark] = ()


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    markers: Sequence[Marker] = (),
    height: int = 280,
) -> Markup:
    """Lines over each other on common axes, the first at the bottom, with a legend."""
    points = [point for line in series for stretch in _stretches(line.points) for point in stretch]
    if not points:
        return _both(title, lambda width: (60, _text(width / 2, 34, "no data", "middle")))
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points), 5)

    def draw(width: int) -> tuple[int, str]:
        across = _scale(left, right, LEFT, width - RIGHT)
        up = _scale(y_ticks[0], y_ticks[-1], height - BOTTOM, TOP)
        x_ticks = [x for x in ticks(left, right, width // 90) if left <= x <= right]
        parts = [_rule(LEFT, up(y), width - RIGHT, up(y), "grid") for y in y_ticks]
        parts += [_text(LEFT - 8, up(y) + 4, number(y), "end") for y in y_ticks]
        parts += [_text(across(x), height - BOTTOM + 18, number(x), "middle") for x in x_ticks]
        parts += [_text(width - RIGHT, height - 4, x_label, "end"), _text(LEFT + 4, TOP + 10, y_label, "start")]
        for row, marker in enumerate(markers):
            x, y = across(marker.at), TOP + 28 + 17 * row
            parts.append(_rule(x, TOP, x, height - BOTTOM, f"marker tone-{marker.tone}"))
            turned = x > width * 0.6
            parts.append(_text(x - 5 if turned else x + 5, y, marker.label, "end" if turned else "start"))
        for line in series:
            kind = "broad" if line.broad else "fine"
            for stretch in _stretches(line.points):
                path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in stretch)
                parts.append(f'<polyline class="line {kind} tone-{line.tone}" points="{path}"/>')
        return height, "".join(parts)

    return Markup(_both(title, draw) + _legend([(line.label, line.tone) for line in series]))


def timeline(lanes: Sequence[Lane], *, title: str, legend: Sequence[tuple[str, Tone]] = ()) -> Markup:
    """What ran when, in seconds, one lane below the other, with the events on each."""
    last = max((lane.end for lane in lanes), default=1.0)

    def draw(width: int) -> tuple[int, str]:
        height = LANE * len(lanes) + BOTTOM
        marks = [at for at in ticks(0.0, last, width // 90) if at <= last]
        across = _scale(0.0, last, 10, width - 24)
        parts = [_rule(across(x), 4, across(x), height - BOTTOM, "grid") for x in marks]
        parts += [_text(across(x), height - BOTTOM + 18, f"{number(x)} s", "middle") for x in marks]
        for row, lane in enumerate(lanes):
            top = row * LANE
            start, end = across(lane.start), across(lane.end)
            # A label stands above its bar, and ends with it where it would leave the picture.
            turned = start + LETTER * len(lane.label) > width
            parts.append(_text(end if turned else start, top + 18, lane.label, "end" if turned else "start"))
            parts.append(
                f'<rect class="bar tone-{lane.tone}" x="{start:.1f}" y="{top + 26}" rx="4" '
                f'width="{max(2.0, end - start):.1f}" height="18"/>'
            )
            parts += [_mark(across(mark.at), top + 35, mark) for mark in lane.marks]
        return height, "".join(parts)

    return Markup(_both(title, draw) + (_legend(legend) if legend else ""))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers that enclose ``low`` and ``high``, about ``wanted`` of them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's label: no more digits than it needs."""
    return f"{value:.6g}"


def _stretches(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points that can be drawn; where a value is no number the line has a gap."""
    groups = groupby(points, key=lambda point: all(map(math.isfinite, point)))
    return [list(group) for finite, group in groups if finite]


def _scale(first: float, last: float, low: float, high: float) -> Callable[[float], float]:
    """Maps ``first`` to the pixel ``low`` and ``last`` to ``high``; a single value goes to the middle."""
    span = last - first
    return lambda value: low + ((value - first) / span if span else 0.5) * (high - low)


def _both(title: str, draw: Callable[[int], tuple[int, str]]) -> Markup:
    parts = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        height, body = draw(width)
        parts.append(
            f'<svg class="chart {name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
            f"{body}</svg>"
        )
    return Markup("".join(parts))


def _legend(entries: Sequence[tuple[str, Tone]]) -> str:
    items = "".join(f'<li><i class="key tone-{tone}"></i>{escape(label)}</li>' for label, tone in entries)
    return f'<ul class="legend">{items}</ul>'


def _text(x: float, y: float, text: str, anchor: Literal["start", "middle", "end"]) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _mark(x: float, y: float, mark: Mark) -> str:
    title = f"<title>{escape(mark.title)}</title>"
    if mark.shape == "dot":
        return f'<circle class="mark tone-{mark.tone}" cx="{x:.1f}" cy="{y}" r="5">{title}</circle>'
    arms = f"M{x - 6:.1f},{y - 6}L{x + 6:.1f},{y + 6}M{x - 6:.1f},{y + 6}L{x + 6:.1f},{y - 6}"
    return f'<path class="cross tone-{mark.tone}" d="{arms}">{title}</path>'
