"""Incidents: each is a trouble with the system's reaction to it, from the fault until all is whole again. Pure.

The log of events has ten lines for one incident, which a person wants to read as one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace

from everstep.base.cause import Cause
from everstep.report.fault_count import COORDINATOR, ORDERLY, is_place, struck_by
from everstep.report.seats import seats_of
from everstep.report.words import Event, as_dict, cause, known, number, one_line, reason_text, time_text, whole_number

_MOST = 1000
_MOST_NAMED = 6
_SHRUGGED_STEPS = 3
_LATE_STEPS = 2
_RESTART_NS = 15_000_000_000
_DID = {
    Cause.KILLED: "was killed",
    Cause.CRASHED: "crashed",
    Cause.EXITED: "ended itself",
    Cause.EXCEPTION: "raised an exception",
    Cause.OOM: "ran out of memory",
    Cause.HUNG: "hung",
    Cause.SILENT: "fell silent",
    Cause.HOST_LOST: "was lost with its host",
    Cause.LINK: "could not reach the others",
    Cause.CORRUPT: "held a damaged state",
    Cause.NONDETERMINISTIC: "computed other bits than the others",
    Cause.PREEMPTED: "was taken away by the scheduler",
    Cause.REPLACED: "was replaced by its next life",
    Cause.INJECTED: "was hit by an injected fault",
}
LAUNCHER = "launcher"
_THINGS = {
    "checkpoint": "a checkpoint was damaged",
    "states": "the states of the workers were in doubt",
    "coordinator": "the coordinator {did}",
    LAUNCHER: "the launcher of the job died without a word",
}


@dataclass(frozen=True)
class Hit:
    """A fault's victim (`home`: its part in the job) and kind; suspected: it only stands still so far; again: an
    earlier incident told the reason."""

    who: str
    cause: Cause
    reason: str
    home: str = ""
    suspected: bool = False
    again: bool = False

    @property
    def brief(self) -> str:
        """The hit without its reason."""
        if self.who not in _THINGS:
            return f"{self.who} {'is suspected' if self.suspected else _DID.get(self.cause, 'was lost')}"
        return _THINGS[self.who].format(did=_DID.get(self.cause, "died"))

    @property
    def text(self) -> str:
        home = f" ({self.home})" if self.home else ""
        return (self.brief.replace(self.who, self.who + home, 1) if home else self.brief) + self.more

    def bare(self) -> Hit:
        """The hit without its reason, which is told elsewhere."""
        return replace(self, cause=self.cause, reason="")

    @property
    def more(self) -> str:
        """The reason, if it says more than the kind."""
        told = self.reason and self.cause is not Cause.KILLED
        return f" ({'the same' if self.again else self.reason})" if told else ""


@dataclass
class Incident:
    """Faults that belong together. hits: by victim; done: the system's acts, in order.

    step: the first one that was not told when it began; again: the one that it struck, which is done again.
    planned_ns: when the plan began that answers it, of generation `answer`. end_ns: when training went on, None before;
    whole_ns: when all who were lost had been replaced. suspect: nobody is lost, a worker only stands still, since
    `stood_ns`. lost: worker ids that are missed.
    """

    number: int
    begin_ns: int
    step: int
    cause: Cause
    hits: dict[str, Hit] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    planned_ns: int | None = None
    suspect: bool = False
    stood_ns: int = 0
    end_ns: int | None = None
    whole_ns: int | None = None
    lost: frozenset[int] = frozenset()
    again: int = 0
    answer: int = 0

    @property
    def what(self) -> str:
        """Victims and kinds of the hits; those with the same words are named together."""
        alike: dict[str, list[Hit]] = {}
        for hit in self._told_once():
            alike.setdefault(hit.text if hit.home else hit.text.removeprefix(hit.who), []).append(hit)
        return self._named([_all(hits) for hits in alike.values()], "; ")

    def _told_once(self) -> list[Hit]:
        """The hits; a reason that several have is left to the last of those that are told apart."""
        hits = list(self.hits.values())
        own = [{hit.reason for hit in hits[n + 1 :] if hit.home or hits[n].home} for n in range(len(hits))]
        return [hit.bare() if hit.reason in said else hit for hit, said in zip(hits, own, strict=True)]

    @property
    def brief(self) -> str:
        """The words of `what`, without reasons."""
        told: dict[str, list[str]] = {}
        for hit in self.hits.values():
            told.setdefault(hit.brief.removeprefix(hit.who), []).append(hit.who)
        return self._named([_together(who, did) for did, who in told.items()], " and ")

    def _named(self, hits: list[str], between: str) -> str:
        more = f" and {len(hits) - _MOST_NAMED} more" if len(hits) > _MOST_NAMED else ""
        said = between.join(hits[:_MOST_NAMED]) + more
        if self.end_ns is not None:  # nobody is suspected any more
            said = said.replace(" is suspected", " was suspected").replace(" are suspected", " were suspected")
        return said

    @property
    def level(self) -> str:
        """info once training went on, warning before."""
        return "warning" if self.end_ns is None else "info"

    @property
    def kind(self) -> str:
        """fault; or suspicion, if nobody was lost."""
        return "suspicion" if all(hit.suspected for hit in self.hits.values()) else "fault"

    @property
    def stood_s(self) -> float:
        """For how many seconds it held training up, 0 if it did not, or does so still."""
        return max(0, (self.end_ns or 0) - (self.stood_ns or self.begin_ns)) / 1e9

    def did(self, text: str) -> None:
        if text not in self.done and len(self.done) < 2 * _MOST_NAMED:
            self.done.append(text)

    def computed(self, step: int) -> None:
        """The fault struck this step or a later one: commits are told late."""
        self.again = max(self.again, step)

    def precedes(self, time_ns: int, generation: int) -> bool:
        """Whether a commit of that time and generation (0: not told) follows upon the plan that answers it."""
        return generation >= self.answer if generation else time_ns > (self.planned_ns or 0)

    def line(self) -> str:
        went = [f"training went on after {time_text(self.stood_s)}"] if self.stood_s else []
        if self.whole_ns is not None and self.end_ns is not None and self.whole_ns > self.end_ns:
            went.append(f"whole again after {time_text(max(0, self.whole_ns - self.begin_ns) / 1e9)}")
        return "; ".join([self.what, *self.done, *went])


def lost_launcher(number: int, time_ns: int, step: int) -> Incident:
    """The loss of the process that leads the job, and of the job with it; no event tells it."""
    hit = Hit(LAUNCHER, Cause.UNKNOWN, "")
    return Incident(number, time_ns, step + 1, Cause.UNKNOWN, {LAUNCHER: hit}, ["nobody leads it any more"])


@dataclass
class Incidents:
    """Takes in events in file order; `all`: the newest incidents. `open`: the one that holds training up. kills: how
    often the coordinator was killed for its silence since the job was started, the last time at `killed_ns`."""

    all: deque[Incident] = field(default_factory=lambda: deque(maxlen=_MOST))
    open: Incident | None = None
    count: int = 0
    kills: int = 0
    killed_ns: int = 0
    _homes: dict[int, str] = field(default_factory=dict)
    _redone: Incident | None = None
    _shrugged: dict[str, tuple[int, int, Hit]] = field(default_factory=dict)

    @property
    def newest(self) -> Incident | None:
        return self.all[-1] if self.all else None

    def missed(self) -> list[Incident]:
        """Incidents that training has overcome, but whose workers are not replaced yet."""
        return [incident for incident in self.all if incident.end_ns is not None and incident.whole_ns is None]

    def take(self, event: Event, time_ns: int, step: int) -> None:
        """Take in the next event other than a commit. step: the newest one by then."""
        act = _ACTS.get(event["kind"])
        if act is not None:
            with contextlib.suppress(TypeError, ValueError):  # it is malformed; the facts count that
                act(self, event, time_ns, step)

    @property
    def waits(self) -> bool:
        """Whether the next commit may change an incident."""
        return self.open is not None or self._redone is not None or bool(self._shrugged)

    def launcher_lost(self, time_ns: int, step: int, again_ns: int) -> None:
        """The launcher died at about that time, after this step, and the job was started again."""
        self.count += 1
        incident = lost_launcher(self.count, time_ns, step)
        incident.end_ns = incident.whole_ns = time_ns
        incident.planned_ns, incident.done = again_ns, ["the job was started again"]
        self.all.append(incident)

    def committed(self, time_ns: int, step: int, generation: int = 0) -> None:
        """Take in a commit of that time; its event may come when a later step has begun."""
        redone, incident = self._redone, self.open
        if redone is not None and redone.precedes(time_ns, generation):
            redone.again = step
            redone.did(f"step {redone.again} was done again")
            self._redone = None
        for who, (struck_ns, at, hit) in list(self._shrugged.items()):
            soon = who == COORDINATOR and time_ns - struck_ns < _RESTART_NS  # nobody waits for it
            if step > at + _SHRUGGED_STEPS and not soon:  # it cost nothing
                del self._shrugged[who]
                self._alone(hit, struck_ns, at, "training did not stand still")
        if incident is None:
            return
        since_ns = incident.begin_ns if incident.suspect else incident.planned_ns
        if since_ns is not None and time_ns <= since_ns:  # it was done before, and is told late
            incident.computed(step + 1)
        if (since_ns is not None and time_ns > since_ns) or step > incident.step + _LATE_STEPS:  # clocks may differ
            if incident.suspect:
                incident.did("it went on by itself")
            self._went_on(time_ns)

    def begins(self) -> None:
        """The job is started, or over: the open incident stays as it is."""
        for incident in self.missed():
            incident.whole_ns = incident.end_ns
        for struck_ns, at, hit in list(self._shrugged.values()) if self.open is None else ():
            self._alone(hit, struck_ns, at, "training did not stand still")
        self.open = self._redone = None
        self._shrugged.clear()

    def has_raised(self, event: Event) -> bool:
        """Whether another worker has raised an exception in the open incident, too: it is one fault of the code."""
        hits = self.open.hits.values() if self.open is not None else ()
        return cause(event) is Cause.EXCEPTION and any(hit.cause is Cause.EXCEPTION for hit in hits)

    # ---- events

    def _evicted(self, event: Event, time_ns: int, step: int) -> None:
        worker_id, why = known(event.get("worker_id")), cause(event)
        if why in ORDERLY:
            return
        died_ns = whole_number(event.get("died_unix_ns")) or time_ns
        home = self._homes.get(worker_id, "") if worker_id is not None else ""
        reason = _reason(event)
        hit = Hit(f"worker {worker_id}", why, reason, home, again=self._was_raised(why, reason))
        if self._homes and worker_id not in self._homes and hit.who not in (self.open.hits if self.open else ()):
            self._alone(hit, min(died_ns, time_ns), step, "it took no part")
            return
        incident = self._strike(hit, min(died_ns, time_ns), step)
        if incident.suspect and incident.stood_ns and not event.get("died_unix_ns"):
            incident.begin_ns = min(incident.begin_ns, incident.stood_ns)
        incident.suspect, incident.planned_ns, incident.cause = False, None, why
        incident.stood_ns = 0
        if worker_id is not None:
            incident.lost |= {worker_id}

    def _was_raised(self, why: Cause, reason: str) -> bool:
        """Whether an earlier incident told of this exception."""
        told = (hit.reason for one in self.all if one is not self.open for hit in one.hits.values())
        return why is Cause.EXCEPTION and reason in told

    def _suspected(self, event: Event, time_ns: int, step: int) -> None:
        hit = Hit(f"worker {known(event.get('worker_id'))}", cause(event), _reason(event), suspected=True)
        if self.open is not None and hit.who in self.open.hits:
            return
        fresh = self.open is None
        incident = self._strike(hit, time_ns, step)
        incident.suspect = incident.suspect or fresh
        if fresh:
            incident.stood_ns = whole_number(event.get("stood_unix_ns"))

    def _injected(self, event: Event, time_ns: int, step: int) -> None:
        """Note an injected fault; it becomes an incident by itself only if no other event follows from it."""
        who = struck_by(event)
        if len(self._shrugged) < _MOST_NAMED:
            self._shrugged[who] = (
                time_ns,
                max(step, whole_number(event.get("step")) - 1),
                Hit(who, Cause.INJECTED, _reason(event)),
            )

    def _strike(self, hit: Hit, begin_ns: int, step: int) -> Incident:
        incident = self.open
        struck_ns, struck_at, _ = self._shrugged.pop(hit.who, (0, 0, None))
        if hit.who == COORDINATOR and struck_ns:  # it is told when the next one begins
            begin_ns, step = min(begin_ns, struck_ns), min(step, struck_at)
        for place in [who for who in self._shrugged if is_place(who)]:
            del self._shrugged[place]
        if incident is None:
            self.count += 1
            incident = self.open = Incident(self.count, begin_ns, step + 1, hit.cause)
            self.all.append(incident)
        incident.computed(max(step, struck_at) + 1)
        incident.begin_ns = min(incident.begin_ns, begin_ns)
        incident.hits[hit.who] = hit
        return incident

    def _alone(self, hit: Hit, time_ns: int, step: int, did: str) -> None:
        """Take in a hit that does not hold training up: an incident of its own, unless another one is open."""
        incident = self._strike(hit, time_ns, step)
        incident.did(did)
        if incident.hits.keys() == {hit.who}:
            incident.whole_ns = time_ns
            self._went_on(incident.begin_ns)

    def _plan(self, event: Event, time_ns: int, step: int) -> None:
        self._remember(event)
        incident = self.open
        if incident is not None and not incident.suspect:
            incident.planned_ns, incident.answer = time_ns, whole_number(event.get("generation"))
            incident.computed(whole_number(event.get("step")) + 1)
        seated = set(self._homes)
        wanted = whole_number(event.get("target"))
        for old in self.missed():
            if old.lost <= seated or 0 < wanted <= len(seated):
                if old.lost <= seated and old.lost:
                    old.did(f"worker {_listed(old.lost)} {'is' if len(old.lost) == 1 else 'are'} back")
                old.whole_ns = time_ns
        if incident is not None and 0 < wanted <= len(seated):
            incident.lost = frozenset()  # spares have taken the places

    def _remember(self, event: Event) -> None:
        leaders = event.get("leaders")
        leading = leaders if isinstance(leaders, list) else [event.get("leader")]
        homes: dict[int, str] = {}
        for worker_id, held in seats_of(event).items():
            where = "stage " + ", ".join(str(stage) for stage, _, _ in held) if len(leading) > 1 else ""
            homes[worker_id] = " of ".join(part for part in ("leader" * (worker_id in leading), where) if part)
        self._homes = homes

    def _leader(self, event: Event, time_ns: int, step: int) -> None:
        if self.open is not None:
            stage = known(event.get("stage"))
            self.open.did(f"worker {known(event.get('worker_id'))} leads{f' stage {stage}' if stage else ''}")

    def _healed(self, event: Event, time_ns: int, step: int) -> None:
        worker_id = known(event.get("worker_id"))
        if self.open is not None and worker_id is not None and worker_id not in self.open.lost:
            self.open.did(f"worker {worker_id} takes its place")
        for old in self.missed():
            if worker_id in old.lost:
                old.lost -= {worker_id}
                if not old.lost:
                    old.did(f"worker {worker_id} healed")
                    old.whole_ns = time_ns

    def _waiting(self, event: Event, time_ns: int, step: int) -> None:
        if self.open is not None:
            self.open.did("waited for workers")

    def _fallback(self, event: Event, time_ns: int, step: int) -> None:
        back_to, redone = known(event.get("step")), known(event.get("steps_redone"))
        if event.get("what") == "checkpoint":
            self._alone(Hit("checkpoint", cause(event), _reason(event)), time_ns, step, "an older one is used")
            return
        if redone is None or back_to is None:
            return
        incident = self.open or self._strike(Hit("states", cause(event), _reason(event)), time_ns, step)
        incident.planned_ns = time_ns
        where = f"the {one_line(event.get('source'), 20) or 'copy'} of step {back_to}" if back_to else "the start"
        incident.did(f"went back to {where}: {redone or 'no'} step{'s' * (redone != 1)} again")

    def _killed(self, event: Event, time_ns: int, step: int) -> None:
        self.kills, self.killed_ns = self.kills + 1, time_ns
        self._alone(Hit("coordinator", cause(event), _reason(event)), time_ns, step, "it was killed")

    def _coordinator(self, event: Event, time_ns: int, step: int) -> None:
        newest = self.newest
        done = newest.done if newest is not None and COORDINATOR in newest.hits else []
        if newest is not None and done[-1:] == ["it was killed"] and cause(event) is Cause.HUNG:
            newest.did("it was restarted")
            return
        self._alone(Hit("coordinator", cause(event), _reason(event)), time_ns, step, "it was restarted")

    def _given_up(self, event: Event, time_ns: int, step: int) -> None:
        if cause(event) is Cause.CRASH_LOOP and self.newest is not None:
            taken = f"moved to host {one_line(host, 40)}" if (host := event.get("host")) else "was given up"
            self.newest.did(f"the slot of worker {known(event.get('worker_id'))} {taken}")

    def _smaller(self, event: Event, time_ns: int, step: int) -> None:
        if self.newest is not None:
            self.newest.did(f"worker {known(event.get('worker_id'))} goes on as a smaller cell")

    def _recovered(self, event: Event, time_ns: int, step: int) -> None:
        incident = self.open
        if incident is None:
            return
        incident.begin_ns = min(incident.begin_ns, time_ns - round(max(0.0, number(event.get("duration_s"))) * 1e9))
        if as_dict(event.get("phases_s")).get("redo") and not any(
            text.startswith("went back to") for text in incident.done
        ):
            self._redone = incident
        self._went_on(time_ns)

    def _went_on(self, time_ns: int) -> None:
        incident, self.open = self.open, None
        if incident is not None:
            incident.end_ns = max(time_ns, incident.begin_ns)
            if not incident.lost:
                incident.whole_ns = incident.whole_ns or incident.end_ns

    def _over(self, event: Event, time_ns: int, step: int) -> None:
        undone = [one for one in (self.open, self._redone) if one is not None and event.get("state") == "failed"]
        for one in undone:
            one.end_ns = one.whole_ns = None  # the others went on only to save the state
        for one in undone[:1]:
            one.did("the job failed")
        self.begins()
        self.kills = 0


def _reason(event: Event) -> str:
    return reason_text(event.get("reason"), 240)


def _all(hits: list[Hit]) -> str:
    """The hits in words, those with the same words together."""
    first = hits[0]
    if len(hits) == 1:
        return first.text
    return _together([hit.who for hit in hits], first.brief.removeprefix(first.who)) + first.more


def _together(who: list[str], did: str) -> str:
    """Several victims in one phrase: workers 1, 2 were killed."""
    if len(who) == 1 or not did.startswith(" "):
        return who[0] + did if did.startswith(" ") else did
    for one, many in (("was ", "were "), ("is ", "are "), ("itself", "themselves"), ("its host", "their hosts")):
        did = did.replace(one, many)
    named = sorted((name.removeprefix("worker ") for name in who), key=lambda name: (len(name), name))
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return f"workers {', '.join(named[:_MOST_NAMED])}{more}{did}"


def _listed(ids: frozenset[int]) -> str:
    return ", ".join(str(i) for i in sorted(ids)[:_MOST_NAMED])


_ACTS = {
    "worker_evicted": Incidents._evicted,
    "worker_suspected": Incidents._suspected,
    "fault_injected": Incidents._injected,
    "generation_started": Incidents._plan,
    "leader_changed": Incidents._leader,
    "worker_healed": Incidents._healed,
    "waiting": Incidents._waiting,
    "fallback": Incidents._fallback,
    "coordinator_restarted": Incidents._coordinator,
    "coordinator_killed": Incidents._killed,
    "warning": Incidents._given_up,
    "cell_shrunk": Incidents._smaller,
    "recovery_completed": Incidents._recovered,
    "job_started": Incidents._over,
    "job_completed": Incidents._over,
    "job_failed": Incidents._over,
}
