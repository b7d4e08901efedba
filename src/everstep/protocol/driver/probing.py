"""Whether members compute the same: what they say of lanes that several have computed, and what follows. Pure.

Digests of states cannot see that a member computes from other code or data, or with a damaged device: all add the same
wrong gradient. So some lanes are computed twice (`placement.probes`), and both say in their records of that step what
went in and what came out. All judge the same records, so all come to the same, before anything is applied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.base.plan import Plan
from everstep.placement.probes import ProbeRule, probes
from everstep.protocol.driver.records import StepOutcome
from everstep.protocol.step_types import Holding

_SHOWN = 12


@dataclass(frozen=True)
class ProbeVerdict:
    """Members computed a lane otherwise. odd: those who are wrong; none if nobody knows who is. workers: all who said
    what it gives. sound: the last step up to which nobody had differed, as far as lanes were compared. ends: nobody
    will know; else the step is done again, and all compute that lane where nobody is odd."""

    lane: int
    workers: tuple[int, ...]
    odd: frozenset[int]
    reason: str
    sound: int
    ends: bool = False


class Probing:
    """What one worker knows of probes. begins_after: the step whose state the job began with."""

    def __init__(self, rule: ProbeRule, begins_after: int = 0) -> None:
        self.proven = False  # that this worker computes as others do
        self._rule = rule
        self._unproven: frozenset[int] = frozenset()
        self._sound = begins_after
        self._doubt: tuple[int, int, Mapping[int, str]] = (0, 0, {})  # step, lane and what was said of it at first

    def entered(self, holdings: Mapping[int, Holding]) -> None:
        """A generation has settled."""
        self._unproven = frozenset(i for i, holding in holdings.items() if not holding.proven)

    def owed(self, step: int, plan: Plan | None, me: int) -> tuple[int, ...]:
        """The lanes of a step of which this worker has to say what it gets."""
        if plan is None:
            return ()
        if self._doubt[0] == step and plan.stages == 1:
            return (self._doubt[1],)
        return tuple(lane for lane, who in probes(plan, step, self._rule, self._unproven).items() if me in who)

    def judge(self, outcome: StepOutcome, me: int) -> ProbeVerdict | None:
        """What the records of a step show; None if nobody differs."""
        said = {lane: of for lane, of in sorted(outcome.probes.items()) if len(of) > 1}
        for lane, of in said.items():
            if len(set(of.values())) > 1:
                return self._differ(outcome.step, lane, of)
        self._doubt = (0, 0, {})
        seen = {worker for of in said.values() for worker in of}
        alone = len(set(outcome.workers.values())) == 1
        self._unproven = frozenset() if alone else self._unproven - seen
        self.proven = self.proven or me in seen or alone
        if any(not self._unproven.intersection(of) for of in said.values()):
            self._sound = outcome.step
        return None

    def _differ(self, step: int, lane: int, of: Mapping[int, str]) -> ProbeVerdict:
        known = {digest for worker, digest in of.items() if worker not in self._unproven}
        common, count = Counter(of.values()).most_common(1)[0]
        right = next(iter(known)) if len(known) == 1 else common if 2 * count > len(of) else ""
        odd = frozenset(worker for worker, digest in of.items() if right and digest != right)
        again = self._doubt[:2] == (step, lane)
        if again and not odd:  # who said something else at first
            changed = frozenset(worker for worker, digest in self._doubt[2].items() if of.get(worker) != digest)
            odd = changed if len(changed) < len(of) else odd
        self._doubt = (0, 0, {}) if again or odd else (step, lane, of)
        ends = again and not odd
        data = len({digest.partition(" ")[0] for digest in of.values()}) > 1
        what = "gets other samples" if data else "computes another gradient from the same samples"
        values = "; ".join(f"worker {worker}: {_shown(digest, data)}" for worker, digest in sorted(of.items()))
        who = f"worker {' and '.join(map(str, sorted(odd)))}" if odd else "one of them"
        who += ", nobody knows which," if ends else ""
        later = "" if ends or odd else ": all compute it once more"
        reason = f"{who} {what} in lane {lane} of step {step} ({values}){later}"
        return ProbeVerdict(lane, tuple(sorted(of)), odd, reason, self._sound, ends)


def _shown(digest: str, data: bool) -> str:
    """Of what is said of a lane, the part that differs."""
    samples, _, gradient = digest.partition(" ")
    return (samples if data else gradient)[:_SHOWN]
