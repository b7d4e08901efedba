"""The plan that a worker follows, named in a few bytes, so that thousands of workers that reconnect need not send
it. Pure.

A hello names the plan (`PlanName`). One worker is asked for the plan (`PlanAsked`) and sends it (`PlanShown`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from hashlib import blake2b
from typing import Annotated

import msgspec

from everstep.base.plan import Plan
from everstep.protocol.messages_base import AnyMessage, OfLife

_Generation = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
_Term = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class PlanName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name of a plan. Two plans of one generation and term differ in their digests. digest: made by `name_of`, 32
    hex digits."""

    term: _Term
    generation: _Generation
    digest: _Digest

    @property
    def rank(self) -> tuple[int, int]:
        """Newer plans have a greater rank: a plan of a coordinator of an older term is never newer."""
        return self.term, self.generation


class PlanAsked(AnyMessage, frozen=True, kw_only=True):
    """To a worker: send the plan that you follow."""


class PlanShown(OfLife, frozen=True, kw_only=True):
    """Answer to `PlanAsked`: the plan that the worker now follows, None if it follows none."""

    plan: Plan | None


class StatesAlike(OfLife, frozen=True, kw_only=True):
    """From the leader: all members found their states of this step alike, with these digests by stage."""

    step: int
    digests: dict[int, str]


_encoder = msgspec.msgpack.Encoder()


def name_of(plan: Plan | None) -> PlanName | None:
    """The name of a plan; None for None. Equal plans have equal names, however they arrived."""
    if plan is None:
        return None
    speeds = tuple((worker_id, float(speed)) for worker_id, speed in plan.speeds)
    named = replace(plan, speeds=speeds)
    # Digests of states are left out: they do not change a worker's part. What says nothing is left out, too: shares if
    # every seat holds all, and the generation in which all went back if none did.
    left_out = {"alike", *(name for name in ("shards", "voided") if not getattr(plan, name))}
    said = _encoder.encode({f.name: getattr(named, f.name) for f in fields(Plan) if f.name not in left_out})
    return PlanName(plan.term, plan.generation, blake2b(said, digest_size=16).hexdigest())
