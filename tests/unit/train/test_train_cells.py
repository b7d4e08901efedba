"""Ranks of one worker, as threads over one shared memory: their sums and updates are those of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.base.errors import ConfigError, MembershipError, TaskError
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.layout import GradientLayout, align_parameters, untie
from everstep.exact.pieces import PieceUpdate
from everstep.exact.rank_sums import RankSums
from everstep.exact.trees import bundle
from everstep.parallel.cell_memory import CellMemory, SharedPlace
from everstep.placement.ranks import rounds
from everstep.placement.tree import cover
from everstep.train.cell_elsewhere import NoOthers
from everstep.train.cell_store import CAME, GOES, CellPlaces, CellStore
from everstep.train.cell_update import CellUpdate

LANES, RANKS = 6, 3


class Model(nn.Module):
    """Three units; statistics; a matrix that two units share; a parameter that some lanes use, and one that none do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40))
        self.middle = nn.Linear(40, 40)
        self.last = nn.Linear(40, 40)
        self.last.weight = self.middle.weight
        self.last.sometimes = nn.Parameter(torch.ones(40))
        self.last.never = nn.Parameter(torch.ones(3000))

    def units(self) -> list[nn.Module]:
        return [self.first, self.middle, self.last]

    def forward(self, x: Tensor, lane: int) -> Tensor:
        y = self.last(torch.tanh(self.middle(self.first(x))))
        return y * self.last.sometimes if lane % 3 == 1 else y


class Rank:
    """One process's model, and what it shares."""

    def __init__(
        self, rank: int, memory: CellMemory | None = None, wrap: int | None = None, *, hops: bool = False
    ) -> None:
        self.model = Model()
        untie(self.model, self.model.units())
        align_parameters(self.model)
        self.layout = GradientLayout.build(self.model, self.model.units())
        self.places = CellPlaces(self.layout, self.model, RANKS, LANES, wrap, hops=hops)
        if memory is None:
            self.memory = CellMemory.create(self.places.size)
        else:
            self.memory = CellMemory.attach(memory.path, rank, self.places.size)
        self.store = CellStore(self.memory, self.places, lambda: None)
        self.store.move_in(list(self.model.parameters()))
        self.sums = RankSums(self.layout, self.model, LANES, self.store, self.places.units, whole_first=rank == 0)

    def start(self) -> None:
        """Put the statistics in place that the step starts from."""
        self.model.first[1].running_mean.zero_()
        self.model.first[1].running_var.fill_(1.0)

    def lane(self, sums: Any, lane: int, before: Callable[[], None] = lambda: None) -> None:
        """Compute a lane, from the statistics that the step starts from."""
        self.start()
        sums.enter(lane)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(lane))
        loss = self.model(x, lane).square().mean()
        sums.capture(lane)
        before()
        loss.backward()
        sums.add(lane)


class Apart(NoOthers):
    """Each rank has a memory of its own, as if it were on a host of its own."""

    def __init__(self, own: CellMemory, memories: list[CellMemory]) -> None:
        self._own, self._memories = own, memories
        others = [memory for memory in memories if memory is not own]
        own.tell_with(lambda index, value: [memory.receive(index, value) for memory in others] and None)

    def bring(self, rank: int, offset: int, size: int) -> None:
        if size > 0 and self._memories[rank] is not self._own:
            source = self._memories[rank].tensor(SharedPlace(offset, size), torch.uint8)
            self._own.tensor(SharedPlace(offset, size), torch.uint8).copy_(source)


def in_threads(
    act: Callable[[Rank], None], wrap: int | None = None, *, apart: bool = False
) -> tuple[list[Rank], list[BaseException]]:
    """All ranks at once; what they raised. apart: as if each were on a host of its own."""
    head = Rank(0, wrap=wrap)
    threads = torch.get_num_threads()
    raised: list[BaseException] = []
    memories = [CellMemory.create(head.places.size, k) if apart else head.memory for k in range(RANKS)]
    ranks = (
        [Rank(k, memories[k], wrap) for k in range(RANKS)]
        if apart
        else [head, *(Rank(k, head.memory, wrap) for k in range(1, RANKS))]
    )
    for one in ranks if apart else ():
        one.store.others = Apart(one.memory, [other.memory for other in ranks])
        for parameter, same in zip(one.model.parameters(), head.model.parameters(), strict=True):
            parameter.data.copy_(same.detach())

    def run(one: Rank) -> None:
        torch.set_num_threads(threads)  # a new thread has another number, and bits depend on it
        try:
            act(one)
        except BaseException as error:
            raised.append(error)

    running = [threading.Thread(target=run, args=(one,)) for one in ranks]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60.0)
        assert not thread.is_alive()
    return ranks, raised


