"""Events and effects of the worker's step machine, and what they carry. Pure.

A *decision* has a key (step, seq): seq 0 is the agree of that step, by which the step is committed; seq 1, 2, ... are
gathers after it (evaluation, barriers, the empty agree at the end). Decisions are totally ordered; a decision is taken
at a worker when the records of all members of the generation for its key have arrived there. `payload` is opaque here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.base.plan import Plan


class Key(NamedTuple):
    """Of a decision."""

    step: int
    seq: int


@dataclass(frozen=True)
class Record:
    """One worker's contribution to one decision. `prepared`: generation of the newest prepared plan it holds, or 0."""

    prepared: int
    payload: bytes


@dataclass(frozen=True)
class Holding:
    """What a worker states when it settles.

    position: key of its last decision; records: that decision's records by worker id, handed to whoever lacks them.
    gradient_step: the step beyond position.step whose reduced gradient it holds in full (it has contributed, or was
    about to), 0 if none. digest: of the initial state, at step 0 only.
    """

    position: Key
    records: Mapping[int, Record]
    gradient_step: int
    digest: str = ""


# ---- events


@dataclass(frozen=True)
class PlanArrived:
    """From the coordinator: leave what you do and settle in this plan."""

    plan: Plan


@dataclass(frozen=True)
class PreparedArrived:
    """From the coordinator: a plan to switch to once all hold it."""

    plan: Plan


@dataclass(frozen=True)
class HoldingArrived:
    """A member (oneself included) stated what it holds in this generation."""

    generation: int
    worker_id: int
    holding: Holding


@dataclass(frozen=True)
class LaneDone:
    """A lane of a step has been computed here; its result is kept until the step is decided."""

    step: int
    lane: int


@dataclass(frozen=True)
class GradientReduced:
    """This worker holds the whole reduced gradient of the step; `payload` is its agree record's."""

    generation: int
    step: int
    payload: bytes


@dataclass(frozen=True)
class RecordArrived:
    """A member's record (oneself's included) for a decision."""

    generation: int
    key: Key
    worker_id: int
    record: Record


@dataclass(frozen=True)
class Updated:
    """The optimizer has been applied; the state is that of `step`."""

    step: int


@dataclass(frozen=True)
class StateCopied:
    """The state of `step` was received from a peer in settling, with the records of `position`."""

    generation: int
    position: Key
    records: Mapping[int, Record]


@dataclass(frozen=True)
class GatherAsked:
    """The application wants a decision after the current step (every member asks for the same, in the same order)."""

    payload: bytes


@dataclass(frozen=True)
class StepAsked:
    """The application wants the next step."""


@dataclass(frozen=True)
class Followed:
    """To a worker without a plan, which heals: its state is now that of `position`, copied or replayed.

    `records`: those of the decision `position`; empty for a snapshot whose records are not known.
    """

    position: Key
    records: Mapping[int, Record] = field(default_factory=dict)


StepEvent = (
    PlanArrived
    | PreparedArrived
    | HoldingArrived
    | LaneDone
    | GradientReduced
    | RecordArrived
    | Updated
    | StateCopied
    | GatherAsked
    | StepAsked
    | Followed
)

# ---- effects


@dataclass(frozen=True)
class Leave:
    """Abandon every pending transfer of this generation and older."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Open:
    """Regroup the transport for this plan."""

    plan: Plan


@dataclass(frozen=True)
class SendHolding:
    """State what is held, to all members."""

    generation: int
    holding: Holding


@dataclass(frozen=True)
class Compute:
    """Compute these lanes of the step (those of the plan that are not held already)."""

    step: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Reduce:
    """All own lanes are there: offer them and finish the reduction."""

    generation: int
    step: int


@dataclass(frozen=True)
class SendRecord:
    """Contribute to a decision, to all members."""

    generation: int
    key: Key
    record: Record


@dataclass(frozen=True)
class Update:
    """The step is decided by these records: apply it. Nothing may interrupt it."""

    step: int
    records: Mapping[int, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Gathered:
    """A gather is decided; hand the records to the application."""

    key: Key
    records: Mapping[int, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Release:
    """All members have gone beyond this step: its effects may leave the process and its gradient may be freed."""

    step: int


@dataclass(frozen=True)
class Discard:
    """Drop lane results and gradients of this step and older: the state has moved past them."""

    step: int


@dataclass(frozen=True)
class ServeState:
    """Give the state at `position` to these members, which lack it, before anything else."""

    generation: int
    position: Key
    to: tuple[int, ...]


@dataclass(frozen=True)
class FetchState:
    """Copy the state at `position` from one of these members before anything else; answer with `StateCopied`."""

    generation: int
    position: Key
    donors: tuple[int, ...]


@dataclass(frozen=True)
class Entered:
    """Settled: this generation goes on from the state of `step`."""

    generation: int
    step: int


@dataclass(frozen=True)
class LeftPlan:
    """The members switched to a prepared plan of this generation that this worker is not part of: it may go."""

    generation: int


StepEffect = (
    Leave
    | Open
    | SendHolding
    | Compute
    | Reduce
    | SendRecord
    | Update
    | Gathered
    | Release
    | Discard
    | ServeState
    | FetchState
    | Entered
    | LeftPlan
)
