"""Whether all members hold the same state, and what follows if they do not. Pure.

All judge the same statements by the same function, so all reach the same verdict:

- A member that was healed or resumed since all were last alike differs from those that were not: the script itself
  makes states differ, since every bit that this member was given was verified. The same holds for a member whose
  repeated steps end differently. That is *drift*: going back does not help, and the job ends.
- Otherwise a bit has changed by itself. Of the members that were not healed or resumed since, more than half hold
  the right state; the others are outvoted, and heal. All go back to the last step at which states were alike, since
  the wrong state has entered the results of all.

A digest may say more than whether states are alike: after `WHOLE` hex digits come `PART` for each part of the state,
which show a person which parts differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.base.plan import Plan
from everstep.protocol.driver.records import StageSection, StepOutcome, copy_of
from everstep.protocol.step_types import BY_SCRIPT, Holding

WHOLE, PART = 32, 8
_KEPT = 8
_NAMED = 3
_MOST_TOLD = 4096

_VERIFIED = f"from state that was verified, so {BY_SCRIPT}"

Names = Callable[[int], Sequence[str]]
"""Names of the parts of a stage's state, in the order of the digest."""


@dataclass(frozen=True)
class Statements:
    """Statements of members about the state of `step`. digests: by stage and worker; ties: by name and (stage,
    worker). whole: all members state all of their stages; otherwise only those do that know the expected state."""

    step: int
    when: str
    digests: Mapping[int, Mapping[int, str]]
    ties: Mapping[str, Mapping[tuple[int, int], str]] = field(default_factory=dict)
    whole: bool = True

    @staticmethod
    def before(outcome: StepOutcome) -> Statements:
        """Statements in a step's records."""
        digests = outcome.digests
        whole = all(len(of) == len(digests.get(stage, ())) for stage, of in outcome.buffers.items())
        return Statements(outcome.step - 1, f"before step {outcome.step}", digests, outcome.ties, whole)

    @staticmethod
    def last(step: int, said: Mapping[int, Sequence[StageSection]]) -> Statements:
        """Statements of members that are done with the last step."""
        digests: dict[int, dict[int, str]] = {}
        ties: dict[str, dict[tuple[int, int], str]] = {}
        for worker_id, sections in sorted(said.items()):
            for section in sections:
                digests.setdefault(section.stage, {})[worker_id] = section.digest
                for name, digest in section.tied.items():
                    ties.setdefault(copy_of(name), {})[section.stage, worker_id] = digest
        return Statements(step, f"after step {step}, the last", digests, ties)


@dataclass(frozen=True)
class Disagreement:
    """A difference in words; the outvoted members; whether it is drift."""

    reason: str
    outvoted: frozenset[int] = frozenset()
    drift: bool = False


@dataclass(frozen=True)
class Copies:
    """Copies that should be alike. said: owner and digest of each copy, by its name. agreed: the digest that members
    stated before, "" if they did not. parts: names of the state's parts."""

    place: str
    said: Mapping[str, tuple[int, str]]
    agreed: str = ""
    parts: Sequence[str] = ()


def verdict(when: str, copies: Iterable[Copies], fresh: Collection[int]) -> Disagreement | None:
    """None if all copies are alike. fresh: members that were healed or resumed since they last were."""
    found = [one for each in copies if (one := _judge(when, each, fresh)) is not None]
    if not found:
        return None
    # A state that changed by itself may explain the other differences; the outvoted member then heals.
    by_itself = [one for one in found if not one.drift]
    outvoted = frozenset(worker for one in by_itself for worker in one.outvoted)
    return Disagreement("; ".join(one.reason for one in by_itself or found), outvoted, not by_itself)


