"""Names that only the batches of a step set, read behind them."""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from everstep.script.batch_names import unset_behind

CASES = {
    "the loss": ("", "    print(loss)", "loss"),
    "a target of the batches": ("", "    print(x)", "x"),
    "in a condition": ("", "    if s % 2:\n        print(loss)", "loss"),
    "in a call of a method": ("", "    losses.append(loss.bit_length())", "loss"),
    "added to": ("", "    out += 1", "out"),
    "deleted": ("", "    del loss", "loss"),
    "in a comprehension": ("", "    print([loss for _ in range(2)])", "loss"),
    "set in one branch alone": ("", "    if s:\n        loss = 1\n    print(loss)", "loss"),
    "from itself": ("", "    loss = loss + 1", "loss"),
    "none": ("", "    print(s)", ""),
    "set before the loop over steps": ("loss = None", "    print(loss)", ""),
    "set behind the batches first": ("", "    loss = 1\n    print(loss)", ""),
    "set in both branches": ("", "    if s:\n        loss = 1\n    else:\n        loss = 2\n    print(loss)", ""),
    "a name of the comprehension's own": ("", "    print([loss for loss in losses])", ""),
    "in another scope": ("", "    f = lambda: loss", ""),
}


def loop(before: str, behind: str, first: str = "") -> str:
    return (
        f"losses = []\n{before}\nfor s in steps():\n{first or '    pass'}\n"
        f"    for x in batches(s):\n        out = x\n        loss = out * 2\n{behind}\n"
    )


def found(tmp_path: Path, text: str, name: str = "train") -> tuple[str, int] | None:
    """What is found when the loop begins."""
    file, seen = tmp_path / f"{name}.py", []

    def steps() -> Any:
        seen.append(unset_behind(sys._getframe(1)))
        yield from (0, 1)

    file.write_text(text)
    exec(compile(text, str(file), "exec"), {"steps": steps, "batches": lambda s: [s], "__name__": "user"})
    return seen[0]


@pytest.mark.parametrize(("before", "behind", "name"), CASES.values(), ids=CASES)
def test_the_first_is_found(tmp_path: Path, before: str, behind: str, name: str) -> None:
    for where in ("module", "function"):
        text = loop(before, behind)
        if where == "function":
            text = f"def main():\n{textwrap.indent(text, '    ')}\nmain()\n"
        said = found(tmp_path, text, where)
        assert (said[0] if said else "") == name, where


def test_a_name_that_the_body_sets_before_its_batches_has_a_value(tmp_path: Path) -> None:
    assert found(tmp_path, loop("", "    print(loss)", "    loss = 0")) is None


def test_a_parameter_of_the_function_has_a_value(tmp_path: Path) -> None:
    text = f"def main(loss):\n{textwrap.indent(loop('', '    print(loss)'), '    ')}\nmain(1)\n"
    assert found(tmp_path, text) is None


def test_its_line_is_told(tmp_path: Path) -> None:
    text = loop("", "    print(loss)")
    assert found(tmp_path, text) == ("loss", text.splitlines().index("    print(loss)") + 1)


def test_without_source_nothing_is_said() -> None:
    code = compile("f()", "<nowhere>", "exec")
    seen: list[Any] = []
    exec(code, {"f": lambda: seen.append(unset_behind(sys._getframe(1)))})
    assert isinstance(code, types.CodeType) and seen == [None]
