"""A second `join` is found in a script's code at the first, where it certainly follows, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from everstep.script.join_again import second_call

HEAD = "import sys\n\n\ndef train(lr):\n    run = join(lr)\n    for step in run:\n        pass\n    return run\n\n\n"
AGAIN = {
    "train(1)\ntrain(2)": 12,
    "run = join(1)\nfor step in run:\n    pass\nrun = join(2)": 14,
    "for rate in (1, 2):\n    train(rate)": 11,
    "if len('a') == 1:\n    train(1)\nresult = str(train(2))": 13,
    "def main():\n    train(1)\n    with open(__file__):\n        train(2)\n\n\nmain()": 14,
    "train(1)\nfinetune = True\nif finetune:\n    train(2)": 14,
    "args = SimpleNamespace(mode='both')\nif args.mode in ('a', 'both'):\n    train(1)\nif args.mode in ('b', 'both'):"
    "\n    train(2)": 15,
    "def main(again):\n    train(1)\n    if again:\n        train(2)\n\n\nmain(True)": 14,
    "if __name__ == 's':\n    train(1)\n    if __name__ == 's':\n        train(2)": 14,
    "try:\n    join(1)\nfinally:\n    pass\nfor step in join(2):\n    pass": 15,
}
ONCE = (
    "train(1)",
    "if len('a') == 1:\n    train(1)\nelse:\n    train(2)",
    "if len('a') == 1:\n    train(1)\nif len('a') == 2:\n    train(2)",
    "for fold in range(3):\n    if fold != 1:\n        continue\n    train(fold)",
    "for mode in ('train', 'eval'):\n    if mode == 'train':\n        train(1)",
    "while True:\n    train(1)\n    break",
    "def main():\n    if len('a') == 1:\n        train(1)\n        return\n    train(2)\n\n\nmain()",
    "train(1)\nraise SystemExit\ntrain(2)",
    "train(1)\nsys.exit()\ntrain(2)",
    "args = SimpleNamespace(mode='a')\nif args.mode == 'a':\n    train(1)\nif args.mode == 'b':\n    train(2)",
    "train(1)\nagain = True\nif len('a') == 1:\n    again = False\nif again:\n    train(2)",
    "args = SimpleNamespace(mode='a')\ntrain(1)\nargs.mode = 'b'\nif args.mode == 'a':\n    train(2)",
    "train(1)\nif len('a') == 1:\n    sys.exit()\ntrain(2)",
    "join(1)\n', '.join(['a', 'b'])",
    "join(1)\ntry:\n    package.pipeline()\nexcept ImportError:\n    pass",
    "train(1)\n\n\ndef other():\n    train(2)",
)


def found(folder: Path, text: str) -> list[int]:
    """What each call of join finds."""
    script, lines = folder / "script.py", list[int]()

    def join(_: Any) -> list[int]:
        lines.append(second_call(sys._getframe(1), join))
        return []

    def lazy(name: str) -> Any:
        raise ImportError(f"{name} needs what is not there")

    package = ModuleType("package")
    vars(package)["__getattr__"] = lazy
    names = {
        "join": join,
        "package": package,
        "__name__": "s",
        "__file__": str(script),
        "SimpleNamespace": SimpleNamespace,
    }
    script.write_text(HEAD + text + "\n")
    try:
        exec(compile(script.read_text(), str(script), "exec"), names)
    except SystemExit:
        pass
    return lines


@pytest.mark.parametrize("text", AGAIN)
def test_what_certainly_follows(text: str, tmp_path: Path) -> None:
    assert found(tmp_path, text)[0] == AGAIN[text]


@pytest.mark.parametrize("text", ONCE)
def test_what_may_not_follow(text: str, tmp_path: Path) -> None:
    assert not any(found(tmp_path, text))
