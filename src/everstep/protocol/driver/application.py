"""The application's asks, and their answers. Pure. Apart because an ask may outlive several generations, each of
which has to find again what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from everstep.base.cause import Cause, Why
from everstep.base.errors import InvariantViolation
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.joint_feeds import Followers
from everstep.protocol.driver.last_step import LastStep
from everstep.protocol.driver.operations import SaveAsked
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.records import last_states
from everstep.protocol.driver.saver import Saver
from everstep.protocol.settling import Sources
from everstep.protocol.step_machine import StepMachine
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import Key, Piecewise, Record

_UNSETTLED = frozenset({Phase.WAITING, Phase.SETTLING, Phase.FETCHING, Phase.UPDATING, Phase.LEFT, Phase.LACKING})


class Application:
    """One application's asks, one after the other.

    ask: the present one. asked: the step that it asked for last; one more once it is done with that step. ended: how
    the job has ended, if it has.
    """

    def __init__(
        self,
        machine: StepMachine,
        out: Outbox,
        saver: Saver,
        last: LastStep,
        rewindable: bool,
        bring_together: Callable[[], tuple[Sources, Piecewise]],
        followers: Followers,
    ) -> None:
        """bring_together: as `Settler` does."""
        self.ask: do.Ask | None = None
        self.asked = 0
        self.ended: wire.JobEnded | None = None
        self._machine = machine
        self._out = out
        self._saver = saver
        self._last = last
        self._rewindable = rewindable
        self._bring_together = bring_together
        self._gather = Key(0, 0)
        self._finished = 0
        self._jumped = False
        self._followers = followers
        self._told_left = Key(-1, 0)
        self._data = b""

    @property
    def settled(self) -> bool:
        """Whether this worker is a member that may go on as soon as queued events are handled."""
        return self._machine.phase not in _UNSETTLED

    @property
    def holds(self) -> bool:
        """Whether the application has raised, so that it computes nothing more."""
        return isinstance(self.ask, do.HoldAsked)

    @property
    def finishing(self) -> tuple[do.EndAsked, Mapping[int, Record]] | None:
        """The application's end, and the records by which all members are done with the last step; until the result
        is begun in this generation."""
        ask, machine = self.ask, self._machine
        ready = self.settled and not self.ended and self._gather in self._last.gathers.known
        if not ready or not isinstance(ask, do.EndAsked) or self._finished == machine.generation:
            return None
        return None if self._last.gathers.disagrees(self._gather) else (ask, self._last.gathers.known[self._gather])

    @property
    def loop(self) -> Literal["", "left", "on"]:
        """State of the loop after this worker's step: "left", "on", or "" if unknown."""
        match self.ask:
            case do.EndAsked(left=left) if left or self._last.gathers.disagrees(self._gather):
                return "" if self._jumped else "left"
            case do.GatherAsked() | do.SaveAsked() if self._last.gathers.disagrees(self._gather):
                return "on"
            case do.StepAsked() if self.past and not self._jumped:
                return "on"
        return ""

    @property
    def past(self) -> bool:
        """Whether the application is done with the step whose state this worker has."""
        return self.asked > self._machine.position.step

    @property
    def answerable(self) -> bool:
        """Whether the ask can be answered now in a way that lets the application go on."""
        ask, known = self.ask, self._last.gathers.known
        if self.ended or self._last.ends_job or not self.settled or isinstance(ask, do.HoldAsked):
            return False
        match ask:
            case do.StepAsked(step=wanted) if not self._jumped:
                at = self._machine.step
                return at == wanted or (self._rewindable and at > wanted)
            case do.GatherAsked() | SaveAsked() if not self._jumped:
                return self._gather in known and not self._last.gathers.disagrees(self._gather)
        return self._jumped or isinstance(ask, do.JoinAsked)

    @property
    def waits(self) -> bool:
        """Whether the application, once this worker is settled, changes the state only after a decision that all
        members take: it has asked for the next step, or for a gather that nobody has decided."""
        match self.ask:
            case do.StepAsked(step=wanted):
                return not self._jumped and wanted == self._machine.step + 1
            case do.GatherAsked() | SaveAsked() | do.EndAsked():
                return not (self._jumped or self.ended or self._gather in self._last.gathers.known)
        return False

    # ---- what happens

    def end(self, message: wire.JobEnded) -> None:
        self.ended = message
        if message.state != "completed":
            self.answer(do.Exit(message.reason, failed=True))

    def went_back(self) -> None:
        """The state is that of another step: the application goes on from there and counts its gathers from 0."""
        self._jumped, self._gather, self.asked = True, Key(0, 0), 0

    def answer(self, answer: do.Answer) -> None:
        """Answer the application's ask; it has the turn from here on."""
        self.ask = None
        self._out.put(answer)

    # ---- asks

    def take(self, event: do.Ask) -> bytes | None:
        """Take an ask. Returns the data to be gathered for it, if any."""
        leaves = isinstance(event, do.HoldAsked | do.EndAsked)
        if self.ask is not None and not leaves:
            raise InvariantViolation(f"{event} before {self.ask} was answered")
        self.ask = event
        match event:
            case do.StepAsked():
                self.asked = event.step
                if self._last.ends_job:
                    self.answer(do.EndsJob(self._last.ends_job))
                else:
                    self._offer_feeds()
            case do.GatherAsked():
                return self._begin_gather(event.data)
            case SaveAsked():
                return self._begin_gather(self._saver.verdict(event))
            case do.EndAsked():
                self._finished, self.asked = 0, self._machine.step + 1
                if event.left:
                    self._tell_left()
                return self._begin_gather(b"")  # proves that all have committed the last step
            case do.HoldAsked() if self.settled and self._machine.step:
                self._out.put(do.DropLanes())
                self._out.send(event.words)
            case do.HoldAsked():
                self.answer(do.Released())
        return None

    def _tell_left(self) -> None:
        machine = self._machine
        if self._told_left != machine.position:
            self._told_left = machine.position
            self._out.tell(wire.LoopLeft, generation=machine.generation, step=machine.step)

    def again(self) -> bytes | None:
        """A generation goes on. Returns the data to be gathered again: members whose loops were over, while those of
        others went on, may be gone."""
        if isinstance(self.ask, do.GatherAsked | do.SaveAsked | do.EndAsked) and self._last.gathers.disagrees(
            self._gather
        ):
            return self._begin_gather(self._data)
        return None

    def _begin_gather(self, data: bytes) -> bytes | None:
        at, before, self._data = self._machine.position.step, self._gather, data
        self._gather = Key(at, before.seq + 1 if before.step == at else 1)
        while self._last.gathers.disagrees(self._gather):
            self._gather = Key(at, self._gather.seq + 1)
        if self._gather in self._last.gathers.known or self.ended:
            return None
        return data

    def _offer_feeds(self) -> None:
        """Feed joiners that asked: the state does not change now, between two steps."""
        machine, followers = self._machine, self._followers
        waits = machine.phase is Phase.IDLE and followers.tickets
        tickets = followers.ready(self._last.asked) if waits else frozenset()
        if machine.phase is Phase.IDLE and (followers.asked or tickets):
            followers.served()
            known, stages = dict(self._last.gathers.known), machine.stages
            held = {k: machine.held[k] for k in stages if not machine.held[k].whole}
            self._out.put(do.OfferFeeds(machine.position, machine.records, known, stages, held, tickets))

    # ---- answers

    def go_on(self) -> None:
        """Answer the ask, or begin the operation that it waits for, if that is possible now."""
        answer, machine = self._answer(), self._machine
        if answer is not None:
            self.answer(answer)
        elif self.settled and isinstance(self.ask, do.EvaluateAsked):
            self._out.start(do.Evaluate, machine.generation, machine.plan, self._gather.seq)
        elif not self.settled or not isinstance(self.ask, do.EndAsked) or self._gather not in self._last.gathers.known:
            return
        elif self._last.gathers.disagrees(self._gather):
            self._tell_left()
        elif self._finished != machine.generation:
            self._finished = machine.generation
            why = Why(Cause.COMPLETED, "the end of the job")
            save = self._saver.boundary(why, past=self.past, metrics=self.ask.metrics)
            said = last_states(self._last.gathers.known[self._gather]).values()
            digests = {one.stage: one.digest for states in said for one in states}
            at = machine.step, save, digests, machine.position
            self._out.start(do.Finish, machine.generation, machine.plan, *at, *self._bring_together())

    def _answer(self) -> do.Answer | None:
        """The answer to the ask, if there is one yet."""
        ask = self.ask
        if isinstance(ask, do.HoldAsked):
            return do.Released() if self.ended or self._out.times.now_ns >= ask.until_ns else None
        member = self.settled
        if member and isinstance(ask, do.JoinAsked):
            self._jumped = False
            ends = self._last.ends_job  # it has followed, and carried out the step with which the job ends
            return do.EndsJob(ends) if ends else do.Arrived(self._machine.step)
        if member and self._jumped:
            self._jumped = False
            return do.WentBack(self._machine.step)
        if member and isinstance(ask, do.StepAsked) and self._machine.step >= ask.step:
            return self._stepped(ask.step)
        if isinstance(ask, do.GatherAsked | SaveAsked | do.EndAsked):
            return self._answer_gather(ask)
        if not self.ended:
            return None
        if isinstance(ask, do.EvaluateAsked):
            return do.Evaluated()
        return do.Exit("the job is over, and this worker was not needed", drained=True)

    def _stepped(self, wanted: int) -> do.Answer:
        at = self._machine.step  # later than the step asked for if the state was copied from members that are there
        if at == wanted:
            return do.EndsJob(self._last.ends_job) if self._last.ends_job else do.Stepped(at)
        if self._rewindable:
            return do.WentBack(at)
        return do.Exit(f"the others are at step {at}, while step {wanted} was under way here: this worker restarts")

    def _answer_gather(self, ask: do.GatherAsked | SaveAsked | do.EndAsked) -> do.Answer | None:
        if not isinstance(ask, do.EndAsked) and (self._gather in self._last.gathers.known or self.ended):
            records = self._last.gathers.known.get(self._gather, {})
            if self._last.gathers.disagrees(self._gather) and not self.ended:
                return None  # whose loop is over has told so: the job ends
            if isinstance(ask, SaveAsked) and not self.ended:
                self._saver.judged(ask, records, past=self.past or ask.past)
            return do.GatherDone(records)
        if self.ended:
            return do.JobOver()
        if self.settled and self._machine.step > self._gather.step:  # else it may have to be told that it went back
            key = self._gather
            return do.Exit(f"the others have decided {key} without this worker; it has to restart")
        return None
