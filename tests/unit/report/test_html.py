"""Charts and page: well-formed, self-contained, escaped, and true to the numbers."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from onward.report.charts import Lane, Mark, Marker, Series, line_chart, ticks, timeline
from onward.report.html import Section, Verdict, facts, join, listing, page, table

EVIL = "<script>alert('x')</script>&\""


def pictures(markup: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", markup, flags=re.DOTALL)]


def chart(points: list[tuple[float, float]]) -> str:
    return line_chart([Series("a", points, "main")], title="t", x_label="x", y_label="y")


def polyline(picture: ElementTree.Element) -> list[tuple[float, float]]:
    line = picture.find("polyline")
    assert line is not None
    return [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 130), (2.1, 4.7), (-3, 3), (5, 5), (0, 0), (1e-9, 3e-9), (0, 1e9)]
)
def test_ticks_enclose_the_range_with_few_round_numbers(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert found[0] <= low
    assert found[-1] >= high - abs(high) * 1e-12
    assert 2 <= len(found) <= 9
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in pairwise(found)}
    assert steps == {1.0}


def test_a_chart_is_drawn_wide_and_narrow_inside_its_picture() -> None:
    points = [(float(x), math.sin(x)) for x in range(50)]
    wide, narrow = pictures(chart(points))
    for picture in (wide, narrow):
        width, height = map(float, picture.attrib["viewBox"].split()[2:])
        drawn = polyline(picture)
        assert len(drawn) == 50
        assert all(0 <= x <= width and 0 <= y <= height for x, y in drawn)
    assert float(wide.attrib["viewBox"].split()[2]) > 2 * float(narrow.attrib["viewBox"].split()[2])


def test_a_higher_value_stands_higher_and_equal_series_lie_on_each_other() -> None:
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]
    both = line_chart(
        [Series("a", points, "quiet", broad=True), Series("b", points, "main")], title="t", x_label="x", y_label="y"
    )
    picture = pictures(both)[0]
    first, second = (line.attrib["points"] for line in picture.findall("polyline"))
    assert first == second
    (x0, y0), (x1, y1), (x2, y2) = polyline(picture)
    assert x0 < x1 < x2
    assert y1 < y2 < y0


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(0.0, 0.0), (1.0, 0.0)], [(0.0, math.nan)]])
def test_a_chart_of_little_data_is_still_a_chart(points: list[tuple[float, float]]) -> None:
    markup = chart(points)
    assert len(pictures(markup)) == 2
    assert "nan" not in markup


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_line_has_a_gap_where_the_loss_is_no_number(value: float) -> None:
    markup = chart([(0.0, 1.0), (1.0, 1.5), (2.0, value), (3.0, 3.0)])
    for picture in pictures(markup):
        assert [len(line.attrib["points"].split()) for line in picture.findall("polyline")] == [2, 1]


def test_a_chart_escapes_every_text() -> None:
    markup = line_chart(
        [Series(EVIL, [(0, 0), (1, 1)], "main")],
        title=EVIL,
        x_label=EVIL,
        y_label=EVIL,
        markers=[Marker(0.5, EVIL, "bad")],
    ) + timeline([Lane(EVIL, 0, 1, "main", [Mark(0.5, "bad", EVIL)])], title=EVIL, legend=[(EVIL, "bad")])
    assert "<script" not in markup
    assert len(pictures(markup)) == 4


def test_a_time_line_keeps_bars_and_marks_in_order_and_inside() -> None:
    markup = timeline(
        [
            Lane("first", 0.0, 14.0, "second", [Mark(4.0, "good", "commit"), Mark(14.0, "bad", "kill", "cross")]),
            Lane("a label that is long and stands near the end", 38.0, 40.0, "main"),
        ],
        title="t",
    )
    for picture in pictures(markup):
        width = float(picture.attrib["viewBox"].split()[2])
        bars = picture.findall("rect")
        assert [float(bar.attrib["x"]) for bar in bars] == sorted(float(bar.attrib["x"]) for bar in bars)
        assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width for bar in bars)
        assert len(picture.findall("circle")) == 1
        assert len(picture.findall("path")) == 1


def test_a_time_line_of_nothing_is_empty() -> None:
    assert len(pictures(timeline([], title="t"))) == 2


class Outline(HTMLParser):
    """Collects what a browser would load, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "polyline", "circle", "rect", "path"):
            self.open.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img", "object") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def document(text: str) -> str:
    body = join(
        table(("claim", text, "evidence"), [(text, Verdict(True, text), text), ("b", Verdict(False, "no"), "c")]),
        facts({text: text}),
        listing(text),
    )
    return page(title=text, lead=text, verdict=Verdict(False, text), sections=[Section(text, body, note=text)])


def test_a_page_loads_nothing_and_closes_what_it_opens() -> None:
    outline = Outline()
    text = document("plain")
    outline.feed(text)
    assert outline.open == []
    assert outline.loads == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_a_page_escapes_every_text() -> None:
    text = document(EVIL)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 9
    outline = Outline()
    outline.feed(text)
    assert outline.loads == []


def test_a_table_with_a_cell_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(("a", "b", "c"), [("1", "2")])