def _judge(when: str, copies: Copies, fresh: Collection[int]) -> Disagreement | None:
    digests = {who: digest[:WHOLE] for who, (_, digest) in copies.said.items() if digest}
    owner = {who: worker for who, (worker, _) in copies.said.items()}
    agreed = copies.agreed[:WHOLE]
    if len({*digests.values(), *([agreed] if agreed and digests else [])}) <= 1:
        return None
    stayed = {who: digest for who, digest in digests.items() if owner[who] not in fresh}
    if agreed in digests.values():
        right = agreed
    elif len(set(digests.values())) == 1:
        return Disagreement(_differs_from_before(when, copies, digests), drift=True)
    else:
        right = _majority(stayed)
    odd = [who for who, digest in digests.items() if right and digest != right]
    text = _words(when, copies, digests)
    if len({*stayed.values(), *([agreed] if right == agreed else [])}) <= 1:
        blamed = odd or list(digests)
        were = f"workers {' and '.join(blamed)} were" if len(blamed) > 1 else f"worker {blamed[0]} was"
        return Disagreement(f"{text}; {were} healed or resumed since all were alike, {_VERIFIED}", drift=True)
    judged = f"worker {' and '.join(odd)} deviates" if odd else "no copy is outvoted"
    return Disagreement(f"{text}: {judged}", frozenset(owner[who] for who in odd))


def _majority(digests: Mapping[str, str]) -> str:
    """The digest that more than half of the members have; "" if there is none."""
    common, count = next(iter(Counter(digests.values()).most_common(1)), ("", 0))
    return common if 2 * count > len(digests) else ""


def _words(when: str, copies: Copies, digests: Mapping[str, str]) -> str:
    by: dict[str, list[str]] = {}
    for who, digest in digests.items():
        by.setdefault(digest, []).append(who)
    said = ", ".join(f"{digest[:12]} at worker {' and '.join(who)}" for digest, who in sorted(by.items()))
    where = named([digest for _, digest in copies.said.values()], copies.parts)
    return f"{copies.place} differs among the workers {when} ({said}){where}"


def _differs_from_before(when: str, copies: Copies, digests: Mapping[str, str]) -> str:
    now = next(digest for _, digest in copies.said.values() if digest)
    where = named([copies.agreed, now], copies.parts)
    return (
        f"{copies.place} {when} differs from that of the first time ({now[:12]}, expected {copies.agreed[:12]})"
        f"{where}; the steps were repeated, {_VERIFIED}"
    )


def named(digests: Sequence[str], parts: Sequence[str]) -> str:
    """The end of a sentence: which parts differ; "" if unknown."""
    tails = [digest[WHOLE:] for digest in digests if len(digest) == WHOLE + PART * len(parts)]
    if len(tails) < 2:
        return ""
    columns = ([tail[PART * k : PART * (k + 1)] for tail in tails] for k in range(len(parts)))
    found = [name for name, column in zip(parts, columns, strict=True) if len(set(column)) > 1]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f", in {', '.join(found[:_NAMED])}{more}" if found else ""


