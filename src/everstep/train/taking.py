"""How a worker gets state from others: in ranges of one donor or of several at once; whole or in part.

Whom to ask for what is the work queue's (`protocol.chunks`); here is a thread per donor, and what has arrived. Small
states have one donor: a second one has to be worth its snapshot. The manifest is that of the donor who answered first,
so what others give, and what is one's own, counts where it is just that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from everstep.base.cause import Cause, Why
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, EverstepError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member, Plan
from everstep.exact.digest import digest_bytes
from everstep.exact.image import BLOCK_BYTES, sizes_of
from everstep.protocol.chunks import Chunk, Chunks, share
from everstep.protocol.step_types import Pieces, Piecewise
from everstep.runtime.link.peer import PeerConnection
from everstep.train import heal
from everstep.train.executor import Unusable
from everstep.train.heal import FollowedStep, Held, ReceivedOffer, StageState
from everstep.train.view import WorkerView

CHUNK_BLOCKS = 32
"""8 MiB at once of one donor: long enough that asking costs nothing, short enough to be done again elsewhere."""
MOST_DONORS = 4
MOST_FOLLOWED = 3
LEAST_BYTES = 64 << 20
"""What each of several donors has to give: below that, connecting and its snapshot cost more than they save."""

_SLICE_S = 0.005


@dataclass
class Donation:
    """A conversation with one donor, begun when it is needed. follows: the donor feeds this worker on the same
    connection, so it is for others to close."""

    _view: WorkerView
    _generation: int
    member: Member
    stages: Sequence[int]
    _request: Mapping[str, Any]
    _follows: bool = False
    _position: Sequence[int] | None = None
    _connection: PeerConnection | None = None
    _header: dict[str, Any] | None = None

    def expect(self, position: Sequence[int]) -> None:
        """Where the donor has to be; else it is let go."""
        self._position = position

    def connect(self) -> PeerConnection:
        """Make the request. Raises: EverstepError or OSError."""
        if self._connection is None:
            request = {**self._request, "stages": list(self.stages)}
            self._connection = self._view.link.call_peer(self.member.address, request)
            self._view.cutter.guard(self._connection, self._generation)
        return self._connection

    def reached(self) -> bool:
        """Whether the request could be made."""
        try:
            self.connect()
        except (EverstepError, OSError):
            return False
        return True

    def wait(self) -> None:
        """Until the donor says something, or goes away."""
        connection = self.connect()
        while not connection.readable(_SLICE_S):
            self._view.tick()

    def header(self) -> dict[str, Any]:
        """What is offered, as soon as it is. Raises: EverstepError or OSError."""
        if self._header is None:
            self._header = self.connect().recv_json()
        return self._header

    def there(self) -> Mapping[int, Extents] | None:
        """What the donor has of the stages, None if it is not where the others are. Raises: as `header`."""
        header = self.header()
        if self._position is not None and header["position"] != list(self._position):
            return None
        return heal.parts_in(header, self.stages)

    def close(self) -> None:
        """The conversation is over. From any thread, before it has begun, too."""
        if self._connection is not None and not self._follows:
            self._view.cutter.close(self._connection)


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
        self._waiting: deque[Donation] = deque()
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

    def take(self, sources: Sequence[Donation], at_once: int) -> dict[int, StageState]:
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
        return {
            stage: StageState(self._manifests[stage], [block for block in blocks if block is not None])
            for stage, blocks in self._blocks.items()
        }

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

    def _run(self, number: int, source: Donation) -> None:
        """Until all is there, or the donor is gone."""
        try:
            there = source.there()
        except (EverstepError, OSError) as error:
            there = None
            self._gone(number, source, error)
        with self._changed:
            self._opening -= 1
            if there is not None:
                self._queue.join(number, there)
            self._changed.notify_all()
        try:
            if there is not None:
                self._ask(source, number, source.connect())
        except (EverstepError, OSError) as error:
            self._gone(number, source, error)
        finally:
            source.close()

    def _gone(self, number: int, source: Donation, error: BaseException) -> None:
        with self._changed:
            self._failed.append(f"{source.member.key}: {error}")
            self._queue.lost(number)
            self._changed.notify_all()

    def _ask(self, source: Donation, number: int, connection: PeerConnection) -> None:
        while (chunk := self._next(number)) is not None:
            damaged = self._receive(connection, chunk)
            with self._changed:
                if damaged:
                    self._refused.append(
                        f"blocks of stage {chunk.stage} ({damaged}) did not come from {source.member.key}"
                    )
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


@dataclass(frozen=True)
class Taker:
    """One worker's copying. own: what is here of a stage at a step, as it is."""

    _view: WorkerView
    _own: Callable[[int, int], Sequence[Held]]

    # ---- when a generation settles

    def settle(
        self, plan: Plan, step: int, sources: Mapping[int, tuple[int, ...]], pieces: Piecewise
    ) -> list[ReceivedOffer]:
        """All that is wanted, in memory: nothing is changed before all of it is there.

        Raises: CollectiveAborted; Unusable if blocks that were stated are not to be had.
        """
        whole: dict[tuple[int, ...], list[int]] = {}
        for stage, ids in sorted(sources.items()):
            if stage not in pieces:
                whole.setdefault(ids, []).append(stage)
        received = []
        for ids, stages in [*whole.items(), *((sources[k], [k]) for k in sorted(pieces) if k in sources)]:
            try:
                received.append(self._copy(plan, ids, stages, step, pieces.get(stages[0])))
            except BlocksDamaged as error:
                why = Why(error.cause, f"the state of step {step} cannot be copied: {error}")
                raise Unusable(why, False) from error
            except (EverstepError, OSError) as error:
                if self._view.cutter.over(plan.generation):
                    raise CollectiveAborted("a newer plan has come") from error
                raise CollectiveAborted(f"the state could not be copied: {error}", ids[:1]) from error
        return received

    def _copy(
        self, plan: Plan, ids: Sequence[int], stages: Sequence[int], step: int, one: Pieces | None
    ) -> ReceivedOffer:
        """Of some donors; the manifests are those of the first one that answers, where that has all. one: what is
        missing of the one stage, and who has what of that."""

        def donation(member: Member, ranges: str) -> Donation:
            request = {"kind": "settle", "generation": plan.generation, "ranges": ranges}
            return Donation(self._view, plan.generation, member, stages, request)

        given = one is not None and bool(one.given)
        donors, failed = [plan.member(i) for i in ids], []
        heads: list[Donation] = []
        while donors and (not heads or given):
            head = donation(donors.pop(0), "first")
            try:
                head.wait()
                head.header()
                heads.append(head)
            except (EverstepError, OSError) as error:
                head.close()
                failed.append(f"{head.member.key} at {head.member.address}: {error}")
        if not heads:
            raise CheckpointCorrupt("no donor could be reached: " + "; ".join(failed))
        header = heads[0].header()
        manifests = dict(zip(stages, header["manifests"], strict=True))
        own = self._own(stages[0], step) if one is not None and not one.missing.whole else []
        if one is not None and given:
            told = [(head.header()["manifests"][0], heal.parts_in(head.header(), stages)[stages[0]]) for head in heads]
            manifests[stages[0]] = heal.joint_manifest(told, [(r, there - one.missing) for r, there in own])
        gathering = Gathering(manifests, self._view.tick, CHUNK_BLOCKS)
        for stage in stages:
            gathering.want(stage, WHOLE if one is None else one.missing, own)
        at_once = len(ids) if given else self._at_once(stages, len(ids), MOST_DONORS)
        others = [donation(member, "more") for member in donors]
        return heal.offered(header, gathering.take([*heads, *others], at_once))

    def _at_once(self, stages: Sequence[int], donors: int, most: int) -> int:
        size = max(0, self._view.stages.expected_bytes) * len(stages)
        return share(size, donors, most=most, least_bytes=LEAST_BYTES)

    # ---- following

    def knock(self, members: Iterable[Member]) -> None:
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

    def ask(self, generation: int, donors: Sequence[Member], stages: Sequence[int]) -> FollowedDonor:
        """Ask the first one that can be reached to be followed, and others for blocks, where that is worth it.

        Raises: CollectiveAborted if nobody can be reached.
        """
        view = self._view
        several = self._at_once(stages, len(donors), MOST_FOLLOWED)
        request = {"kind": "heal", "worker": str(view.link.me)}
        failed = []
        for n, member in enumerate(donors):
            main = Donation(view, generation, member, stages, {**request, "ranges": "first"}, True)
            try:
                connection = main.connect()
            except (EverstepError, OSError) as error:
                failed.append(f"{member.key} at {member.address}: {error}")
                continue
            more = {**request, "ranges": "more"}
            others = [Donation(view, generation, other, stages, more) for other in donors[n + 1 : n + several]]
            return FollowedDonor(connection, tuple(stages), main, [other for other in others if other.reached()], [])
        raise CollectiveAborted("no donor could be reached: " + "; ".join(failed))

    def offered(self, followed: FollowedDonor) -> ReceivedOffer:
        """What the one who is followed offers, with all its blocks.

        Raises: EverstepError or OSError if it goes away.
        """
        main, others = followed.main, followed.others
        main.wait()
        header = main.header()
        gathering = Gathering(
            dict(zip(followed.stages, header["manifests"], strict=True)), self._view.tick, CHUNK_BLOCKS
        )
        for stage in followed.stages:
            gathering.want(stage)
        for other in others:
            other.expect(header["position"])
        states = gathering.take([main, *others], 1 + len(others))
        followed.connection.send_json({"enough": True})
        return heal.offered(header, states)


class FollowedDonor(NamedTuple):
    """Who is followed in some stages, and who else has been asked for blocks of what it offers. steps: those that have
    come and are not applied yet."""

    connection: PeerConnection
    stages: tuple[int, ...]
    main: Donation
    others: Sequence[Donation]
    steps: list[FollowedStep]
