"""Loops of many kinds, as their code says it: what is carried into the training is named, and nothing else."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import beside_loops
import carried_loops
import everstep
import harmless_loops
import indirect_loops
from everstep.data.given_loader import read_data
from everstep.script.carried_names import Read, Trained, read_loop
from everstep.script.loop_values import LoopValues, held
from everstep.script.reachable import loop_frames
from everstep.script.restarts import read_in_code
from rehearsed_scripts import Loop


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
        found = read_data(dataset, collate)
        runs.append(Run({**given, "dataset": found.dataset, "collate": found.collate, "given": dataset}))
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
    if "registered" in vars(module):  # for all modules, or all optimizers, of the process
        module.registered.remove()
    assert runs[0].read is not None
    return runs[0].read


@pytest.mark.parametrize(
    "loop", [*carried_loops.BAD, *indirect_loops.BAD, *beside_loops.BAD], ids=lambda loop: loop.name
)
def test_what_reaches_the_training_is_named(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, loop.text, monkeypatch)
    assert {name for name, *_ in found.carried} == set(loop.refused)
    lines = loop.text.splitlines()
    assert all(0 < line <= len(lines) and Path(file).name == "script.py" for _, _, file, line in found.carried)


@pytest.mark.parametrize(
    "loop", [*carried_loops.CLEAN, *harmless_loops.CLEAN, *beside_loops.CLEAN], ids=lambda loop: loop.name
)
def test_what_does_no_harm_is_not(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(tmp_path, loop.text, monkeypatch)
    assert not found.carried and not found.notes


def test_there_are_enough_of_both() -> None:
    assert len(carried_loops.BAD) >= 40 and len(carried_loops.CLEAN) >= 40


SETS = {
    "main = run.is_main": "2 if main else 1",
    "main = not run.is_main and bool(data)": "2 if main else 1",
    "main: bool = run.is_main": "2 if main else 1",
    "scale = 1.0\nif run.is_main:\n    scale = 0.5": "scale",
    "print(main := run.is_main)": "2 if main else 1",
}


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("use", ["x = x * ({})", "print({})", "main, scale = False, 1.0\nx = x * ({})"])
def test_a_name_set_before_the_loop_may_stand_for_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: str, use: str
) -> None:
    loop = Loop("leads", batch=use.format(SETS[sets]))
    text = loop.text.replace("for step in run:", f"{sets}\nfor step in run:")
    found = read(tmp_path, text, monkeypatch)
    assert [kind for _, kind, _, _ in found.carried] == ["leader"] * use.startswith("x")


@pytest.mark.parametrize("verbose", ["run.is_main", "True"])
def test_an_object_that_knows_the_leader_is_read_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: str
) -> None:
    helpers = """
class Helper:
    def __init__(self, verbose):
        self.verbose, self.calls, self.rate = verbose, 0, 1.0
    def weigh(self, x):
        if self.verbose:
            print(x)
        return x
    def count(self):
        self.calls += 1
        if self.calls > 3:
            optimizer.param_groups[0]['lr'] *= 0.9
"""
    made = f"helper = Helper(verbose={verbose})\nfor step in run:"
    honest = Loop("weighs", setup=helpers, batch="x = helper.weigh(x)").text.replace("for step in run:", made)
    assert not read(tmp_path, honest, monkeypatch).carried
    counts = Loop("counts", setup=helpers, after="helper.count()").text.replace("for step in run:", made)
    assert [title for title, *_ in read(tmp_path, counts, monkeypatch).carried] == ["helper.calls"]


LOADER = "small, data = data, torch.utils.data.DataLoader(data, batch_size=4, sampler=range(8))"
ANEW = {
    "data": ("", "if step.number == 3: data = data[:16]"),
    "loader": (LOADER, "if step.number == 3: data = torch.utils.data.DataLoader(small * 2, batch_size=4)"),
    "behind a loader": (LOADER, "small = small + small"),
    "in turn": ("more = data + data", "data, more = more, data"),
    "held": ("class Held: pass\nheld = Held()\nheld.data = data", "held.data = data[:16]"),
    "optimizer": ("", "if step.number == 3: optimizer = torch.optim.Adam(model.parameters())"),
}


@pytest.mark.parametrize("name", ANEW)
def test_what_join_has_read_is_not_set_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setup, after = ANEW[name]
    lines = Loop("anew", setup=setup, after=after).text.splitlines()
    found = read(tmp_path, "\n".join(lines), monkeypatch)
    wanted = {"loader": "data", "behind a loader": "small", "in turn": "data", "held": "held.data"}.get(name, name)
    at = [number for number, line in enumerate(lines, 1) if line.strip() == after]
    assert [(title, kind, line) for title, kind, _, line in found.carried] == [(wanted, "given", *at)]
    assert "join has read" in str(read_in_code(*found.carried[0]))


@pytest.mark.parametrize("batch", ["data = [t * 1 for t in data]", "data = data", ""])
def test_the_name_of_the_data_may_stand_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    loop = Loop("batches", batch=f"{batch}\nx, y = data").text
    assert not read(tmp_path, loop.replace("for x, y in step", "for data in step"), monkeypatch).carried
    assert not read(tmp_path, Loop("same", after="data, optimizer = data, optimizer").text, monkeypatch).carried


def test_a_bar_that_the_leader_alone_shows_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop("bar", setup="from tqdm import tqdm").text
    shown = loop.replace("in step:", "in tqdm(step, disable=not run.is_main):")
    assert not read(tmp_path, shown, monkeypatch).carried
