"""Loops of many kinds, as their code says it: what is carried into the training is named, and nothing else."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carried_loops
import everstep
import harmless_loops
import indirect_loops
from everstep.script.carried_names import Read, Trained, read_loop
from everstep.script.loop_values import LoopValues, held
from everstep.script.reachable import loop_frames
from rehearsed_scripts import HEAD


class Reading(Exception):
    """The loop has begun: no round of it is run."""


class Run:
    """Stands for a job; reads the loop that iterates over it."""

    is_main = True

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.read: Read | None = None

    def __iter__(self) -> Iterator[Any]:
        state = self.given.pop("state", None)
        extras = {"state": state} if isinstance(state, LoopValues) else dict(state or {})
        trained = Trained(**self.given, carried=held(extras), is_run=lambda thing: isinstance(thing, Run))
        self.read = read_loop(loop_frames(sys._getframe()), trained)
        raise Reading
        yield


def read(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Read:
    """What the loop of a script says."""
    runs: list[Run] = []

    def join(
        model: Any,
        optimizer: Any,
        dataset: Any,
        scheduler: Any = None,
        state: Any = None,
        collate: Any = None,
        ignore: Any = (),
        **_: Any,
    ) -> Run:
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": state, "ignored": ignore}
        runs.append(Run({**given, "dataset": dataset, "collate": collate}))
        return runs[0]

    script = folder / "script.py"
    script.write_text(text)
    module = types.ModuleType("script")
    module.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "script", module)
    monkeypatch.setattr(everstep, "join", join, raising=False)
    monkeypatch.chdir(folder)
    linecache.checkcache()
    with pytest.raises(Reading):
        exec(compile(text, str(script), "exec"), vars(module))
    assert runs[0].read is not None
    return runs[0].read


@pytest.mark.parametrize("loop", [*carried_loops.BAD, *indirect_loops.BAD], ids=lambda loop: loop.name)
def test_what_reaches_the_training_is_named(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, loop.text, monkeypatch)
    assert {name for name, *_ in found.carried} == set(loop.refused)
    lines = loop.text.splitlines()
    assert all(0 < line <= len(lines) and Path(file).name == "script.py" for _, _, file, line in found.carried)


@pytest.mark.parametrize("loop", [*carried_loops.CLEAN, *harmless_loops.CLEAN], ids=lambda loop: loop.name)
def test_what_does_no_harm_is_not(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, loop.text, monkeypatch)
    assert not found.carried and not found.notes


def test_there_are_enough_of_both() -> None:
    assert len(carried_loops.BAD) >= 40 and len(carried_loops.CLEAN) >= 40


@pytest.mark.parametrize("main", ["run.is_main", "bool(run.is_main)", "not run.is_main and bool(data)"])
@pytest.mark.parametrize("uses, carried", [("x = x * (2 if main else 1)", ["run.is_main"]), ("if main: print(x)", [])])
def test_a_name_set_before_the_loop_may_stand_for_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: str, uses: str, carried: list[str]
) -> None:
    text = f"""
run = everstep.join(model, optimizer, data, lanes=2, micro_batch=2, steps=6)
main = {main}
for step in run:
    for x, y in step:
        {uses}
        step.backward(loss_fn(model(x), y))
"""
    found = read(tmp_path, HEAD + text, monkeypatch)
    assert [(title, kind) for title, kind, _, _ in found.carried] == [(title, "leader") for title in carried]
