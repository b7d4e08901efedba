"""The code of the page by itself: each word has one meaning, as in the glossary; what some functions say and do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

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


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not there")
NO_PAGE = """
const nodes = {};
const node = () => ({
  dataset: {}, append(...all) { this.children = all; }, setAttribute() {}, replaceChildren() {}, addEventListener() {},
});
globalThis.Node = class {};
globalThis.document = { getElementById: (id) => (nodes[id] ??= node()), createElement: node };
"""


def said_by(code: str) -> Any:
    """What a piece of the page's code, run by itself, prints as JSON."""
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_small_numbers_are_none_that_read_as_zero() -> None:
    asked = [(3e-5, 4), (0.00012346, 4), (0.5, 4), (0, 4), (0.04, 1), (812.34, 1), (-2e-7, 3), (12345, 1)]
    code = f"import {{ number }} from {json.dumps(str(STATIC / 'dom.js'))}; "
    code += f"console.log(JSON.stringify({json.dumps(asked)}.map(([v, digits]) => number(v, digits))))"
    assert said_by(code) == ["0.00003", "0.0001235", "0.5000", "0", "0.04", "812.3", "-2e-7", "12.35K"]


@needs_node
@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ([("a", "1"), ("a", "1")], "The final states are bitwise equal."),
        ([("a", "1"), ("b", "1")], "The final states are not all equal."),
        ([("a", "1"), ("b", "2")], "Their digests are of different versions"),
        ([("a", "1"), ("b", "2"), ("a", "1")], "see everstep verify. r0, r2 are equal to the bit."),
        ([("a", "1"), ("", "1")], "No final state to compare yet: r1."),
    ],
)
def test_digests_of_other_versions_say_nothing_of_each_other(digests: list[tuple[str, str]], words: str) -> None:
    heads = [{"name": f"r{i}", "digest": d, "digest_version": v} for i, (d, v) in enumerate(digests)]
    runs = [{"number": i, "config": {}, "head": head} for i, head in enumerate(heads)]
    code = f"{NO_PAGE} const {{ compared }} = await import({json.dumps(str(STATIC / 'panels.js'))}); "
    code += f'compared({json.dumps(runs)}); console.log(JSON.stringify(nodes["verdict"].textContent))'
    assert words in said_by(code)


@needs_node
def test_a_button_asks_whether_one_is_sure_while_the_pointer_is_on_it() -> None:
    code = f"{NO_PAGE} const {{ Actions }} = await import({json.dumps(str(STATIC / 'actions.js'))});"
    code += """
        let on = true, due = null;
        globalThis.setTimeout = (act) => { due = act; };
        globalThis.clearTimeout = () => { due = null; };
        const asked = [];
        const [, form] = Actions.prototype.ofWorker.call({ ask: (name) => asked.push(name) }, 1, null);
        const button = form.children[0], press = () => form.onsubmit({ preventDefault() {} });
        button.matches = () => on;
        press(); due(); due(); press();  // a slow second press
        const slow = asked.length;
        press(); on = false; button.onpointerleave(); due(); press();  // one that comes long after the pointer has left
        console.log(JSON.stringify([slow, asked]));
    """
    assert said_by(code) == [1, ["drain"]]
