"""Members that have divided an optimizer's state: together they do what one does alone, and each has what it says."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD

from divided_members import DividedMember, plan_of
from everstep.base.extents import Extents, union
from everstep.exact.dealt import Dealt, digested_planes
from everstep.exact.state_memory import give_back
from everstep.placement.shards import share


def exchange(dealt: list[Dealt]) -> None:
    """All that members give each other."""
    for to, mine in enumerate(dealt):
        for source, theirs in enumerate(dealt):
            given, taken = theirs.given(source, to), mine.given(source, to)
            assert [t.shape for t in given] == [t.shape for t in taken]
            with torch.no_grad():
                for target, part in zip(taken, given, strict=True):
                    target.copy_(part)


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


def test_each_part_goes_once_to_each_member_that_has_not_updated_it() -> None:
    plan, workers = plan_of(3, 2), [DividedMember() for _ in range(3)]
    dealt = [worker.part(1, plan, me) for me, worker in enumerate(workers)]
    given = sum(part.numel() for i in range(3) for k in range(3) for part in dealt[i].given(i, k))
    divided = sum(p.numel() for p in workers[0].model.parameters() if p.requires_grad and p.is_contiguous())
    assert given == divided, "one of three members lacks each part"


def test_memory_of_what_others_hold_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []

    def noted(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> None:
        kept.append(sum(stop - first for first, stop in ranges))
        assert kept[-1] <= tensor.numel()

    worker, plan = DividedMember(), plan_of(2, 1)
    dealt = worker.part(1, plan, 0)
    monkeypatch.setattr("everstep.exact.dealt.give_back", noted)
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


def test_before_the_first_gradients_nothing_is_divided() -> None:
    worker, plan = DividedMember(), plan_of(2, 1)
    dealt = Dealt(worker.state, plan, 0, 0)
    assert dealt.made().whole and dealt.given(0, 1) == []


def test_memory_that_is_given_back_reads_as_zeros_and_the_rest_stays() -> None:
    tensor = torch.ones(100_000)
    give_back(tensor, [(20_000, 30_000), (50_000, 50_001)])
    assert float(tensor[20_000:30_000].sum()) == 10_000 and float(tensor[50_000]) == 1.0
    assert float(tensor.sum()) < 30_000
    give_back(tensor, [])
    assert float(tensor.sum()) < 3_000  # no more than what lies on pages with neighbours
