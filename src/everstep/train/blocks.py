"""Blocks of states between workers: asked for in ranges, of several donors at once, checked as they come.

Whom to ask for what is the work queue's (`protocol.chunks`); here is a thread per donor, and what has arrived.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.base.cause import Cause
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, EverstepError
from everstep.base.extents import WHOLE, Extents
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, Scatter, sealed, sizes_of
from everstep.exact.state import ModelState
from everstep.protocol.chunks import Chunk, Chunks
from everstep.runtime.peer import PeerConnection

CHUNK_BLOCKS = 32
"""8 MiB at once of one donor: long enough that asking costs nothing, short enough to be done again elsewhere."""

_SLICE_S = 0.005


class Readable(Protocol):
    """A snapshot, whoever made it."""

    @property
    def n_blocks(self) -> int: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def manifest(self) -> dict[str, Any]: ...

    def read_block(self, index: int) -> memoryview: ...


Held = tuple[Readable, Extents]
"""A snapshot, and what is there of it."""


@dataclass(frozen=True)
class Layers:
    """One state, of which several snapshots have a part each: the first one that has a block gives it."""

    layers: Sequence[Held]

    @property
    def n_blocks(self) -> int:
        return self.layers[0][0].n_blocks

    def wait(self, timeout_s: float | None = None) -> bool:
        return all(readable.wait(timeout_s) for readable, _ in self.layers)

    def manifest(self) -> dict[str, Any]:
        return self.layers[0][0].manifest()

    def read_block(self, index: int) -> memoryview:
        for readable, there in self.layers:
            if any(lo <= index < hi for lo, hi in there.spans((("", readable.n_blocks),))):
                return readable.read_block(index)
        raise CheckpointCorrupt(f"block {index} is in none of {len(self.layers)} snapshots")


@dataclass(frozen=True)
class StageState:
    """One stage's state as it arrived. verified: each block was checked then; else they are when it is loaded."""

    manifest: dict[str, Any]
    blocks: list[memoryview]
    verified: bool = False

    def damaged(self) -> list[int]:
        """The numbers of the blocks that do not match their digests."""
        pairs = zip(self.blocks, self.manifest["blocks"], strict=True)
        return [n for n, (block, expected) in enumerate(pairs) if digest_bytes(block) != expected]

    def load_into(self, state: ModelState) -> None:
        """Raises: CheckpointCorrupt if it was altered."""
        if self.verified:
            state.load_with(self.manifest, self._fill)
        else:
            state.load(self.manifest, lambda i: self.blocks[i])

    def _fill(self, scatter: Scatter) -> None:
        for index, data in enumerate(self.blocks):
            at = 0
            for view in scatter.views(index):
                view[:] = data[at : at + len(view)]
                at += len(view)


def joint_manifest(told: Sequence[tuple[dict[str, Any], Extents]], own: Iterable[Held]) -> dict[str, Any]:
    """The manifest of a state that nobody has all of: each block's digest is of who has it.

    told: manifests and what their makers have; what they lack may be anything, and their manifests say so. own: here.
    """
    first = told[0][0]
    digests: list[str | None] = [None] * len(first["blocks"])
    for manifest, there in told:
        if manifest["entries"] == first["entries"]:
            for lo, hi in there.spans(sizes_of(manifest)):
                digests[lo:hi] = [a or b for a, b in zip(digests[lo:hi], manifest["blocks"][lo:hi], strict=True)]
    for readable, there in own:
        for lo, hi in there.spans((("", readable.n_blocks),)):
            for n in range(lo, min(hi, len(digests))):
                digests[n] = digests[n] or digest_bytes(readable.read_block(n))
    body = {key: value for key, value in first.items() if key != "digest"}
    return sealed({**body, "blocks": [a or b for a, b in zip(digests, first["blocks"], strict=True)]})


# ---- the donor


def serve_blocks(
    connection: PeerConnection,
    snapshots: Mapping[int, Readable],
    parts: Mapping[int, Extents],
    doubt: Callable[[int], None],
) -> None:
    """Blocks of these stages as they are asked for, until the other side has enough or goes.

    parts: of the stages that are not whole. doubt: called when blocks of a stage came damaged.

    Raises: CollectiveAborted when the other side has gone.
    """
    while not (request := connection.recv_json()).get("enough"):
        stage = int(request["stage"])
        snapshot = snapshots[stage]
        there = parts.get(stage, WHOLE).spans((("", snapshot.n_blocks),))
        if request.get("damaged"):
            doubt(stage)
            continue
        numbers = [n for lo, hi in request["blocks"] for n in range(max(lo, 0), min(hi, snapshot.n_blocks))]
        for n in numbers:
            held = any(lo <= n < hi for lo, hi in there)
            connection.send_bytes([snapshot.read_block(n)] if held else [])


# ---- who takes them


@dataclass(frozen=True)
class BlockSender:
    """One donor. open: reach it, from a thread of its own; gives what it has of the stages, or None if it is not where
    the others are. close: let it go, from any thread, before it was reached too."""

    name: str
    open: Callable[[], tuple[PeerConnection, Mapping[int, Extents]] | None]
    close: Callable[[], None]


class BlocksDamaged(EverstepError):
    """Blocks came damaged from everybody who was asked, or are not there any more."""

    cause = Cause.CORRUPT


