"""How a worker gets state from others: of one donor as it comes, or in ranges of several at once; whole or in part.

Small states have one donor: a second one has to be worth its snapshot. The manifest is that of the donor who answered
first, so what others give, and what is one's own, counts where it is just that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.base.cause import Why
from everstep.base.errors import CheckpointCorrupt, CollectiveAborted, EverstepError
from everstep.base.extents import WHOLE, Extents
from everstep.base.plan import Member, Plan
from everstep.protocol.chunks import share
from everstep.protocol.step_types import Pieces, Piecewise
from everstep.runtime.peer import PeerConnection, peer_connect
from everstep.train import heal
from everstep.train.blocks import CHUNK_BLOCKS, BlocksDamaged, BlockSender, Gathering, Held, StageState, joint_manifest
from everstep.train.executor import Unusable
from everstep.train.heal import ReceivedOffer
from everstep.train.view import WorkerView

MOST_DONORS = 4
MOST_FOLLOWED = 3
LEAST_BYTES = 64 << 20
"""What each of several donors has to give: below that, connecting and its snapshot cost more than they save."""

_SLICE_S = 0.005


class Taker:
    """One worker's copying. own: what is here of a stage at a step, as it is."""

    def __init__(self, view: WorkerView, own: Callable[[int, int], Sequence[Held]]) -> None:
        self._view = view
        self._own = own

    # ---- when a generation settles

    def settle(
        self, plan: Plan, step: int, sources: Mapping[int, tuple[int, ...]], pieces: Piecewise
    ) -> list[ReceivedOffer]:
        """All that is wanted, in memory: nothing is changed before all of it is there.

        Raises: CollectiveAborted; Unusable if blocks that were stated are not to be had.
        """
        view, received = self._view, []
        whole = heal.by_donors({k: ids for k, ids in sources.items() if k not in pieces})
        wanted = [*whole.items(), *((sources[k], [k]) for k in sorted(pieces) if k in sources)]
        for ids, stages in wanted:
            members = [plan.member(i) for i in ids]
            one = pieces.get(stages[0])
            try:
                at_once = self._at_once(stages, len(members), MOST_DONORS)
                if one is None and at_once == 1:
                    received.append(self._stream(plan, members, stages))
                else:
                    at_once = len(members) if one is not None and one.given else at_once
                    received.append(self._ranges(plan, members, stages, step, one, at_once))
            except BlocksDamaged as error:
                raise Unusable(
                    Why(error.cause, f"the state of step {step} cannot be copied: {error}"), False
                ) from error
            except (EverstepError, OSError) as error:
                if view.cutter.over(plan.generation):
                    raise CollectiveAborted("a newer plan has come") from error
                raise heal.unreachable(error, ids) from error
        return received

    def _at_once(self, stages: Sequence[int], donors: int, most: int) -> int:
        size = max(0, self._view.stages.expected_bytes) * len(stages)
        return share(size, donors, most=most, least_bytes=LEAST_BYTES)

    def _stream(self, plan: Plan, donors: Sequence[Member], stages: Sequence[int]) -> ReceivedOffer:
        """Of the first one that can be reached; what comes damaged, of any."""
        request = {"kind": "settle", "generation": plan.generation, "stages": stages}
        connection = heal.connect_first(donors, self._view.link.token, request)
        with self._view.cutter.guarded(connection, plan.generation):
            self._await(connection)
            found = heal.receive_offer(connection, stages, self._view.tick)
        damaged = {k: numbers for k, state in found.states.items() if (numbers := state.damaged())}
        states = {k: StageState(s.manifest, s.blocks, verified=True) for k, s in found.states.items()}
        if damaged:
            again = self._assembly({k: states[k].manifest for k in damaged})
            for k, numbers in damaged.items():
                again.want_again(states[k], k, numbers)
            lines = [self._settling(plan, member, list(damaged), "more") for member in (*donors[1:], donors[0])]
            states |= again.take([line.source(list(damaged)) for line in lines], 1)
        return replace(found, states=states)

    def _ranges(
        self, plan: Plan, donors: Sequence[Member], stages: Sequence[int], step: int, one: Pieces | None, at_once: int
    ) -> ReceivedOffer:
        """In ranges, of several; the manifests are those of the first one that answers, where that has all."""
        lines, failed = [self._settling(plan, member, stages, "first") for member in donors], []
        heads: list[_Line] = []
        while lines and (not heads or (one is not None and one.given)):
            line = lines.pop(0)
            try:
                self._await(line.connect())
                line.header()
                heads.append(line)
            except (EverstepError, OSError) as error:
                line.close()
                failed.append(str(error))
        if not heads:
            raise CheckpointCorrupt("no donor could be reached: " + "; ".join(failed))
        header = heads[0].header()
        manifests = dict(zip(stages, header["manifests"], strict=True))
        own = self._own(stages[0], step) if one is not None and not one.missing.whole else []
        if one is not None and one.given:
            told = [(line.header()["manifests"][0], heal.parts_in(line.header(), stages)[stages[0]]) for line in heads]
            manifests[stages[0]] = joint_manifest(told, [(r, there - one.missing) for r, there in own])
        assembly = self._assembly(manifests)
        for stage in stages:
            assembly.want(stage, WHOLE if one is None else one.missing, own)
        others = [self._settling(plan, line.member, stages, "more") for line in lines]
        return heal.offered(header, assembly.take([line.source(stages) for line in (*heads, *others)], at_once))

    def _settling(self, plan: Plan, member: Member, stages: Sequence[int], ranges: str) -> _Line:
        request = {"kind": "settle", "generation": plan.generation, "stages": list(stages), "ranges": ranges}
        return _Line(self._view, plan.generation, member, request)

    def _assembly(self, manifests: Mapping[int, dict[str, Any]]) -> Gathering:
        return Gathering(manifests, self._view.tick, CHUNK_BLOCKS)

    def _await(self, connection: PeerConnection) -> None:
        while not heal.readable(connection, _SLICE_S):
            self._view.tick()

    # ---- following

    def ask(self, generation: int, donors: Sequence[Member], stages: Sequence[int]) -> Asked:
        """Ask the first one that can be reached to be followed, and others for blocks, where that is worth it.

        Raises: CollectiveAborted if nobody can be reached.
        """
        view = self._view
        several = self._at_once(stages, len(donors), MOST_FOLLOWED)
        request = {"kind": "heal", "worker": str(view.link.me), "stages": list(stages)}
        failed = []
        for n, member in enumerate(donors):
            line = _Line(view, generation, member, request if several == 1 else {**request, "ranges": "first"})
            try:
                connection = line.connect()
            except (EverstepError, OSError) as error:
                failed.append(f"{member.key} at {member.address}: {error}")
                continue
            others = [
                _Line(view, generation, other, {**request, "ranges": "more"}) for other in donors[n + 1 : n + several]
            ]
            return Asked(connection, tuple(stages), line, [other for other in others if other.reached()])
        raise CollectiveAborted("no donor could be reached: " + "; ".join(failed))

    def offered(self, asked: Asked) -> ReceivedOffer:
        """What the one who is followed offers, with all its blocks.

        Raises: EverstepError or OSError if it goes away.
        """
        self._await(asked.connection)
        if not asked.line.ranges:
            return heal.receive_offer(asked.connection, asked.stages, self._view.tick)
        header = asked.line.header()
        assembly = self._assembly(dict(zip(asked.stages, header["manifests"], strict=True)))
        for stage in asked.stages:
            assembly.want(stage)
        others = [other.source(asked.stages, header["position"]) for other in asked.others]
        states = assembly.take([asked.line.source(asked.stages, stays=True), *others], 1 + len(others))
        asked.connection.send_json({"enough": True})
        return heal.offered(header, states)


