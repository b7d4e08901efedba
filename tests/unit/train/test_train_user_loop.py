"""How a loop is let go: left by break or return for certain, or perhaps by an exception; and what is raised late."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.base.errors import Evicted
from everstep.exact.unchanged import UnchangedTensors
from everstep.protocol.driver.operations import EndAsked, SaveAsked
from everstep.protocol.step_phases import Phase
from everstep.train.executor import StateJumped
from everstep.train.loop_state import LoopState
from everstep.train.user_loop import LoopIterator, UserLoop, raise_soon


def numbers() -> Iterator[int]:
    yield from range(4)


Around = Callable[[Iterable[int]], Iterable[Any]]


class Steps:
    """What is iterated, and how each loop over it was let go."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def __iter__(self) -> LoopIterator:
        self.steps = numbers()  # as a run keeps it
        return LoopIterator(self.steps, self.said.append)


def passed_on(steps: Iterable[int]) -> Iterator[int]:
    for one in steps:  # noqa: UP028 - as a progress bar does
        yield one


def breaks(steps: Iterable[int]) -> None:
    for _ in steps:
        break


def breaks_inside(steps: Iterable[int]) -> None:
    for one in steps:
        with open("/dev/null"):
            try:
                if one:
                    break
            finally:
                pass


def returns(steps: Iterable[int]) -> int:
    for one in steps:
        for _ in range(2):
            return one + 1
    return 0


def raises(steps: Iterable[int], around: Around) -> None:
    for _ in around(steps):
        raise ValueError


def fails_in_a_call(steps: Iterable[int], around: Around) -> None:
    for _ in around(steps):
        int("x")


def is_thrown_into(steps: Iterable[int], around: Around) -> None:
    for _ in around(steps):
        with open("/dev/null"):
            raise ValueError


@pytest.mark.parametrize("loop", [breaks, breaks_inside, returns])
def test_a_loop_that_is_left_is_known_for_certain(loop: Callable[[Any], Any]) -> None:
    steps = Steps()
    loop(steps)
    for one in passed_on(steps):
        if one:
            break
    for one, _ in enumerate(steps):
        if one:
            break
    assert steps.said == [True, True, True]


@pytest.mark.parametrize("loop", [raises, fails_in_a_call, is_thrown_into])
def test_an_exception_is_never_taken_for_that(loop: Callable[[Any], Any]) -> None:
    steps = Steps()
    arounds: tuple[Around, ...] = (enumerate, passed_on, lambda found: zip(found, range(9), strict=False))
    for around in arounds:
        with pytest.raises(ValueError):
            loop(steps, around)
    assert steps.said == [False, False, False]


def test_a_loop_that_comes_to_its_end_was_not_left() -> None:
    steps = Steps()
    assert list(steps) == [0, 1, 2, 3] and steps.said == []


def test_what_is_raised_late_is_what_it_was() -> None:
    def late() -> None:
        raise_soon(Evicted("its slot", drained=True))

    with pytest.raises(Evicted, match="its slot") as caught:
        late()
        for _ in range(9):
            pass
    assert caught.value.drained


class Session:
    """As much of one as a loop asks of it. asked: whether each end that was asked for came before the last step."""

    def __init__(self, phase: Phase = Phase.COMPUTING, step: int = 3, jumps: int = 0) -> None:
        machine = SimpleNamespace(phase=phase)
        self.exits: list[Callable[[], None]] = []
        self.asked: list[bool] = []
        self._jumps = jumps
        link = SimpleNamespace(row=SimpleNamespace(set=lambda **_: None), at_exit=self.exits.append)
        order, driver = SimpleNamespace(total_steps=8), SimpleNamespace(machine=machine)
        self.view = SimpleNamespace(step=step, order=order, driver=driver, link=link)
        self.profiling = SimpleNamespace(end=lambda: None)
        self.updates = SimpleNamespace(last_states=lambda left: b"")
        self.executor = SimpleNamespace(ask=self._ask)
        self.loop = LoopState(SimpleNamespace(split=True))  # type: ignore[arg-type]
        self.unjudged: Callable[[], list[SaveAsked]] = list
        self.metrics: Mapping[str, float] = {}

    def _ask(self, event: EndAsked) -> None:
        self.asked.append(event.left)
        self.metrics, self.astray = event.metrics, self.loop.moves.astray
        if len(self.asked) <= self._jumps:
            raise StateJumped("to another step")


