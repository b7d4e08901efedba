"""What the members of a new generation make of what they hold: one rule, applied by each to the same holdings. Pure.

Apart from the step machine because it is a function: (plan, holdings) -> where everybody goes on, and who gets what
from whom. There is one target for all stages, so no stage can end up a step apart from another:

- *The top*: the newest position that a member is at, if every stage of the plan is held there by a member that is at
  it or takes the one missing decision. Whoever lacks a stage of its seats there copies it from one that holds it.
- *A step R* for which every stage is in somebody's memory (as live state, as one that takes the missing decision, or as
  a kept snapshot), or can be read from disk by all its members; step 0 can always be built anew. The newest such R is
  the target if the top is not held in all stages, or if R is beyond it (a job that starts from a checkpoint). Everybody
  goes to the beginning of R.

The holdings say all of this; nobody decides it. Interrupted settles, with some members gone back and others not, are
settled by the same rule in the next generation: who has gone back holds R as live state.

Where a member knows that states later than that of step S are tainted, nothing later counts, live or not: all go back
to the newest R up to S. They keep saying S until their next decision, which proves that all have gone back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.base.plan import Plan
from everstep.protocol.step_types import Holding, Key, Record

Sources = Mapping[int, tuple[int, ...]]
"""stage -> worker ids that have it in memory, the one to ask first in front; empty: from disk, or at step 0 anew."""


@dataclass(frozen=True)
class Settlement:
    """How a generation begins.

    target: where everybody goes on. back: whether that is a step to go (back) to, rather than the top. records: of the
    target's decision, for whoever rolls forward. rolls: who takes that one decision. wants: by worker id, the stages
    that it has to get and from whom (when going back: all stages of its seats). serves: by worker id, who may ask it
    for state. rerun: the lanes to be computed by all members through whose seats they pass.
    """

    target: Key
    back: bool
    records: Mapping[int, Record]
    rolls: frozenset[int]
    wants: Mapping[int, Sources]
    serves: Mapping[int, tuple[int, ...]]
    rerun: frozenset[int]


def settle(plan: Plan, holdings: Mapping[int, Holding]) -> Settlement:
    """The settlement of a generation; `holdings` are those of all members."""
    limit = sound_limit(holdings)
    if limit is not None:
        return _go_to(plan, holdings, _newest(plan, holdings, limit=limit))
    top = max(h.position for h in holdings.values())
    records = next((h.records for _, h in sorted(holdings.items()) if h.position == top and h.records), {})
    # Nobody rolls forward without the records of the decision; a snapshot may not have them.
    far = {i: _distance(top, h, bool(records)) for i, h in sorted(holdings.items())}
    held = {i: _held_at(top, holdings[i]) if far[i] is not None else frozenset() for i in far}
    by_stage = {stage: _same_start(top.step, stage, held, holdings) for stage in range(plan.stages)}
    rolls = _Rolls(top, records, {i: held[i] for i, decisions in far.items() if decisions == 1})
    newest = _newest(plan, holdings, rolls)
    if not all(by_stage.values()) or newest > top.step:
        return _go_to(plan, holdings, newest, rolls)
    wants: dict[int, Sources] = {}
    for i in held:
        lacking = {k: _donors(top, by_stage[k], holdings) for k in plan.stages_of(i) if i not in by_stage[k]}
        if lacking or far[i] is None:
            wants[i] = lacking
    return Settlement(
        target=top,
        back=False,
        records=records,
        rolls=frozenset(rolls.held),
        wants=wants,
        serves=_serves(wants),
        rerun=_rerun(plan, holdings, wants, top, back=False),
    )


@dataclass(frozen=True)
class _Rolls:
    """Who takes the one decision that is missing to the top, with these records; `held`: the stages they have then."""

    top: Key
    records: Mapping[int, Record]
    held: Mapping[int, frozenset[int]]

    def holders(self, step: int, stage: int) -> list[int]:
        """Who has the stage at the beginning of this step then."""
        return [i for i, stages in self.held.items() if stage in stages] if self.top == Key(step, 0) else []


_NOBODY = _Rolls(Key(0, 0), {}, {})


def sound_limit(holdings: Mapping[int, Holding]) -> int | None:
    """The newest step whose state counts, as far as these members know; None if nobody has a doubt."""
    return min((h.sound for h in holdings.values() if h.sound >= 0), default=None)


def _distance(top: Key, holding: Holding, known: bool) -> int | None:
    """Decisions from the holding to the top: 0, or 1 that can be taken with records that are `known`, or None."""
    at = holding.position
    if at == top:
        return 0
    by_gather = at.step == top.step and at.seq + 1 == top.seq
    by_update = top.seq == 0 and at.step + 1 == top.step and holding.gradient_step == top.step
    return 1 if known and (by_gather or by_update) else None


def _held_at(top: Key, holding: Holding) -> frozenset[int]:
    """The stages that a member has at the top, or will have when it has rolled forward."""
    stages = frozenset(holding.stages)
    return stages if holding.position.step == top.step else stages & frozenset(holding.gradient_stages)


def _same_start(
    step: int, stage: int, held: Mapping[int, Iterable[int]], holdings: Mapping[int, Holding]
) -> tuple[int, ...]:
    """Who holds the stage, ascending. Initial states are what each process built: there the lowest id's counts."""
    who = [i for i in sorted(held) if stage in held[i]]
    if step == 0 and who:
        who = [i for i in who if holdings[i].digest == holdings[who[0]].digest]
    return tuple(who)


