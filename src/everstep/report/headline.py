"""The job's condition in one sentence: the trouble, the system's reaction, and since when. Pure.

It is made of the facts and a clock, so that it also changes when nothing happens any more. This is the one place that
decides whether all is well: the page, `status`, `top` and the live display all show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.base.cause import Cause
from everstep.report.crew import MEMBERS
from everstep.report.facts import SET_BACK_NS, Facts, by_itself, heard_lately
from everstep.report.incidents import Incident
from everstep.report.told_facts import CheckpointFact, Strange, TierCount
from everstep.report.words import as_dict, number, reason_text, shortened, time_text, whole_number

_FULL_BYTES = 1 << 20
_LATELY_S = 60.0
_LONG_START_S = 60.0
_LONG_WAIT_S = 10.0
_BEYOND_HELP_S = 60.0
_SILENT_S = 30.0
_LONG_FIRST_S = 600.0
_MANY_KILLS = 3
_KILLS_LATELY_S = 600.0
_BEYOND_HELP = 30.0
_MANY_LEFT_OUT = 3
_LONG_SAVE_S = 10.0
_WHERE = {"disk": "", "object": " in the object store"}
_PASSIVE = ("reduce", "agree", "transfer", "settle", "idle", "stall")


@dataclass(frozen=True)
class Headline:
    """level: good, warning (the system deals with it, or a person might look) or bad (it does not go on by itself).
    text: the sentence; more: a second one if there is room."""

    level: str
    text: str
    more: str = ""

    def whole(self) -> str:
        return f"{self.text} {self.more}".strip()

    def fitted(self, width: int) -> str:
        """As much as so many characters hold: both, or the sentence, or its first words."""
        return self.whole() if len(self.whole()) <= width else shortened(self.text, width)


@dataclass(frozen=True)
class Now:
    """Facts beside the events. running: a job holds the directory. live: the coordinator's answer, None if it is silent
    (asked: it was asked). phases: of each worker, as last sampled. total: the last step. disk_step: of the
    newest checkpoint that can be read, None if nobody has looked. finished: the final state is there, of
    final_step; left: the loop was left before the last step. resume: the command that goes on. gives_up_s: how
    long workers are waited for. free_bytes: left on the disk of the directory. taken_ns: time at which a job
    took the directory, if no event of it is there yet, else None. unreadable: why the events cannot be read now."""

    time_ns: int
    running: bool = True
    live: Mapping[str, Any] | None = None
    asked: bool = False
    phases: Mapping[int, str] = field(default_factory=dict)
    total: int | None = None
    disk_step: int | None = None
    finished: bool = False
    final_step: int = 0
    left: bool = False
    resume: str = ""
    gives_up_s: float | None = None
    free_bytes: int | None = None
    taken_ns: int | None = None
    unreadable: str = ""


def headline(facts: Facts, now: Now) -> Headline:
    """The sentence for this moment."""
    said = (found for case in _CASES if (found := case(facts, now)) is not None)
    return _with_full(
        _with_kills(_with_clock(next(said, None) or _well(facts, now), facts, now), facts, now), facts, now
    )


def goes_on_untold(facts: Facts, now: Now) -> bool:
    """Whether training goes on although no event tells so: the coordinator knows of more steps."""
    beyond = now.live is not None and told_step(facts, now) > facts.course.step + 1
    return beyond and not facts.course.redo_to and facts.stands_still(now.time_ns)


def disk_trouble(facts: Facts, now: Now) -> bool:
    """Whether the disk of a running job is full, or refused a write and has not taken one since: a checkpoint, or the
    events of steps for a minute."""
    if not now.running or facts.condition.ended_ns is not None:
        return False
    refused_ns = facts.full.time_ns if facts.full is not None else None
    return _is_full(now) or (refused_ns is not None and facts.course.last_step_ns - refused_ns < _LATELY_S * 1e9)


def _with_full(found: Headline, facts: Facts, now: Now) -> Headline:
    """The headline, with a note on the disk if there is trouble with it."""
    if not disk_trouble(facts, now) or " disk " in found.text:
        return found
    level = "warning" if found.level == "good" else found.level
    what = f"The disk is full ({_free(now)} left)." if _is_full(now) else "The disk refuses what is written."
    return Headline(level, f"{found.text} {what}", f"{found.more} Free some space.".strip())


def _with_clock(found: Headline, facts: Facts, now: Now) -> Headline:
    """The headline, with a note on this host's clock if it is behind the events: they would seem to be new for long."""
    ahead_ns = facts.told_ns - now.time_ns
    if found.level != "good" or ahead_ns <= SET_BACK_NS or facts.condition.ended_ns is not None or now.finished:
        return found
    said = found.text.removeprefix("All is well: ")
    text = f"{said[:1].upper()}{said[1:]} The clock of this host is {span(ahead_ns / 1e9)} behind the newest event."
    more = f"So nobody can see here whether training stands still: set the clocks. {found.more}"
    return Headline("warning", text, more.strip())


