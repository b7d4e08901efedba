"""Ranks that compute lanes together, as threads over one shared memory: their sums are those of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.base.config import Config, load_config
from everstep.base.errors import ConfigError, TaskError
from everstep.base.ports import Node
from everstep.exact.accumulate import LaneAccumulator
from everstep.exact.layout import GradientLayout, align_parameters, untie
from everstep.exact.rank_sums import RankSums
from everstep.exact.shard_plan import gather_gradients, shard_model
from everstep.exact.shard_sums import ShardMesh
from everstep.parallel.cell_memory import CellMemory
from everstep.parallel.shard_boxes import BoxExchange
from everstep.placement.ranks import rounds
from everstep.placement.tree import cover
from everstep.train.cell_store import CellPlaces, CellStore
from everstep.zoo.recipe import token_loss
from everstep.zoo.shard_plans import transformer_plan
from everstep.zoo.transformer import Transformer, TransformerConfig

LANES, SHARDS, DEGREE, SEATS = 3, 4, 2, 2


class Rank:
    """One process's model, and what it shares."""

    def __init__(self, rank: int, memory: CellMemory | None = None) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = Transformer(TransformerConfig(37, 8, 1, 16, 4, 0.0))
        self.mesh = ShardMesh(SHARDS)
        shard_model(self.model, transformer_plan(self.model.config), self.mesh)
        units = self.model.units()
        untie(self.model, units)
        align_parameters(self.model)
        self.layout = GradientLayout.build(self.model, units)
        self.places = CellPlaces(self.layout, self.model, SEATS * DEGREE, LANES, None, DEGREE, SHARDS)
        if memory is None:
            self.memory = CellMemory.create(self.places.size)
        else:
            self.memory = CellMemory.attach(memory.path, rank, self.places.size)
        self.store = CellStore(self.memory, self.places, lambda: None)
        self.store.move_in(list(self.model.parameters()))
        self.seat, self.part = divmod(rank, DEGREE)
        self.exchange = self.store.exchange(SHARDS, DEGREE)
        self.sums = RankSums(
            *(self.layout, self.model, LANES, self.store, self.places.units),
            whole_first=True,
            mesh=self.mesh,
            degree=DEGREE,
        )

    def lane(self, sums: Any, lane: int) -> None:
        tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(lane))
        sums.enter(lane)
        loss = token_loss(self.model(tokens[:, :-1]), tokens[:, 1:])
        sums.capture(lane)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(lane)

    def lanes(self) -> None:
        """All lanes, in rounds."""
        point = 0
        self.sums.begin(range(LANES), fresh=True)
        for turn in rounds(range(LANES), SEATS):
            point += 1
            self.store.meet(point, range(SEATS * DEGREE))
            self.sums.round(turn, point)
            if self.seat < len(turn):
                with self.mesh.among(self.part, DEGREE, self.exchange):
                    self.lane(self.sums, turn[self.seat])
            point += self.sums.points
        self.store.meet(point + 1, range(SEATS * DEGREE))


