"""The sums of a worker's lanes, made by all of its processes together: unit by unit, while backward passes run.

In a round each rank computes one lane, or several ranks have a *seat* and compute one together, each some of its
shards. When a unit's gradients are final at a rank, they go into its seat's *box* in the memory that the ranks share,
and out of `.grad`; when they are there from all ranks, each rank adds up its own range of the unit, by the rule of the
lane tree, into *slots*. So no rank ever holds a whole gradient. All ranks come to the units in the same order, from the
last to the first.

A unit is final when each of its parameters has had its gradient, or when the backward pass is over: so where a lane
does not use a parameter, its unit and those before it wait for the end. Absent gradients stay absent: each box has a
byte for each entry. Ranks that compute a lane together put the gradient of a parameter that is not cut into that byte,
too, as a sum of its bits, once in each step: it must be the same at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from everstep.base.errors import TaskError
from everstep.base.ports import Node
from everstep.exact.accumulate import sparse_gradient
from everstep.exact.lane_statistics import LaneStatistics
from everstep.exact.layout import GradientLayout, add_rounded
from everstep.exact.lending import written_twice
from everstep.exact.shard_plan import gather_gradients
from everstep.exact.shard_sums import ShardMesh
from everstep.exact.wrapping import Wrapped
from everstep.placement.ranks import Add, Folding, SumPlace, part_of
from everstep.placement.tree import cover


class Shelves(Protocol):
    """What the ranks of a worker share for their sums. rank: of this process. Ranks that compute a lane have a seat
    together, and one box."""

    rank: int

    def box(self, seat: int, turn: int) -> Tensor:
        """A seat's box for this turn (0 or 1), float32, as large as the largest unit."""

    def row(self, rank: int, turn: int) -> Tensor:
        """The presence of what a rank has put into that box, uint8, one for each entry of the layout."""

    def slot(self, number: int) -> Tensor:
        """A slot, float32, as large as the layout."""

    def meet(self, point: int, ranks: Sequence[int]) -> None:
        """Wait until all these ranks have come to this point."""

    def bring(self, turn: int, seats: Iterable[int], ranks: Sequence[int], start: int, stop: int) -> None:
        """Have here what these ranks have put into their rows, and seats into these elements of their boxes."""

    def bring_sum(self, number: int, rank: int, start: int, stop: int) -> None:
        """Have here these elements of a slot, which this rank has made."""


