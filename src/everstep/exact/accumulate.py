"""Adding up the lanes that one worker computes: autograd's own tensors are the leaves, complete subtrees are folded.

Apart because it makes a step's memory and its traffic: leaves are added in place. The sum of a node's first lanes lies
in the memory that the transport shares from the first lane on, and autograd adds to it there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from everstep.base.errors import ConfigError, check
from everstep.base.ports import Node, OnFinal
from everstep.exact.first_lane import FirstLane
from everstep.exact.lane_statistics import LaneStatistics
from everstep.exact.last_lane import LastLane, block_map, runs_of
from everstep.exact.layout import Entry, GradientLayout
from everstep.exact.lending import GradientWatch, Loan
from everstep.placement.tree import children, path_to

GRADIENT_SLOT: Any = vars(torch._C.TensorBase)["grad"]
"""`.grad` itself, also where the loop's guard asks who uses it."""
_IDLE_STEPS = 4
"""Steps for which views into a buffer are kept after its last use."""

Leaf = list[Tensor | None]
"""One sum: a tensor per parameter entry, then one per unit with running statistics; None where absent."""


class LaneAccumulator:
    """Folds this worker's lanes of a step into the nodes that it hands over. One thread."""

    def __init__(
        self, layout: GradientLayout, model: nn.Module, units: range | None = None, *, lets_go: bool = False
    ) -> None:
        """`layout` was built from this very model, after `untie`. Sets malloc to keep freed memory (process-wide).

        units: units of the layout whose gradients are taken here; by default all. lets_go: blocks that were offered may
        be given back, so nothing of them stays in `.grad`.
        """
        keep_freed_memory()
        units = range(len(layout.units)) if units is None else units
        mine = [i for i in layout.params if layout.entries[i].unit in units]
        by_name = dict(model.named_parameters(remove_duplicate=False))
        self.layout = layout
        self.presence: dict[Node, bytes] = {}
        """Presence of each complete node of the step: one byte per layout entry."""
        self._indices = mine
        self._params: list[nn.Parameter] = [by_name[layout.entries[i].name] for i in mine]
        self._frozen = [(name, by_name[name]) for name in layout.frozen]
        self._entries = [layout.entries[i] for i in mine]
        self._strides = [tuple(p.stride()) for p in self._params]
        self._bytes = [p.numel() * 4 for p in self._params]
        self._rounds = layout.rounds
        whole = self._rounds == torch.float32
        self._narrow = [i for i, p in enumerate(self._params) if p.dtype != torch.float32 or not whole]
        self._statistics = LaneStatistics(layout, model, units)
        self._captured: dict[int, list[Tensor]] = {}
        self._watch: GradientWatch | None = GradientWatch(self._params)
        self._apart = set(self._narrow)
        self._loan: Loan | None = None
        self._first: FirstLane | None = None
        self._last: LastLane | None = None
        self._offer: OnFinal | None = None
        self._blocks = block_map(layout, mine, [(r.start, r.stop) for r in self._statistics.regions])
        self._all = bytes(entry.unit in units for entry in layout.entries)
        self._none = bytes(len(layout.entries))
        self._lets_go = lets_go
        self._step = 0
        self._open: list[Node] = []
        self._pending: dict[Node, Leaf] = {}
        self._node_of_lane: dict[int, Node] = {}
        self._buffer: Callable[[Node], Tensor] | None = None
        self._views: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}

    def begin(
        self, step: int, nodes: Sequence[Node], buffer: Callable[[Node], Tensor], offer: OnFinal | None = None
    ) -> None:
        """Start a step, or take on further nodes of the same step (lanes that another worker lost).

        nodes: disjoint nodes of the lane tree, all of whose lanes will be added here. buffer: gives the flat float32
        tensor (`layout.numel` elements) into which a node's sum is written; called when its first lane begins or is
        added. offer: receives blocks as soon as they are final, from this call on. When a step begins for the first
        time, the model's running statistics must be those that it starts from. Anything left in `.grad` is dropped. In
        a second call, a node that overlaps unfinished ones replaces them: sums of its own lanes count, those of other
        lanes are dropped. So call it with `cover` of all wanted lanes that are not in `presence`.

        Raises: ConfigError if a parameter that was frozen at the start has been unfrozen.
        """
        if step != self._step:
            for name, parameter in self._frozen:
                if parameter.requires_grad:
                    raise ConfigError(
                        f"parameter {name} was frozen when training began and now requires a gradient; "
                        "let it require one from the start, or keep it frozen"
                    )
            self.forget()
            self._step = step
            self._views = {at: v for at, v in self._views.items() if step - _IDLE_STEPS <= v[0] <= step}
            self._statistics.begin_step()
        self._leave_lane()
        self._buffer, self._offer = buffer, offer
        self._let_go()
        wanted = [node for node in nodes if node not in self._open and node not in self.presence]
        for node in wanted:
            self._dissolve(node)
            check(all(lane not in self._node_of_lane for lane in range(*node)), f"{node} overlaps a complete node")
            self._open.append(node)
            self._node_of_lane.update((lane, node) for lane in range(*node))
        if wanted and self._pending:
            self._replan()

    @property
    def watches(self) -> bool:
        """Whether the first lane is still to come; until then `enter` lends nothing."""
        return self._watch is not None

    def begin_lanes(self, step: int) -> None:
        """The model's running statistics are those that the step starts from; the step may have begun before."""
        if step == self._step:
            self._statistics.begin_step()

    def enter(self, lane: int) -> None:
        """The lane's forward and backward pass come next. The call may be left out, or repeated for the same lane.

        If the lane's left sibling is waiting, autograd gets that sum to add the lane's gradients to, while they are in
        the processor's cache: the same addition, with a third of the memory traffic. Until `add`, `.grad` then holds
        both, and no other code may write to it.
        """
        if self._lets_go:
            give_freed_memory_back()
        if self._watch is not None:
            self._watch.clear()
            if self.is_missing(lane):  # else it leaves nothing behind
                self._move_in(lane, self._node_of_lane[lane])
            return
        check(self._loan is None, "the lane before was entered and never added")
        path = path_to(self._node_of_lane[lane], lane)
        sibling = children(path[-2])[0] if len(path) > 1 else path[0]
        if sibling in self._pending:
            leaf = self._pending[sibling]
            lent = leaf[: len(self._params)]
            for i in self._apart:
                lent[i] = None
            self._loan = Loan(sibling, path[-2], leaf, lent, [-1 if g is None else g._version for g in lent])
            for parameter, gradient in zip(self._params, lent, strict=True):
                GRADIENT_SLOT.__set__(parameter, gradient)
        if self._offer is not None:
            self._listen(lane, path, self._offer)
        if self._last is None:
            self._move_in(lane, path[0])

    def _move_in(self, lane: int, top: Node) -> None:
        """The gradients of a node's first lane move into its memory as they come."""
        if lane == top.lo:
            check(self._buffer is not None, "begin() comes before enter()")
            views = self._views_of(self._buffer(top))  # type: ignore[misc]
            self._leave_first()
            self._first = FirstLane(self._params, views, self._apart)

    def _listen(self, lane: int, path: tuple[Node, ...], offer: OnFinal) -> None:
        """If the lane completes its node, its blocks leave while it is computed."""
        siblings: dict[Node, Leaf] = {}
        for parent in reversed(path[:-1]):
            left, _ = children(parent)
            if lane != parent.hi - 1 or left not in self._pending:
                return
            siblings[left] = self._pending[left]
        check(self._buffer is not None, "begin() comes before enter()")
        views = self._views_of(self._buffer(path[0]))  # type: ignore[misc]
        lent = [None] * len(self._params) if self._loan is None else self._loan.lent
        self._last = LastLane(path[0], siblings, lent, views, self._blocks, offer, self._lets_go, self._rounds)
        self._last.listen(self._params, self._apart.difference(self._narrow))
        self._put_statistics(lane)

    def _put_statistics(self, lane: int) -> None:
        last = self._last
        if last is not None and lane == last.node.hi - 1 and lane in self._captured:
            regions = range(len(self._params), len(self._params) + len(self._statistics.regions))
            with torch.no_grad():
                fresh = [i for i in regions if last.lacks(i)]  # none if the lane is computed again
                for i in fresh:
                    last.put(i, self._captured[lane][i - regions.start])
                last.leave(fresh)

    def capture(self, lane: int) -> None:
        """Take the running statistics as the lane's forward pass left them, before anything changes them."""
        if self._statistics.regions:
            with torch.no_grad():
                self._captured[lane] = self._statistics.take()
            self._put_statistics(lane)

    def add(self, lane: int) -> None:
        """Take the gradients that the lane's backward pass left in `.grad` (set to None here), and the captured running
        statistics, or the present ones if none were captured.

        Raises: ConfigError naming a parameter with a sparse gradient; TaskError naming one whose `.grad` was written by
        other code than the lane's backward pass.
        """
        if self._watch is not None:
            self._apart |= self._watch.end()
            self._watch = None
        self._check_missing(lane)
        with torch.no_grad():
            captured = self._captured.pop(lane, None)
            statistics = self._statistics.take() if captured is None else captured
            loan, self._loan = self._loan, None
            self._leave_first()
            last, self._last = self._last, None
            if last is not None:
                check(lane == last.node.hi - 1, f"lane {lane} was added while another one was computed")
                self._complete(last, loan, statistics)
            elif loan is None:
                self._fold(Node(lane, lane + 1), [*self._own(self._let_go()), *statistics])
            else:
                check(lane == loan.parent.hi - 1, f"lane {lane} was added while another one was computed")
                del self._pending[loan.sibling]
                self._fold(loan.parent, self._take_back(loan, statistics))

    def add_empty(self, lane: int) -> None:
        """Add a lane without samples, which is the identity of the sum."""
        self._check_missing(lane)
        with torch.no_grad():
            self._fold(Node(lane, lane + 1), [None] * (len(self._params) + len(self._statistics.regions)))

    def take(self, node: Node, row: bytes, flat: Tensor) -> None:
        """Add the sum of a whole subtree that another process of this worker has made.

        row: its presence, one byte per layout entry. flat: float32 [layout.numel]; it is copied before this returns.
        """
        for lane in range(*node):
            self._check_missing(lane)
        views = self._views_of(flat)
        there = [bool(row[i]) for i in self._indices]
        there += [bool(row[region.entries[0]]) for region in self._statistics.regions]
        leaf: Leaf = [view if one else None for view, one in zip(views, there, strict=True)]
        with torch.no_grad():
            if node != self._node_of_lane[node.lo]:
                leaf = [None if view is None else view.clone() for view in leaf]
            self._fold(node, leaf)

    def offer_again(self, node: Node) -> None:
        """Offer a complete node again, because other members than before want it."""
        if self._offer is not None:
            row = self.presence[node]
            present = [bool(row[i]) for i in self._indices]
            present += [bool(row[region.entries[0]]) for region in self._statistics.regions]
            self._offer_whole(node, present)

    def _offer_whole(self, node: Node, present: Sequence[bool]) -> None:
        if self._offer is not None:
            for run in runs_of(self._blocks.whole(present)):
                self._offer(node, *run)

    def leave_out(self, lane: int) -> None:
        """Throw away the gradients of a lane that had been added before."""
        self.dismiss()

    def dismiss(self) -> None:
        """Throw away the gradients that a backward pass left in `.grad`."""
        check(self._loan is None, "the lane before was entered and never added")
        self._leave_first()
        self._let_go()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (*self._open, *self.presence)

    def drop(self, node: Node) -> None:
        """Forget a complete node, because some of its lanes went to another worker: they count as not added."""
        del self.presence[node]
        for lane in range(*node):
            del self._node_of_lane[lane]

    @property
    def missing(self) -> tuple[int, ...]:
        """Lanes of the step's nodes that have not been added yet, ascending."""
        return tuple(sorted(filter(self.is_missing, self._node_of_lane)))

    def is_missing(self, lane: int) -> bool:
        if lane not in self._node_of_lane:
            return False
        return not any(lo <= lane < hi for held in (self._pending, self.presence) for lo, hi in held)

    def _check_missing(self, lane: int) -> None:
        check(self.is_missing(lane), f"lane {lane} is not expected, or was added before, in step {self._step}")

    def forget(self) -> None:
        self._leave_lane()
        self._open, self._pending, self._node_of_lane, self.presence = [], {}, {}, {}
        self._step, self._buffer, self._offer = 0, None, None
        self._captured = {}

    def _leave_lane(self) -> None:
        """Leave an unfinished lane: the sums that it may have added to are lost."""
        touched = [] if self._loan is None else [self._loan.sibling]
        if self._last is not None:
            self._last.end()
            touched = list(self._last.siblings)
        for node in touched:
            del self._pending[node]
        self._loan = self._last = None
        self._leave_first()

    def _leave_first(self) -> None:
        if self._first is not None:
            self._first.end()
            self._first = None

    # ---- leaves

    def _let_go(self) -> Leaf:
        """Take all gradients out of `.grad`, which is None afterwards."""
        leaf: Leaf = [GRADIENT_SLOT.__get__(p) for p in self._params]
        for parameter in self._params:
            GRADIENT_SLOT.__set__(parameter, None)
        return leaf

    def _name(self, i: int) -> str:
        return self._entries[i].name

    def _take_back(self, loan: Loan, statistics: list[Tensor]) -> Leaf:
        """The sum of the loan's parent."""
        gradients = self._let_go()
        loan.check_returned(gradients, self._name)
        if _whole(loan.lent):
            n = len(gradients)
            return [*loan.leaf[:n], *_add_in_place(loan.leaf[n:], [*statistics])] if statistics else loan.leaf
        fresh = self._own([g if lent is None else None for g, lent in zip(gradients, loan.lent, strict=True)])
        return self._add_in_place(loan.leaf, [*fresh, *statistics])

    def _complete(self, last: LastLane, loan: Loan | None, statistics: list[Tensor]) -> None:
        """Add up the gradients that were not final before; the node is complete afterwards."""
        last.end()
        gradients = self._let_go()
        lent: Sequence[Tensor | None] = [None] * len(gradients)
        last.check(gradients, self._name)
        if loan is not None:
            lent = loan.lent
            loan.check_returned(last.returned(gradients), self._name)
        rest = last.open
        fresh = {i for i in rest if i < len(gradients) and lent[i] is None}
        leaf = self._own([g if i in fresh else None for i, g in enumerate(gradients)])
        for i in rest:
            last.put(i, statistics[i - len(leaf)] if i >= len(leaf) else leaf[i] if i in fresh else lent[i])
        for sibling in last.siblings:
            del self._pending[sibling]
        self._open.remove(last.node)
        self.presence[last.node] = self._row(last.present)
        last.leave(rest)

    def _own(self, leaf: Leaf) -> Leaf:
        """The gradients as dense float32 tensors in the parameters' strides, each in its own memory."""
        for i, gradient in enumerate(leaf):
            if gradient is not None and (gradient.layout is not torch.strided or gradient.stride() != self._strides[i]):
                leaf[i] = _dense(gradient, self._entries[i])
        for i in self._narrow:
            gradient = leaf[i]
            if gradient is not None:
                leaf[i] = gradient.to(self._rounds).float()
        self._unshare(leaf)
        return leaf

    def _unshare(self, leaf: Leaf) -> None:
        """Copy gradients that share memory: autograd may share memory between parameters, and sums are made in
        place."""
        spans = sorted((g.data_ptr(), i) for i, g in enumerate(leaf) if g is not None)
        end = 0
        for start, i in spans:
            if start < end:
                gradient = leaf[i]
                check(gradient is not None, "only present gradients have memory")
                leaf[i] = gradient.clone()  # type: ignore[union-attr]
            end = max(end, start + self._bytes[i])

    # ---- the tree

    def _dissolve(self, node: Node) -> None:
        """Forget unfinished nodes that overlap this one."""
        for other in [o for o in self._open if o.lo < node.hi and node.lo < o.hi]:
            self._open.remove(other)
            for lane in range(*other):
                del self._node_of_lane[lane]

    def _replan(self) -> None:
        """After the nodes changed: drop subtrees in no node, and finish those that are a whole node."""
        for subtree in list(self._pending):
            top = self._node_of_lane.get(subtree.lo)
            if top is None or top.lo > subtree.lo or top.hi < subtree.hi:
                del self._pending[subtree]
            elif top == subtree:
                with torch.no_grad():
                    self._finish(subtree, self._pending.pop(subtree), None)

    def _fold(self, node: Node, leaf: Leaf) -> None:
        """Take in the sum of a node, and climb as far as siblings are there."""
        path = path_to(self._node_of_lane[node.lo], node.lo)
        for at in range(path.index(node) - 1, -1, -1):
            parent = path[at]
            left, right = children(parent)
            sibling = right if node == left else left
            if sibling not in self._pending:
                self._pending[node] = self._into_buffer(path[0], leaf) if node.lo == path[0].lo else leaf
                return
            other = self._pending.pop(sibling)
            pair = (leaf, other) if node == left else (other, leaf)
            if at == 0:
                self._finish(parent, *pair)
                return
            leaf = self._add_in_place(*pair)
            node = parent
        self._finish(node, leaf, None)

    def _into_buffer(self, top: Node, leaf: Leaf) -> Leaf:
        """The sum of a node's first lanes, in the memory of the node: lanes that come later need none of their own."""
        check(self._buffer is not None, "begin() comes before add()")
        flat = self._buffer(top)  # type: ignore[misc]
        if any(g is not None and g.device != flat.device for g in leaf):
            return leaf
        views = self._views_of(flat)
        _copy_into(views, leaf)
        return [None if g is None else view for view, g in zip(views, leaf, strict=True)]

    def _add_in_place(self, left: Leaf, right: Leaf) -> Leaf:
        found = _add_in_place(left, right)
        self._round(found)
        return found

    def _round(self, leaf: Leaf) -> None:
        """Round the sums of gradients as the layout wants them."""
        if self._rounds != torch.float32:
            for value in leaf[: len(self._params)]:
                if value is not None:
                    value.copy_(value.to(self._rounds))

    def _finish(self, node: Node, left: Leaf, right: Leaf | None) -> None:
        check(self._buffer is not None, "begin() comes before add()")
        flat = self._buffer(node)  # type: ignore[misc]
        views = self._views_of(flat)
        if right is None:
            _copy_into(views, left)
        else:
            _add_into(views, left, right)
            both = zip(views, left, right, strict=True)
            self._round([view if a is not None and b is not None else None for view, a, b in both])
        self._open.remove(node)
        present = [g is not None for g in left]
        if right is not None:
            present = [a or b is not None for a, b in zip(present, right, strict=True)]
        self.presence[node] = self._row(present)
        self._offer_whole(node, present)

    def _row(self, present: Sequence[bool]) -> bytes:
        """The node's presence bytes, from the presence of its sums."""
        if all(present):
            return self._all
        if not any(present):
            return self._none
        row = bytearray(len(self._all))
        for i, there in zip(self._indices, present, strict=False):
            row[i] = there
        for region, there in zip(self._statistics.regions, present[len(self._params) :], strict=True):
            for i in region.entries:
                row[i] = there
        return bytes(row)

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        key = (flat.data_ptr(), flat.numel())
        _, views = self._views.get(key, (0, None))
        if views is None:
            check(flat.numel() == self.layout.numel, f"a node has {self.layout.numel} elements, not {flat.numel()}")
            # `data`: each with a counter of changes of its own (`Loan.check_returned`)
            views = [entry.view(flat).data for entry in self._entries]
            views += [flat[region.start : region.stop].data for region in self._statistics.regions]
            for start, stop in self.layout.gaps:
                flat[start:stop].zero_()
        self._views[key] = self._step, views
        return views


