"""A lane that is computed twice with different results: what did it is named, with its line; how a script says that."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import DeterminismError, LaneCarried

DATA: Any = [torch.full((4,), float(i)) for i in range(32)]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.inner(x) * self.calls


def steps(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return everstep.join(model, optimizer, DATA, lanes=4, micro_batch=2, steps=2)


def said(refused: Any) -> str:
    text = str(refused.value)
    assert text.startswith("lane 0 of step 1 was computed twice and gave different gradients: ")
    return text.partition("gradients: ")[2]


def test_a_module_that_counts_its_calls() -> None:
    model = nn.Sequential(Counting())
    with pytest.raises(DeterminismError) as refused:
        for step in steps(model):
            for x in step:
                step.backward(model(x).sum())
    assert said(refused).startswith("0.calls (test_train_lane_witness.py:28) changes with each forward pass, and ")


def test_a_state_that_one_batch_leaves_to_the_next() -> None:
    model = nn.Linear(4, 4)
    hidden: Any = None
    with pytest.raises(DeterminismError) as refused:
        for step in steps(model):
            for x in step:
                out = model(x if hidden is None else x + hidden)
                hidden = out.detach()
                step.backward(out.sum())
    assert said(refused).startswith("hidden (test_train_lane_witness.py:59) is carried from one batch to the next, ")


def test_a_container_that_grows() -> None:
    model, seen = nn.Linear(4, 4), [1.0]
    with pytest.raises(DeterminismError) as refused:
        for step in steps(model):
            for x in step:
                seen.append(2.0)
                step.backward(model(x).sum() * sum(seen))
    assert said(refused).startswith("seen (test_train_lane_witness.py:70) is carried from one batch to the next, and ")


def test_a_generator_of_the_loop_is_named() -> None:
    model, own = nn.Linear(4, 4), np.random.default_rng(1)
    with pytest.raises(LaneCarried) as refused:
        for step in steps(model):
            for x in step:
                step.backward(model(x).sum() * own.random())
    assert said(refused).startswith("own (test_train_lane_witness.py:79) goes on from one batch to the next, and ")


def test_a_random_source_is_still_called_one() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(DeterminismError) as refused:
        for step in steps(model):
            for x in step:
                step.backward(model(x).sum() * int.from_bytes(os.urandom(4)))
    assert "a random source that is not deterministic" in said(refused)


SCRIPT = """
import sys
import torch
import everstep
model = torch.nn.Linear(4, 4)
data = [torch.ones(4)] * 32
class Broken:
    def __len__(self): return 32
    def __getitem__(self, i): raise KeyError("nothing")
if (what := sys.argv[1]) == "file": everstep.TokenFile("none.bin", length=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
more = {"lanes": 0} if what == "config" else {}
run = everstep.join(model, optimizer, Broken() if what == "data" else data, steps=1, micro_batch=2, **more)
for step in run:
    for x in step:
        if what == "own": raise ValueError("of the user")
        if what == "scaler": torch.amp.GradScaler("cpu").scale(model(x).sum())
        step.backward(model(x).sum() if what == "again" else model(x))
if what == "again": getattr(everstep, "join")(model, optimizer, data, steps=1, micro_batch=2)
"""


OWN = ("own", 1, "")
ERRORS = [
    ("config", 2, "lanes: expected whole number, at least 1, got 0 (from join)"),
    ("file", 2, "cannot read none.bin: No such file or directory"),
    ("data", 1, "sample 22 of the dataset cannot be read (epoch 0): KeyError: 'nothing' (train.py:"),
    ("loss", 1, "the loss must be a tensor with one element, got shape (2, 4)"),
    ("again", 2, "everstep.join was called twice in one script, but a worker belongs to one job"),
    ("scaler", 2, "a GradScaler was used in the loop: remove it, and give join(precision='fp16')"),
]
ONE_AFTER_THE_OTHER = """
import os, runpy, sys
from everstep.cli.early_server import PRELOAD
from everstep.runtime.host.fork_server import preload
preload(list(PRELOAD))
folder, *others, last = sys.argv[1:]
for what in others:
    if (pid := os.fork()) == 0:
        os.dup2(os.open(f"{folder}/{what}", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv, code = ["train.py", what], 0
        try:
            runpy.run_path(f"{folder}/train.py", run_name="__main__")
        except BaseException:
            code = 1
            try:
                sys.excepthook(*sys.exc_info())
            except SystemExit as end:
                code = end.code
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
sys.argv = ["train.py", last]
runpy.run_path(f"{folder}/train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How the script ends with each argument, and what it says. One process imports torch: the last of them is run in
    it, as a script is, and the others in forks."""
    folder, names = tmp_path_factory.mktemp("scripts"), [what for what, _, _ in (OWN, *ERRORS)]
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    said = [*((folder / what).read_text() for what in names[:-1]), done.stderr]
    return dict(zip(names, zip([*map(int, done.stdout.split()), done.returncode], said, strict=True), strict=True))


@pytest.mark.parametrize(("what", "code", "expected"), ERRORS)
def test_a_script_says_our_errors_in_one_line(
    ends: dict[str, tuple[int, str]], what: str, code: int, expected: str
) -> None:
    found, said = ends[what]
    assert (found, said.count("\n")) == (code, 1), said
    assert said.startswith(f"everstep: error: {expected}")


def test_exceptions_of_the_user_are_left_alone(ends: dict[str, tuple[int, str]]) -> None:
    found, said = ends["own"]
    assert found == 1 and said.startswith("Traceback") and "ValueError: of the user" in said


def test_an_iterator_that_a_batch_goes_on_in_is_named() -> None:
    model, others = nn.Linear(4, 4), iter(range(1, 9))
    with pytest.raises(LaneCarried) as refused:
        for step in steps(model):
            for x in step:
                step.backward(model(x).sum() * next(others))
    assert said(refused).startswith("others (test_train_lane_witness.py:180) goes on from one batch to the next, and ")


def test_a_module_of_a_program_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `python -c`, or of one that is typed in."""
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    monkeypatch.setattr(Counting, "__module__", "__main__")
    with pytest.raises(DeterminismError) as refused:
        for step in steps(model := nn.Sequential(Counting())):
            for x in step:
                step.backward(model(x).sum())
    assert said(refused).startswith("0.calls (test_train_lane_witness.py:28) changes with each forward pass, and ")
