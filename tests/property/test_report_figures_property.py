"""Where a value lies in a figure, and texts that are cut off, beside all ways to cut them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.report.svg import Curve, line_chart
from everstep.report.words import one_line, reason_text, shortened

NUMBERS = st.integers(-900, 900).map(float)


def drawn(values: list[float]) -> list[tuple[float, ...]]:
    """The places of these values, one step after the other."""
    path = re.findall(r' d="(M[^"]*)"', line_chart("t", [Curve("a", [*map(float, range(len(values)))], values)], "x"))
    return [tuple(map(float, place.split())) for place in re.split("[ML]", path[0])[1:]]


@given(st.lists(NUMBERS, min_size=30, max_size=60, unique=True), st.integers(7, 99), st.sampled_from([1.0, 8.0, 0.25]))
def test_a_figure_looks_the_same_at_any_level_and_in_any_unit(values: list[float], far: int, unit: float) -> None:
    """One value far above the others is cut off: these are drawn over most of the height. Higher is higher."""
    values = [*values, max(values) + far * (max(values) - min(values))]
    below, above, far_below = ([unit * (value + level) for value in values] for level in (-1e7, 1e7, -3e7))
    for other in (drawn(above), drawn(far_below)):
        assert other == [pytest.approx(place, abs=0.11) for place in drawn(below)]
    places = drawn(values)
    ranked = sorted(zip(values, (-y for _, y in places), strict=True))
    assert [y for _, y in ranked] == sorted(y for _, y in ranked) and places == sorted(places)
    (_, top), *_, (_, low) = sorted((y, y) for _, y in drawn(above))
    assert max(y for _, y in drawn(above)[:-1]) - min(y for _, y in drawn(above)[:-1]) > 0.6 * (low - top)


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