def _with_kills(found: Headline, facts: Facts, now: Now) -> Headline:
    """The headline, with a note on the coordinator if it is killed again and again."""
    kills, ago_s = facts.incidents.kills, _s(facts.incidents.killed_ns, now)
    if kills < _MANY_KILLS or ago_s > _KILLS_LATELY_S or not now.running or facts.condition.ended_ns is not None:
        return found
    text = f"{found.text} The coordinator was killed {kills} times, the last time {span(ago_s)} ago: it did not answer."
    level = "warning" if found.level == "good" else found.level
    return Headline(level, text, "Is the machine too busy? coordinator.silent_s is how long it may take.")


def told_step(facts: Facts, now: Now) -> int:
    """The newest step that the leader has told: the coordinator hears of one before it is told as an event."""
    return max(facts.course.step, whole_number((now.live or {}).get("step"))) if now.running else facts.course.step


def step_of(facts: Facts, now: Now) -> int:
    """The newest step that any member has done: a leader that hangs tells of none."""
    told, workers = told_step(facts, now), (now.live or {}).get("workers")
    if not now.running or facts.course.redo_to or not isinstance(workers, list | tuple):
        return told
    members = (worker for worker in map(as_dict, workers) if worker.get("role") in MEMBERS)
    return max([told, *(whole_number(worker.get("step")) for worker in members)])


def span(seconds: float) -> str:
    """40 ms, 0.3 s, 6 s, 5m06s: as exact as a glance needs."""
    seconds = max(0.0, seconds)
    if seconds < 0.095 or seconds >= 60:
        return time_text(seconds)
    return f"{seconds:.0f} s" if seconds >= 0.95 else f"{seconds:.1f} s"


def _s(begin_ns: int, now: Now) -> float:
    return max(0, now.time_ns - begin_ns) / 1e9


# ---- it is over


def _unreadable(facts: Facts, now: Now) -> Headline | None:
    if not now.unreadable:
        return None
    newest = f"Step {facts.course.step} is the newest known." if facts.counts else "Nothing is known of the job."
    return Headline("bad", f"The events of this job cannot be read: {now.unreadable}.", newest)


def _coming(facts: Facts, now: Now) -> Headline | None:
    if now.taken_ns is None:
        return None
    took_s = _s(now.taken_ns, now)
    after = f" again, after step {facts.course.step}" if facts.course.step else ""
    return Headline("warning" if took_s > _LONG_START_S else "good", f"Starting{after}: for {span(took_s)}.")


