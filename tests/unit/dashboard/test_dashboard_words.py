"""Words of the page: each has one meaning, on the page as in the glossary."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

STATIC = resources.files("everstep.dashboard") / "static"
GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"
WORDS = dict(re.findall(r'^  (\w+): "(.*)",$', (STATIC / "words.js").read_text(), re.MULTILINE))


def test_words_of_the_page_stand_in_the_glossary_with_the_same_meaning() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", GLOSSARY.read_text(), re.MULTILINE))
    assert {"generation", "life", "lane", "settle", "agree", "digest"} <= WORDS.keys()
    assert {word: rows.get(word) for word in WORDS} == WORDS
    assert list(rows)[1:] == sorted(list(rows)[1:])


def test_headings_name_words_that_are_explained() -> None:
    named = re.findall(r'data-word="(\w+)"', (STATIC / "index.html").read_text())
    assert named and set(named) <= WORDS.keys()