def _donors(top: Key, holders: tuple[int, ...], holdings: Mapping[int, Holding]) -> tuple[int, ...]:
    """Those that are at the top; if none is, those that roll forward to it and give the state then."""
    return tuple(i for i in holders if holdings[i].position == top) or holders


def _serves(wants: Mapping[int, Sources]) -> dict[int, tuple[int, ...]]:
    serves: dict[int, set[int]] = {}
    for i, sources in wants.items():
        for donors in sources.values():
            for donor in donors:
                if donor != i:
                    serves.setdefault(donor, set()).add(i)
    return {donor: tuple(sorted(to)) for donor, to in serves.items()}


def _rerun(
    plan: Plan, holdings: Mapping[int, Holding], wants: Mapping[int, Sources], target: Key, back: bool
) -> frozenset[int]:
    lanes: set[int] = set()
    for i, holding in holdings.items():
        stays = holding.position == target if back else holding.position.step == target.step
        fresh = not stays or any(k in holding.stages for k in wants.get(i, {}))
        mine = {lane for stage in plan.stages_of(i) for lane in plan.lanes_of(i, stage)}
        lanes |= mine if fresh else mine & set(holding.lacking)
    return frozenset(lanes)


# ---- going to a step that all stages have


def _in_memory(step: int, holdings: Mapping[int, Holding], stage: int, rolls: _Rolls) -> tuple[int, ...]:
    """Who has the stage's state of the step, live (perhaps once it has rolled forward) or as a snapshot, ascending."""
    live = {i: h.stages if h.position.step == step else () for i, h in holdings.items()}
    kept = {i for i, h in holdings.items() if (stage, step) in h.snapshots}
    return tuple(sorted(kept.union(_same_start(step, stage, live, holdings), rolls.holders(step, stage))))


def _available(plan: Plan, holdings: Mapping[int, Holding], step: int, rolls: _Rolls) -> bool:
    return step == 0 or all(
        _in_memory(step, holdings, stage, rolls)
        or all(step in holdings[s.worker_id].disk for s in plan.pool(stage) if s.worker_id in holdings)
        for stage in range(plan.stages)
    )


def _newest(plan: Plan, holdings: Mapping[int, Holding], rolls: _Rolls = _NOBODY, *, limit: int | None = None) -> int:
    """The newest step that every stage has; up to the limit, if there is one."""
    steps = {0}
    for holding in holdings.values():
        steps |= {holding.position.step, *(step for _, step in holding.snapshots), *holding.disk}
    steps = steps if limit is None else {step for step in steps if step <= limit}
    return next(step for step in sorted(steps, reverse=True) if _available(plan, holdings, step, rolls))


def _go_to(plan: Plan, holdings: Mapping[int, Holding], step: int, rolls: _Rolls = _NOBODY) -> Settlement:
    target = Key(step, 0)
    sources = {stage: _in_memory(step, holdings, stage, rolls) for stage in range(plan.stages)}
    rolling = frozenset(rolls.held) if rolls.top == target else frozenset()
    wants: dict[int, Sources] = {}
    for i, holding in sorted(holdings.items()):
        seats = plan.stages_of(i)
        here = rolls.held[i] if i in rolling else holding.stages if holding.position == target else ()
        stands = all(k in here and (step > 0 or i in sources[k]) for k in seats)
        if not stands:
            wants[i] = {k: _first(i, sources[k]) for k in seats}
    return Settlement(
        target=target,
        back=True,
        records=rolls.records if rolling else {},
        rolls=rolling,
        wants=wants,
        serves=_serves(wants),
        rerun=_rerun(plan, holdings, wants, target, back=True),
    )


def _first(worker_id: int, sources: tuple[int, ...]) -> tuple[int, ...]:
    """The same, oneself in front."""
    if worker_id not in sources:
        return sources
    return (worker_id, *(i for i in sources if i != worker_id))