def _over(facts: Facts, now: Now) -> Headline | None:
    if facts.condition.ended_ns is None and not (now.finished and not now.running):
        return None
    ran_s = sum(v for k, v in facts.account.seconds().items() if k != "not running")
    strange = facts.course.strange
    if (now.finished or facts.condition.state == "completed") and strange is not None and strange.in_a_row:
        text = f"Finished, but the loss or gradient was not finite from step {strange.since} to the last."
        if not strange.applied:
            return Headline("warning", text, f"{_unmade(strange)}.")
        return Headline("bad", text, "The weights are of no use: go on from a checkpoint before that step.")
    if now.finished or facts.condition.state == "completed":
        if not facts.course.step:
            return Headline("good", "Finished.", "Its events are gone, so nothing is known of how it went.")
        step = max(facts.course.step, now.final_step)
        done = f"Finished early, after step {step}" if now.left else f"Finished: all {step} steps are done"
        ran = "" if by_itself(facts) else f", in {span(ran_s)}"  # nobody knows when a script by itself ran
        if (wrong := _lacks(facts)) is not None:
            return Headline("warning", f"{done}{ran}, but {wrong}", _was_strange(facts))
        if strange is not None and strange.often(step):
            return Headline("warning", f"{done}{ran}, but {_not_finite(strange)}.")
        faults = f"{facts.faults} fault{'s' * (facts.faults != 1)} survived." if facts.faults else "No fault."
        return Headline("good", f"{done}{ran}.", f"{faults if ran else ''} {_was_strange(facts)}".strip())
    reason = _raised(facts) or facts.condition.reason or "no reason was given"
    more = _behind(facts, now)
    if facts.condition.state == "interrupted":
        return Headline("warning", f"Stopped after step {facts.course.step}: {reason}.", more)
    return Headline("bad", f"Failed after step {facts.course.step}: {reason}.", more)


def _lacks(facts: Facts) -> str | None:
    """Words about what could not be written of a completed job: rows of its ledger, or its newest checkpoints."""
    if facts.full is not None and facts.full.time_ns >= (facts.condition.ended_ns or 0) > 0:
        return f"{facts.full.reason}."
    failed = _failed(facts)
    cut_off = failed is None or failed.tier == "memory" or failed.cause is Cause.INTERRUPTED
    return None if failed is None or cut_off else f"{_failure(failed)}."


def _raised(facts: Facts) -> str:
    """The exception that ended the job, as the worker has told it; "" if it has not."""
    newest = facts.incidents.newest
    if facts.condition.cause is not Cause.EXCEPTION or newest is None:
        return ""
    return next((hit.reason for hit in newest.hits.values() if hit.cause is Cause.EXCEPTION), "")


def _by_itself(facts: Facts, now: Now) -> Headline | None:
    """A script that nobody has launched: whether it still runs is not known."""
    if now.running or not by_itself(facts):
        return None
    at = f"Step {facts.course.step}{f' of {now.total}' if now.total else ''}"
    heard = f"last heard of {span(_s(facts.told_ns, now))} ago"
    if not heard_lately(facts, now.time_ns):
        return Headline("warning", f"{at}: it may have ended.", f"It was {heard}. {_behind(facts, now)}")
    return _strange(facts, now) or _troubled(facts, now) or Headline("good", f"{at}, {heard}.", _was_strange(facts))


def _died(facts: Facts, now: Now) -> Headline | None:
    if now.running or not facts.counts:
        return None
    last_ns = max(facts.course.last_step_ns, facts.account.end_ns)
    what = "The process of the job died without a word" if facts.began_ns else "The job never started"
    others = facts.crew.on_several_hosts()  # whose workers wait for a new head
    runs = "nothing runs on its host now; other hosts may go on for a while" if others else "nothing runs now"
    heard = f"It was last heard of {span(_s(last_ns, now))} ago. " if last_ns else ""
    behind = _behind(facts, now, "up to " * others)
    return Headline("bad", f"{what} after step {facts.course.step}: {runs}.", heard + behind)


