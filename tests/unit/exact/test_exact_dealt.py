"""Members that have divided an optimizer's state: together they do what one does alone, and each has what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from divided_members import DividedMember, exchange, plan_of
from everstep.base.extents import Extents, Runs, union
from everstep.exact.dealt import Dealt, digested_planes
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.state_memory import give_back
from everstep.placement.shards import share
from optimizers_divided import Lamb, Pooled


def blocks_of(worker: DividedMember, there: Extents) -> dict[int, bytes]:
    image = worker.state.image()
    of = image.outline.sizes
    return {n: bytes(image.read_block(n)) for lo, hi in there.spans(of) for n in range(lo, hi)}


@pytest.mark.parametrize(("members", "copies"), [(2, 1), (3, 1), (3, 2), (4, 3), (2, 2)])
def test_together_they_do_what_one_does_and_each_has_what_it_says(members: int, copies: int) -> None:
    alone, workers, plan = DividedMember(), [DividedMember() for _ in range(members)], plan_of(members, copies)
    for step in range(3):
        alone.whole(step)
        dealt = [worker.part(step, plan, me) for me, worker in enumerate(workers)]
        right = blocks_of(alone, Extents(whole=True))
        of = alone.state.shape.sizes
        for me, (worker, one) in enumerate(zip(workers, dealt, strict=True)):
            assert all(right[n] == data for n, data in blocks_of(worker, one.made()).items())
            assert one.spread() == share(plan.shard(me, 0), of) or step == 0
            assert one.spread().covers(one.made())
        assert union(one.made() for one in dealt).whole
        exchange(dealt)
        for worker, one in zip(workers, dealt, strict=True):
            there = blocks_of(worker, one.spread())
            assert all(right[n] == data for n, data in there.items())
            one.release()
            assert blocks_of(worker, one.spread()) == there
    digests = [worker.state.part_digests(3, digested_planes(worker.state.shape)) for worker in (alone, *workers)]
    assert len({digest for digest, _ in digests}) == 1


def test_holders_of_a_segment_say_the_same_digest_of_it_and_only_they_do() -> None:
    plan, workers = plan_of(3, 2), [DividedMember() for _ in range(3)]
    said = [worker.part(1, plan, me).digests() for me, worker in enumerate(workers)]
    together: dict[int, list[str]] = {}
    for one in said:
        for segment, digest in one.items():
            together.setdefault(segment, []).append(digest)
    assert together and all(len(of) == 2 and len(set(of)) == 1 for of in together.values())
    parameter = workers[0].model[0].weight
    with torch.no_grad():
        workers[0].optimizer.state[parameter]["exp_avg"].view(-1)[:].add_(1.0)
    changed = Dealt(workers[0].state, plan, 0, 0).digests()
    assert changed.keys() == said[0].keys() and changed != said[0]


@pytest.mark.parametrize(("members", "copies"), [(3, 2), (4, 1), (5, 3)])
def test_each_part_goes_once_to_each_member_that_has_not_updated_it(members: int, copies: int) -> None:
    plan, workers = plan_of(members, copies), [DividedMember() for _ in range(members)]
    dealt = [worker.part(1, plan, me) for me, worker in enumerate(workers)]
    model, portions = workers[0].model, dealt[0].portions()
    divided = [p for p in model.parameters() if p.requires_grad and p.is_contiguous()]
    begins, given = [one.data.data_ptr() for one in portions], Counter[int]()
    for parameter in divided:
        size, ends = parameter.numel(), range(parameter.data_ptr(), parameter.data_ptr() + 4 * parameter.numel())
        assert sum(one.data.numel() for one in portions if one.data.data_ptr() in ends) == size
    assert len(set(begins)) == len(begins)
    for one in portions:
        assert len(one.takers) == members - copies and one.source not in one.takers
        given[one.source] += one.data.numel()
    most, least = max(given.values()), min(given[k] for k in range(members))
    assert most - least <= 2 * BLOCK_ELEMENTS * copies, "holders of a segment share the giving"


def test_parts_are_given_in_the_order_of_the_grid() -> None:
    worker, plan = DividedMember(), plan_of(3, 1)
    portions = worker.part(1, plan, 0).portions()
    order = [
        [p.data_ptr() <= one.data.data_ptr() < p.data_ptr() + 4 * p.numel() for p in worker.model.parameters()].index(
            True
        )
        for one in portions
    ]
    assert order == sorted(order) and len(set(order)) > 3


def test_memory_of_what_others_hold_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def noted(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> None:
        kept.append(sum(stop - first for first, stop in ranges))
        assert kept[-1] <= tensor.numel()

    worker, plan = DividedMember(), plan_of(2, 1)
    dealt = worker.part(1, plan, 0)
    monkeypatch.setattr("everstep.exact.state_memory.give_back", noted)
    dealt.release()
    assert len(kept) >= 4 and sum(kept) > 0


def test_parameters_of_an_optimizer_without_such_state_are_divided_all_the_same() -> None:
    alone, plan = DividedMember(lambda ps: SGD(ps, lr=0.1)), plan_of(3, 1)
    workers = [DividedMember(lambda ps: SGD(ps, lr=0.1)) for _ in range(3)]
    alone.whole(0)
    dealt = [worker.part(0, plan, me) for me, worker in enumerate(workers)]
    assert not any(one.made().whole for one in dealt) and all(one.spread().whole for one in dealt)
    exchange(dealt)
    assert len({worker.state.state_digest(1) for worker in (alone, *workers)}) == 1


def test_parameters_that_come_later_and_keep_more_end_the_division_of_others_which_is_strange() -> None:
    """What members have divided is in pieces: nobody has all of it."""

    def two_kinds(parameters: list[nn.Parameter]) -> Optimizer:
        large, *others = parameters
        return AdamW([{"params": [large], "amsgrad": True}, {"params": others}])

    plan, workers = plan_of(2, 1), [DividedMember(two_kinds) for _ in range(2)]
    for step in range(2):
        for worker in workers:
            worker.late = step == 0
        dealt = [worker.part(step, plan, me) for me, worker in enumerate(workers)]
        assert [one.strange() for one in dealt] == [None if step == 0 else (400,)] * 2
        exchange(dealt)


def test_before_the_first_gradients_nothing_is_divided() -> None:
    worker, plan = DividedMember(), plan_of(2, 1)
    dealt = Dealt(worker.state, plan, 0, 0)
    assert dealt.made().whole and dealt.portions() == []


def test_memory_that_is_given_back_reads_as_zeros_and_the_rest_stays() -> None:
    tensor = torch.ones(100_000)
    give_back(tensor, [(20_000, 30_000), (50_000, 50_001)])
    assert float(tensor[20_000:30_000].sum()) == 10_000 and float(tensor[50_000]) == 1.0
    assert float(tensor.sum()) < 30_000
    give_back(tensor, [])
    assert float(tensor.sum()) < 3_000  # no more than what lies on pages with neighbours


def test_who_holds_a_segment_takes_the_gradient_of_its_blocks_and_all_take_what_all_update() -> None:
    plan, workers = plan_of(3, 2), [DividedMember() for _ in range(3)]
    for me, worker in enumerate(workers):
        worker.part(0, plan, me)
    model = workers[0].model
    layout = GradientLayout.build(model, list(model))
    found = Dealt(workers[0].state, plan, 0, 0).takers(layout)
    assert found == Dealt(workers[1].state, plan, 0, 1).takers(layout)
    mine = {i: {block for run in runs for block in range(*run)} for i, runs in found.items()}
    by_all = {
        block
        for entry in layout.entries
        if entry.kind == "buffer" or not model.get_parameter(entry.name).is_contiguous()
        for block in range(entry.offset // BLOCK_ELEMENTS, -(-entry.stop // BLOCK_ELEMENTS))
    }
    counts = [sum(block in blocks for blocks in mine.values()) for block in range(layout.n_blocks)]
    assert counts == [3 if block in by_all else 2 for block in range(layout.n_blocks)] and 2 in counts and 3 in counts
    for me, worker in enumerate(workers):  # all that a worker updates, it takes the gradient of
        ranges = Dealt(worker.state, plan, 0, me).updates()
        for entry in (layout.entries[i] for i in layout.params):
            for first, stop in ranges[worker.model.get_parameter(entry.name)]:
                begin, last = (entry.offset + first) // BLOCK_ELEMENTS, (entry.offset + stop - 1) // BLOCK_ELEMENTS
                assert {*range(begin, last + 1)} <= mine[me]


@pytest.mark.parametrize(("members", "copies"), [(3, 1), (4, 2)])
def test_who_updates_a_whole_parameter_takes_all_of_its_gradient(members: int, copies: int) -> None:
    plan, worker = plan_of(members, copies), Pooled(Lamb, "matrices")
    worker.update(0, None, 0, first=False)
    places = {entry.name: entry.offset for entry in worker.layout.entries}
    assert any(spot.offset != places[name] for name, _, spot in worker.state.placed()), "the grids differ"
    found = Dealt(worker.state, plan, 0, 0).takers(worker.layout)
    for me in range(members):
        ranges, right = Dealt(worker.state, plan, 0, me).updates(), set[int]()
        for entry in worker.layout.entries:
            parameter = worker.model.get_parameter(entry.name)
            assert ranges[parameter] in ([], [(0, parameter.numel())])
            if ranges[parameter]:
                right.update(range(entry.offset // BLOCK_ELEMENTS, -(-entry.stop // BLOCK_ELEMENTS)))
        assert {block for run in found[me] for block in range(*run)} == right
    assert any(runs != ((0, worker.layout.n_blocks),) for runs in found.values())


def test_all_take_the_gradient_of_a_parameter_that_is_used_twice() -> None:
    plan, worker = plan_of(2, 1), DividedMember()
    worker.part(0, plan, 0)
    layout = GradientLayout.build(worker.model, list(worker.model))
    dealt, weight = Dealt(worker.state, plan, 0, 0), layout.entries[0]
    assert weight.name == "0.weight"
    blocks = {*range(weight.offset // BLOCK_ELEMENTS, -(-weight.stop // BLOCK_ELEMENTS))}

    def by_all(takers: dict[int, Runs]) -> set[int]:
        sets = [{block for run in runs for block in range(*run)} for runs in takers.values()]
        return set.intersection(*sets)

    assert not blocks <= by_all(dealt.takers(layout))
    assert blocks <= by_all(dealt.takers(layout, {0}))  # in another stage
    again = replace(layout.entries[-1], tied_to=0)
    assert blocks <= by_all(dealt.takers(replace(layout, entries=(*layout.entries[:-1], again))))