def alone(lanes: list[int]) -> dict[Node, tuple[bytes, list[Tensor]]]:
    """The sums of these lanes in one process: presence, and each entry that is there."""
    one, found = Rank(0), dict[Node, Tensor]()
    accumulator = LaneAccumulator(one.layout, one.model)
    accumulator.begin(1, cover(lanes, LANES), lambda node: found.setdefault(node, torch.zeros(one.layout.numel)))
    for lane in lanes:
        one.lane(accumulator, lane)
    return {node: (row, there(one.layout, row, found[node])) for node, row in accumulator.presence.items()}


def there(layout: GradientLayout, row: bytes, flat: Tensor) -> list[Tensor]:
    return [flat[e.offset : e.stop].clone() for e, is_there in zip(layout.entries, row, strict=True) if is_there]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("wrap", [None, 50])
@pytest.mark.parametrize("lanes", [list(range(6)), [0, 1, 2, 3], [1, 2, 4, 5], [0, 1, 2, 3, 5], [3]])
def test_sums_have_the_bits_of_one_process(lanes: list[int], wrap: int | None, *, apart: bool) -> None:
    """Twice: the first lane of a head is another case. By units, and by modules of some size. On several hosts the
    ranks of a last round that is not full take over ranges from the others."""

    def act(one: Rank) -> None:
        point = 0
        for _ in range(2):
            one.start()
            one.sums.begin(lanes, fresh=True)
            for turn in rounds(lanes, RANKS):
                point += 1
                one.store.meet(point, range(RANKS))
                one.sums.round(turn, point)
                if one.memory.rank < len(turn):
                    one.lane(one.sums, turn[one.memory.rank])
                point += one.sums.points
            point += 1
            one.store.meet(point, range(RANKS))

    ranks, raised = in_threads(act, wrap, apart=apart)
    assert not raised, raised
    expected = alone(lanes)
    found = {node: (row, there(ranks[0].layout, row, flat)) for node, row, flat in ranks[0].sums.results()}
    assert found.keys() == expected.keys()
    for node, (row, tensors) in expected.items():
        assert found[node][0] == row
        assert all(torch.equal(a, b) for a, b in zip(found[node][1], tensors, strict=True))
    assert all(parameter.grad is None for one in ranks for parameter in one.model.parameters())


def test_a_lane_that_does_not_count_takes_part_and_leaves_nothing() -> None:
    """A trial, or a lane that had been added before: its rank exchanges with the others."""
    counted = [0, 2]

    def act(one: Rank) -> None:
        one.start()
        one.sums.begin(counted, fresh=True)
        for point, turn in ((1, (0, 1, 2)), (10, (4,))):
            one.store.meet(point, range(RANKS))
            one.sums.round([lane if lane in counted else None for lane in turn], point)
            if one.memory.rank < len(turn):
                lane = turn[one.memory.rank]
                add = one.sums.add if one.sums.is_missing(lane) else one.sums.leave_out
                one.start()
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(lane))
                loss = one.model(x, lane).square().mean()
                if one.sums.is_missing(lane):
                    one.sums.capture(lane)
                loss.backward()
                add(lane)
        one.store.meet(20, range(RANKS))

    ranks, raised = in_threads(act)
    assert not raised, raised
    expected = alone(counted)
    found = {node: (row, there(ranks[0].layout, row, flat)) for node, row, flat in ranks[0].sums.results()}
    assert found.keys() == expected.keys()
    for node, (row, tensors) in expected.items():
        assert found[node][0] == row
        assert all(torch.equal(a, b) for a, b in zip(found[node][1], tensors, strict=True))


