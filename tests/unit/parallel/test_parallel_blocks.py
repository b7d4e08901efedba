"""What the transports keep of each block, beside plain sets: nothing is added up twice, too early or never."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_cases import layout

from everstep.base.errors import InvariantViolation, ProtocolError
from everstep.base.ports import Node
from everstep.exact.layout import BLOCK_ELEMENTS
from everstep.parallel import reduction
from everstep.parallel.early import runs_in
from everstep.parallel.reduction import CHUNK_BLOCKS, BlockFinisher, Flats, decode_offers, encode_offers, zero_absent
from everstep.parallel.streaming import LEAVING_BLOCKS, BlockCut, BlockSums, StepBlocks

BLOCKS, LANES = 2 * CHUNK_BLOCKS + 5, 4
SHAPE = layout(BLOCKS)
RUN = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)).map(lambda r: (r[0], min(BLOCKS, r[0] + r[1])))
BYTES = st.binary(min_size=2, max_size=2)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["finish", "received", "begin", "enter"]), st.integers(5, 8), RUN)))
def test_each_block_is_finished_once_a_step_and_generation(orders: Sequence[tuple[str, int, tuple[int, int]]]) -> None:
    looks: list[int] = []
    made: list[int] = []
    done: dict[int, set[int]] = {}  # by parity: of the step that lies there
    at: dict[int, int] = {}

    def finish(shape: object, lanes: int, parts: object, start: int, stop: int, out: torch.Tensor) -> None:
        assert (lanes, parts, out.numel()) == (LANES, "parts", stop - start) and len(looks) == len(made) + 1
        assert 0 < stop - start <= CHUNK_BLOCKS * BLOCK_ELEMENTS
        made.append(start)
        found.extend(range(start // BLOCK_ELEMENTS, stop // BLOCK_ELEMENTS))

    out = torch.empty(1).expand(SHAPE.numel)  # of no memory: nothing is written
    finisher = BlockFinisher(SHAPE, LANES, lambda: looks.append(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "finish", finish)
        for what, step, run in orders:
            if what == "enter":
                finisher.enter()
                at.clear()
                continue
            if at.get(step % 2) != step:
                at[step % 2], done[step % 2] = step, set()
            finisher.begin(step)
            held, found = done[step % 2], list[int]()
            if what == "finish":
                finisher.finish(step, run, "parts", out)  # type: ignore[arg-type]
                assert found == [k for k in range(*run) if k not in held]
                held |= set(range(*run))
            elif what == "received":
                finisher.received(step, run if run[0] else None)
                held |= set(range(*run)) if run[0] else set(range(BLOCKS))


@given(st.data())
def test_a_block_is_added_up_once_all_lanes_of_it_are_there(data: st.DataObject) -> None:
    """And only then, whatever the nodes, the order, and when the absent entries become known."""
    lo, hi = data.draw(st.sampled_from([(0, LANES), (2, 4), (0, 1)]))
    wanted = sorted(data.draw(st.sets(st.integers(2, 9), min_size=1)))
    runs = runs_in(bytes(k in wanted for k in range(10)))
    bounds = sorted({lo, hi, *data.draw(st.sets(st.integers(lo, hi)))})
    nodes = [Node(a, b) for a, b in pairwise(bounds)]
    sums = BlockSums(Node(lo, hi), runs)
    for node in nodes:
        with pytest.raises(ProtocolError, match="which others have"):
            sums.add(5, Node(node.lo, hi + 1), torch.empty(0), 0)
        with pytest.raises(ProtocolError, match="which others have"):
            sums.add(5, Node(lo - 1, node.hi), torch.empty(0), 0)
        sums.add(3, node, torch.empty(0), 0)
        with pytest.raises(ProtocolError, match="which others have"):
            sums.add(5, node, torch.empty(0), 0)
    assert {node: owner for node, (owner, _, _) in sums.parts.items()} == dict.fromkeys(nodes, 3)
    pieces = data.draw(st.permutations([(node, k) for node in nodes for k in range(10)]))
    tells, told = data.draw(st.integers(0, len(pieces))), False
    came: dict[int, dict[Node, bool]] = {k: {} for k in range(10)}
    given_out: list[int] = []

    def may(k: int) -> bool:
        everything = all(node in came[k] and (told or came[k][node]) for node in nodes)
        return k in wanted and everything and k not in given_out

    for n, (node, k) in enumerate(pieces):
        if n == tells:
            told = True
            expected = [b for b in range(10) if may(b)]
            assert sums.tell() == expected
            given_out += expected
        whole = data.draw(st.booleans())
        came[k][node] = whole
        expected = [b for b in (k,) if may(b)]
        assert sums.come(node, k, k + 1, whole) == expected
        given_out += expected
        if k in wanted:
            with pytest.raises(ProtocolError, match="twice"):
                sums.come(node, k, k + 1, whole)
        else:
            assert sums.come(node, k, k + 1, whole) == []
    if not told:
        told = True
        expected = [b for b in range(10) if may(b)]
        assert sums.tell() == expected
        given_out += expected
    assert sorted(given_out) == wanted and sums.tell() == []


@given(st.lists(RUN), st.lists(RUN), st.integers(0, 3) | st.none())
def test_blocks_leave_and_come_back_once(left: list[tuple[int, int]], came: list[tuple[int, int]], n: int) -> None:
    blocks = StepBlocks(((0, BLOCKS),), BLOCKS, LANES, lambda: torch.empty(0), n)
    gone: set[int] = set()
    for run in left:
        runs = blocks.leave(Node(0, 1), *run)
        assert [k for one in runs for k in range(*one)] == [k for k in range(*run) if k not in gone]
        assert all(one[1] < other[0] for one, other in pairwise(runs))
        gone |= set(range(*run))
    assert blocks.leave(Node(1, 2), 0, BLOCKS) == ((0, BLOCKS),)  # each node by itself
    there: set[int] = set()
    for run in came:
        if there & set(range(*run)):
            with pytest.raises(ProtocolError, match="twice"):
                blocks.result(*run)
        else:
            blocks.result(*run)
            there |= set(range(*run))
        assert blocks.open == (BLOCKS if n is None else n) - len(there)


@given(RUN)
def test_a_run_is_cut_into_few_blocks_without_the_padding_between_units(run: tuple[int, int]) -> None:
    cut, stops = BlockCut(SHAPE), {0: SHAPE.units[0].stop}  # the first block is a unit of its own, with padding
    pieces = list(cut.pieces(*run))
    assert [k for piece in pieces for k in range(*piece)] == list(range(*run))
    for first, last in pieces:
        assert last - first <= LEAVING_BLOCKS and not any(k in stops for k in range(first, last - 1))
        assert last - first == LEAVING_BLOCKS or last in (run[1], 1)
        size = 4 * (cut.stop(last) - first * BLOCK_ELEMENTS)
        assert cut.stop(last) == stops.get(last - 1, last * BLOCK_ELEMENTS) and cut.last(first, size) == last
        for wrong in (size - 4, size + 4, 0):
            with pytest.raises(ProtocolError, match="no run of blocks"):
                cut.last(first, wrong)


def test_padding_is_cleared_and_nothing_else() -> None:
    shape = layout(3)
    flat, cut = torch.ones(2 * BLOCK_ELEMENTS), BlockCut(shape)
    cut.clear_padding(flat, BLOCK_ELEMENTS, 1, 3)
    assert flat.all()
    cut.clear_padding(flat, 0, 0, 2)
    stop = shape.units[0].stop
    assert flat[:stop].all() and not flat[stop:BLOCK_ELEMENTS].any() and flat[BLOCK_ELEMENTS:].all()


@given(st.dictionaries(st.builds(Node, st.integers(0, 9), st.integers(10, 19)), st.tuples(st.integers(0, 99), BYTES)))
def test_offers_arrive_as_they_were_made(offers: dict[Node, tuple[int, bytes]]) -> None:
    record = encode_offers({n: slot for n, (slot, _) in offers.items()}, {n: has for n, (_, has) in offers.items()})
    assert decode_offers(record, 2) == [(node, *said) for node, said in offers.items()]
    if offers:
        with pytest.raises(InvariantViolation, match="multiple"):
            decode_offers(record[:-1], 2)


def test_absent_entries_become_zero_with_the_padding_after_them() -> None:
    shape = layout(3)
    for present in (b"\0\1\1", b"\1\0\1", b"\1\1\0"):
        flat = torch.ones(shape.numel)
        zero_absent(shape, flat, present)
        entry = shape.entries[present.index(0)]
        end = shape.boundaries[present.index(0)]
        assert not flat[entry.offset : end].any() and flat[: entry.offset].all() and flat[end:].all()


@given(st.lists(st.tuples(st.sampled_from(["begin", "node", "result", "give", "lose"]), st.integers(0, 1))))
def test_memory_of_a_step_stays_until_the_next_begins(orders: list[tuple[str, int]]) -> None:
    """A result may come for the step after the one that was begun here: the one before lies where it was."""
    flats, step, given_back, lost = Flats(64, torch.device("cpu")), 1, set[Node](), set[Node]()
    nodes: dict[Node, int] = {}
    results: dict[int, int] = {}
    flats.begin(step)
    for what, more in orders:
        node = Node(more, more + 1)
        if what == "begin":
            step += more
            flats.begin(step)
            if more:
                nodes, given_back, lost = {}, set(), set()
            assert flats.begun(step) and not flats.begun(step - 1) and not flats.begun(step + 1)
        elif what == "node":
            assert nodes.setdefault(node, flats.tensor(step, node).data_ptr()) == flats.held(step, node).data_ptr()
            assert len(set(nodes.values())) == len(nodes)
            with pytest.raises(InvariantViolation, match="never asked"):
                flats.held(step + 1, node)
        elif what == "result" and step + more >= max(results, default=0):
            place = flats.result(step + more).data_ptr()
            assert results.setdefault(step + more, place) == place and place not in nodes.values()
            assert more == 0 or results.get(step) != place
        elif what == "give":
            flats.give_back(step + more, node, 0, 0)
            given_back |= {node} if not more and node in nodes else set()
        elif what == "lose":
            flats.lose()
            lost, given_back = lost | given_back, set()
            assert flats.lost(step) == lost and flats.lost(step) == frozenset()
            lost = set()
