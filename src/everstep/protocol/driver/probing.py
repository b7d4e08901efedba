"""Whether members compute the same: their results for lanes that several have computed, and what follows. Pure.

Digests of states cannot show that a member computes with other code or data, or with a damaged device: all members
add up the same wrong gradient. So some lanes are computed twice (`placement.probes`), and both members put the
digests of inputs and outputs of each part of the model into their records of that step. All judge the same records,
so all reach the same verdict before anything is applied. The first difference shows which members to compare; later
ones follow from it. A first difference blames nobody: a member may have computed its lanes before its state changed
by itself, and a new one may have copied the state since. So all compute the lane again from the states that they
hold now. If the older member's result then changes, its state, of which the new one's is a copy, is in doubt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from everstep.base.plan import Plan
from everstep.placement.probes import ProbeRule, Trial, alone, once_more, probes
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_types import Doubt, Holding, LaneSaid

_FORWARD = {
    "data": "got different samples",
    "took": "received a different input from the stage before",
    "made": "computed a different output from the same input",
}
_BACKWARD = {
    "back": "received a different gradient from the next stage",
    "gave": "computed a different gradient from the same samples",
}
_SHOWN = 12


@dataclass(frozen=True)
class ProbeVerdict:
    """Members got different results for a lane.

    odd: those that are wrong; empty if unknown. workers: all that stated a result. sound: the last step up to which
    compared lanes gave no difference. ends: it will stay unknown; changed: the state that new members have copied
    may have changed before; otherwise the step is repeated, and if odd is empty all compute that lane.
    """

    lane: int
    workers: tuple[int, ...]
    odd: frozenset[int]
    reason: str
    sound: int
    ends: bool = False
    changed: bool = False


class Probing:
    """One worker's knowledge of probes. begins_after: the step whose state the job began with."""

    def __init__(self, rule: ProbeRule, begins_after: int = 0) -> None:
        self.seen = False  # that this worker computes as others do
        self.doubt = Doubt()
        self._rule = rule
        self._unproven: frozenset[int] = frozenset()
        self._sound = begins_after
        self._at = 0
        self._plan: Plan | None = None
        self._alone: frozenset[int] = frozenset()
        self._split = self._single = False

    def entered(self, plan: Plan, holdings: Mapping[int, Holding], at: int) -> None:
        """A generation has settled, and goes on from step `at`. Members that were not there learn of earlier
        differences."""
        self._at, self._sound = at, min(self._sound, at)
        self._plan = plan
        self._single = len(alone(plan)) == plan.stages
        self._alone, self._split = frozenset(alone(plan).values()), plan.stages > 1
        self._unproven = frozenset(i for i, holding in holdings.items() if not holding.proven)
        self.doubt = max((holdings[i].doubt for i in sorted(holdings)), key=lambda d: (d.step, d.lane, d.part))

    def void(self, plan: Plan, step: int) -> bool:
        """Whether all results for this step, the next one, are void in this plan: in a split model, others computed
        them from outputs of a member that computes otherwise. That may be so if a difference in this step is open,
        since this worker may not have heard the verdict, and if a member left before anybody compared it."""
        before = self._plan
        if before is None or not self._split:
            return False
        gone = (m.worker_id for m in before.members if not plan.has(m.key))
        return self.doubt.step == step or any(worker_id in self._unproven for worker_id in gone)

    def proven(self, number: int) -> int:
        """The newest step, up to `number`, by which members are known to compute alike."""
        return min(self._sound, number) if (self._rule.every or self._rule.share) and not self._single else number

    def forget(self) -> None:
        """Members that computed differently did so from other states."""
        self.doubt = Doubt()

    def trials(self, step: int, plan: Plan | None) -> tuple[Trial, ...]:
        """The lanes of a step that are computed more than once."""
        if plan is None:
            return ()
        doubted = self.doubt.step == step
        return once_more(plan, self.doubt.lane) if doubted else probes(plan, step, self._rule, self._unproven)

    def judge(self, outcome: StepOutcome, me: int) -> ProbeVerdict | None:
        """Verdict from the records of a step; None if no results differ."""
        said = dict(outcome.probes)
        doubt = self.doubt
        if doubt.step == outcome.step:  # what those said who have gone still counts
            at = doubt.lane, doubt.part
            said[at] = {**doubt.said, **said.get(at, {})}
        differs = _first_difference(said)
        if differs is not None:
            return self._differ(outcome, *differs, said[differs[:2]])
        changed = self._changed(outcome)
        if changed is not None:
            return changed
        self.doubt = Doubt() if doubt.step <= outcome.step else doubt
        compared = [frozenset(of) for of in said.values() if len(of) > 1]
        seen = self._alone.union(*compared)
        if outcome.step > self._at:  # else this worker only catches up with what the others have stated
            self._unproven -= seen
        self.seen = self.seen or me in seen
        if any(not self._unproven & of for of in compared):
            self._sound = outcome.step
        return None

    def _differ(
        self, outcome: StepOutcome, lane: int, part: int, what: str, said: Mapping[int, LaneSaid]
    ) -> ProbeVerdict:
        step = outcome.step
        of: dict[int, str] = {worker: getattr(one, what) for worker, one in sorted(said.items())}
        first = self.doubt.said if (self.doubt.step, self.doubt.lane, self.doubt.part) == (step, lane, part) else {}
        agreed = len({getattr(one, what) for one in first.values()}) == 1
        stand = {worker for worker, one in first.items() if agreed and getattr(one, what) == of.get(worker)}
        old = [worker for worker in of if worker not in self._unproven]
        known = {of[worker] for worker in old if worker not in first or worker in stand}
        common, count = Counter(of.values()).most_common(1)[0]
        right = next(iter(known)) if len(known) == 1 else common if 2 * count > len(of) else ""
        odd = frozenset(worker for worker, digest in of.items() if right and digest != right)
        if first and not odd:  # who said something else at first
            changed = frozenset(worker for worker, one in first.items() if one != said.get(worker))
            odd = changed if len(changed) < len(of) else odd
        again = self.doubt.step == step
        if again:
            self.doubt = Doubt()
        else:  # the next time states are compared, too
            right_ones = {worker: said[worker] for worker in old if worker not in odd}
            self.doubt, odd = Doubt(step, lane, part, right_ones if odd else dict(said)), frozenset()
        ends = again and not odd
        values = "; ".join(f"worker {worker}: {digest[:_SHOWN]}" for worker, digest in of.items())
        who = _workers(odd) if odd else "one of them, unknown which," if ends else "one of them"
        later = "" if ends or odd else ": all compute it again"
        does = f"{(_FORWARD | _BACKWARD)[what]} for {self._where(step, lane, part)}"
        return ProbeVerdict(lane, tuple(sorted(of)), odd, f"{who} {does} ({values}){later}", self._sound, ends)

    def _changed(self, outcome: StepOutcome) -> ProbeVerdict | None:
        """All members agree now. None unless older members, which new ones differed from, get another result from
        the same input than at first, or other samples."""
        doubt = self.doubt
        now = outcome.probes.get((doubt.lane, doubt.part), {})
        reread = {worker for worker, one in doubt.said.items() if one.data != now.get(worker, one).data}
        changed = {worker for worker, one in doubt.said.items() if _otherwise(one, now.get(worker, one))}
        if doubt.step != outcome.step or not (reread or changed) or len(set(doubt.said.values())) > 1:
            return None
        self.doubt = Doubt()
        where = self._where(doubt.step, doubt.lane, doubt.part)
        if reread:
            rule = "a sample may depend on its index and epoch alone"
            reason = f"{_workers(reread)} got different samples for {where} the second time: {rule}"
        else:
            reason = f"{_workers(changed)} got different results for {where} before and after others copied the state"
        ends = bool(reread)
        return ProbeVerdict(doubt.lane, tuple(sorted(now)), frozenset(), reason, self._sound, ends, changed=not ends)

    def _where(self, step: int, lane: int, part: int) -> str:
        return f"lane {lane} of step {step}" + (f", part {part} of the model" if self._split else "")