@pytest.mark.parametrize("way", [CAME, GOES])
def test_what_lanes_hand_on_keeps_its_form(way: int) -> None:
    head = Rank(0, hops=True)
    limb = Rank(1, head.memory, hops=True)
    whole = torch.randn(5, 7)
    sent = bundle({"x": whole.t(), "parts": (whole[1:, 2:], 3), "no": None, "empty": torch.zeros(0)}, lambda: "it")
    head.store.put_hop(2, way, sent)
    came = limb.store.take_hop(2, way)
    head.store.put_hop(2, way, bundle(torch.zeros(5, 7), lambda: "it"))  # what came is a copy
    assert came.meta == sent.meta
    for one, other in zip(came.tensors, sent.tensors, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
        assert not one.numel() or (one.data_ptr() - other.data_ptr()) % 64 == 0


def test_what_is_too_large_to_be_handed_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Rank(0, hops=True)
    monkeypatch.setattr("everstep.train.cell_store._HOP_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"expected at most 1000 bytes of a lane .* got 4"):
        head.store.put_hop(0, CAME, bundle(torch.zeros(1000), lambda: "it"))


def test_a_rank_that_leaves_a_pass_frees_the_others() -> None:
    def act(one: Rank) -> None:
        def leave() -> None:
            if one.memory.rank == 1:
                one.sums.leave()
                one.memory.break_pass()
                raise TaskError("this rank cannot")

        one.sums.begin(range(RANKS), fresh=True)
        one.sums.round(range(RANKS), 1)
        one.lane(one.sums, one.memory.rank, leave)

    _, raised = in_threads(act)
    assert sorted(type(error).__name__ for error in raised) == ["PassBroken", "PassBroken", "TaskError"]


def test_a_gradient_that_comes_twice_is_refused() -> None:
    one = Rank(0)
    sums = RankSums(one.layout, one.model, LANES, one.store, one.places.units, whole_first=False)
    sums.begin([0], fresh=True)
    sums.round([0], 1)
    sums.enter(0)
    sums.capture(0)
    one.model(torch.randn(4, 6), 0).square().mean().backward()
    with pytest.raises(TaskError, match="was written more than once for one batch"):
        one.model(torch.randn(4, 6), 0).square().mean().backward()


def test_a_sparse_gradient_is_refused() -> None:
    one = Rank(0)
    sums = RankSums(one.layout, one.model, LANES, one.store, one.places.units, whole_first=False)
    sums.begin([0], fresh=True)
    sums.round([0], 1)
    sums.enter(0)
    rows = nn.functional.embedding(torch.tensor([1, 2]), one.model.middle.weight, sparse=True)
    with pytest.raises(ConfigError, match=r"middle.weight has a sparse gradient .*; use sparse=False"):
        (rows.sum() + one.model.last(rows.detach()).sum()).backward()
        sums.add(0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_updates_have_the_bits_of_one_process(kind: Any) -> None:
    """All of the state lies at the head afterwards, as one process would have it."""
    reference = Rank(0).model
    optimizer = kind(reference.parameters(), lr=0.1)
    head = Rank(0)
    ranks = [head, *(Rank(k, head.memory) for k in range(1, RANKS))]
    optimizers = [kind(one.model.parameters(), lr=0.1) for one in ranks]
    parts = [CellUpdate(o, one.store, RANKS) for o, one in zip(optimizers, ranks, strict=True)]
    for step in range(3):
        torch.manual_seed(step)
        for parameters in zip(reference.parameters(), *(one.model.parameters() for one in ranks), strict=True):
            gradient = None if parameters[0].numel() == 3000 and step == 0 else torch.randn(parameters[0].shape)
            for parameter in parameters:
                parameter.grad = gradient if gradient is None else gradient.clone()
        optimizer.step()
        kept = parts[0].describe()
        for part in parts[1:]:
            part.follow(kept, adopts=False)
        for part, own in zip(parts, optimizers, strict=True):
            PieceUpdate(own).make([part.pieces])
        made = parts[0].new()
        for part in parts[1:]:
            if made is not None:
                part.follow(made, adopts=True)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), head.model.parameters(), strict=True))
    for mine, theirs in zip(head.model.parameters(), reference.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(optimizers[0].state[mine][key], value), key


def test_a_part_of_the_updates_is_divided() -> None:
    """What was not dealt to this worker stays, and its state takes no memory once it was given back."""
    reference = Rank(0).model
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    head = Rank(0)
    ranks = [head, *(Rank(k, head.memory) for k in range(1, RANKS))]
    optimizers = [torch.optim.AdamW(one.model.parameters(), lr=0.1) for one in ranks]
    parts = [CellUpdate(o, one.store, RANKS) for o, one in zip(optimizers, ranks, strict=True)]
    kept = [(p.numel() // 3, p.numel()) for p in reference.parameters()]
    before = [p.detach().clone() for p in reference.parameters()]
    for parameters in zip(reference.parameters(), *(one.model.parameters() for one in ranks), strict=True):
        for parameter in parameters:
            parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    dealt = parts[0].deal({p: [run] for p, run in zip(head.model.parameters(), kept, strict=True)})
    for part in parts[1:]:
        part.take(dealt)
        part.follow(parts[0].describe(), adopts=False)
    for part, own in zip(parts, optimizers, strict=True):
        PieceUpdate(own).make([part.pieces])
    made = parts[0].new()
    for part in parts[1:]:
        part.follow(made or [], adopts=True)
    updated = [sum(stop - first for runs in part.pieces.values() for first, stop in runs) for part in parts]
    assert sum(updated) == sum(stop - first for first, stop in kept) and max(updated) < 2 * sum(updated) / RANKS
    for mine, theirs, whole, (first, _) in zip(
        head.model.parameters(), reference.parameters(), before, kept, strict=True
    ):
        assert torch.equal(mine.flatten()[first:], theirs.flatten()[first:])
        assert torch.equal(mine.flatten()[:first], whole.flatten()[:first])
        state = optimizers[0].state[mine]["exp_avg"]
        parts[0].release(state, [(first, mine.numel())])
        assert torch.equal(state.flatten()[first:], optimizer.state[theirs]["exp_avg"].flatten()[first:])
        parts[0].release(state, [])
        assert mine.numel() < 4096 or not state.flatten()[1024:-1024].any()


def test_frozen_parameters_lie_with_all_ranks() -> None:
    """One that two units share is one. Ranges of trained ones stay."""
    one = Rank(0)
    trained = [one.model.last.never]
    part = CellUpdate(torch.optim.SGD(trained, lr=0.1), one.store, RANKS)
    before = part.shares(one.model)
    assert before.keys() == {one.model.last.never.data_ptr()}
    for parameter in one.model.parameters():
        parameter.requires_grad_(parameter is one.model.last.never)
    shares = part.shares(one.model)
    sizes = {p.data_ptr(): p.numel() for p in one.model.parameters()}
    assert len(sizes) == len(list(one.model.parameters())) - 1 and shares.keys() == sizes.keys()
    assert shares.items() >= before.items()
    for at, runs in shares.items():
        assert [e for run in runs for first, stop in run for e in range(first, stop)] == list(range(sizes[at]))
    held = [sum(stop - first for at in shares for first, stop in shares[at][rank]) for rank in range(RANKS)]
    assert max(held) < 2 * sum(held) / RANKS


def test_memory_of_another_model_is_refused() -> None:
    head = Rank(0)
    with pytest.raises(MembershipError, match="they have built different models"):
        CellMemory.attach(head.memory.path, 1, head.places.size + 4096)


def test_notes_and_buffers_go_through_memory() -> None:
    head = Rank(0)
    limb = Rank(1, head.memory)
    size = head.store.write_note({"kept": b"x" * 100_000, "factor": 0.1})
    assert limb.store.read_note(0, size) == {"kept": b"x" * 100_000, "factor": 0.1}
    head.model.first[1].running_mean.fill_(3.0)
    head.model.first[1].num_batches_tracked.fill_(7)
    head.store.give_buffers(head.model)
    limb.store.take_buffers(limb.model)
    assert all(torch.equal(a, b) for a, b in zip(head.model.buffers(), limb.model.buffers(), strict=True))
    for other in (torch.zeros(4000), torch.zeros(40, dtype=torch.float64), torch.zeros(39)):
        head.model.first[1].running_mean = other
        with pytest.raises(ConfigError, match=r"but first.1.running_mean is .* and was \(40,\) torch.float32: keep it"):
            head.store.give_buffers(head.model)
