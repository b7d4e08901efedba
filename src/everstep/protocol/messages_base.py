"""What messages have in common: their bases, and what several of them say of a worker. Pure."""

from __future__ import annotations

import msgspec


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that crosses a control connection. `reason`: for people; `cause`: the same for programs."""


class FromAgent(AnyMessage, frozen=True, kw_only=True):
    """What an agent says."""

    agent_id: str


class OfLife(AnyMessage, frozen=True, kw_only=True):
    """What is said by, or about, one life of a worker."""

    worker_id: int
    incarnation: int


# ---- agent (one per host) -> coordinator


class WorkerLife(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live worker, as its agent knows it. `pid`: of the head of its cell; `limbs`: of the others, if it has any."""

    worker_id: int
    incarnation: int
    pid: int
    limbs: tuple[int, ...] = ()


class WorkerPulse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's progress, read by its agent from shared memory. `still_ms`: how long the counter has not moved.

    compute_ms_per_lane: what a lane's forward and backward passes took of late, waiting excluded; 0 if not known.
    slowest: of a cell of several, the rank whose counter that is.
    """

    worker_id: int
    incarnation: int
    step: int
    phase: str
    still_ms: int
    samples_per_s: float
    compute_ms_per_lane: float = 0.0
    slowest: int | None = None
