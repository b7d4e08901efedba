"""What a worker's step machine can be doing, and what may come when: its transitions as one table. Pure."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter

from everstep.protocol.step_types import (
    Followed,
    GatherWanted,
    GradientReduced,
    HoldingArrived,
    Holds,
    LaneDone,
    LanesLost,
    PlanArrived,
    PreparedArrived,
    RecordArrived,
    SnapshotsKept,
    StateCopied,
    StepLeft,
    StepSaved,
    StepWanted,
    Takes,
    Updated,
    UpdateRefused,
)


class Phase(StrEnum):
    """What the worker is doing."""

    WAITING = "waiting"  # no plan: not started, or healing
    SETTLING = "settling"  # has stated its holding, waits for the others' holdings
    FETCHING = "fetching"  # gets state that it lacks, or goes back
    IDLE = "idle"  # the application has the turn
    COMPUTING = "computing"
    REDUCING = "reducing"
    AGREEING = "agreeing"
    UPDATING = "updating"
    GATHERING = "gathering"
    LACKING = "lacking"  # a step left it less than its share: waits for a plan, in which it gets the rest
    LEFT = "left"  # the members switched to a plan without this worker


_ALL = frozenset(Phase)
_RESUMED = frozenset({Phase.IDLE, Phase.COMPUTING, Phase.REDUCING, Phase.GATHERING})
_SETTLED = _RESUMED | {Phase.SETTLING, Phase.FETCHING, Phase.UPDATING}
OUTSIDE = frozenset({Phase.WAITING, Phase.LEFT})
MUST_FIT = (StepWanted, GatherWanted, Updated, UpdateRefused, StateCopied, Followed)
_AFTER_DECISION = frozenset({Phase.UPDATING, Phase.IDLE, Phase.SETTLING})
_TURN = frozenset({Phase.WAITING, Phase.LEFT, Phase.SETTLING, Phase.FETCHING, Phase.IDLE, Phase.LACKING})

# Every transition: event, phases in which it may come, what handles it (part and method), phases it may lead to
# (besides staying).
# In other phases an event is an echo of something superseded and is dropped, or, if in MUST_FIT, the driver's mistake.
TRANSITIONS: tuple[tuple[type, frozenset[Phase], str, frozenset[Phase]], ...] = (
    (PlanArrived, _ALL, "_switching.plan_arrived", frozenset({Phase.SETTLING})),
    (PreparedArrived, _ALL, "_switching.prepared_arrived", frozenset({Phase.SETTLING})),
    (HoldingArrived, _ALL, "_entering.holding_arrived", _SETTLED),
    (StepWanted, _TURN, "_contributing.asked_for", frozenset({Phase.COMPUTING, Phase.REDUCING})),
    (GatherWanted, _TURN, "_contributing.asked_for", frozenset({Phase.GATHERING})),
    (StepLeft, _ALL, "_contributing.step_left", frozenset({Phase.IDLE})),
    (LaneDone, _ALL, "_contributing.lane_done", frozenset({Phase.REDUCING})),
    (LanesLost, frozenset({Phase.SETTLING, Phase.UPDATING}), "_contributing.lanes_lost", frozenset()),
    (GradientReduced, _ALL, "_contributing.gradient_reduced", frozenset({Phase.AGREEING})),
    (Takes, _ALL, "_contributing.takes", frozenset()),
    (Holds, _ALL, "_deciding.holds", frozenset()),
    (RecordArrived, _ALL, "_deciding.record_arrived", frozenset({Phase.UPDATING, Phase.IDLE})),
    (Updated, frozenset({Phase.UPDATING}), "_deciding.updated", _SETTLED | {Phase.LEFT, Phase.LACKING}),
    (UpdateRefused, _AFTER_DECISION, "_deciding.refused", frozenset({Phase.SETTLING})),
    (StateCopied, frozenset({Phase.FETCHING}), "_entering.state_copied", _RESUMED),
    (Followed, OUTSIDE, "_switching.followed", frozenset({Phase.SETTLING})),
    (SnapshotsKept, _ALL, "_held.keeps", frozenset()),
    (StepSaved, _ALL, "_deciding.saved", frozenset()),
)
BY_EVENT = {event: (phases, attrgetter(name), name, reach) for event, phases, name, reach in TRANSITIONS}