def _behind(facts: Facts, now: Now, most: str = "") -> str:
    """Distance of the newest checkpoint from the last step, and the command that goes on from it. most: words before
    the number of steps."""
    saved = facts.checkpoint_step if now.disk_step is None else now.disk_step
    again = max(0, facts.course.step - saved)
    strange = facts.course.strange
    if saved and strange is not None and strange.in_a_row and strange.applied and saved >= strange.since:
        advice = "" if facts.condition.cause is Cause.NONFINITE else ": go on from one of before that (--resume-from)"
        if not any(one.ok and one.step < strange.since for one in facts.checkpoints.newest):
            advice = ", and no older one is known: start again (--fresh), or from another job's (--resume-from)"
        return f"The newest checkpoint is of step {saved}, but nothing is finite since step {strange.since}{advice}."
    if not saved:
        text = "There is no checkpoint: it would start again from step 0."
    elif again:
        text = f"The newest checkpoint is of step {saved}: {most}{again} step{'s' * (again != 1)} would be done again."
    else:
        text = f"The newest checkpoint is of step {saved}: nothing is lost."
    return f"{text} To go on: {now.resume}" if now.resume else text


# ---- it has not begun, or is about to end


def _starting(facts: Facts, now: Now) -> Headline | None:
    began_ns = facts.condition.started_ns
    if not facts.counts:
        said = "Starting: no events so far." if now.running else "The job has not started: it wrote no events."
        return Headline("warning", said)
    if began_ns is None and facts.course.last_step_ns:
        return None
    if facts.incidents.open is not None or facts.condition.state == "waiting":
        return None
    if began_ns is None and step_of(facts, now) > facts.course.step:
        return None  # the first step is done, its event comes with the next
    since_ns = (
        began_ns if began_ns is not None else (facts.crew.generations[-1].time_ns if facts.crew.generations else None)
    )
    took_s = _s(since_ns, now) if since_ns else 0.0
    ready = sum(worker.state not in ("dead", "left") for worker in facts.crew.workers.values())
    text = f"Starting for {span(took_s)}: {ready} of {facts.crew.wanted or '?'} workers are ready."
    if began_ns is None:
        text = f"Starting: step {facts.course.step + 1}, the first one, is being computed for {span(took_s)}."
    if now.asked and now.live is None and took_s > _SILENT_S:
        level = "bad" if took_s > _LONG_FIRST_S else "warning"
        return Headline(level, text, "The coordinator does not answer; the job restarts it if it stays silent.")
    return Headline("warning" if took_s > _LONG_START_S else "good", text)


def _stopping(facts: Facts, now: Now) -> Headline | None:
    if facts.condition.stopping is None:
        return None
    text = f"Stopping for {span(_s(facts.condition.stopping.time_ns, now))}: {facts.condition.stopping.reason}."
    stands = _stands(facts, now)
    return Headline("warning", text, stands and f"{stands}.")


def _finishing(facts: Facts, now: Now) -> Headline | None:
    if now.total is None or step_of(facts, now) < now.total or facts.incidents.open is not None:
        return None
    took_s = _s(facts.course.last_step_ns, now) if facts.course.last_step_ns else 0.0
    level = "warning" if took_s > _BEYOND_HELP_S else "good"
    return Headline(level, f"All {now.total} steps are done; writing the results for {span(took_s)}.")


# ---- it does not train


def _waiting(facts: Facts, now: Now) -> Headline | None:
    live = now.live or {}
    if facts.condition.state != "waiting" and live.get("state") != "waiting":
        return None
    waited_s = _s(facts.condition.waiting_ns or now.time_ns, now)
    reason = facts.condition.reason if facts.condition.state == "waiting" else reason_text(live.get("reason"))
    newest = facts.incidents.newest
    if facts.condition.cause is Cause.EXCEPTION and newest is not None:  # its words are those of the error at the end
        reason = f"{newest.brief}, and {'is' if len(newest.hits) == 1 else 'are'} started again"
    left_s = None if now.gives_up_s is None else now.gives_up_s - waited_s
    more = f"It gives up in {span(left_s)}." if left_s is not None and left_s > 0 else ""
    return Headline("bad" if waited_s > _LONG_WAIT_S else "warning", f"Waiting for {span(waited_s)}: {reason}.", more)


