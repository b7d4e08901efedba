"""How a worker gets state from others: the decisions of `protocol.moving.taker`, carried out on sockets and memory.

A thread per source waits for its answers, and tells the machine under a lock, so no block waits for another thread.
The manifest comes from the leading source; blocks of other sources, and this worker's own, count only if they match
it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from everstep.base.cause import Cause, Why
from everstep.base.errors import CollectiveAborted, EverstepError
from everstep.base.extents import NONE, WHOLE, Extents, Sizes
from everstep.base.own_pages import own_pages
from everstep.base.plan import Member, Plan, WorkerKey
from everstep.checkpoint.vault import Kept, StageState
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, sizes_of
from everstep.exact.state_memory import HeldBlock, RoomThere
from everstep.placement.shards import share as share_of
from everstep.protocol.driver.hearing import FOREVER
from everstep.protocol.driver.operations import Keep
from everstep.protocol.moving import taker as moving
from everstep.protocol.moving.chunks import Chunk, share
from everstep.protocol.moving.giver import JointAsk
from everstep.protocol.moving.taker import TakeOrder, following, orders
from everstep.protocol.step_types import Key, Piecewise
from everstep.runtime.link.peer import PeerConnection
from everstep.train import heal
from everstep.train.executor import Unusable
from everstep.train.heal import Held, ReceivedOffer
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)

CHUNK_BLOCKS = 32
"""8 MiB at once of one source: long enough that asking costs nothing, short enough to be done again elsewhere."""
MOST_DONORS = 4
MOST_FOLLOWED = 3
LEAST_BYTES = 64 << 20
"""Bytes that each of several sources should give at least: below that, connecting and its snapshot cost more than
they save.
"""

_SLICE_S = 0.005
_PATIENCE_S = 0.5


class BlocksDamaged(EverstepError):
    """Blocks came damaged from every source that was asked, or are gone."""

    cause = Cause.CORRUPT


class SourceTalk:
    """The conversation with one source, in a thread of its own. head: of its offer, once it has come. feeds: its
    steps come on the same connection, which others then close."""

    def __init__(self, taking: Taking, member: Member, request: dict[str, Any]) -> None:
        self.head: heal.OfferHead | None = None
        self.connection: PeerConnection | None = None
        self._taking = taking
        self._member = member
        self._request = request
        self._asked: queue.SimpleQueue[moving.SourceTold] = queue.SimpleQueue()
        self.feeds = self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="everstep-blocks", daemon=True)
        self._thread.start()

    def say(self, effect: moving.SourceTold) -> None:
        self._asked.put(effect)

    def close(self) -> None:
        """From any thread: the conversation is over, and what waits for it raises."""
        with self._lock:
            self._closed, connection = True, self.connection
        self.say(moving.LeaveSource(self._member.key))
        if connection is not None:
            self._taking.view.cutter.close(connection)

    def ended(self) -> None:
        """Wait until its thread does no more; one that still tries to connect is not waited for."""
        if self.connection is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # a bug, too, must not leave anybody waiting for this source
            if not isinstance(error, EverstepError | OSError):
                log.exception("taking state from %s failed", self._member.key)
            self._taking.tell(moving.SourceLost(self._member.key, str(error)))
        finally:
            if not self.feeds:
                self.close()

    def _talk(self) -> None:
        view, source = self._taking.view, self._member.key
        connection = view.link.call_peer(self._member.address, self._request)
        view.cutter.guard(connection, self._taking.generation)
        with self._lock:
            self.connection, closed = connection, self._closed
        if closed:
            return
        self._taking.tell(moving.SourceReached(source))
        while not connection.readable(_PATIENCE_S):
            pass
        self.head = heal.receive_head(connection)
        self._taking.tell(moving.SourceOffers(source, *self.head.place(self._taking.order.stages)))
        while not isinstance(said := self._asked.get(), moving.LeaveSource):
            self._taking.tell(self._taking.receive(connection, source, said.chunk))
        if said.feeds:
            self.feeds = True
            connection.send_json({"enough": True})


class _Rooms:
    """Where blocks lie that came: here, or (`make_room`, for so many bytes) with all hosts of this worker."""

    def __init__(self, make_room: Callable[[int], RoomThere] | None) -> None:
        self._make_room = make_room
        self._rooms: dict[int, RoomThere] = {}
        self._failed: Exception | None = None

    def make(self, states: Mapping[int, StageState]) -> None:
        if self._make_room is not None:
            self._rooms = {k: self._make_room(state.n_blocks * BLOCK_BYTES) for k, state in states.items()}

    def put(self, stage: int, index: int, data: memoryview) -> HeldBlock:
        room = self._rooms.get(stage)
        try:
            return data if room is None else room.put(index * BLOCK_BYTES, data)
        except Exception as error:
            self._failed = error
            raise

    def check(self) -> None:
        """Raises what kept a block from lying where it belongs: no source is to blame for that. Unusable if a host of
        this worker has no room: it begins anew, as the same would not fit again."""
        if isinstance(self._failed, OSError):
            why = Why(Cause.OOM, f"a host of this worker has no room for the state that comes: {self._failed}")
            raise Unusable(why, torn=True) from self._failed
        if self._failed is not None:
            raise self._failed

    def clear(self) -> None:
        self._rooms = {}


class Taking:
    """One order being carried out. Starts at once; `offer` waits for the end."""

    def __init__(
        self,
        view: WorkerView,
        generation: int,
        order: TakeOrder,
        members: Iterable[Member],
        request: Mapping[str, Any],
        own: Callable[[int], Sequence[Held]] = lambda stage: (),
        tick: Callable[[], None] | None = None,
        wanted: Callable[[int, Sizes], Extents] = lambda stage, of: WHOLE,
        joint: Mapping[int, JointAsk] = {},
        room: Callable[[int], RoomThere] | None = None,
    ) -> None:
        """own: this worker's blocks of a stage. tick: called while `offer` waits; None: the training thread waits.
        wanted: the part of a stage of these sizes to get. joint: what to ask of donors that offer a state together, by
        worker id. room: makes one for so many bytes, where blocks lie; None: here."""
        self._tick = tick or view.tick
        self.view, self.generation, self.order = view, generation, order
        self._members = {member.key: member for member in members}
        self._request = {**request, "stages": list(order.stages)}
        self._own, self._wanted, self._joint = own, wanted, joint
        self._states: dict[int, StageState] = {}
        self._rooms = _Rooms(room)
        self._lines: dict[WorkerKey, SourceTalk] = {}
        self._news: queue.SimpleQueue[moving.TakerEffect] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._taker = moving.Taker(order, CHUNK_BLOCKS)
        with self._lock:
            self._carry_out(self._taker.begin())

    # ---- from any thread

    def tell(self, event: moving.TakerEvent) -> None:
        with self._lock:
            self._carry_out(self._taker.handle(event))

    def _carry_out(self, effects: Iterable[moving.TakerEffect]) -> None:
        for effect in effects:
            match effect:
                case moving.ReachSource(source, leads):
                    request = {**self._request, "ranges": "first" if leads else "more"}
                    if source.worker_id in self._joint:
                        request["joint"] = asdict(self._joint[source.worker_id])
                    self._lines[source] = SourceTalk(self, self._members[source], request)
                case moving.LeaveSource(source, False):
                    self._lines[source].close()
                case moving.AskSource(source) | moving.LeaveSource(source):
                    self._lines[source].say(effect)
                case _:
                    self._news.put(effect)

    def receive(self, connection: PeerConnection, source: WorkerKey, chunk: Chunk) -> moving.BlocksCame:
        """Ask for blocks, and report the result; a source of damaged blocks is told to check them."""
        state = self._states[chunk.stage]
        manifest, blocks = state.made_of, state.blocks
        of, damaged, empty = sizes_of(manifest), [], []
        spans = chunk.extents.spans(of)
        connection.send_json({"stage": chunk.stage, "blocks": spans})
        numbers = [n for lo, hi in spans for n in range(lo, hi)]
        memory = own_pages(len(numbers) * BLOCK_BYTES)
        for place, n in enumerate(numbers):
            data = connection.recv_at_most(memory[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            if not data.nbytes:
                empty.append(n)
            elif data.nbytes != BLOCK_BYTES or digest_bytes(data) != manifest["blocks"][n]:
                damaged.append(n)
            else:
                blocks[n] = self._rooms.put(chunk.stage, n, data)  # nobody else has this block under way
        if damaged:
            connection.send_json({"stage": chunk.stage, "damaged": True})
        return moving.BlocksCame(source, chunk, Extents.numbered(of, damaged + empty))

    # ---- the thread that waits for it

    def offer(self) -> ReceivedOffer:
        """The offer, with all wanted blocks in memory.

        Raises: BlocksDamaged; CollectiveAborted, which accuses those that have gone.
        """
        try:
            while not isinstance(news := self._next(), moving.TookAll):
                match news:
                    case moving.FindBlocks(leaders):
                        head = self._describe(leaders)
                    case moving.TookNothing(why, refused, lost):
                        raise BlocksDamaged(why) if refused else CollectiveAborted(why, [k.worker_id for k in lost])
        except BaseException:
            self.close()
            self._let_go()
            raise
        for line in self._lines.values():
            line.ended()
        return heal.offered(head, self._let_go())

    def _let_go(self) -> dict[int, StageState]:
        """Nothing keeps the states but who gets them: they are a copy of the state."""
        states, self._states = self._states, {}
        self._rooms.clear()
        return states

    def _next(self) -> moving.TakerEffect:
        while True:
            self._tick()
            with contextlib.suppress(queue.Empty):
                news = self._news.get(timeout=_SLICE_S)
                self._rooms.check()
                return news

    def _describe(self, leaders: Sequence[WorkerKey]) -> heal.OfferHead:
        """Facts beside the state. The manifests are those of the source that leads, where that has all."""
        order = self.order
        heads = [head for source in leaders if (head := self._lines[source].head) is not None]
        told = [dict(zip(order.stages, map(json.loads, head.manifests), strict=True)) for head in heads]
        manifests = told[0]
        missing = WHOLE if order.pieces is None else order.pieces.missing
        own = [] if missing.whole else self._own(order.stages[0])
        if order.scattered:
            (stage,) = order.stages
            theirs = [(one[stage], head.place((stage,))[1][stage]) for one, head in zip(told, heads, strict=True)]
            manifests[stage] = heal.joint_manifest(theirs, [(r, there - missing) for r, there in own])
        self._states = {k: StageState(one, own_blocks(one, missing, own)) for k, one in manifests.items()}
        self._rooms.make(self._states)
        of = {k: sizes_of(manifest) for k, manifest in manifests.items()}
        needed = {k: self._needed(k, of[k]) for k in of}
        lacking = {k: [n for n in needed[k] if state.blocks[n] is None] for k, state in self._states.items()}
        self.tell(moving.BlocksKnown({k: (Extents.numbered(of[k], lacking[k]), of[k]) for k in of}))
        return heads[0]

    def _needed(self, stage: int, of: Sizes) -> Iterator[int]:
        return (n for lo, hi in self._wanted(stage, of).spans(of) for n in range(lo, hi))

    @property
    def fed(self) -> list[PeerConnection]:
        """On which steps come from those that are followed, in order, once all of their offers are here."""
        lines = [self._lines[source] for source in self.order.sources if source in self._lines]
        return [line.connection for line in lines if line.feeds and line.connection is not None]

    def close(self) -> None:
        with self._lock:
            self._taker.stop()
            lines = list(self._lines.values())
        for line in lines:
            line.close()
        for line in lines:
            line.ended()


def own_blocks(
    manifest: Mapping[str, Any], missing: Extents = NONE, own: Iterable[Held] = ()
) -> list[HeldBlock | None]:
    """A stage's blocks as far as they are here, where they are those of the manifest; of those missing, none."""
    blocks: list[HeldBlock | None] = [None] * len(manifest["blocks"])
    for n, _, data in _sound(manifest, missing, own):
        blocks[n] = data
    return blocks


