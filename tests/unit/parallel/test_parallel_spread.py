"""Spreads of updated parameters within a host, between hosts and both: in the end whole, cut anywhere, late, twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from parallel_cases import plan_of, together
from torch import Tensor
from torch.distributed import HashStore

from everstep.base.errors import CollectiveAborted, InvariantViolation
from everstep.base.plan import Member, WorkerKey
from everstep.base.ports import Portion
from everstep.parallel import spread_ring
from everstep.parallel.either import ways_of
from everstep.parallel.mapping import PeerMapping
from everstep.parallel.spread_ring import SpreadRing
from everstep.parallel.staged import StagedTransport

LANES = 8
PIECE = 1000
Made = tuple[int, tuple[int, ...], int]
"""Source, takers and size of a portion."""
MADE: list[Made] = [
    (0, (1, 2, 3), 12_345),
    (1, (0, 2), 1),
    (2, (0, 1, 3), 999),
    (1, (0, 2, 3), 7_000),
    (3, (0,), 400),
    (3, (0,), 400),
    (3, (0,), 400),
    (2, (1,), 5_001),
    (0, (1, 2, 3), 77),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_ring, "PIECE_ELEMENTS", PIECE)


class Crew:
    """Transports of workers in this process. kind: of the transport; "hosts": two workers on each of several."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = HashStore()
        self.waiting = threading.Event()
        self.transports: dict[int, StagedTransport] = {}

    def open(self, generation: int, n: int) -> None:
        for i in range(len(self.transports), n):
            machine, kind = ("", self.kind) if self.kind != "hosts" else (f"m{i // 2}", "auto")
            more = {} if kind == "shm" else {"store": self.store, "key": b"k" * 32}
            self.transports[i] = StagedTransport(
                *(WorkerKey(i, 0), LANES, self.waiting.set), kind=kind, machine=machine, **more
            )
        members = [Member(i, 0, "here", os.getpid(), "127.0.0.1:1", self.transports[i].segment) for i in range(n)]
        plan = replace(plan_of(generation, members, LANES), seats=())
        assert together(*(lambda t=t: t.open(plan, {}) for t in self.transports.values())) == [None] * n

    def spread(self, i: int, step: int, portions: Sequence[Portion], stage: int = 0) -> None:
        self.transports[i].channel.spread(step, stage, portions)

    def all_spread(self, step: int, own: Sequence[Sequence[Portion]]) -> list[object]:
        """All members at once, each with its portions; returns what each has raised, None else."""
        return together(*(partial(self.spread, i, step, one) for i, one in enumerate(own)))

    def abort(self, generation: int) -> None:
        for transport in self.transports.values():
            transport.abort(generation)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