def _silent(facts: Facts, now: Now) -> Headline | None:
    """No events come although the job's processes live: the disk, or the coordinator, is the reason."""
    if not facts.course.last_step_ns:
        return None
    if (goes_on_untold(facts, now) or (_is_full(now) and facts.incidents.open is None)) and facts.stands_still(
        now.time_ns
    ):
        since = span(_s(facts.course.last_step_ns, now))
        text = f"Training is at step {step_of(facts, now)}, but nothing has been written for {since}"
        if now.live is None:  # nobody has said how far it is by now
            text = f"Step {facts.course.step} is the newest known, as nothing has been written for {since}"
        if _is_full(now):
            full = f": the disk is full ({_free(now)} left)."
            return Headline("warning", f"{text}{full}", "Events wait in memory; free some space.")
        return Headline("warning", f"{text}.", "Events wait in memory: can the job's files be written?")
    return None


def _held_up(facts: Facts, now: Now) -> Headline | None:
    """A fault holds training up, or a step takes much longer than usual."""
    incident = facts.incidents.open
    late = facts.stands_still(now.time_ns)
    if incident is None and not late:
        return None
    first = not facts.progress_ns and incident is not None  # no step of this start was done: it takes longer
    since_ns = incident.begin_ns if first and incident is not None else facts.progress_ns
    passed_s = _s(since_ns, now) if since_ns else 0.0
    usual_s = facts.course.pace.usual_s
    beyond = passed_s > (_LONG_FIRST_S if first else max(_BEYOND_HELP_S, _BEYOND_HELP * (usual_s or 0.0)))
    no_answer = now.asked and now.live is None
    level = "bad" if beyond or (late and no_answer and passed_s > _SILENT_S) else "warning"
    what = _cure(incident, facts, now) if incident is not None else _blame(facts, now)
    if no_answer and incident is None:
        what = "the coordinator does not answer"
        if late and level == "warning":
            return Headline(level, f"{_stands(facts, now)}: {what}.", "The job restarts it if it stays silent.")
    if late:
        return Headline(level, f"{_stands(facts, now)}: {what}.", _help(level, incident))
    text = f"Recovering for {span(_s(incident.begin_ns, now) if incident else 0)}: {what}."
    return Headline(level, text, _help(level, incident) if level == "bad" else "")


def _stands(facts: Facts, now: Now) -> str:
    """Words about a late step: No step for 6 s (usually 0.3 s)."""
    if not facts.stands_still(now.time_ns):
        return ""
    usual_s = facts.course.pace.usual_s
    usually = f" (usually {span(usual_s)})" if usual_s is not None else ""
    return f"No step for {span(_s(facts.progress_ns, now))}{usually}"


def _cure(incident: Incident, facts: Facts, now: Now) -> str:
    """The system's reaction to an incident."""
    ago = f"{span(_s(incident.begin_ns, now))} ago"
    if incident.suspect:
        reasons = "; ".join(hit.reason for hit in incident.hits.values() if hit.reason)
        waits = span(_s(incident.begin_ns, now))
        return f"{incident.brief} for {waits}{f' ({reasons})' if reasons else ''}, and is evicted if it stays so"
    if incident.planned_ns is None:
        return f"{incident.brief} {ago}, and a new plan is being made"
    if facts.course.redo_to:
        return f"doing steps {facts.course.step + 1} to {facts.course.redo_to} again since {incident.brief} {ago}"
    did = ", ".join(text for text in incident.done)
    return f"redoing step {incident.again} since {incident.brief} {ago}{f'; {did}' if did else ''}"


def _blame(facts: Facts, now: Now) -> str:
    """Without a known reason: the worker that the others wait for."""
    members = {i for i, worker in facts.crew.workers.items() if worker.role in MEMBERS}
    phases = {i: phase for i, phase in now.phases.items() if i in members and phase}
    counted = Counter(phases.values())
    if len(counted) == 1 and next(iter(counted)) not in _PASSIVE:
        return f"all workers are in the phase {next(iter(counted))!r}"
    busy = sorted(i for i, phase in phases.items() if phase not in _PASSIVE)
    if busy and len(busy) < len(phases):
        named = ", ".join(f"worker {i} ({phases[i]})" for i in busy[:3])
        return f"the others wait for {named}{' and more' if len(busy) > 3 else ''}"
    return "no fault has been noticed yet"


