"""Which worker has what, and whose waits are ended, beside what plain loops say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.extents import Extents
from everstep.exact.digest import digest_bytes
from everstep.exact.image import sealed
from everstep.parallel.cell_memory import SharedPlace
from everstep.runtime.host.cell_doors import CellPlan
from everstep.train.cell_elsewhere import owned
from everstep.train.executor import Cutter
from everstep.train.heal import joint_manifest

BLOCKS = 6
OF = (("rest", BLOCKS),)
BLOCK_SETS = st.sets(st.integers(0, BLOCKS - 1))


class Connection:
    """That notes its end."""

    aborted = closed = False

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


@given(st.lists(st.tuples(st.sampled_from(["cut", "guard", "close"]), st.integers(0, 5)), max_size=30))
def test_waits_end_with_their_generation_whichever_comes_first(orders: list[tuple[str, int]]) -> None:
    """A connection is ended if its generation is over, now or later, and let be otherwise, or once it is closed."""
    aborts: list[int] = []
    cutter, open_ones, over = Cutter(aborts.append), list[tuple[Connection, int]](), list[int]()
    for what, number in orders:
        if what == "cut":
            cutter.cut(number)
            over.append(number)
            assert aborts == over
        elif what == "guard":
            open_ones.append((Connection(), number))
            cutter.guard(cast(Any, open_ones[-1][0]), number)
        elif open_ones:
            connection, bound = open_ones.pop(number % len(open_ones))
            cutter.close(cast(Any, connection))
            ended = connection.aborted
            cutter.cut(bound)
            over.append(bound)
            assert connection.closed and connection.aborted == ended
        assert [cutter.over(g) for g in range(6)] == [any(g <= cut for cut in over) for g in range(6)]
        assert all(one.aborted == any(bound <= cut for cut in over) and not one.closed for one, bound in open_ones)


class Readable:
    """A worker's own state."""

    n_blocks = BLOCKS

    def read_block(self, number: int) -> bytes:
        return b"own %d" % number


def manifest(who: int, other: bool) -> dict[str, Any]:
    return sealed({"entries": ["others" if other else "these"], "blocks": [f"{who}.{n}" for n in range(BLOCKS)]})


@given(st.lists(st.tuples(BLOCK_SETS, st.booleans()), min_size=1, max_size=4), BLOCK_SETS, BLOCK_SETS)
def test_each_digest_is_that_of_a_worker_that_has_the_block(
    told: list[tuple[set[int], bool]], own: set[int], besides: set[int]
) -> None:
    said = [(manifest(who, other), Extents.numbered(OF, blocks)) for who, (blocks, other) in enumerate(told)]
    mine: Any = [(Readable(), Extents.numbered(OF, own)), (Readable(), Extents.numbered(OF, besides))]
    found = joint_manifest(said, mine)
    for n in range(BLOCKS):
        there = [who for who, (blocks, other) in enumerate(told) if n in blocks and other == told[0][1]]
        if there:
            assert found["blocks"][n] == f"{there[0]}.{n}"
        elif n in own | besides:
            assert found["blocks"][n] == digest_bytes(b"own %d" % n)
        else:
            assert found["blocks"][n] == f"0.{n}"
    body = {key: value for key, value in found.items() if key != "digest"}
    assert found == sealed(body) and found["entries"] == said[0][0]["entries"]


@given(st.data())
def test_every_byte_of_a_place_is_of_the_part_whose_rank_has_its_element(data: Any) -> None:
    """Ranks have runs one after the other, some none; parts have several ranks."""
    each, parts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=each * parts, max_size=each * parts).filter(any))
    plan = CellPlan("0.0", 0, tuple(map(str, range(parts))), each)
    runs, owners, at = [], list[int](), 0
    for rank, size in enumerate(sizes):
        runs.append([(at + k, at + k + 1) for k in range(size)])
        owners += [rank // each] * size
        at += size
    place = SharedPlace(64, 4 * at)
    room = place.offset + place.size + 60
    found = owned(plan, place, runs, room)
    assert [one.part for one in found for _ in range(one.offset, one.stop, 4)] == owners
    assert [k for one in found for k in range(one.offset, one.stop)] == list(range(64, 64 + 4 * at))
    assert [one.room for one in found] == [*(one.offset for one in found[1:]), room]
    assert all(one.part != other.part for one, other in pairwise(found))
    assert owned(plan, place, None, room) == [(64, 64 + 4 * at, 0, room)]
