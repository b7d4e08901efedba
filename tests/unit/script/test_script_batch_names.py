"""Names that only the batches of a step set, read behind them."""

from __future__ import annotations

import ast
import contextlib
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from everstep.script.batch_names import unset_behind
from everstep.script.flow_sources import Function, names_attribute, names_of

CASES = {
    "the loss": ("    print(loss)", "loss"),
    "a target of the batches": ("    print(x)", "x"),
    "in a condition": ("    if s % 2:\n        print(loss)", "loss"),
    "in a call of a method": ("    losses.append(loss.bit_length())", "loss"),
    "added to": ("    out += 1", "out"),
    "deleted": ("    del loss", "loss"),
    "in a comprehension": ("    print([loss for _ in range(2)])", "loss"),
    "behind a comprehension with a name like it": (
        "    print([loss for loss in losses])\n    print(loss)",
        "loss",
    ),
    "behind a condition that sets another": ("    if (loss := s):\n        print(out)", "out"),
    "from itself": ("    loss = loss + 1", "loss"),
    "inside a with": ("    with nothing():\n        print(loss)", "loss"),
    "none": ("    print(s)", ""),
    "set behind the batches first": ("    loss = 1\n    print(loss)", ""),
    "set in a branch": ("    if s >= 0:\n        loss = 1\n    print(loss)", ""),
    "a name of the comprehension's own": ("    print([loss for loss in losses])", ""),
    "in another scope": ("    f = lambda: loss", ""),
    "where it is asked for": ("    if 'loss' in locals():\n        print(loss)", ""),
    "where a flag of the batches says so": ("    if fresh:\n        print(loss)", ""),
    "where its absence is caught": ("    try:\n        print(loss)\n    except NameError:\n        pass", ""),
    "set by a loop over something of the step": ("    for k in [s]:\n        loss = k\n    print(loss)", ""),
    "of an import": ("    import math as loss\n    print(loss)", ""),
}


def loop(behind: str, *, before: str = "", first: str = "    fresh = False", over: str = "batches(s)") -> str:
    """A loop over steps, and what stands before it, in it before the batches, and behind them."""
    body = f"    for x in {over}:\n        out = x\n        loss = out * 2\n        fresh = True\n{behind}\n"
    return f"losses = []\n{before}\nfor s in steps():\n{first}\n{body}"


def found(tmp_path: Path, text: str, name: str = "train", **known: Any) -> tuple[str, int] | None:
    """What is found when the loop begins. known: more names of the module."""
    file, seen = tmp_path / f"{name}.py", []

    def steps() -> Any:
        seen.append(unset_behind(sys._getframe(1)))
        yield from (0, 1)

    file.write_text(text)
    given = {"steps": steps, "batches": lambda s: [s], "nothing": contextlib.nullcontext, **known}
    exec(compile(text, str(file), "exec"), given)
    return seen[0]


@pytest.mark.parametrize(("behind", "name"), CASES.values(), ids=CASES)
def test_the_first_is_found(tmp_path: Path, behind: str, name: str) -> None:
    for where in ("module", "function"):
        text = loop(behind)
        if where == "function":
            text = f"def main():\n{textwrap.indent(text, '    ')}\nmain()\n"
        said = found(tmp_path, text, where)
        assert (said[0] if said else "") == name, where


@pytest.mark.parametrize("over", ["list(batches(s))", "enumerate(batches(s), 1)", "zip([s], batches(s))"])
def test_batches_are_those_of_the_step_in_whatever_form(tmp_path: Path, over: str) -> None:
    assert found(tmp_path, loop("    print(loss)", over=over)) is not None


@pytest.mark.parametrize(
    "given",
    [
        {"before": "loss = None"},
        {"before": "from math import pi as loss"},
        {"before": "try:\n    pass\nfinally:\n    loss = 0"},
        {"first": "    loss = 0"},
        {"first": "    with nothing() as loss:\n        pass"},
        {"over": "(loss := batches(s))"},
        {"over": "batches(s.real)"},
    ],
    ids=[
        "before the loop",
        "by an import",
        "in a finally",
        "in its body",
        "by a with",
        "by the batches' own loop",
        "none",
    ],
)
def test_a_name_that_has_a_value_is_none(tmp_path: Path, given: dict[str, str]) -> None:
    assert found(tmp_path, loop("    print(loss)", **given)) is None


def test_names_that_another_cell_has_set_are_known(tmp_path: Path) -> None:
    assert found(tmp_path, loop("    print(loss)"), loss=None) is None


def test_what_is_set_beside_the_batches_in_a_with_is_set(tmp_path: Path) -> None:
    batches = textwrap.indent(loop("").split("fresh = False\n")[1], "    ")
    text = f"for s in steps():\n    with nothing():\n{batches}        loss = 1\n    print(loss)\n"
    assert (
        found(tmp_path, text) is None and found(tmp_path, text.replace("        loss = 1\n", ""), "other") is not None
    )


def test_a_parameter_of_the_function_has_a_value(tmp_path: Path) -> None:
    text = f"def main(loss):\n{textwrap.indent(loop('    print(loss)'), '    ')}\nmain(1)\n"
    assert found(tmp_path, text) is None


def test_its_line_is_told(tmp_path: Path) -> None:
    text = loop("    print(loss)")
    assert found(tmp_path, text) == ("loss", text.splitlines().index("    print(loss)") + 1)


def test_without_source_nothing_is_said() -> None:
    code = compile("f()", "<nowhere>", "exec")
    seen: list[Any] = []
    exec(code, {"f": lambda: seen.append(unset_behind(sys._getframe(1)))})
    assert isinstance(code, types.CodeType) and seen == [None]


def test_names_that_a_function_captures_by_match_are_its_own() -> None:
    source = (
        "def f(x):\n match x:\n  case [a, *rest]:\n   return a\n  case {'k': v, **others} as all_of_it:\n   return v"
    )
    (node,) = ast.parse(source).body
    assert isinstance(node, Function)
    assert names_of(node) == {"x", "a", "rest", "v", "others", "all_of_it"}


ATTRIBUTES = {
    "a tensor's": ("for p in model.parameters():\n    p.data.mul_(2)", True),
    "of an object's own": ("class A:\n    def f(self):\n        self.shadow.data.copy_(1)", True),
    "of a module": ("import torch\nclass A(torch.utils.data.Dataset):\n    x = torch.utils.data.DataLoader(1)", False),
    "of a renamed module": ("import torch.utils as u\nx = u.data.Subset", False),
    "arguments": ("rows = load(args.data)\nclass A:\n    def f(self):\n        return self.data[0]", False),
    "called": ("x = source.data()", False),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_files_that_may_name_an_attribute_of_tensors(tmp_path: Path, case: str) -> None:
    code, may = ATTRIBUTES[case]
    file = tmp_path / "script.py"
    file.write_text(code)
    assert names_attribute([str(file)], "data") is may