class Comparing:
    """One worker's knowledge of comparisons: when the next is due, and the step up to which all were alike.

    every: steps between comparisons, 0 for none; each compares the state before its step. begins_after: the step
    whose state the job began with. repeats: whether a repeated step gives the same bits. names: see `Names`. votes:
    whether a majority holds the right state; not if most have it from one of them.
    """

    def __init__(
        self,
        every: int,
        begins_after: int,
        *,
        repeats: bool = True,
        names: Names = lambda stage: (),
        votes: bool = True,
    ) -> None:
        self.fresh = False  # this worker was healed or resumed since all were alike
        self._every, self._begins_after, self._repeats, self._names = every, begins_after, repeats, names
        self._votes = votes
        self._members: frozenset[int] = frozenset()  # of this generation those that were
        self._alike: dict[int, Mapping[int, str]] = {}  # by step and stage: the digest that all have once come to
        self._sound: frozenset[int] = frozenset()  # steps at which all were alike, unless the job went back behind them
        self._heard: frozenset[int] = frozenset()  # such steps of which the plans since the last settle tell
        self._asked = 0

    # ---- when

    def entered(self, holdings: Mapping[int, Holding], copy: Collection[int], at: int, *, back: bool) -> None:
        """A generation has settled, and goes on from step `at`.

        copy: members that had to copy or read their state for that. back: all go to that step. Later steps are
        repeated, and their states compared with those of the first time; until then nothing proves them. Others may
        have come back to the step itself without this worker.
        """
        self._members = frozenset({*copy, *(i for i, holding in holdings.items() if holding.fresh)})
        heard = {step for step in self._heard if back or step < at}
        self._sound, self._heard = frozenset(step for step in self._sound | heard if step <= at), frozenset()

    def copied(self) -> None:
        """This worker's state is not the one that it has computed itself."""
        self.fresh = True

    def ask(self, number: int) -> None:
        """The records of the step before ask for a comparison before this step."""
        self._asked = number

    def due(self, number: int, plan: Plan) -> bool:
        periodic = bool(self._every) and number % self._every == 0
        known = self._repeats and bool(self._alike.get(number - 1))
        return periodic or known or (len(plan.members) > 1 and (bool(self._members) or self._asked == number))

    # ---- results

    def learn(self, plan: Plan) -> None:
        """Take the steps at which all were alike from the plan."""
        self._heard |= {step for step, _, _ in plan.alike} - self._alike.keys()
        for step, stage, digest in plan.alike:
            self._note(step, {stage: digest})

    def judge(self, said: Statements) -> Disagreement | None:
        """None if all copies are alike."""
        places = []
        for stage, of in sorted(said.digests.items()):
            copies = {str(worker): (worker, digest) for worker, digest in of.items()}
            agreed = self._alike.get(said.step, {}).get(stage, "") if self._repeats else ""
            place = f"stage {stage}" if any(said.digests) else "the state"
            places.append(Copies(place, copies, agreed, self._names(stage)))
        for name, tied in sorted(said.ties.items()):
            copies = {f"{worker} (stage {k})": (worker, digest) for (k, worker), digest in sorted(tied.items())}
            places.append(Copies(name, copies))
        found = verdict(said.when, places, self._members)
        return found if found is None or self._votes else replace(found, outvoted=frozenset())

    def alike(self, said: Statements, *, member: bool = True) -> None:
        """All copies were alike, and so are states computed from them. member: this worker is one of those that
        state it."""
        if any(said.digests.values()):
            self._note(said.step, {stage: next(iter(of.values())) for stage, of in said.digests.items() if of})
            if said.whole:
                self._count(said.step)
            if said.whole and member:
                self.fresh, self._members = False, frozenset()

    def any_stayed(self, workers: Iterable[int]) -> bool:
        """Whether any of these members was not healed or resumed since all were alike."""
        return any(worker not in self._members for worker in workers)

    def told(self, step: int) -> dict[int, str]:
        """Digests by stage of a step at which all were alike, for the coordinator to keep."""
        digests = self._alike.get(step, {}) if self._repeats else {}
        return {k: digest if len(digest) <= _MOST_TOLD else digest[:WHOLE] for k, digest in digests.items()}

    def saved(self, step: int) -> None:
        """A checkpoint of this step counts: the workers that wrote it were alike."""
        if step > self._begins_after:
            self._count(step)

    def proven(self, number: int) -> int:
        """The newest step, up to `number`, whose state the workers have compared and found alike."""
        every = self._every
        periodic = number // every * every - 1 if every else 0
        return max(0, periodic, self._begins_after, *(step for step in self._sound if step <= number))

    def _note(self, step: int, digests: Mapping[int, str]) -> None:
        known = {**self._alike, step: {**self._alike.get(step, {}), **digests}}
        self._alike = {at: known[at] for at in sorted(known)[-_KEPT:]}

    def _count(self, step: int) -> None:
        self._sound = frozenset(sorted({*self._sound, step})[-_KEPT:])  # as a whole: another thread may read it