def _help(level: str, incident: Incident | None) -> str:
    if level == "bad":
        return "It does not seem to go on by itself: look at the logs of the workers."
    return "" if incident is not None else "A worker that hangs is evicted when its time limit is over."


# ---- it trains, but


def _again(facts: Facts, now: Now) -> Headline | None:
    began_ns = facts.course.began_again_ns
    if not facts.course.redo_to or facts.incidents.open is not None or began_ns is None:
        return None
    why = f", since the job was started again {span(_s(began_ns, now))} ago"
    for incident in facts.incidents.all:
        if incident.begin_ns <= began_ns <= max(incident.end_ns or 0, incident.planned_ns or 0):
            why = f", since {incident.brief} {span(_s(incident.begin_ns, now))} ago"
    at = step_of(facts, now)
    where = f" (now at step {at})" if facts.course.step < at <= facts.course.redo_to else ""
    text = f"Doing steps {facts.course.step + 1} to {facts.course.redo_to} again, to the same bits{where}{why}."
    passed_s = _s(began_ns, now)
    due_s = (facts.course.redo_to - facts.course.step + 1) * (facts.course.pace.usual_s or 0.0)
    late = passed_s > max(_BEYOND_HELP_S, 4 * due_s)
    return Headline("bad" if late else "warning", text, f"This has taken {span(passed_s)} so far." if late else "")


def _strange(facts: Facts, now: Now) -> Headline | None:
    """The newest step is not finite, or many of those before it were not."""
    strange, step = facts.course.strange, step_of(facts, now)
    if strange is not None and not strange.in_a_row and strange.often(step):
        return Headline("warning", f"Training goes on at step {step}, but {_not_finite(strange)}.")
    if strange is None or not strange.in_a_row:
        return None
    text = f"The loss or gradient of step {strange.last} is not finite."
    if strange.in_a_row > 1:
        text = f"The loss or gradient is not finite for {strange.in_a_row} steps, since step {strange.since}."
    if strange.level == "warning":
        return Headline("warning", text, f"{'' if strange.applied else f'{_unmade(strange)}. '}Training goes on.")
    return Headline(
        "bad", text, "Training goes on, for nothing: stop it, and go on from a checkpoint before that step."
    )


def _unmade(strange: Strange) -> str:
    """Words about the newest steps, whose updates were left out."""
    updates = "Its update was" if strange.in_a_row == 1 else "Their updates were"
    return f"{updates} left out: the weights are those of step {strange.since - 1}"


def _was_strange(facts: Facts) -> str:
    """Words about past steps that were not finite, in a job that goes on well."""
    strange = facts.course.strange
    return f"T{_not_finite(strange)[1:]}." if strange is not None else ""


def _not_finite(strange: Strange) -> str:
    if strange.count == 1:
        return f"the loss or gradient of step {strange.last} was not finite"
    return f"the loss or gradient of {strange.count} steps was not finite, the last was step {strange.last}"


def _troubled(facts: Facts, now: Now) -> Headline | None:
    """Files cannot be written."""
    if _is_full(now):
        return Headline(
            "warning",
            f"The disk is full ({_free(now)} left): training goes on, and its events wait in memory.",
            "Free some space.",
        )
    failed = _failed(facts)
    if failed is not None:
        saved, ago = facts.checkpoint_step, f" {span(_s(failed.time_ns, now))} ago"
        whole = f"The newest whole one is of step {saved}." if saved else "There is no other."
        return Headline("warning", f"Training goes on, but {_failure(failed, ago)}.", whole)
    tiers = facts.checkpoints.tiers
    late = next((tier for name in _WHERE if (tier := tiers.get(name)) and _is_late(tier, now)), None)
    if late is not None:
        return _left_out(late, facts)
    if facts.full is not None and disk_trouble(facts, now):
        return Headline(
            "warning",
            f"Trouble with the disk {span(_s(facts.full.time_ns, now))} ago: {facts.full.reason}.",
            "Training goes on.",
        )
    if facts.slow is not None and _s(facts.slow.time_ns, now) < _LATELY_S:
        ago = span(_s(facts.slow.time_ns, now))
        return Headline("warning", f"Training goes on, but {facts.slow.reason} ({ago} ago).")
    return None