def loop_of(session: Session) -> tuple[UserLoop, LoopIterator]:
    """One that has begun."""
    loop = UserLoop(session, contextlib.nullcontext())  # type: ignore[arg-type]
    steps = loop.begin(numbers())
    next(steps)
    return loop, steps


def test_a_loop_that_is_left_ends_the_job_wherever_the_state_is_put_to() -> None:
    session = Session(jumps=2)
    loop, _steps = loop_of(session)
    loop.leave()
    assert session.asked == [True, True, True] and not loop.begun
    loop.leave()
    assert len(session.asked) == 3, "it is over"


def test_after_an_update_that_failed_there_is_no_state_to_end_with() -> None:
    session = Session(Phase.UPDATING)
    loop, _steps = loop_of(session)
    loop.leave()
    assert session.asked == [] and loop.begun


@pytest.mark.parametrize(("step", "left"), [(7, True), (8, False)])
def test_a_loop_that_came_to_its_last_step_was_not_left(step: int, left: bool) -> None:
    session = Session(step=step)
    UserLoop(session, contextlib.nullcontext()).end()  # type: ignore[arg-type]
    assert session.asked == [left]


def test_evaluations_that_were_not_judged_rank_the_checkpoint_at_the_end() -> None:
    session = Session()
    session.unjudged = lambda: [SaveAsked({"x": 1.0, "y": 2.0}), SaveAsked({"x": 3.0})]
    UserLoop(session, contextlib.nullcontext()).end()  # type: ignore[arg-type]
    assert session.metrics == {"x": 3.0, "y": 2.0}


def test_at_the_end_what_the_loop_has_changed_since_the_update_is_astray() -> None:
    """A newcomer enters the loop's body right after the update, and would change it again."""
    session, model = Session(), nn.Linear(2, 2)
    session.loop.moves.begin(UnchangedTensors(model, torch.optim.SGD(model.parameters())))
    session.loop.moves.updated()
    with torch.no_grad():
        model.bias.mul_(2)
    UserLoop(session, contextlib.nullcontext()).end()  # type: ignore[arg-type]
    assert session.astray == "parameter bias" and not session.loop.moves.astray


def test_where_an_exception_may_be_on_its_way_the_end_of_the_script_ends_the_job() -> None:
    session = Session()
    loop = UserLoop(session, contextlib.nullcontext())  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        for one in loop.begin(numbers()):
            if one:
                raise ValueError
    assert session.asked == [] and loop.begun
    for act in session.exits:
        act()
    assert session.asked == [True] and not loop.begun


DATA = [(torch.randn(4, generator=torch.manual_seed(i)), torch.tensor(i % 2)) for i in range(64)]


def train(folder: Path, left_at: int = 0, inside: bool = False, halves: bool = False) -> int:
    """A job of one worker; returns the number of steps that the loop began. halves: each loss goes back in two halves,
    through one graph."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    begun = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"lanes": 4, "micro_batch": 2, "steps": 8, "rehearse": False, "run_dir": folder}
    for step in everstep.join(model, optimizer, DATA, **options):
        begun += 1
        for x, y in step:
            if inside and step.number == left_at:
                return begun
            loss = nn.functional.cross_entropy(model(x), y)
            if halves:
                step.backward(0.5 * loss, retain_graph=True)
            step.backward(0.5 * loss if halves else loss)
        if step.number == left_at:
            break
    return begun


def digest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "final" / "digest.json").read_text())
    return found


@pytest.mark.parametrize("inside", [False, True])
def test_by_itself_a_job_ends_in_order_and_stays_ended(
    inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update of a step counts that was done; run again, there is no more to do."""
    last = 4 if inside else 5
    assert train(tmp_path / "left", left_at=5, inside=inside) == 5
    assert digest(tmp_path / "left")["step"] == last
    events = [json.loads(line) for line in (tmp_path / "left" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "step_committed"] == list(range(1, last + 1))
    assert train(tmp_path / "left") == 0
    assert f"finished: its loop was left after step {last}" in capsys.readouterr().err
    assert train(tmp_path / "whole", left_at=last) == last
    same = {**digest(tmp_path / "whole"), "left": True}
    assert digest(tmp_path / "left") == same


def test_two_calls_through_one_graph_are_added_up(tmp_path: Path) -> None:
    assert train(tmp_path / "whole") == train(tmp_path / "halves", halves=True) == 8
    assert digest(tmp_path / "whole")["state"] == digest(tmp_path / "halves")["state"]