class Gathering:
    """The blocks of some stages. `came`: how many have crossed the wire."""

    def __init__(self, manifests: Mapping[int, dict[str, Any]], tick: Callable[[], None], most: int) -> None:
        """manifests: what is to be had, by stage. most: blocks asked for at once."""
        self.came = 0
        self._manifests = dict(manifests)
        self._tick = tick
        self._queue: Chunks[int] = Chunks(most)
        self._blocks: dict[int, list[memoryview | None]] = {k: [None] * len(m["blocks"]) for k, m in manifests.items()}
        self._changed = threading.Condition()
        self._waiting: deque[BlockSender] = deque()
        self._opening = 0
        self._over = False
        self._refused: list[str] = []
        self._failed: list[str] = []
        self._threads: list[threading.Thread] = []

    def want(self, stage: int, missing: Extents = WHOLE, own: Iterable[Held] = ()) -> None:
        """A stage. Of what is not missing, one's own blocks are taken where they are those of the manifest."""
        manifest, blocks = self._manifests[stage], self._blocks[stage]
        of = sizes_of(manifest)
        missing = missing if missing.fits(Extents(of=of)) else WHOLE
        gone = {n for lo, hi in missing.spans(of) for n in range(lo, hi)}
        for readable, there in own if len(gone) < len(blocks) else ():
            spans = there.spans((("", readable.n_blocks),))
            for n in {n for lo, hi in spans for n in range(lo, min(hi, len(blocks)))} - gone:
                data = readable.read_block(n) if blocks[n] is None else None
                if data is not None and digest_bytes(data) == manifest["blocks"][n]:
                    blocks[n] = data
        self._queue.want(stage, Extents.numbered(of, (n for n, block in enumerate(blocks) if block is None)), of)

    def want_again(self, state: StageState, stage: int, numbers: Sequence[int]) -> None:
        """A stage of which these blocks came damaged."""
        blocks, of = self._blocks[stage], sizes_of(state.manifest)
        blocks[:] = [None if n in set(numbers) else block for n, block in enumerate(state.blocks)]
        self._queue.want(stage, Extents.numbered(of, numbers), of)

    def take(self, sources: Sequence[BlockSender], at_once: int) -> dict[int, StageState]:
        """Get what is wanted, from so many at once, and from the others where one of them fails.

        Raises: BlocksDamaged; CollectiveAborted if nobody is left.
        """
        self._waiting.extend(sources)
        try:
            for _ in range(min(at_once, len(sources))):
                self._start()
            while not self._finished():
                self._tick()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for source in sources:
                source.close()
            for thread in self._threads:
                thread.join()
        states = {}
        for stage, blocks in self._blocks.items():
            whole = [block for block in blocks if block is not None]
            states[stage] = StageState(self._manifests[stage], whole, verified=True)
        return states

    def _finished(self) -> bool:
        """Whether all is there, after a moment; another donor is asked if it needs one. Raises what `take` does."""
        with self._changed:
            if self._queue.finished:
                return True
            if self._opening or not self._queue.out_of_reach:
                self._changed.wait(_SLICE_S)
                return False
        if self._waiting:
            self._start()
            return False
        if self._refused or not self._failed:
            raise BlocksDamaged("; ".join(self._refused) or "none of the donors has all that is wanted")
        raise CollectiveAborted("; ".join(self._failed))

    # ---- a thread per donor

    def _start(self) -> None:
        number, source = len(self._threads), self._waiting.popleft()
        with self._changed:
            self._opening += 1
        thread = threading.Thread(target=self._run, args=(number, source), name="everstep-blocks", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, number: int, source: BlockSender) -> None:
        """Until all is there, or the donor is gone."""
        try:
            found = source.open()
        except (EverstepError, OSError) as error:
            found = None
            self._gone(number, source, error)
        with self._changed:
            self._opening -= 1
            if found is not None:
                self._queue.join(number, found[1])
            self._changed.notify_all()
        if found is None:
            return
        try:
            self._ask(source, number, found[0])
        except (EverstepError, OSError) as error:
            self._gone(number, source, error)
        finally:
            source.close()

    def _gone(self, number: int, source: BlockSender, error: BaseException) -> None:
        with self._changed:
            self._failed.append(f"{source.name}: {error}")
            self._queue.lost(number)
            self._changed.notify_all()

    def _ask(self, source: BlockSender, number: int, connection: PeerConnection) -> None:
        while (chunk := self._next(number)) is not None:
            damaged = self._receive(connection, chunk)
            with self._changed:
                if damaged:
                    self._refused.append(f"blocks of stage {chunk.stage} ({damaged}) did not come from {source.name}")
                self._queue.done(number, chunk, damaged)
                self._changed.notify_all()

    def _next(self, number: int) -> Chunk | None:
        with self._changed:
            while not self._over and not self._queue.finished:
                chunk = self._queue.next(number)
                if chunk is not None:
                    return chunk
                self._changed.wait()
            return None

    def _receive(self, connection: PeerConnection, chunk: Chunk) -> Extents:
        """Returns what came damaged, or not at all, and has the donor look at the former."""
        manifest, blocks = self._manifests[chunk.stage], self._blocks[chunk.stage]
        of, damaged, empty = sizes_of(manifest), [], []
        spans = chunk.extents.spans(of)
        connection.send_json({"stage": chunk.stage, "blocks": spans})
        for n in (n for lo, hi in spans for n in range(lo, hi)):
            data = memoryview(connection.recv_bytes(BLOCK_BYTES))
            if not data.nbytes:
                empty.append(n)
            elif data.nbytes != BLOCK_BYTES or digest_bytes(data) != manifest["blocks"][n]:
                damaged.append(n)
            else:
                self.came += 1  # nobody else has this block under way
                blocks[n] = data
        if damaged:
            connection.send_json({"stage": chunk.stage, "damaged": True})
        return Extents.numbered(of, damaged + empty)