def _failed(facts: Facts) -> CheckpointFact | None:
    """The newest checkpoint of a tier, if it failed and none of that step is whole."""
    for tier in facts.checkpoints.tiers.values():
        tried, good = tier.tried, tier.good
        whole = tried is None or tried.ok or (good is not None and good.step == tried.step)
        if tried is not None and not whole:
            return tried
    return None


def _failure(failed: CheckpointFact, ago: str = "") -> str:
    where = _WHERE.get(failed.tier, f" in {failed.tier}")
    return f"the checkpoint of step {failed.step}{where} failed{ago}: {failed.reason}"


def _is_late(tier: TierCount, now: Now) -> bool:
    """Whether checkpoints of this tier have been left out for long."""
    return (tier.late >= _MANY_LEFT_OUT or tier.too_slow) and _s(tier.late_ns, now) > _LONG_SAVE_S


def _left_out(tier: TierCount, facts: Facts) -> Headline:
    where, saved = _WHERE[tier.newest.tier], facts.checkpoint_step
    which = f"checkpoints{where} are" if tier.too_slow else f"the last {tier.late} checkpoints{where} were"
    whole = f"The newest whole one is of step {saved}." if saved else "There is no other."
    reason = tier.left_out.reason if tier.left_out is not None else ""
    return Headline("warning", f"Training goes on, but {which} left out: {reason}.", whole)


def _fewer(facts: Facts, now: Now) -> Headline | None:
    members = facts.crew.seated
    wanted = whole_number((now.live or {}).get("target")) or facts.crew.wanted
    if members >= wanted:
        return None
    healing = sorted(i for i, worker in facts.crew.workers.items() if worker.state == "healing")
    missed = facts.incidents.missed()
    why = "; ".join(f"{one.brief} {span(_s(one.begin_ns, now))} ago" for one in missed[-2:])
    several = len(healing) != 1
    comes = f"; worker{'s' * several} {', '.join(map(str, healing[:6]))} heal{'s' * (not several)}" if healing else ""
    return Headline("warning", f"Training with {members} of {wanted} workers{f': {why}' if why else ''}{comes}.")


def _well(facts: Facts, now: Now) -> Headline:
    total = f" of {now.total}" if now.total else ""
    members = facts.crew.seated
    wanted = f" of {facts.crew.wanted}" if facts.crew.wanted else ""
    text = f"step {step_of(facts, now)}{total}, {members}{wanted} worker{'s' * (bool(wanted) or members != 1)}."
    silent = (now.asked and now.live is None) or as_dict(now.live).get("state") == "starting"
    if silent and now.running and facts.course.step:
        return Headline("warning", f"Training goes on, but the coordinator does not answer: {text}")
    text = f"All is well: {text}"
    last = facts.incidents.newest
    strange = _was_strange(facts)
    if last is None:
        return Headline("good", text, strange or "No fault so far.")
    went = f"; training went on after {span(last.stood_s)}" if last.stood_s else ""
    told = f"Last {last.kind} {span(_s(last.begin_ns, now))} ago: {last.brief}{went}."
    return Headline("good", text, f"{told} {strange}".strip())


def _is_full(now: Now) -> bool:
    return now.free_bytes is not None and now.free_bytes < _FULL_BYTES


def _free(now: Now) -> str:
    return f"{number(now.free_bytes) / 1000:.0f} kB"


_CASES: tuple[Callable[[Facts, Now], Headline | None], ...] = (
    _unreadable,
    _coming,
    _over,
    _by_itself,
    _died,
    _starting,
    _stopping,
    _finishing,
    _waiting,
    _silent,
    _again,
    _held_up,
    _strange,
    _troubled,
    _fewer,
)
