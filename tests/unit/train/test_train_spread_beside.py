"""Parameters that come in a thread of their own, and the gate where a pass waits for those of its next unit."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from torch import nn

from everstep.base.errors import CollectiveAborted
from everstep.train.spread_beside import SpreadBeside, UnitGate


class Exchanges:
    """Three parts; each comes when it is let. An error that is let raises."""

    def __init__(self) -> None:
        self.let: SimpleQueue[Exception | None] = SimpleQueue()
        self.begun = 0
        self.beside = SpreadBeside(1, 4, [self._exchange] * 3)

    def _exchange(self) -> None:
        self.begun += 1
        error = self.let.get(timeout=60.0)
        if error is not None:
            raise error


def waited(beside: SpreadBeside, number: int | None) -> threading.Thread:
    thread = threading.Thread(target=lambda: beside.wait(number))
    thread.start()
    return thread


def test_who_waits_for_a_part_goes_on_when_it_has_come() -> None:
    given = Exchanges()
    first, all_of_them = waited(given.beside, 1), waited(given.beside, None)
    given.beside.wait(0)
    assert first.is_alive()
    given.let.put(None)
    first.join(60.0)
    assert not first.is_alive() and all_of_them.is_alive()
    for _ in range(2):
        given.let.put(None)
    all_of_them.join(60.0)
    assert not all_of_them.is_alive() and given.begun == 3


def test_what_ends_it_is_raised_wherever_a_part_lacks_and_nothing_comes_after_it() -> None:
    given = Exchanges()
    given.let.put(None)
    given.let.put(CollectiveAborted("gone", [2]))
    given.beside.end()
    given.beside.wait(1)
    for number in (2, None, None):
        with pytest.raises(CollectiveAborted) as fault:
            given.beside.wait(number)
        assert fault.value.accused == (2,)
    assert given.begun == 2


def test_a_pass_waits_for_the_newest_part_that_its_unit_needs() -> None:
    units = [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Linear(2, 2)]
    gate, waits = UnitGate(units, [4, 5, 6, 7]), list[int]()
    gate.enter(4)
    gate.shut({4: 2, 6: 3}, waits.append)
    for unit in (4, 5, 6, 7, 8, 3):
        gate.enter(unit)
    assert waits == [2, 2, 3, 3, 3]
    gate.open()
    gate.enter(7)
    assert len(waits) == 5


def test_a_parameter_belongs_to_the_first_unit_that_has_it_and_one_outside_comes_first() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    gate = UnitGate([first, last], [3, 4])
    assert [gate.unit_of(p) for p in (first.weight, last.weight, last.bias)] == [3, 3, 4]
    assert gate.unit_of(nn.Parameter(first.weight.clone())) < 3