class RankSums:
    """One rank's part in the sums: `begin`, then `round` for each round, and for its own lane of it `enter`, `capture`
    and `add`, as an accumulator has them. The last round may have no lane for it. watches: it waits for its first
    lane."""

    def __init__(
        self,
        layout: GradientLayout,
        model: nn.Module,
        n_lanes: int,
        shelves: Shelves,
        units: Sequence[Wrapped],
        *,
        whole_first: bool,
        mesh: ShardMesh | None = None,
        degree: int = 1,
    ) -> None:
        """layout: of this very model, which is one stage. units: of it, or smaller parts that are exchanged one by one.
        whole_first: the first lane is computed twice for comparison, so its gradients stay in `.grad` until `add`.
        mesh: of a model that is cut; degree: ranks that compute each lane together, each its own shards."""
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self._layout, self._n_lanes, self._shelves, self._model = layout, n_lanes, shelves, model
        self._params: dict[int, nn.Parameter] = {i: by_name[layout.entries[i].name] for i in layout.params}
        cuts = {} if mesh is None else {id(by_name[name]): cut for name, cut in mesh.cuts.items() if name in by_name}
        self._cuts = {i: cuts[id(p)] for i, p in self._params.items() if id(p) in cuts} if degree > 1 else {}
        self._mesh, self._degree = mesh, degree
        self._seat, rank = divmod(shelves.rank, degree)
        self._leads = rank == 0
        self._units = units
        self._unit_of = {i: k for k, unit in enumerate(units) for i in unit.entries}
        self._order = list(reversed(range(len(units))))
        self._entries = {k: unit.entries for k, unit in enumerate(units)}
        self._statistics = LaneStatistics(layout, model, range(len(layout.units)))
        self.watches = whole_first
        self._folding = Folding(())
        self._rows: dict[int, bytearray] = {}
        self._lane = _LaneUnderWay(())
        self._compares = False
        self._captured: dict[int, list[Tensor]] = {}
        self._counted: frozenset[int] = frozenset()
        self._adds: list[Add] = []
        self._elsewhere: dict[int, int] = {}
        self._ranks: Sequence[int] = ()
        self._point = 0

    @property
    def points(self) -> int:
        """Points at which the ranks meet in one round, at most."""
        return len(self._order) + 1

    def begin(self, lanes: Sequence[int], *, fresh: bool) -> None:
        """These lanes come next, and nothing of others counts any more. fresh: so does a step, and the model's running
        statistics are those that it starts from."""
        self._folding, self._rows = Folding(cover(lanes, self._n_lanes)), {}
        self._counted, self._captured = frozenset(lanes), {}
        self._compares = self._degree > 1
        if fresh:
            self._statistics.begin_step()

    def is_missing(self, lane: int) -> bool:
        """Whether the lane counts, of those in flight."""
        return lane in self._counted

    def round(self, lanes: Sequence[int | None], point: int) -> None:
        """A round begins. lanes: by seat, None for one that does not count, but takes part. point: before the first at
        which the ranks meet in it."""
        self._ranks, self._point = range(len(lanes) * self._degree), point
        before, self._adds = self._folding.seats, self._folding.round(lanes)
        read = {place.number for add in self._adds for place in add[1:] if place is not None and place.kind == "slot"}
        self._elsewhere = {slot: before[slot] for slot in sorted(read) if before.get(slot, len(lanes)) != len(lanes)}

    def enter(self, lane: int) -> None:
        """The lane's passes come next. Without this call all of its gradients stay in `.grad` until `add`."""
        if self.watches:
            return
        hooks = (
            parameter.register_post_accumulate_grad_hook(partial(self._fired, i))  # type: ignore[no-untyped-call]
            for i, parameter in self._params.items()
            if parameter.requires_grad
        )
        self._lane = _LaneUnderWay(hooks, lane)

    def capture(self, lane: int) -> None:
        """Take the running statistics as the lane's forward pass left them."""
        with torch.no_grad():
            self._captured[lane] = self._statistics.take()

    def dismiss(self) -> None:
        """Throw away the gradients of a lane that will be computed again, and was not entered."""
        for parameter in self._params.values():
            parameter.grad = None

    def leave_out(self, lane: int) -> None:
        """`add`, for a lane that does not count: the other ranks' may."""
        self.add(lane)

    def add(self, lane: int) -> None:
        """The lane's backward pass is over: what is left of its gradients goes the way of the others.

        Raises: ConfigError naming a parameter with a sparse gradient; TaskError naming one that had two gradients; what
        `Shelves.meet` raises.
        """
        self.watches = False
        self._lane.end()
        self._lane.number = lane
        with torch.no_grad():
            while self._lane.at < len(self._order):
                self._move_all(self._order[self._lane.at])
                self._exchange()
        self.dismiss()
        self._compares = False
        self._captured.pop(lane, None)
        self._lane = _LaneUnderWay(())

    def gather(self) -> None:
        """Have all of a lane's gradients at each rank that computes it. All of them call it."""
        if self._mesh is not None and self._degree > 1:
            gather_gradients(self._model, self._mesh)

    def leave(self) -> None:
        """Leave a lane in its middle: its sums are lost."""
        self._lane.end()
        self._lane = _LaneUnderWay(())

    def results(self) -> list[tuple[Node, bytes, Tensor]]:
        """The sums: complete subtrees, their presence by entry, and the slots that hold them."""
        found = sorted(self._folding.slots.items())
        for _, slot in found:
            for unit in self._units:
                self._bring_sum(slot, self._folding.seats[slot], unit, unit.start, unit.stop)
        return [(node, bytes(self._rows[slot]), self._shelves.slot(slot)) for node, slot in found]

    # ---- one lane

    def _fired(self, i: int, parameter: Tensor) -> None:
        """Autograd has finished a gradient."""
        lane, unit = self._lane, self._unit_of[i]
        if i in lane.moved:
            raise TaskError(written_twice(self._layout.entries[i].name))
        lane.fired.add(i)
        with torch.no_grad():
            if lane.at < len(self._order) and self._order[lane.at] == unit:
                self._move(i)
            while lane.at < len(self._order) and self._is_final(self._order[lane.at]):
                self._move_all(self._order[lane.at])
                self._exchange()

    def _is_final(self, unit: int) -> bool:
        wanted = (i for i in self._entries[unit] if i in self._params and self._params[i].requires_grad)
        return self._lane.fired.issuperset(wanted)

    def _move_all(self, unit: int) -> None:
        for i in self._entries[unit]:
            if i in self._params and i not in self._lane.moved:
                self._move(i)

    def _move(self, i: int) -> None:
        """Out of `.grad`, into the box of the present unit."""
        gradient, entry = self._params[i].grad, self._layout.entries[i]
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise sparse_gradient(entry.name, gradient)
        box = self._shelves.box(self._seat, self._lane.at % 2)
        at = entry.offset - self._units[self._unit_of[i]].start
        into = box.as_strided(entry.shape, entry.stride, box.storage_offset() + at)
        cut, mesh = self._cuts.get(i), self._mesh
        if cut is not None and mesh is not None:
            for shard in mesh.mine:
                pairs = zip(cut.views(into, shard, mesh.shards), cut.views(gradient, shard, mesh.shards), strict=True)
                for view, own in pairs:
                    view.copy_(own.to(self._layout.rounds))
        elif self._leads:
            into.copy_(gradient.to(self._layout.rounds))
        self._params[i].grad = None
        self._lane.moved[i] = 1 + 2 * (_sum_of_bits(gradient) % 127 if self._compares and cut is None else 0)

    def _exchange(self) -> None:
        """The present unit is in this rank's box: add it up with the others, and come to the next one."""
        lane, shelves = self._lane, self._shelves
        unit, turn = self._order[lane.at], lane.at % 2
        mine, entries = shelves.row(shelves.rank, turn), self._entries[unit]
        there = [lane.moved.get(i, 0) if i in self._params else 1 for i in entries]
        mine[entries[0] : entries[-1] + 1] = torch.tensor(there, dtype=torch.uint8)
        box, start = shelves.box(self._seat, turn), self._units[unit].start
        for region, value in zip(self._statistics.regions, self._captured.get(lane.number, ()), strict=False):
            if self._leads and self._unit_of[region.entries[0]] == unit:
                box[region.start - start : region.stop - start].copy_(value)
        self._point += 1
        shelves.meet(self._point, self._ranks)
        seats = {place.number for add in self._adds for place in add[1:] if place is not None and place.kind == "box"}
        lo, hi = part_of(self._units[unit].start, self._units[unit].stop, len(self._ranks), shelves.rank)
        shelves.bring(turn, sorted(seats), self._ranks, lo - start, hi - start)
        for slot, count in self._elsewhere.items():  # its ranges were others than this round's
            self._bring_sum(slot, count, self._units[unit], lo, hi)
        self._fold(unit, turn)
        lane.at += 1

    def _bring_sum(self, slot: int, seats: int, unit: Wrapped, lo: int, hi: int) -> None:
        """Have here these elements of a slot, which the ranks of so many seats have made."""
        for rank in range(seats * self._degree):
            first, last = part_of(unit.start, unit.stop, seats * self._degree, rank)
            self._shelves.bring_sum(slot, rank, max(first, lo), min(last, hi))

    def _fold(self, unit: int, turn: int) -> None:
        """Make the round's additions, of this rank's range of a unit."""
        entries, bounds = self._entries[unit], self._units[unit]
        first, last = entries[0], entries[-1] + 1
        by_rank = [bytes(self._shelves.row(rank, turn)[first:last].tolist()) for rank in self._ranks]
        for rank in self._ranks:
            self._compare(entries, by_rank[rank], by_rank[rank // self._degree * self._degree])
        rows = {
            SumPlace("box", seat): bytes(byte & 1 for byte in row) for seat, row in enumerate(by_rank[:: self._degree])
        }
        rows |= {SumPlace("slot", slot): bytes(row[first:last]) for slot, row in self._rows.items()}
        lo, hi = part_of(bounds.start, bounds.stop, len(self._ranks), self._shelves.rank)
        for add in self._adds:
            left, right = rows[add.left], rows[add.right] if add.right is not None else bytes(last - first)
            rows[add.into] = bytes(a | b for a, b in zip(left, right, strict=True))
            for start, stop, a, b, rounds in self._runs(entries, left, right, lo, hi):
                into = self._at(add.into, bounds.start, turn, start, stop)
                one = self._at(add.left, bounds.start, turn, start, stop)
                if not b or add.right is None:
                    into.copy_(one)
                elif a:
                    add_rounded(one, self._at(add.right, bounds.start, turn, start, stop), into, rounds)
                else:
                    into.copy_(self._at(add.right, bounds.start, turn, start, stop))
        for place, row in rows.items():
            if place.kind == "slot":
                whole = self._rows.setdefault(place.number, bytearray(len(self._layout.entries)))
                whole[first:last] = row

    def _compare(self, entries: Sequence[int], row: bytes, first: bytes) -> None:
        """Compare what two ranks of a seat have of these entries. Raises: TaskError."""
        for i, own, others in zip(entries, row, first, strict=True):
            if own != others and own and others:
                raise TaskError(
                    f"cell.tp: {self._layout.entries[i].name} is not cut, but processes that compute a lane together "
                    "have different gradients of it: let the plan cut it, or add up over the shards what reaches it"
                )
            if own != others:
                raise TaskError(
                    "cell.tp: the processes that computed a lane together have gradients of different parameters: let "
                    "the loss use the same ones for every shard"
                )

    def _runs(
        self, entries: Sequence[int], left: bytes, right: bytes, lo: int, hi: int
    ) -> list[tuple[int, int, int, int, torch.dtype]]:
        """Runs of elements in [lo, hi) where both sums are alike in what is there and to which type they are rounded:
        (from, to, left, right, type)."""
        found: list[tuple[int, int, int, int, torch.dtype]] = []
        ends = self._layout.boundaries
        for i, a, b in zip(entries, left, right, strict=True):
            start, stop = max(self._layout.entries[i].offset, lo), min(ends[i], hi)
            stop = min(stop, self._units[self._unit_of[i]].stop)
            if start >= stop or not (a or b):
                continue
            rounds = self._layout.rounds if i in self._params else torch.float32
            if found and found[-1][1:] == (start, a, b, rounds):
                found[-1] = (found[-1][0], stop, a, b, rounds)
            else:
                found.append((start, stop, a, b, rounds))
        return found

    def _at(self, place: SumPlace, unit_start: int, turn: int, start: int, stop: int) -> Tensor:
        if place.kind == "slot":
            return self._shelves.slot(place.number)[start:stop]
        return self._shelves.box(place.number, turn)[start - unit_start : stop - unit_start]


class _LaneUnderWay:
    """A lane between `enter` and `add`. at: of the units in their order, the one that is next. fired: entries whose
    gradients were final. moved: those that are in a box, each with its byte of the row."""

    def __init__(self, hooks: Iterable[torch.utils.hooks.RemovableHandle], number: int = -1) -> None:
        self.at, self.number = 0, number
        self.fired: set[int] = set()
        self.moved: dict[int, int] = {}
        self._hooks = list(hooks)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _sum_of_bits(tensor: Tensor) -> int:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(tensor.contiguous().view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