def _workers(ids: Collection[int]) -> str:
    return f"worker{'s' if len(ids) > 1 else ''} {' and '.join(map(str, sorted(ids)))}"


class LanesGiven:
    """This worker's results for lanes of one step that several members compute."""

    def __init__(self) -> None:
        self._step = 0
        self._said: dict[int, dict[int, LaneSaid]] = {}  # by lane and part of the model

    def note(self, step: int, lane: int, part: int, said: LaneSaid) -> str:
        """Note results. Returns those that differ from this worker's earlier results for the same input; "" if none
        do."""
        if self._step != step:
            self._step, self._said = step, {}
        return _otherwise(self._said.setdefault(lane, {}).setdefault(part, said), said)

    def has(self, step: int, lane: int) -> bool:
        return self._step == step and lane in self._said

    def of(self, step: int, parts: Collection[int]) -> dict[int, dict[int, LaneSaid]]:
        """Results to state about these parts of the model, by lane and part."""
        known = self._said if self._step == step else {}
        found = {lane: {part: one for part, one in said.items() if part in parts} for lane, said in known.items()}
        return {lane: said for lane, said in found.items() if said}

    def drop(self, step: int) -> None:
        """Drop the results of lanes of this step and older ones."""
        if self._step <= step:
            self._step = 0


def _otherwise(first: LaneSaid, now: LaneSaid) -> str:
    """Name of the result that differs from the first one, from the same input; "" if none does."""
    if (first.data, first.took) != (now.data, now.took):
        return ""
    if first.made != now.made:
        return "outputs"
    return "gradients" if first.back == now.back and first.gave != now.gave else ""


def _first_difference(said: Mapping[tuple[int, int], Mapping[int, LaneSaid]]) -> tuple[int, int, str] | None:
    """Lane, part and name of the first result, in order of computation, in which members differ."""
    for lane in sorted({lane for lane, _ in said}):
        parts = sorted(part for at, part in said if at == lane)
        order = [(part, what) for part in parts for what in _FORWARD]
        order += [(part, what) for part in reversed(parts) for what in _BACKWARD]
        for part, what in order:
            if len({getattr(one, what) for one in said[lane, part].values()}) > 1:
                return lane, part, what
    return None
