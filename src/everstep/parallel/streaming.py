"""One generation's reductions over sockets, block by block: a block of a node leaves as soon as its holder reports it.

Apart from the transport because here nobody waits for a whole gradient. Blocks of nodes go to their owners as they
become final, while others are still computed. An owner finishes a block when the nodes that have come of it cover all
lanes, and sends its result at once to all who take it. Nobody asks for anything: a member that begins step s + 1 has
agreed on step s, and so have all others, who therefore have room for it. Blocks of a generation that ends count for
nothing. The `Reach` says whose sums a member sends, and who exchanges blocks with whom, the `Division` of a step who
finishes and who takes which blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from everstep.base.errors import CollectiveAborted, ProtocolError, check
from everstep.base.extents import Runs, common, within
from everstep.base.ports import Node
from everstep.exact.layout import BLOCK_ELEMENTS, GradientLayout
from everstep.exact.reduce import NodePart
from everstep.exact.state_memory import give_back
from everstep.parallel.reduction import CHUNK_BLOCKS, BlockFinisher
from everstep.parallel.socket_mesh import BlockNote, SocketMesh, bytes_of
from everstep.placement.shards import Division

LEAVING_BLOCKS = 4
"""Blocks (1 MiB) that leave together: a link of 100 Mbit/s takes 84 ms for them. The last ones are waited for twice, on
their way to the owner and back."""
_STEPS = 2
_WAIT_S = 0.05
_BLOCK_BYTES = 4 * BLOCK_ELEMENTS


class BlockCut:
    """Cuts blocks for the wire: not many at once, and without the padding at the end of each unit."""

    def __init__(self, layout: GradientLayout) -> None:
        self._stops = [(block + 1) * BLOCK_ELEMENTS for block in range(layout.n_blocks)]
        for unit in layout.units:
            if unit.start < unit.stop:
                self._stops[(unit.stop - 1) // BLOCK_ELEMENTS] = unit.stop

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of blocks [first, last) that leave together."""
        begin = first
        for block in range(first, last):
            end = block + 1
            if end - begin == LEAVING_BLOCKS or end == last or self._stops[block] < end * BLOCK_ELEMENTS:
                yield begin, end
                begin = end

    def stop(self, last: int) -> int:
        """Element at which the content of blocks up to this one, exclusive, ends."""
        return self._stops[last - 1]

    def last(self, first: int, size_bytes: int) -> int:
        """End (exclusive block) of a run of this many bytes. Raises: ProtocolError if no run has this size."""
        last = first + -(-size_bytes // _BLOCK_BYTES)
        if not first < last <= len(self._stops) or 4 * (self.stop(last) - first * BLOCK_ELEMENTS) != size_bytes:
            raise ProtocolError(f"{size_bytes} bytes from block {first} on are no run of blocks")
        return last

    def clear_padding(self, flat: torch.Tensor, origin: int, first: int, last: int) -> None:
        """Write zeros behind the content of each of these blocks; `flat` begins at element `origin`."""
        for block in range(first, last):
            end = (block + 1) * BLOCK_ELEMENTS
            if self._stops[block] < end:
                flat[self._stops[block] - origin : end - origin].zero_()


Rows = Mapping[int, Sequence[tuple[Node, bytes]]]
"""By worker: its nodes, with a presence byte for each entry of the layout."""


class BlockSums:
    """Sums of some of a node's lanes, block by block as they come. A block that has come of all lanes can be added up,
    once. Not thread-safe. runs: of these blocks."""

    def __init__(self, into: Node, runs: Runs) -> None:
        self.into = into
        self._runs = runs
        self._first, last = within(runs)
        size = last - self._first
        self._lanes: set[int] = set()
        self._came: dict[Node, bytearray] = {}
        self._whole = [0] * size
        self._there = [0] * size
        self._taken = bytearray(size)
        self._told = False
        self.parts: dict[Node, tuple[int, torch.Tensor, int]] = {}
        """By node: its owner, and its tensor, which begins at that element of the layout."""

    def add(self, worker_id: int, node: Node, tensor: torch.Tensor, start: int) -> None:
        """Announce a node of which blocks will come. Raises: ProtocolError if others have lanes of it."""
        inside = self.into.lo <= node.lo < node.hi <= self.into.hi
        lanes = set(range(*node)) if inside else set()
        if not lanes or not self._lanes.isdisjoint(lanes):
            raise ProtocolError(
                f"worker {worker_id} has a sum of the lanes {node.lo}..{node.hi - 1}, which others have"
            )
        self._lanes |= lanes
        self.parts[node] = worker_id, tensor, start
        self._came[node] = bytearray(len(self._taken))

    def come(self, node: Node, first: int, last: int, whole: bool) -> list[int]:
        """Note that blocks of a node have come; only wanted ones count. whole: no entry in them is absent. Returns the
        blocks that can be added up now.

        Raises: ProtocolError if one of them had come before.
        """
        came, found = self._came[node], list[int]()
        for begin, end in common(self._runs, ((first, last),)):
            lo, hi = begin - self._first, end - self._first
            if any(came[lo:hi]):
                raise ProtocolError(f"blocks {first}..{last - 1} of the lanes {node.lo}..{node.hi - 1} came twice")
            came[lo:hi] = b"\x01" * (hi - lo)
            for k in range(lo, hi):
                self._there[k] += node.hi - node.lo
                self._whole[k] += (node.hi - node.lo) * whole
            found += self._take(range(lo, hi))
        return found

    def tell(self) -> list[int]:
        """Note that the absent entries of all nodes are known. Returns the blocks that can be added up now."""
        self._told = True
        return [k for lo, hi in self._runs for k in self._take(range(lo - self._first, hi - self._first))]

    def _take(self, among: range) -> list[int]:
        wanted = self.into.hi - self.into.lo
        lanes = self._there if self._told else self._whole
        found = [k for k in among if lanes[k] == wanted and not self._taken[k]]
        for k in found:
            self._taken[k] = 1
        return [self._first + k for k in found]


class StepBlocks(BlockSums):
    """State of one step's reduction: lanes that have come of each own block, and results. Not thread-safe.

    own: blocks that are finished here. result: gives the flat result; not asked before there are blocks of it.
    awaited: blocks whose result will come here, None: all.
    """

    def __init__(
        self, own: Runs, n_blocks: int, n_lanes: int, result: Callable[[], torch.Tensor], awaited: int | None = None
    ) -> None:
        super().__init__(Node(0, n_lanes), own)
        self._result = result
        self._results = bytearray(n_blocks)
        self._pushed: dict[Node, bytearray] = {}
        self.open = n_blocks if awaited is None else awaited
        """Number of blocks whose result has not come yet."""

    @cached_property
    def out(self) -> torch.Tensor:
        """The flat result."""
        return self._result()

    def result(self, first: int, last: int) -> None:
        """Note that results have come. Raises: ProtocolError if one of them had come before."""
        if any(self._results[first:last]):
            raise ProtocolError(f"results of the blocks {first}..{last - 1} came twice")
        self._results[first:last] = b"\x01" * (last - first)
        self.open -= last - first

    def leave(self, node: Node, first: int, last: int) -> Runs:
        """Runs of an own node in this range that had not left yet; they count as left from now on."""
        left = self._pushed.setdefault(node, bytearray(len(self._results)))
        runs = []
        while (first := left.find(0, first, last)) >= 0:
            stop = left.find(1, first, last)
            stop = last if stop < 0 else stop
            runs.append((first, stop))
            left[first:stop] = b"\x01" * (stop - first)
        return tuple(runs)


class Reach(NamedTuple):
    """Members with whom one exchanges blocks. owners: receive sums from here, and send results. readers: send sums, and
    receive the own results. sums: the sums that may come, and from whom; None: any from readers."""

    owners: Sequence[int]
    readers: Sequence[int]
    sums: frozenset[tuple[int, Node]] | None = None


class Work(NamedTuple):
    """Work to add up: blocks [first, last) of a step. what: 0 for the own blocks, else the number of one of the sums
    for others. whole: no entry is absent in them."""

    step: int
    what: int
    first: int
    last: int
    parts: list[NodePart]
    whole: bool


class BlockStream:
    """The reductions of one generation. `offer` and `reduce` are called by one thread.

    division: of every step; None: each step has its own (`divide`), and what comes before that is known here waits.
    scratch: receive buffers by number, as `Flats.scratch`. result: gives the flat tensor for a step's result. reach:
    None: every member sends its sums to all owners. give_back: gives the memory of blocks [first, last) of an own node
    of a step back; None: they stay.
    """

    def __init__(
        self,
        me: int,
        ids: Sequence[int],
        division: Division | None,
        layout: GradientLayout,
        n_lanes: int,
        finisher: BlockFinisher,
        scratch: Callable[[int, int], torch.Tensor],
        result: Callable[[int], torch.Tensor],
        reach: Reach | None = None,
        give_back: Callable[[int, Node, int, int], None] | None = None,
    ) -> None:
        self._me = me
        self._always = division
        self._divisions: dict[int, Division] = {}
        self._freeing: dict[int, bool] = {}
        self._give_back = give_back
        at = ids.index(me)
        others = [*ids[at + 1 :], *ids[:at]]  # not all begin with the same one
        self._reach = reach or Reach(others, others)
        self._layout = layout
        self._n_lanes = n_lanes
        self._finisher = finisher
        self._scratch = scratch
        self._result = result
        self._cut = BlockCut(layout)
        self._mesh: SocketMesh | None = None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._known = threading.Condition(self._lock)
        self._steps: dict[int, StepBlocks] = {}
        self._rows: dict[int, dict[Node, bytes]] = {}
        self._numbers: dict[int, list[int]] = {}
        self._ready: dict[tuple[int, int], list[int]] = {}
        self._reduced = -1
        self._over = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-reduce", daemon=True)

    def begin(self, mesh: SocketMesh) -> None:
        """Begin over these connections, which are up."""
        self._mesh = mesh
        self._thread.start()

    def leave(self) -> None:
        """Stop all writes for this generation."""
        with self._lock:
            self._over = True
            busy = bool(self._steps)
            self._wake()
            self._progress.notify_all()
            self._known.notify_all()
        if busy and self._mesh is not None:
            self._mesh.cut()
        if self._thread.ident is not None:
            self._thread.join()

    def divide(self, step: int, division: Division, *, frees: bool = False) -> None:
        """Say how a step is divided, if that is not the same for all: after the state is that of the step before.
        frees: blocks of nodes are given back once they have left, or have been added up."""
        with self._lock:
            if self._always is None and step not in self._divisions:
                self._divisions[step] = division
                self._freeing[step] = frees and self._give_back is not None
                self._known.notify_all()
                self._wake()

    # ---- offers of this worker

    def offer(self, step: int, node: Node, flat: torch.Tensor, first: int, last: int, *, whole: bool = True) -> None:
        """Send these blocks of an own node, which are final. whole: no entry in them is absent. Blocks that have left
        before do not leave again; nothing happens if the generation has ended."""
        with self._lock:
            if self._over or step <= self._reduced:
                return
            blocks = self._step(step)
            if node not in blocks.parts:
                blocks.add(self._me, node, flat, 0)
            runs = blocks.leave(node, first, last)
            for begin, end in runs:
                self._finishable(step, blocks.come(node, begin, end, whole))
            frees = self._freeing.get(step, False)
        for w, begin, end in self._in_turns(step, runs):
            left = partial(self._left, step, node, begin, end) if frees else None
            self._push(w, BlockNote(step, node.lo, node.hi, begin, whole), flat, end, left=left)

    def reduce(
        self, step: int, own: Mapping[Node, torch.Tensor], presence: Mapping[Node, bytes], gather: Callable[[], Rows]
    ) -> Rows:
        """Offer all blocks that have not left; return when the result of the whole step is here. gather: exchanges the
        rows of presence bytes of all members' nodes.

        Raises: CollectiveAborted.
        """
        for node, flat in own.items():
            self.offer(step, node, flat, 0, self._layout.n_blocks, whole=all(presence[node]))
        rows = gather()
        self._conclude(step, {node: (w, row) for w, nodes in rows.items() for node, row in nodes})
        return rows

    def _conclude(self, step: int, told: Mapping[Node, tuple[int, bytes]]) -> None:
        """Wait until the result of the step is here. told: owner and presence of all offered nodes."""
        mesh = self._mesh
        check(mesh is not None, "a reduction before the members have met")
        with self._lock:
            blocks = self._step(step)
            for node, (w, _, _) in blocks.parts.items():
                check(
                    told.get(node, (-1, b""))[0] == w, f"worker {w} has sent blocks of {node}, and offers no such node"
                )
            self._rows[step] = {node: row for node, (_, row) in told.items()}
            self._tell(step)
            while blocks.open and self._fault is None and not self._over and mesh.whole:  # type: ignore[union-attr]
                self._progress.wait(_WAIT_S)
            fault, there = self._fault, not blocks.open
            if there:
                self._reduced = step
                self._forget(step)
        if fault is not None:
            raise fault
        if not there:
            mesh.fail()  # type: ignore[union-attr]

    def _in_turns(self, step: int, runs: Runs) -> Iterator[tuple[int, int, int]]:
        """(owner, first, last) of the next pieces to leave: of each owner a few, so that all have something to do."""
        queues, finishes = [], self._division(step).finishes
        for w in self._reach.owners:
            queues.append([(w, a, b) for run in common(runs, finishes[w]) for a, b in self._cut.pieces(*run)])
        for k in range(max(map(len, queues), default=0)):
            yield from (queue[k] for queue in queues if k < len(queue))

    def _push(
        self,
        w: int,
        note: BlockNote,
        flat: torch.Tensor,
        last: int,
        origin: int = 0,
        left: Callable[[], None] | None = None,
    ) -> None:
        if self._mesh is not None:
            blocks = flat[note.first * BLOCK_ELEMENTS - origin : self._cut.stop(last) - origin]
            self._mesh.push(*(w, note, blocks), *(() if left is None else (left,)))

    def _left(self, step: int, node: Node, first: int, last: int) -> None:
        """Blocks of an own node are not needed any more. Nothing happens once the generation has ended."""
        with self._lock:
            if not self._over and self._give_back is not None:
                self._give_back(step, node, first, last)

    # ---- incoming blocks (called by the thread that receives)

    def space(self, w: int, note: BlockNote, size: int) -> memoryview:
        """Memory for blocks that worker `w` sends.

        Raises: ProtocolError if they are not wanted from it.
        """
        self._check_reach(w, note)
        last = self._cut.last(note.first, size)
        with self._lock:
            self._await_division(note.step)
            if self._over or note.step <= self._reduced:
                raise ProtocolError(f"worker {w} sends blocks of step {note.step}, which is over")
            division = self._division(note.step)
            runs = division.finishes[self._me if note.of_node else w]
            if not note.of_node:
                runs = common(runs, division.takes[self._me])
            if common(runs, ((note.first, last),)) != ((note.first, last),):
                raise ProtocolError(f"worker {w} sends blocks {note.first}..{last - 1}, expected some of {list(runs)}")
            blocks = self._step(note.step)
            if not note.of_node:
                self._cut.clear_padding(blocks.out, 0, note.first, last)
                return bytes_of(blocks.out[note.first * BLOCK_ELEMENTS : self._cut.stop(last)])
            if note.node not in self._rows.get(note.step, {note.node: b""}):
                raise ProtocolError(f"worker {w} sends blocks of the lanes {note.lo}..{note.hi - 1}, and offered none")
            if note.node not in blocks.parts:
                lo, hi = within(runs)
                blocks.add(w, note.node, self._room(note.step, hi - lo), lo * BLOCK_ELEMENTS)
            sender, tensor, origin = blocks.parts[note.node]
            if sender != w:
                raise ProtocolError(f"worker {w} sends blocks of a sum that worker {sender} has")
            self._cut.clear_padding(tensor, origin, note.first, last)
            return bytes_of(tensor[note.first * BLOCK_ELEMENTS - origin : self._cut.stop(last) - origin])

    def _check_reach(self, w: int, note: BlockNote) -> None:
        reach = self._reach
        wanted = w in (reach.readers if note.of_node else reach.owners)
        if note.of_node and reach.sums is not None:
            wanted = (w, note.node) in reach.sums
        if not wanted:
            raise ProtocolError(f"worker {w} sends blocks of the lanes {note.lo}..{note.hi - 1}, which are another's")

    def came(self, note: BlockNote, size: int) -> None:
        """Note that these blocks have come. Raises: ProtocolError if they had come before."""
        last = self._cut.last(note.first, size)
        with self._lock:
            blocks = self._steps.get(note.step)
            if self._over or blocks is None:
                return
            if note.of_node:
                self._finishable(note.step, blocks.come(note.node, note.first, last, note.whole))
            else:
                self._arrived(blocks, note.first, last)

    def lost(self) -> None:
        """A connection has ended. Thread-safe."""
        with self._lock:
            self._progress.notify_all()

    # ---- inside, with the lock held

    def _await_division(self, step: int) -> None:
        """Wait until it is known here how a step is divided: somebody who was faster has sent blocks of it already."""
        while not (self._over or step <= self._reduced or self._divided(step)):
            self._known.wait()

    def _divided(self, step: int) -> bool:
        """Whether it is known how a step is divided."""
        return self._always is not None or step in self._divisions

    def _division(self, step: int) -> Division:
        check(self._divided(step), f"nobody has said who takes the gradient of step {step}")
        return self._always or self._divisions[step]

    def _step(self, step: int) -> StepBlocks:
        blocks = self._steps.get(step)
        if blocks is None:
            if len(self._steps) >= _STEPS:
                raise ProtocolError(f"step {step} begins while the steps {sorted(self._steps)} are not over")
            self._finisher.begin(step)
            division, result = self._division(step), partial(self._result, step)
            own, mine = division.finishes[self._me], division.takes[self._me]
            awaited = sum(
                hi - lo for w in (self._me, *self._reach.owners) for lo, hi in common(division.finishes[w], mine)
            )
            blocks = StepBlocks(own, self._layout.n_blocks, self._n_lanes, result, awaited)
            self._steps[step], self._numbers[step] = blocks, []
        return blocks

    def _room(self, step: int, blocks: int) -> torch.Tensor:
        taken = {number for numbers in self._numbers.values() for number in numbers}
        number = next(k for k in range(len(taken) + 1) if k not in taken)
        self._numbers[step].append(number)
        return self._scratch(number, blocks * BLOCK_ELEMENTS)

    def _forget(self, step: int) -> None:
        for table in (self._steps, self._numbers, self._rows, self._divisions, self._freeing):
            table.pop(step, None)  # type: ignore[attr-defined]

    def _sums_of(self, step: int, what: int) -> BlockSums:
        """Sums by number; 0: the own blocks, of which results are made."""
        return self._steps[step]

    def _tell(self, step: int) -> None:
        self._finishable(step, self._steps[step].tell())

    def _finishable(self, step: int, blocks: Sequence[int], what: int = 0) -> None:
        if blocks:
            self._ready.setdefault((step, what), []).extend(blocks)
            self._wake()

    def _wake(self) -> None:
        self._work.notify_all()

    def _arrived(self, blocks: StepBlocks, first: int, last: int) -> None:
        blocks.result(first, last)
        if not blocks.open:
            self._progress.notify_all()

    # ---- the thread that adds up

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._perform(work)
        except CollectiveAborted:
            pass  # the generation has ended
        except BaseException as error:
            with self._lock:
                self._fault = error
                self._progress.notify_all()

    def _perform(self, work: Work) -> None:
        """Finish own blocks, and send their result to all readers that take it."""
        with self._lock:
            out, takes = self._steps[work.step].out, self._division(work.step).takes
            own = {node for node, (w, _, _) in self._steps[work.step].parts.items() if w == self._me}
            frees = self._freeing.get(work.step, False)
        run = (work.first, work.last)
        self._finisher.finish(work.step, run, work.parts, out)
        for one in work.parts if frees else ():
            if one.node in own:
                self._left(work.step, one.node, *run)
            else:
                start, stop = (block * BLOCK_ELEMENTS - one.offset for block in run)
                give_back(one.tensor[start:stop], ())
        for part in _alike(run, [takes[w] for w in self._reach.readers]):
            for begin, end in self._cut.pieces(*part):
                for w in self._reach.readers:
                    if common(takes[w], (part,)):
                        self._push(w, BlockNote(work.step, 0, 0, begin, True), out, end)
        with self._lock:
            self._arrived(self._steps[work.step], work.first, work.last)

    def _next(self) -> Work | None:
        """Next work; waits for it. None at the end."""
        with self._lock:
            while not self._ready and not self._over:
                self._work.wait()
            return None if self._over else self._take()

    def _take(self) -> Work:
        """A run of blocks that can be added up, with all its parts. With the lock held; sums take turns."""
        step, what = next(iter(self._ready))
        blocks = sorted(self._ready.pop((step, what)))
        size = 1
        while size < min(len(blocks), CHUNK_BLOCKS) and blocks[size] == blocks[0] + size:
            size += 1
        if blocks[size:]:
            self._ready[step, what] = blocks[size:]
        rows = self._rows.get(step)
        everything = b"\x01" * len(self._layout.entries)
        parts = [
            NodePart(node, tensor, everything if rows is None else rows[node], start)
            for node, (_, tensor, start) in sorted(self._sums_of(step, what).parts.items())
        ]
        return Work(step, what, blocks[0], blocks[0] + size, parts, rows is None)


def _alike(run: tuple[int, int], sets: Sequence[Runs]) -> Iterator[tuple[int, int]]:
    """Parts of a run of blocks, each of which lies in each of the sets with all of its blocks or none."""
    return pairwise(sorted({*run, *(edge for one in sets for part in common(one, (run,)) for edge in part)}))
