"""P3: one plan per generation; and what its members have said, which the other promises look into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from everstep.base.plan import Plan
from everstep.base.ports import Tag
from everstep.protocol.driver.records import AgreePayload, decode_holding, decode_record
from everstep.protocol.step_types import Holding, Key, Record
from everstep.sim.promise import PromiseBroken, require

_agree = msgspec.msgpack.Decoder(AgreePayload)
_encode = msgspec.msgpack.Encoder().encode
_Pairs = tuple[tuple[int, int], ...]
_vote = msgspec.msgpack.Decoder(tuple[int, int, tuple[int, ...], _Pairs, _Pairs])


@dataclass(frozen=True)
class Vote:
    """What a record's payload says in the simulation: who contributed what, in which generation."""

    generation: int
    worker_id: int
    lanes: tuple[int, ...]  # stage times the number of lanes, plus lane
    sums: tuple[tuple[int, int], ...]  # stage and what its reduced gradient is
    states: tuple[tuple[int, int], ...] = ()  # stage and its state before the step

    def encode(self) -> bytes:
        return _encode((self.generation, self.worker_id, self.lanes, self.sums, self.states))

    @staticmethod
    def decode(payload: bytes) -> Vote:
        return Vote(*_vote.decode(payload))


class SimRecords:
    """Plans, and the records and holdings that members have contributed."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self.holdings: dict[int, dict[int, Holding]] = {}  # by generation and worker
        self.exchanged: dict[Key, dict[int, dict[int, Record]]] = {}  # by generation and worker
        self._votes: dict[bytes, Vote] = {}

    def plan(self, plan: Plan) -> None:
        """A plan was sent to, or taken in by, somebody."""
        known = self.plans.setdefault(plan.generation, plan)
        if known is plan:
            self._new_plan(plan)
        elif known != plan:
            raise PromiseBroken(f"P3: two plans of generation {plan.generation}: {known} and {plan}")

    def _new_plan(self, plan: Plan) -> None:
        text = f"generation {plan.generation}: {plan}"
        require(bool(plan.members), "P3", f"no members in {text}")
        require(plan.generation >= 1, "P3", f"not a generation in {text}")
        for stage in range(plan.stages):
            pool = plan.pool(stage)
            lanes = sorted(lane for seat in pool for lane in seat.lanes)
            require(lanes == list(range(plan.lanes)), "P3", f"lanes {lanes} in {text}")
            require({s.worker_id for s in pool} <= set(plan.worker_ids), "P3", f"a stranger has a seat in {text}")
            require(plan.leader(stage) in plan.worker_ids, "P3", f"no leader in {text}")

    def contributed(self, generation: int, tag: Tag, worker_id: int, payload: bytes) -> None:
        """A member gives its record for a decision of this generation."""
        if tag.kind == "decide":
            made = self.exchanged.setdefault(Key(tag.step, tag.seq), {})
            made.setdefault(generation, {})[worker_id] = decode_record(payload)

    def made_in(self, generation: int, key: Key, records: Mapping[int, Record]) -> int:
        """The newest generation, up to this one, whose members have contributed just these records."""
        for made_in, given in sorted(self.exchanged.get(key, {}).items(), reverse=True):
            if made_in <= generation and given == records and tuple(sorted(given)) == self.plans[made_in].worker_ids:
                return made_in
        given_in = {g: sorted(given) for g, given in self.exchanged.get(key, {}).items()}
        raise PromiseBroken(
            f"P3: {key} decided in generation {generation} with records of {sorted(records)}, "
            f"but those of one generation are from {given_in}"
        )

    def vote(self, payload: bytes) -> Vote:
        """What an agree record bears for the checks."""
        found = self._votes.get(payload)
        if found is None:
            found = Vote.decode(_agree.decode(payload).sections[0].buffers[0])
            self._votes[payload] = found
        return found

    def stated(self, generation: int, worker_id: int, payload: bytes) -> None:
        """A member states what it holds."""
        self.holdings.setdefault(generation, {})[worker_id] = decode_holding(payload)

    def copies(self, records: Mapping[int, Record]) -> dict[int, set[int]]:
        """What the copies of each stage were before the step."""
        copies: dict[int, set[int]] = {}
        for record in records.values():
            for stage, state in self.vote(record.payload).states:
                copies.setdefault(stage, set()).add(state)
        return copies