def own_sources(manifest: Mapping[str, Any], own: Iterable[Held]) -> list[HeldBlock | None]:
    """By block, what reads it from the snapshot that has it as the manifest says."""
    sources: list[HeldBlock | None] = [None] * len(manifest["blocks"])
    for n, readable, _ in _sound(manifest, NONE, own):
        sources[n] = partial(readable.read_block, n)
    return sources


def _sound(
    manifest: Mapping[str, Any], missing: Extents, own: Iterable[Held]
) -> Iterator[tuple[int, Kept, memoryview]]:
    """Each block that is here and is that of the manifest, once: (number, snapshot that has it, bytes)."""
    of, digests = sizes_of(manifest), manifest["blocks"]
    missing = missing if missing.fits(Extents(of=of)) else WHOLE
    gone = {n for lo, hi in missing.spans(of) for n in range(lo, hi)}
    for readable, there in own if len(gone) < len(digests) else ():
        spans = there.spans((("", readable.n_blocks),))
        for n in {n for lo, hi in spans for n in range(lo, min(hi, len(digests)))} - gone:
            data = readable.read_block(n)
            if digest_bytes(data) == digests[n]:
                gone.add(n)
                yield n, readable, data


def _next_few(left: Mapping[int, Extents], stage: int, of: Sizes) -> Extents:
    """Blocks that pass by together: 32 MiB, or a 32nd of the state. left: by stage."""
    return left[stage].first(max(CHUNK_BLOCKS * MOST_DONORS, sum(n for _, n in of) // 32), of)


@dataclass(frozen=True)
class Copier:
    """One worker's copying. own: its blocks of a stage at a step."""

    _view: WorkerView
    _own: Callable[[int, int], Sequence[Held]]

    def settle(
        self,
        plan: Plan,
        position: Key,
        sources: Mapping[int, tuple[int, ...]],
        pieces: Piecewise,
    ) -> list[ReceivedOffer]:
        """All wanted blocks, in memory (of a worker that spans hosts, in that of all of them): nothing is changed
        before all of them are there.

        Raises: CollectiveAborted; Unusable if no member sends blocks that were stated.
        """
        me = self._view.me
        own = partial(self._here, position.step)
        room = self._view.stages.room
        return [
            self._take(plan, order, own, lambda stage, of: share_of(plan.shard(me, stage), of), room)
            for order in orders(plan, position, sources, pieces, self._several, me)
        ]

    def pass_by(
        self, plan: Plan, position: Key, sources: Mapping[int, tuple[int, ...]], pieces: Piecewise
    ) -> Iterator[ReceivedOffer]:
        """All blocks that this worker lacks, in ascending order, a few at a time: they need not fit in memory.

        Raises: as `settle`.
        """
        for order in orders(plan, position, sources, pieces, self._several, self._view.me):
            missing = WHOLE if order.pieces is None else order.pieces.missing
            left = dict.fromkeys(order.stages, missing)
            wanted = partial(_next_few, left)
            while any(left.values()):
                offer = self._take(plan, order, lambda stage: (), wanted)
                yield offer
                for stage, state in offer.states.items():
                    left[stage] -= wanted(stage, sizes_of(state.manifest())) if state.n_blocks else WHOLE

    def _take(
        self,
        plan: Plan,
        order: TakeOrder,
        own: Callable[[int], Sequence[Held]],
        wanted: Callable[[int, Sizes], Extents],
        room: Callable[[int], RoomThere] | None = None,
    ) -> ReceivedOffer:
        request, generation = {"kind": "settle", "generation": plan.generation}, plan.generation
        try:
            return Taking(self._view, generation, order, plan.members, request, own, wanted=wanted, room=room).offer()
        except BlocksDamaged as error:
            step = order.position.step if order.position is not None else 0
            raise Unusable(Why(error.cause, f"the state of step {step} cannot be copied: {error}"), False) from error
        except CollectiveAborted as error:
            if self._view.cutter.over(plan.generation):
                raise CollectiveAborted("a newer plan has come") from error
            raise CollectiveAborted(f"the state could not be copied: {error}", error.accused) from error

    def _here(self, step: int, stage: int) -> Sequence[Held]:
        return self._own(stage, step)

    def follow(
        self,
        generation: int,
        donors: Sequence[Member],
        stages: Sequence[int],
        plan: Plan | None = None,
        joint: Mapping[int, JointAsk] = {},
    ) -> Taking:
        """Be fed by the first one that can be reached, once all that it offers is here. plan: in which this worker has
        its part; joint: what is asked of each donor then, all of which feed."""
        me, parts = self._view.me, any(one.segments is not None for one in joint.values())
        at_once = 1 if joint else self._several(stages, len(donors), MOST_FOLLOWED)
        order = following(stages, [member.key for member in donors], at_once, in_parts=parts)
        request = {"kind": "heal", "worker": str(self._view.link.me)}

        def wanted(stage: int, of: Sizes) -> Extents:
            return WHOLE if plan is None else share_of(plan.shard(me, stage), of)

        room = self._view.stages.room
        return Taking(self._view, generation, order, donors, request, wanted=wanted, joint=joint, room=room)

    def kept(self, effect: Keep) -> Iterator[ReceivedOffer]:
        """The snapshots of a step that others keep. In any thread, for as long as the job goes on.

        Raises: BlocksDamaged; CollectiveAborted.
        """
        plan, request = effect.plan, {"kind": "kept", "step": effect.step}
        at, me = Key(effect.step, 0), self._view.me
        for order in orders(plan, at, effect.sources, effect.pieces, self._several, me):
            room = self._view.stages.room
            yield Taking(self._view, FOREVER, order, plan.members, request, tick=lambda: None, room=room).offer()

    def _several(self, stages: Sequence[int], sources: int, most: int = MOST_DONORS) -> int:
        size = max(0, self._view.stages.expected_bytes) * len(stages)
        return share(size, sources, most=most, least_bytes=LEAST_BYTES)

    def reach(self, members: Iterable[Member]) -> None:
        """Look whether a member of each other host can be reached: who cannot reach all would keep all from going on.

        Raises: CollectiveAborted naming one that cannot be.
        """
        own = self._view.link.host
        for member in {m.host: m for m in members if m.host != own}.values():
            try:
                self._view.link.call_peer(member.address, {"kind": "knock"}).close()
            except (EverstepError, OSError) as error:
                text = f"host {member.host} cannot be reached from here ({own}), which all members have to be: {error}"
                raise CollectiveAborted(text) from None
            self._view.tick()
