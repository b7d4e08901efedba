"""State that the user's loop changes (`state=` of join, and the model's settings), as it was at two moments of each
round.

A worker that gets a step's state enters the loop's body for that step again, and the donor's loop has gone on by then.
So the body begins with the state at the moment when the donor entered it. From its batches on, of which none are left,
it has the state right after the update. So the code before the batches is done once, and so is the code after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from everstep.exact.settings import Moment
from everstep.exact.unchanged import BUFFER, UnchangedTensors
from everstep.train.heal import StateCopy, moved_in, pack_state, unpack_state, with_entry, with_moved
from everstep.train.loop_survey import LoopSurvey
from everstep.train.stage_lanes import StageLanes
from everstep.train.view import Stages


@dataclass
class _Entry:
    """The entry into the body of a step's round. given: another worker's copy, packed; None: it was here."""

    number: int
    given: bytes | None = None
    copy: StateCopy = field(default_factory=StateCopy)
    moment: Moment | None = None


class LoopMoves:
    """What the loop changes in trained tensors after the batches of a step. known: whether it has ever done so. told:
    by name, what has been changed since the update, as of the next round's batches. astray: name of a tensor that has,
    or may have, another value than after the update while the loop waits for other workers; "" if none has."""

    def __init__(self) -> None:
        self.known = False
        self.told: dict[str, Tensor] = {}
        self.astray = ""
        self._tensors: UnchangedTensors | None = None
        self._round = 0

    def begin(self, tensors: UnchangedTensors) -> None:
        self._tensors = tensors

    def enter(self, number: int) -> None:
        """The body is about to be entered, for this step."""
        self._round = number

    def reach(self) -> bool:
        """The loop has come to the batches of its round. Returns whether its first change has shown."""
        # Lanes change buffers; nothing changes parameters and the optimizer's state before the next update.
        found = {} if self._tensors is None else self._tensors.moved()
        self.told = {name: t.detach().clone() if name.startswith(BUFFER) else t for name, t in found.items()}
        known, self.known = self.known, self.known or bool(found)
        return self.known and not known

    def updated(self, *, followed: bool = False) -> None:
        """The tensors are as an update, or another worker, has left them. followed: as for `UnchangedTensors`."""
        self.told = {}
        if self._tensors is not None:
            self._tensors.updated(followed=followed)

    def put_back(self) -> None:
        """An evaluation has put back what it has changed."""
        if self._tensors is not None:
            self._tensors.put_back()

    def loaded(self) -> None:
        """Blocks have come from others, at the step where this worker is."""
        if not self.told:
            self.updated()

    def midway(self) -> str:
        """Name of a tensor that the loop has changed since the update; a worker that goes on from here would do so
        again. "" if there is none."""
        found = {} if self._tensors is None else self._tensors.moved(midway=True)
        return next(iter(found), "")

    @contextmanager
    def waiting(self) -> Iterator[str]:
        """While inside, the loop is between an update and further batches, and waits. Yields as `midway`."""
        moved, before = self.midway(), self.astray
        self.astray = moved or ("a parameter" if self._tensors is not None and self._tensors.hides else "")
        try:
            yield moved
        finally:
            self.astray = before

    def past(self, number: int) -> bool:
        """Whether the loop has changed tensors after this step and has gone on: a taker must not repeat the change."""
        return bool(self.told) and self._round == number + 1

    def take(self, data: bytes, lanes: StageLanes) -> None:
        """Make the changes that another worker's loop has made, which come with its state."""
        if (moved := moved_in(data)) and self._tensors is not None:
            lanes.settle_buffers()
            self._tensors.give(moved)


def _stayed(tensors: UnchangedTensors | None) -> bool:
    """Let the tensors change. Returns whether they had to stand still. Raises: Uncarried if one has changed."""
    if tensors is None:
        return False
    tensors.check()
    return tensors.release()