def in_threads(count: int, act: Callable[[int], Any]) -> list[BaseException]:
    """All at once; what they raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        torch.set_num_threads(1)  # a new thread has another number, and bits depend on it
        try:
            act(number)
        except BaseException as error:
            raised.append(error)

    running = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60.0)
        assert not thread.is_alive()
    return raised


def _ranks() -> list[Rank]:
    head = Rank(0)
    return [head, *(Rank(k, head.memory) for k in range(1, SEATS * DEGREE))]


def _alone() -> dict[Node, tuple[bytes, Tensor]]:
    one, found = Rank(0), dict[Node, Tensor]()
    accumulator = LaneAccumulator(one.layout, one.model)
    accumulator.begin(1, cover(range(LANES), LANES), lambda node: found.setdefault(node, torch.zeros(one.layout.numel)))
    for lane in range(LANES):
        one.lane(accumulator, lane)
    return {node: (row, found[node]) for node, row in accumulator.presence.items()}


def test_sums_of_lanes_that_ranks_compute_together_have_the_bits_of_one_process() -> None:
    torch.set_num_threads(1)
    ranks, wanted = _ranks(), _alone()
    assert not in_threads(len(ranks), lambda number: ranks[number].lanes())
    for one in ranks:
        found = {node: (row, flat) for node, row, flat in one.sums.results()}
        assert found.keys() == wanted.keys()
        for node, (row, flat) in wanted.items():
            assert found[node][0] == row
            for entry in one.layout.entries:
                assert torch.equal(found[node][1][entry.offset : entry.stop], flat[entry.offset : entry.stop]), entry


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weight: weight.requires_grad_(False), "different parameters"),
        (lambda weight: weight.register_hook(lambda gradient: gradient * 1.5), "norm1.weight is not cut, but"),
    ],
)
def test_ranks_whose_gradients_differ_are_refused(change: Callable[[nn.Parameter], Any], words: str) -> None:
    ranks = _ranks()
    change(ranks[1].model.blocks[0].norm1.weight)  # type: ignore[index, union-attr, arg-type]

    def run(number: int) -> None:
        try:
            ranks[number].lanes()
        finally:
            ranks[number].memory.break_pass()

    raised = in_threads(len(ranks), run)
    assert any(isinstance(error, TaskError) and words in str(error) for error in raised), raised


def test_gradients_are_brought_together() -> None:
    torch.set_num_threads(1)
    ranks, whole = _ranks()[:DEGREE], Rank(0)
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))

    def run(number: int) -> None:
        one = ranks[number]
        with one.mesh.among(one.part, DEGREE, one.exchange):
            token_loss(one.model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
            gather_gradients(one.model, one.mesh)

    assert not in_threads(DEGREE, run)
    token_loss(whole.model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad for p in whole.model.parameters()]
    for one in ranks:
        assert all(torch.equal(p.grad, w) for p, w in zip(one.model.parameters(), wanted, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0, 7])
def test_boxes_carry_tensors_larger_than_they_are_and_of_different_sizes(start: int) -> None:
    boxes = [[torch.zeros(128 + 64, dtype=torch.uint8) for _ in range(2)] for _ in range(4)]
    barrier = threading.Barrier(2)
    tensors = [torch.arange(k * 20 + 1, dtype=torch.float32).reshape(1, -1) for k in range(4)]
    found: dict[int, list[list[Tensor]]] = {}

    def meet(point: int) -> None:
        barrier.wait(30)

    def run(number: int) -> None:
        mine = range(2 * number, 2 * number + 2)
        exchange = BoxExchange(boxes, mine, meet)
        exchange.start(start)
        sent = [tensors[k] for k in mine]
        found[number] = [exchange.gather(sent), exchange.gather([t.to(torch.bfloat16) for t in sent])]

    assert not in_threads(2, run)
    for one in found.values():
        assert all(torch.equal(a, b) for a, b in zip(one[0], tensors, strict=True))
        assert all(torch.equal(a, b.to(torch.bfloat16)) for a, b in zip(one[1], tensors, strict=True))


def _config(**values: Any) -> Config:
    return load_config([("test", {f"cell.{name}": value for name, value in values.items()})])


def test_the_number_of_shards_follows_the_degree_unless_it_is_set() -> None:
    assert (_config().cell.shards, _config(tp=4).cell.shards, _config(tp=2, shards=4).cell.shards) == (1, 4, 4)
    assert (_config(tp=2, fsdp=3).cell.ranks, _config(shards=4).cell.ranks) == (6, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tp": 3, "shards": 4}, "cell.shards: expected a multiple of cell.tp=3, got 4"),
        ({"tp": 2, "shards": 1}, "cell.shards: expected a multiple of cell.tp=2, got 1"),
        ({"sp": True}, "cell.sp: expected cell.shards or cell.tp above 1, got 1 shard"),
        ({"tp": 8, "fsdp": 8}, "cell.tp: expected at most 32 processes in a worker, got 64"),
    ],
)
def test_cells_that_cannot_be_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _config(**values)


@pytest.mark.parametrize(("key", "value"), [("device", "cuda"), ("batch", "per_worker")])
def test_what_does_not_go_with_ranks_that_share_a_lane_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^cell.(tp|shards): expected 1 with {key}={value}"):
        load_config([("test", {"cell.tp": 2, key: value, "network.address": "10.0.0.1"})])
