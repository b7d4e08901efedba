"""What is drawn, read off the figure again by the numbers at its axes; texts cut off beside all ways to cut them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.report.svg import Bar, Curve, Upright, columns_chart, line_chart, rows_chart, stacked_bar
from everstep.report.words import known, number, one_line, reason_text, shortened, whole_number

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


class Drawn:
    """A figure as its reader sees it: places become values by the two outer numbers of an axis."""

    def __init__(self, svg: str) -> None:
        self.all = list(ElementTree.fromstring(svg).iter())
        self._x = [(float(e.get("x", "")), _value(e)) for e in self.all if e.get("text-anchor") == "middle"]
        self._y = [(float(e.get("y", "")), _value(e)) for e in self.all if e.get("dy") == "4"]

    def __getitem__(self, style: str) -> list[ElementTree.Element]:
        """The elements of a class that have a name."""
        return [e for e in self.all if style in e.get("class", "").split() and any("title" in c.tag for c in e)]

    def x(self, place: float) -> float:
        return _along(self._x, place)

    def y(self, place: float) -> float:
        return _along(self._y, place)

    def points(self, path: ElementTree.Element) -> Iterator[tuple[float, float]]:
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d", "")):
            yield self.x(float(x)), self.y(float(y))

    def readable(self) -> bool:
        return min(len(self._x), len(self._y)) > 1


def _value(text: ElementTree.Element) -> float:
    said = text.text or ""
    return float(said.rstrip("kMG")) * UNITS.get(said[-1], 1.0)


def _along(marks: Sequence[tuple[float, float]], place: float) -> float:
    (first, low), (last, high) = marks[0], marks[-1]
    return low + (high - low) * (place - first) / (last - first)


def near(value: float, size: float) -> object:
    return pytest.approx(value, abs=0.01 * size)


NUMBERS = st.integers(-900, 900).map(float)


@given(st.lists(st.tuples(NUMBERS, st.none() | NUMBERS), min_size=2, max_size=20), st.lists(NUMBERS, max_size=3))
def test_a_curve_is_where_the_numbers_at_the_axes_say(
    rows: list[tuple[float, float | None]], marks: list[float]
) -> None:
    xs, ys = [x + 0.5 for x, _ in rows], [y for _, y in rows]
    there = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    assume(len({x for x, _ in there}) > 1)
    band = ([0.0 if y is None else y - 5 for y in ys], [0.0 if y is None else y + 7 for y in ys])
    curves = [Curve("of all", xs, ys), Curve("with a band", xs, ys, 1, band)]
    drawn = Drawn(line_chart("t", curves, "x", [Upright(x, f"at {x}", x < 0) for x in marks]))
    assume(drawn.readable())
    wide, high = (max(abs(value) for value in values) + 1 for values in zip(*there, strict=True))
    for path in (*drawn["l0"], *drawn["l1"]):
        assert list(drawn.points(path)) == [(near(x, wide), near(y, high)) for x, y in there]
        runs = "".join("." if y is None else "y" for y in ys).split(".")
        assert path.get("d", "").count("M") == sum(bool(run) for run in runs), "a gap is no line"
    least, most = min(x for x, _ in there), max(x for x, _ in there)
    uprights = [e for e in drawn.all if e.tag.endswith("}g")]
    assert [e[0].text for e in uprights] == [f"at {x}" for x in marks if least <= x <= most]
    for e in uprights:
        line = e[1]
        assert drawn.x(float(line.get("x1", ""))) == near(float((e[0].text or "")[3:]), wide)
        assert len(e) == (2 if "soft" in line.get("class", "") else 3), "a fault has a head"


@given(st.lists(NUMBERS, min_size=30, max_size=60, unique=True), st.sampled_from([-1e5, 0.0, 2e3]), st.integers(7, 99))
def test_one_value_far_above_the_others_is_cut_off_at_any_level(values: list[float], level: float, far: int) -> None:
    """And no other: the rest fills the figure as it would without that one."""
    rest = [level + value for value in values]
    xs, spread = [n + 0.5 for n in range(len(rest) + 1)], max(rest) - min(rest)
    drawn = Drawn(line_chart("t", [Curve("a", xs, [*rest, max(rest) + far * spread])], "x"))
    [path] = drawn["l0"]
    assume(drawn.readable())
    *inside, (_, outlier) = drawn.points(path)
    assert [y for _, y in inside] == [near(value, abs(level) + spread) for value in rest]
    places = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", path.get("d", ""))]
    tall = max(places) - min(places)
    assert outlier > max(rest) and max(places[:-1]) - min(places[:-1]) > 0.6 * tall
    assert tall > 0.5 * 222 or level == 0.0 or min(rest) > 0, "the figure is used"


@given(st.lists(st.lists(st.integers(0, 50).map(float), min_size=3, max_size=3), min_size=2, max_size=12))
def test_parts_lie_on_top_of_each_other(rows: list[list[float]]) -> None:
    ends = [10.0 * (n + 1) for n in range(len(rows))]
    assume(any(sum(row) for row in rows))
    names = ("first", "second", "third")
    parts = [(name, f"s-{name}", [row[k] for row in rows]) for k, name in enumerate(names)]
    drawn = Drawn(columns_chart("t", ends, parts, 10.0, "x"))
    assume(drawn.readable())
    size = max(sum(row) for row in rows)
    for k, name in enumerate(names):
        [path] = drawn[f"s-{name}"]
        found = re.findall(r"M([-\d.]+) ([-\d.]+)V([-\d.]+)H([-\d.]+)V([-\d.]+)Z", path.get("d", ""))
        expected = [(end, sum(row[:k]), sum(row[: k + 1])) for end, row in zip(ends, rows, strict=True) if row[k]]
        for (x0, y0, y1, x1, back), (end, low, high) in zip(found, expected, strict=True):
            assert (drawn.x(float(x0)), drawn.x(float(x1))) == (near(end - 10, 100), near(end, 100))
            assert (drawn.y(float(y0)), drawn.y(float(y1)), back) == (near(low, size), near(high, size), y0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 500), st.integers(1, 90)), min_size=1, max_size=12))
def test_a_bar_lies_in_the_row_of_its_name(bars: list[tuple[int, int, int]]) -> None:
    rows, values = [f"row {n}" for n in range(5)], [f"value {n}" for n in range(5)]
    given_bars = [
        Bar(row, float(x), float(x + length), "s-dead", f"bar {n}") for n, (row, x, length) in enumerate(bars)
    ]
    drawn = Drawn(rows_chart("t", rows, given_bars, "x", legend=[("dead", "s-dead")], values=values))
    heights = {e.text: float(e.get("y", "")) for e in drawn.all if e.text in (*rows, *values)}
    size = max(bar.x1 for bar in given_bars)
    assert len(drawn["s-dead"]) == len(bars)
    for e, bar in zip(drawn["s-dead"], given_bars, strict=True):
        begin, width, top, tall = (float(e.get(name, "")) for name in ("x", "width", "y", "height"))
        assert (e[0].text, drawn.x(begin)) == (bar.text, near(bar.x0, size))
        assert drawn.x(begin + width) == near(bar.x1, size) or width == 1.0
        assert top < heights[rows[bar.row]] < top + tall and heights[values[bar.row]] == heights[rows[bar.row]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_a_bar_of_parts_is_as_wide_as_the_figure(sizes: list[int]) -> None:
    parts = [(f"part {n}", size / sum(sizes), f"f{n}", f"{size} s") for n, size in enumerate(sizes)]
    drawn = Drawn(stacked_bar("t", parts))
    at = 16.0
    for n, size in enumerate(sizes):
        [bar] = drawn[f"f{n}"]
        assert (float(bar.get("x", "")), bar[0].text) == (pytest.approx(at, abs=0.1), f"part {n}: {size} s")
        at += float(bar.get("width", ""))
        assert float(bar.get("width", "")) == pytest.approx(928 * size / sum(sizes), abs=0.01)
    legend = [e for e in drawn.all if e.tag.endswith("text") and (e.text or "").startswith("part ")]
    said = [(e.text or "").removesuffix(" %").rpartition(" ") for e in legend]
    assert [(name, float(share)) for name, _, share in said] == [
        (f"part {n}", pytest.approx(100 * size / sum(sizes), abs=0.051)) for n, size in enumerate(sizes)
    ]
    places = [(float(e.get("y", "")), float(e.get("x", ""))) for e in legend]
    assert places == sorted(set(places)) and all(x + 6.6 * 10 < 960 for _, x in places)


WORDS = st.text(st.sampled_from("abc ,;:é\n\x1b\u202e"), max_size=30)


@given(st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=8), st.integers(2, 40))
def test_a_text_is_shortened_to_the_most_words_that_fit(words: list[str], most: int) -> None:
    text = " ".join(words)
    ways = [text, *(" ".join(words[:n]) + "…" for n in range(len(words) - 1, 0, -1)), text[: most - 1] + "…"]
    assert shortened(text, most) == next(way for way in ways if len(way) <= most)


@given(WORDS, st.integers(1, 20), st.sampled_from([" ", ", ", "; "]))
def test_a_shortened_text_is_its_begin(text: str, most: int, between: str) -> None:
    for said, whole in (
        (shortened(text, most, between), text),
        (one_line(text, most), one_line(text)),
        (reason_text(text, most), one_line(text)),
    ):
        assert said == whole if len(whole) <= most else len(said) <= max(most, len(between.strip()) + 1)
        assert said == whole or (said.endswith("…") and whole.startswith(said[:-1].removesuffix(between.strip())))
    line = one_line(text)
    assert line.isprintable() and line == one_line(line) == " ".join(line.split()), (
        "nothing but words and single spaces"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.integers(10**300, 10**310) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@given(JSON)
def test_a_number_is_read_from_a_file_only_where_one_stands(value: object) -> None:
    whole, real = type(value) is int, type(value) is float and value == value and abs(value) != float("inf")
    assert known(value) == (value if whole else None)
    assert whole_number(value) == (value if whole else int(value) if real else 0)  # type: ignore[call-overload]
    fits = whole and abs(value) < 2**1023  # type: ignore[operator]
    assert number(value, 7.0) == (float(value) if real or fits else 7.0) or (whole and not fits)  # type: ignore[arg-type]
