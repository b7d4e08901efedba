"""What the user's loop changes (`state=` of join, and how the model is set), as it was at two moments of each round.

A worker that gets a step's state enters the loop's body for that step once more, and the donor's loop has gone on by
then. So it begins from what held when the donor entered that body, and from its batches on, of which none are left, has
what held right after the update: what stands before the batches is done once, and what stands after them, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from everstep.exact.settings import Moment
from everstep.exact.unchanged import StandingTensors
from everstep.train.heal import StateCopy, pack_state, unpack_state, with_entry
from everstep.train.loop_survey import LoopSurvey
from everstep.train.view import Stages


@dataclass
class _Entry:
    """The body of a step's round was entered. given: what others have told of it, packed; else it was here."""

    number: int
    given: bytes | None = None
    copy: StateCopy = field(default_factory=StateCopy)
    moment: Moment | None = None


class LoopState:
    """Of one worker."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._initial = b"" if stages.split else pack_state(stages.only.application)
        self._step = -1
        self._copy = StateCopy()
        self._entries: list[_Entry] = []
        self._again = b""
        self._standing: StandingTensors | None = None
        self.survey: LoopSurvey | None = None

    def watch(self, survey: LoopSurvey) -> None:
        """What else the loop changes is looked at with each checkpoint."""
        self.survey = survey

    def changed(self) -> tuple[str, ...]:
        """The names of what was found to have changed, and is not carried."""
        return self.survey.changed if self.survey is not None else ()

    def refuse(self, names: Sequence[str], where: str) -> None:
        """This worker's loop begins anew, with a state in which these had changed. Raises: ConfigError."""
        if self.survey is not None and names:
            self.survey.refuse(names, where)

    # ---- the moments of a round

    def begin(self, prepares: bool) -> None:
        """The loop is about to begin. prepares: it may do something in its body before it comes to the batches."""
        parts = self._stages.only.parts
        self._stages.only.state.settings.begin()
        self._standing = StandingTensors(parts.model, parts.optimizer) if prepares else None

    def enter(self, number: int) -> None:
        """The loop's body is about to be entered, for the next step."""
        replica = self._stages.any
        if self._standing is None:
            return
        self._standing.begin()
        copy = self._entries.pop().copy if len(self._entries) > 1 else StateCopy()
        moment = replica.state.settings.enter()
        if replica.application.extras:
            copy.take(replica.application)
        self._entries = [_Entry(number, None, copy, moment), *self._entries]

    def enter_again(self, number: int) -> None:
        """The same, for a step that is done: `reach` puts back what holds after it."""
        if self._standing is None:
            return
        self._standing.begin()
        application, entry = self._stages.any.application, self.entered(number)
        self._again = self.after(number) or pack_state(application, {})
        if entry:
            unpack_state(application, entry)

    def reach(self) -> None:
        """The loop has come to the batches of its round. Raises: Uncarried for a change that cannot be put back."""
        if self._standing is not None:
            self._standing.check()
            self._standing.release()
        again, self._again = self._again, b""
        if again:
            unpack_state(self._stages.any.application, again)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile it is not the loop that changes tensors. Raises: as `reach`."""
        stood = False
        if self._standing is not None:
            self._standing.check()
            stood = self._standing.release()
        yield
        if stood and self._standing is not None:
            self._standing.begin()

    def remember(self, number: int) -> None:
        """The state is that of this step, and the loop does not know it yet."""
        replica = self._stages.any
        if self._step != number:  # whoever stays at a step has gone on since
            self._again = b""
            replica.state.settings.after_update()
            if replica.application.extras:
                self._copy.take(replica.application)
        self._step = number

    # ---- for others, and from them

    def after(self, number: int) -> bytes:
        """Right after this step's update; empty if the loop has no state, or the update is not the newest."""
        if self._step != number:
            return b""
        if self._again:
            return self._again
        settings = self._stages.any.state.settings
        return self._packed(self._copy, settings.after())

    def entered(self, number: int) -> bytes:
        """When the loop's body was entered for this step; empty if it has no state, or that is not known any more."""
        entry = next((e for e in self._entries if e.number == number), None)
        if entry is None or entry.given is not None:
            return (entry.given or b"") if entry is not None else b""
        moment = entry.moment
        return self._packed(entry.copy, {} if moment is None else self._stages.any.state.settings.as_of(moment))

    def _packed(self, copy: StateCopy, settings: dict[str, object]) -> bytes:
        replica = self._stages.any
        if replica.application.extras:
            return copy.packed(settings)
        return pack_state(replica.application, settings) if settings or replica.state.settings.now() else b""

    def told(self, number: int) -> bytes:
        """For whoever gets the state of this step: `after` and `entered`; empty if the loop has no state."""
        return self._joined(self.after(number), number)

    def fed(self, number: int) -> bytes:
        """For whoever follows, which does not run this loop: what holds before this step's update, and `entered`."""
        return self._joined(pack_state(self._stages.any.application), number)

    def _joined(self, state: bytes, number: int) -> bytes:
        entry = self.entered(number)
        return with_entry(state or pack_state(self._stages.any.application, {}), entry) if entry else state

    def take(self, data: bytes, number: int) -> None:
        """Take on what `told` or `fed` has given. Who is at this step already has its own rounds."""
        entry = unpack_state(self._stages.any.application, data)
        if self._step != number:
            self._entries = [_Entry(number, entry)]

    def take_entered(self, data: bytes) -> None:
        """Take on what `entered` has given of the step that comes next."""
        if data:
            unpack_state(self._stages.any.application, data)

    def went_back(self, number: int) -> None:
        """The state is that of this step: the loop goes on from there."""
        state = self.after(number) if number else self._initial
        if state:
            unpack_state(self._stages.any.application, state)
        self._step, self._entries, self._again = -1, [], b""