def _dense(gradient: Tensor, entry: Entry) -> Tensor:
    if gradient.layout is not torch.strided:
        raise sparse_gradient(entry.name, gradient)
    if gradient.is_contiguous():
        return gradient
    return torch.empty_strided(entry.shape, entry.stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def sparse_gradient(name: str, gradient: Tensor) -> ConfigError:
    """Why a sparse gradient is refused."""
    return ConfigError(f"parameter {name} has a sparse gradient ({gradient.layout}); use sparse=False")


def _add_in_place(left: Leaf, right: Leaf) -> Leaf:
    """left + right, in the memory of `left`; if one is absent, the other."""
    if left and _whole(left) and _whole(right):
        torch._foreach_add_(left, right)  # type: ignore[arg-type]
        return left
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [a if a is not None else b for a, b in zip(left, right, strict=True)]


def _whole(leaf: Leaf) -> bool:
    """Whether no tensor is absent. Not `None in leaf`: that compares each tensor, about 50 us apiece."""
    return NoneType not in map(type, leaf)


def _add_into(views: list[Tensor], left: Leaf, right: Leaf) -> None:
    for view, a, b in zip(views, left, right, strict=True):
        if a is not None and b is not None:
            if view.device == a.device:
                torch.add(a, b, out=view)
            else:
                view.copy_(a.add_(b))
        elif a is not None and a is not view:
            view.copy_(a)
        elif b is not None:
            view.copy_(b)


def _copy_into(views: list[Tensor], leaf: Leaf) -> None:
    present = [(v, g) for v, g in zip(views, leaf, strict=True) if g is not None and g is not v]
    if present:
        torch._foreach_copy_([v for v, _ in present], [g for _, g in present])


# ---- freed memory
#
# A lane's gradients outlive its backward pass until their sibling comes. Meanwhile the C library would give the top of
# the heap back, and fetch it again in every lane.


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses larger thresholds on 64-bit machines; larger tensors are mapped and unmapped each time."""


def keep_freed_memory() -> bool:
    """Tell malloc not to return freed memory to the system; returns whether the C library can (glibc can).

    Source: measured on a ResNet-18 with 8 lanes of 8 small images, one thread: 42,000 page faults and about 100 ms per
    step (of 750) without, none with. Bits do not depend on it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 << 20),
    )
    accepted = [mallopt(key, value) == 1 for key, value in settings]
    return all(accepted)


def give_freed_memory_back() -> None:
    """Have malloc return all that is free to the system now, and keep what is freed later. Without a C library that
    can, nothing happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
