"""The search over splits: all that is possible, the best of each, why, what would be needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.cli.plan_runs import how_it_runs
from everstep.cost.catalogue import CATALOGUE
from everstep.cost.memory import Model, Split, of_ours
from everstep.cost.models import PUBLISHED, ModelShape
from everstep.cost.split_memory import CONTEXT_BYTES, split_memory
from everstep.cost.split_search import (
    RankedSplit,
    best_of_each,
    devices_needed,
    memory_of_ours,
    pareto_front,
    planned_splits,
    possible_splits,
    ranked_splits,
    why_better,
)
from everstep.cost.step_time import STACKS, Fleet, ParallelSplit, micro_batches_of, step_time

SHAPES = {model.name: model.shape for model in PUBLISHED}
STACK = STACKS["torchtitan-compile"]
H100 = CATALOGUE["h100-80"]
FLEET = Fleet(H100, 32, 8, 50e9)
SHAPE = SHAPES["llama2-13b"]


def with_memory(gb: float, fleet: Fleet = FLEET) -> Fleet:
    return replace(fleet, device=replace(fleet.device, memory_gb=gb))


def test_every_split_is_possible() -> None:
    shape = ModelShape(12, 768, 12)
    found = list(possible_splits(shape, FLEET, 64))
    assert len(set(found)) == len(found)
    for split in found:
        assert split.devices == 32 and shape.heads % split.tp == 0 and shape.layers % (split.pp * split.chunks) == 0
        assert micro_batches_of(64, split) and split.sequence_parallel == (split.tp > 1)
        assert split.zero <= 1 or split.pp == 1
        assert split.schedule != "interleaved" or (split.chunks > 1 and micro_batches_of(64, split) % split.pp == 0)
    assert {(split.tp, split.pp) for split in found} == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)}


def test_tensor_parallelism_stays_in_a_node() -> None:
    found = list(possible_splits(SHAPES["gpt3-175b"], replace(FLEET, per_node=4), 64))
    assert {split.tp for split in found} == {1, 2, 4}


def test_what_jobs_run_on_such_devices() -> None:
    found = list(possible_splits(SHAPE, FLEET, 64, ours=True))
    assert found and all(how_it_runs(split, micro_batches_of(64, split), cpu=False).config for split in found)
    assert {split.recompute for split in found} == {"none", "full"} and max(split.pp for split in found) == 8


def test_the_best_of_each_is_first_and_no_other_is_better() -> None:
    """Against a look at every split."""
    found = ranked_splits(SHAPE, FLEET, 128, "bf16", STACK)
    assert len({(one.split.tp, one.split.pp) for one in found}) == len(found) > 10
    best: dict[tuple[int, int], float] = {}
    for split in possible_splits(SHAPE, FLEET, 128):
        if split_memory(SHAPE, split, micro_batches_of(128, split)).total <= 80e9:
            seconds = step_time(SHAPE, FLEET, split, 128, "bf16", STACK).step_s
            key = split.tp, split.pp
            best[key] = min(best.get(key, seconds), seconds)
    assert {(one.split.tp, one.split.pp): one.time.step_s for one in found if one.fits} == best
    assert [one.time.step_s for one in found if one.fits] == sorted(best.values())
    flags = [one.fits for one in found]
    assert flags == sorted(flags, reverse=True)


def test_what_does_not_fit_comes_by_memory() -> None:
    found = ranked_splits(SHAPE, with_memory(4), 128, "bf16", STACK)
    sizes = [one.memory.total for one in found]
    assert not any(one.fits for one in found) and sizes == sorted(sizes)
    least = min(
        split_memory(SHAPE, split, micro_batches_of(128, split)).total for split in possible_splits(SHAPE, FLEET, 128)
    )
    assert sizes[0] == least


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(SHAPES)), st.sampled_from([8, 32, 64]), st.integers(1, 200), st.integers(0, 100))
def test_more_memory_never_fits_less(name: str, count: int, gb: int, more: int) -> None:
    fleet = Fleet(H100, count, 8, 50e9)
    small = ranked_splits(SHAPES[name], with_memory(gb, fleet), 64, "bf16", STACK)
    large = ranked_splits(SHAPES[name], with_memory(gb + more, fleet), 64, "bf16", STACK)
    fits = [{(one.split.tp, one.split.pp) for one in found if one.fits} for found in (small, large)]
    assert fits[0] <= fits[1]
    if fits[0]:
        assert large[0].time.step_s <= small[0].time.step_s


def ranked(split: ParallelSplit, fits: bool = True, stack: str = "megatron-2021") -> RankedSplit:
    usage = split_memory(SHAPE, split, micro_batches_of(64, split))
    return RankedSplit(split, usage, step_time(SHAPE, FLEET, split, 64, "bf16", STACKS[stack]), fits)


def test_nothing_is_shorter_and_smaller_than_the_front() -> None:
    fleet = Fleet(CATALOGUE["a100-80"], 32, 8, 25e9)
    shape = next(one.shape for one in PUBLISHED if one.name == "gpt3-13b")
    planned = planned_splits(shape, fleet, 1024, "bf16", STACKS["megatron-2021"])
    front = pareto_front(planned)
    assert front[0] == best_of_each(planned)[0] and len(front) > 2
    assert not pareto_front(one for one in planned if not one.fits)
    for one in front:
        assert not any(
            other.time.step_s <= one.time.step_s and other.memory.total < one.memory.total
            for other in planned
            if other.fits
        )


def test_why_one_is_before_the_next() -> None:
    plain, deep, wide = (ranked(ParallelSplit(*sizes)) for sizes in ((1, 1, 32), (1, 8, 4), (8, 1, 4)))
    assert why_better(plain, deep).endswith("s less for bubble") and "% shorter: " in why_better(plain, deep)
    assert why_better(plain, wide).endswith("s less for sums within layers")
    assert why_better(plain, ranked(ParallelSplit(dp=32), fits=False)).startswith("it fits: the next needs 2")
    lost, least = ranked(ParallelSplit(dp=32), fits=False), ranked(ParallelSplit(dp=32, zero=3), fits=False)
    assert why_better(least, lost).startswith("it needs 2") and why_better(least, lost).endswith("GB less")
    thin = ranked(ParallelSplit(8, 1, 4, sequence_parallel=False))
    same = replace(thin, memory=split_memory(SHAPE, replace(thin.split, sequence_parallel=True), 16))
    assert why_better(same, thin).startswith("as fast, it needs ")


def test_what_would_be_needed() -> None:
    shape = SHAPES["gpt3-175b"]
    found = devices_needed(shape, Fleet(H100, 8, 8, 50e9), 64, "bf16", STACK)
    assert found == 64
    assert not any(one.fits for one in ranked_splits(shape, Fleet(H100, 32, 8, 50e9), 64, "bf16", STACK))
    assert devices_needed(shape, with_memory(0.5), 64, "bf16", STACK) is None


def test_memory_of_what_jobs_run_is_that_of_their_layout() -> None:
    """One stage as `memory.of_ours` counts it; more stages divide the states."""
    split = ParallelSplit(dp=4, micro_batch=2)
    found = memory_of_ours(SHAPE, split, 48)
    moving = split_memory(SHAPE, split, 6, "fp32").device
    moved = moving["activations"] + moving["output"] + moving["fragmentation"]
    states = SHAPE.parameters
    model = Model(states, 4.0 * states, 8.0 * states, activation_bytes=moved, fixed_bytes=CONTEXT_BYTES)
    assert found == of_ours(model, Split(4, 24, 2, hosts=4), 0)
    deep = memory_of_ours(SHAPE, ParallelSplit(pp=4, micro_batch=2), 48)
    assert deep.device["parameters"] == pytest.approx(states)