class LoopState:
    """Loop state of one worker. moves: its changes of trained tensors after an update."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._initial = b"" if stages.split else pack_state(stages.only.application)
        self._step = -1
        self._copy = StateCopy()
        self._entries: list[_Entry] = []
        self._again = b""
        self._unchanged: UnchangedTensors | None = None
        self.moves = LoopMoves()
        self.survey: LoopSurvey | None = None

    def watch(self, survey: LoopSurvey) -> None:
        """Set the survey, which looks with each checkpoint for other changes of the loop."""
        self.survey = survey

    def changed(self) -> tuple[str, ...]:
        """Names that were found to have changed, and are not carried."""
        return self.survey.changed if self.survey is not None else ()

    def refuse(self, names: Sequence[str], where: str) -> None:
        """This worker's loop starts over, with a state in which these had changed. Raises: ConfigError."""
        if self.survey is not None and names:
            self.survey.refuse(names, where)

    # ---- the moments of a round

    def begin(self, prepares: bool, *, hides: bool = False) -> None:
        """The loop is about to begin. prepares: its body may do something before it comes to the batches. hides: as for
        `UnchangedTensors`."""
        parts = self._stages.only.parts
        self._stages.only.state.settings.begin()
        tensors = UnchangedTensors(parts.model, parts.optimizer, hides=hides)
        self.moves.begin(tensors)
        self._unchanged = tensors if prepares else None

    def enter(self, number: int) -> None:
        """The loop's body is about to be entered, for the next step."""
        replica = self._stages.any
        self.moves.enter(number)
        if self._unchanged is None:
            return
        self._unchanged.begin()
        copy = self._entries.pop().copy if len(self._entries) > 1 else StateCopy()
        moment = replica.state.settings.enter()
        if replica.application.extras:
            copy.take(replica.application)
        self._entries = [_Entry(number, None, copy, moment), *self._entries]

    def enter_again(self, number: int) -> None:
        """The loop's body is about to be entered for a step that is done: `reach` puts back the state after it."""
        if self._unchanged is None:
            return
        self._unchanged.begin()
        application, entry = self._stages.any.application, self.entered(number)
        self._again = self.after(number) or pack_state(application, {})
        if entry:
            unpack_state(application, entry)

    def reach(self) -> bool:
        """The loop has come to the batches of its round. Returns whether it has changed trained tensors after the
        batches before, for the first time. Raises: Uncarried for a change that cannot be put back."""
        _stayed(self._unchanged)
        again, self._again = self._again, b""
        if again:
            unpack_state(self._stages.any.application, again)
        return self.moves.reach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, changes of tensors are not the loop's. Raises: as `reach`."""
        stayed = _stayed(self._unchanged)
        with self.moves.waiting() as moved:
            yield
        if not moved:
            self.moves.put_back()  # an evaluation does so with buffers
        if stayed and self._unchanged is not None:
            self._unchanged.begin()

    def remember(self, number: int, *, followed: bool = False) -> None:
        """The state is that of this step, and the loop does not know it yet. followed: as for `UnchangedTensors`."""
        replica = self._stages.any
        if self._step != number:  # a loop that stays at a step has gone on since
            self._again = b""
            replica.state.settings.after_update()
            if replica.application.extras:
                self._copy.take(replica.application)
            self.moves.updated(followed=followed)
        self._step = number

    # ---- exchange with other workers

    def after(self, number: int) -> bytes:
        """State right after this step's update; empty if the loop has none, or the update is not the newest."""
        if self._step != number:
            return b""
        if self._again:
            return self._again
        settings = self._stages.any.state.settings
        return self._packed(self._copy, settings.after())

    def entered(self, number: int) -> bytes:
        """State at the entry into the loop's body for this step; empty if there is none, or it is lost."""
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
        """State for a worker that gets the state of this step: `after` and `entered`; empty if the loop has no
        state."""
        return self._joined(self.after(number), number)

    def fed(self, number: int) -> bytes:
        """State for a follower, which does not run this loop: the state before this step's update, `entered`, and the
        tensors that the loop has moved."""
        return with_moved(self._joined(pack_state(self._stages.any.application), number), self.moves.told)

    def going_on(self, number: int) -> bytes:
        """State for a worker that begins with this step's round, as `take_entered` takes it."""
        return self.entered(number) or pack_state(self._stages.any.application)

    def _joined(self, state: bytes, number: int) -> bytes:
        entry = self.entered(number)
        return with_entry(state or pack_state(self._stages.any.application, {}), entry) if entry else state

    def take(self, data: bytes, number: int) -> None:
        """Take on state from `told` or `fed`. A worker that is at this step already keeps its own rounds."""
        replica = self._stages.any
        entry = unpack_state(replica.application, data)
        self.moves.take(data, replica.lanes)
        if self._step != number:
            self._entries = [_Entry(number, entry)]

    def take_entered(self, data: bytes) -> None:
        """Take on state from `entered` for the next step."""
        if data:
            unpack_state(self._stages.any.application, data)

    def went_back(self, number: int) -> None:
        """The state is that of this step: the loop goes on from there."""
        state = self.after(number) if number else self._initial
        if state:
            unpack_state(self._stages.any.application, state)
        self._step, self._entries, self._again = -1, [], b""