@dataclass(frozen=True)
class Asked:
    """Who is to be followed in some stages, and who else has been asked for blocks of what it offers."""

    connection: PeerConnection
    stages: tuple[int, ...]
    line: _Line
    others: Sequence[_Line]


class _Line:
    """A conversation with one donor, begun when it is needed."""

    def __init__(self, view: WorkerView, generation: int, member: Member, request: dict[str, Any]) -> None:
        self._view = view
        self._generation = generation
        self.member = member
        self._request = request
        self._connection: PeerConnection | None = None
        self._header: dict[str, Any] | None = None

    @property
    def ranges(self) -> bool:
        """Whether blocks are given as they are asked for."""
        return "ranges" in self._request

    def connect(self) -> PeerConnection:
        """Make the request. Raises: EverstepError or OSError."""
        if self._connection is None:
            self._connection = peer_connect(self.member.address, self._view.link.token, self._request)
            self._view.cutter.guard(self._connection, self._generation)
        return self._connection

    def reached(self) -> bool:
        """Whether the request could be made."""
        try:
            self.connect()
        except (EverstepError, OSError):
            return False
        return True

    def header(self) -> dict[str, Any]:
        """What is offered, as soon as it is. Raises: EverstepError or OSError."""
        if self._header is None:
            self._header = self.connect().recv_json()
        return self._header

    def close(self) -> None:
        """The conversation is over."""
        if self._connection is not None:
            self._view.cutter.close(self._connection)

    def source(
        self, stages: Sequence[int], position: Sequence[int] | None = None, *, stays: bool = False
    ) -> BlockSender:
        """For blocks of these stages. position: where it has to be, else it is let go. stays: others close it."""

        def opened() -> tuple[PeerConnection, Mapping[int, Extents]] | None:
            header = self.header()
            if position is not None and header["position"] != list(position):
                self.close()
                return None
            return self.connect(), heal.parts_in(header, stages)

        return BlockSender(str(self.member.key), opened, (lambda: None) if stays else self.close)