@pytest.fixture(params=["shm", "sockets", "hosts"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    found = Crew(request.param)
    yield found
    found.close()


@pytest.fixture
def near() -> Iterator[Crew]:
    found = Crew("shm")
    yield found
    found.close()


def value(step: int, number: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + number))


def held(me: int, step: int, made: Sequence[Made] = MADE) -> list[Portion]:
    """Portions of one member before a spread: zeros where it lacks one, -1 where it neither has nor takes one."""
    found = []
    for number, (source, takers, numel) in enumerate(made):
        data = value(step, number, numel) if source == me else torch.full((numel,), 0.0 if me in takers else -1.0)
        found.append(Portion(source, takers, data))
    return found


def right(me: int, step: int, portions: Sequence[Portion]) -> bool:
    return all(
        torch.equal(one.data, value(step, n, one.data.numel()) if me in (one.source, *one.takers) else -one.data.abs())
        for n, one in enumerate(portions)
    )


def test_all_comes_to_those_who_lack_it_and_to_no_others(crew: Crew) -> None:
    crew.open(1, 4)
    for step in range(1, 6):
        own = [held(i, step) for i in range(4)]
        assert crew.all_spread(step, own) == [None] * 4
        assert all(right(i, step, one) for i, one in enumerate(own))


def test_what_was_given_may_change_as_soon_as_the_giver_goes_on(crew: Crew) -> None:
    """Even if the taker comes later."""
    made = [(0, (2,), 100)]
    crew.open(1, 3)
    own = [held(i, 1, made) for i in range(3)]
    crew.waiting.clear()

    def giver() -> None:
        crew.spread(0, 1, own[0])
        own[0][0].data.fill_(7.0)
        crew.waiting.set()

    def taker() -> None:
        assert crew.waiting.wait(60)
        crew.spread(2, 1, own[2])

    assert together(giver, taker, lambda: crew.spread(1, 1, own[1])) == [None] * 3
    assert right(2, 1, own[2])


@pytest.mark.parametrize("kind", ["shm", "hosts"])
def test_a_spread_that_was_cut_at_any_record_is_made_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of it, or lies there still, is never taken for what comes in the next generation."""
    crew = Crew(kind)
    made = [(0, (1, 2), 6 * PIECE), (1, (0,), 500), (2, (1,), 2500)]
    written, write, cut_at = [0], SpreadRing._write, [0]

    def counted(ring: SpreadRing, *args: object) -> None:
        write(ring, *args)  # type: ignore[arg-type]
        written[0] += 1
        if written[0] == cut_at[0]:
            crew.abort(generation)

    monkeypatch.setattr(SpreadRing, "_write", counted)
    generation, cuts = 0, 0
    while cuts == generation:
        generation += 1
        crew.open(generation, 3)
        cut_at[0], written[0] = generation, 0
        own = [held(i, 2 * generation, made) for i in range(3)]
        found = crew.all_spread(5, own)
        assert all(one is None or isinstance(one, CollectiveAborted) for one in found), found
        assert all(right(i, 2 * generation, own[i]) for i, one in enumerate(found) if one is None)
        cuts += any(one is not None for one in found)
    crew.close()
    assert cuts >= 7, cuts
    assert found == [None] * 3


def test_pieces_of_an_older_step_do_not_count(crew: Crew) -> None:
    """A taker that comes first to the next spread finds what the one before has left."""
    made = [(0, (1,), 300)]
    crew.open(1, 2)
    for step in range(1, 4):
        own = [held(i, step, made) for i in range(2)]
        crew.waiting.clear()

        def giver(step: int, own: Sequence[Portion]) -> None:
            assert crew.waiting.wait(60)
            crew.spread(0, step, own)

        assert together(partial(giver, step, own[0]), partial(crew.spread, 1, step, own[1])) == [None] * 2
        assert right(1, step, own[1])


def test_a_slow_taker_is_waited_for_before_its_pieces_are_written_over(near: Crew) -> None:
    made = [(0, (1, 2), 3 * PIECE)]
    near.open(1, 3)
    own = [[held(i, stage, made) for stage in (1, 2)] for i in range(3)]
    near.waiting.clear()
    first_done = threading.Event()

    def quick(i: int) -> None:
        near.spread(i, 1, own[i][0], 1)
        near.waiting.clear()
        first_done.set()
        near.spread(i, 1, own[i][1], 2)

    def slow() -> None:
        assert first_done.wait(60) and near.waiting.wait(60)
        near.spread(2, 1, own[2][0], 1)
        near.spread(2, 1, own[2][1], 2)

    assert together(lambda: quick(0), lambda: quick(1), slow) == [None] * 3
    assert all(right(i, 1, own[i][0]) and right(i, 2, own[i][1]) for i in range(3))


def test_a_record_that_is_half_written_is_none(near: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the border is between its new bytes and the old ones."""
    write, size, mixed = SpreadRing._write, spread_ring._RECORD.size, list[bytes]()

    def slowly(ring: SpreadRing, at: int, *args: object) -> None:
        memory, record = ring._own.memory, slice(at, at + size)
        before = bytes(memory[record])
        write(ring, at, *args)  # type: ignore[arg-type]
        after = bytes(memory[record])
        for cut in range(1, size):
            torn = memory[record] = after[:cut] + before[cut:]
            if torn not in (before, after) and ring._read(ring._me, at) is not None:
                mixed.append(torn)
        memory[record] = after

    monkeypatch.setattr(SpreadRing, "_write", slowly)
    near.open(1, 2)
    own = [held(i, 1, [(0, (1,), 3 * PIECE)]) for i in range(2)]
    assert near.all_spread(1, own) == [None] * 2 and not mixed
    assert right(1, 1, own[1])


def test_a_spread_twice_over_in_a_generation_is_refused_and_in_the_next_gives_the_same(near: Crew) -> None:
    for generation in (1, 2):
        near.open(generation, 4)
        own = [held(i, 3) for i in range(4)]
        assert near.all_spread(3, own) == [None] * 4
        assert all(right(i, 3, one) for i, one in enumerate(own))
        with pytest.raises(InvariantViolation, match="expected a spread after"):
            near.spread(0, 3, own[0])


@pytest.mark.parametrize("role", ["source", "taker"])
def test_who_died_is_accused_when_it_is_waited_for(near: Crew, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(0, (1,), 9 * PIECE)]
    near.open(1, 2)
    monkeypatch.setattr(PeerMapping, "alive", lambda _: False)
    me = int(role == "source")
    with pytest.raises(CollectiveAborted) as fault:
        near.spread(me, 1, held(me, 1, made))
    assert fault.value.accused == (1 - me,)


def test_what_a_source_had_given_before_it_died_counts(near: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it came after the last look."""
    made, asked = [(0, (1,), 2 * PIECE)], list[None]()
    near.open(1, 2)

    def dies(_: PeerMapping) -> bool:
        if not asked:
            near.spread(0, 1, held(0, 1, made))
        asked.append(None)
        return False

    monkeypatch.setattr(PeerMapping, "alive", dies)
    own = held(1, 1, made)
    near.spread(1, 1, own)
    assert asked and right(1, 1, own)


def test_after_a_fault_on_this_host_no_other_writes_to_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew("hosts")
    try:
        crew.open(1, 4)
        monkeypatch.setattr(PeerMapping, "alive", lambda _: False)
        made = [(2, (0,), 500), (1, (0,), 500)]
        with pytest.raises(CollectiveAborted) as fault:
            crew.spread(0, 1, held(0, 1, made))
        assert fault.value.accused == (1,)
        assert not crew.transports[0].channel._far._carrier.mesh.whole  # type: ignore[attr-defined]
    finally:
        crew.close()


def test_a_portion_goes_once_to_each_other_machine_and_is_passed_on_there() -> None:
    machines = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    everybody = (0, 1, 2, 3, 4)
    portions = [Portion(s, tuple(w for w in everybody if w != s), torch.zeros(n + 1)) for n, s in enumerate((0, 0, 2))]
    ways = {machine: ways_of(portions, machines, machine) for machine in "abc"}
    assert all(of.far == ways["a"].far for of in ways.values())
    assert [one.takers for one in ways["a"].far] == [(2, 4), (3, 4), (0, 4)]
    assert [(one.source, one.takers) for one in ways["a"].near] == [(0, (1,)), (0, (1,))]
    assert [(one.source, one.takers) for one in ways["a"].relayed] == [(0, (1,))]
    assert [(one.source, one.takers) for one in ways["b"].near] == [(2, (3,))]
    assert [(one.source, one.takers) for one in ways["b"].relayed] == [(2, (3,)), (3, (2,))]
    assert not ways["c"].near and not ways["c"].relayed


def test_a_generation_of_one_machine_needs_no_sockets() -> None:
    crew = Crew("hosts")
    try:
        crew.open(1, 2)
        own = [held(i, 1, [(0, (1,), 2500)]) for i in range(2)]
        assert crew.all_spread(1, own) == [None] * 2
        assert right(1, 1, own[1])
    finally:
        crew.close()
