"""Changes of a running loop beside the state that `join` carries: looked for with each checkpoint, off the step's path.

The first look is before the first step of a life, the second after its first steps, for which the rehearsal is
responsible. A value that is the same in both and different later is lost on resume, unless code that was read shows it
to be harmless. Apart from the rehearsal because this is about the job itself, for as long as it lasts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import msgspec

from everstep.base.cause import Cause
from everstep.base.errors import ConfigError
from everstep.script.carried_names import Read, Trained, is_run, read_loop
from everstep.script.loop_values import held, shared
from everstep.script.reachable import Carried, Fact, Survey, loop_frames, variables
from everstep.script.restarts import differing, is_one_of
from everstep.train.view import WorkerView

CHANGED = "changed"
"""Part of a checkpoint: names that had changed, and names that were not looked into."""
LIMIT_S = 0.1
_FIRST_LIMIT_S = 0.05
_PATIENCE_S = 1.0
_STEPS = 3
_MOST_NAMES, _MOST_CHARACTERS = 50, 200
_MOST_TENSOR_BYTES = 1 << 16


class _Recorded(msgspec.Struct):
    changed: list[str]
    unseen: list[str] = []


_recorded = msgspec.json.Decoder(_Recorded)


@dataclass
class LoopSurvey:
    """Survey of one life. carried: gives the present objects that `join` carries; trained: the same, for the reading of
    code. tell: says a sentence to the user."""

    carried: Callable[[], Carried]
    trained: Trained
    tell: Callable[[str], None]
    changed: tuple[str, ...] = ()
    _unseen: tuple[str, ...] = ()
    _turns: int = 0
    _first: dict[str, Fact] = field(default_factory=dict)
    _moving: set[str] = field(default_factory=set)
    _read: Read = field(default_factory=Read)
    _thread: threading.Thread | None = None

    def turn(self, frame: FrameType) -> None:
        if self._turns == 0:
            frames = loop_frames(frame)
            self._first = self._look(frames, _FIRST_LIMIT_S)
            try:
                self._read = read_loop(frames, self.trained)
            except Exception as error:  # the user's objects may raise at any look
                self._read = Read(notes=(f"the loop ({type(error).__name__})",))
        elif self._turns == _STEPS:
            self._moving = differing(self._first, self._look(loop_frames(frame), LIMIT_S))
        self._turns += 1

    def begin(self, frame: FrameType) -> None:
        """A checkpoint is being taken: look, in a thread. Raises: ConfigError for `shared` memory."""
        if text := shared(self.trained.carried, self.trained.model, self.trained.optimizer):
            raise ConfigError(text)
        if self._turns > _STEPS and (self._thread is None or not self._thread.is_alive()):
            frames = loop_frames(frame)
            thread = threading.Thread(target=self._compare, args=(frames,), name="everstep-survey", daemon=True)
            thread.start()
            self._thread = thread  # known once it runs: another thread may wait for it at any moment

    def record(self) -> dict[str, bytes]:
        """Entry for the checkpoint. Waits for a look that is under way; not called in the training thread."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
        if not self.changed:
            return {}
        said = {"changed": list(self.changed[:_MOST_NAMES]), "unseen": list(self._unseen[:_MOST_NAMES])}
        return {CHANGED: json.dumps(said).encode()}

    def refuse(self, names: Sequence[str], where: str) -> None:
        """Check a state in which these had changed, for a loop that starts over.

        Raises: ConfigError if one of them may not be lost.
        """
        ignored = [given for given in self.trained.ignored if isinstance(given, str)]
        lost = [name for name in names if not is_one_of(name, ignored)]
        if lost:
            raise ConfigError(
                f"{where}: the loop had changed {', '.join(lost[:5])}, which join does not carry, so this worker would "
                "go on with different values: give join state=everstep.state(...) that holds it, or "
                f"ignore={lost[:5]!r} if no later step depends on it"
            )

    def _compare(self, frames: Sequence[FrameType]) -> None:
        found = self._look(frames, LIMIT_S)
        both = {name: fact for name, fact in found.items() if name in self._first}
        moved = differing({name: self._first[name] for name in both}, both) - self._moving
        named = sorted({_whole(name) for name in moved if not is_one_of(_whole(name), self._read.harmless)})
        news = [name for name in named if name not in self.changed][: _MOST_NAMES - len(self.changed)]
        self.changed = (*self.changed, *(name[:_MOST_CHARACTERS] for name in news))
        for name in news:
            self.tell(
                f"{name} has changed since the first steps, and join does not carry it: a worker that is resumed or "
                "healed would begin with another value, and is refused; give join state=everstep.state(...) that holds "
                f"it, or ignore=['{name}'] if no later step depends on it"
            )

    def _look(self, frames: Sequence[FrameType], limit_s: float) -> dict[str, Fact]:
        scopes = [f.f_locals["self"] for f in frames if "self" in f.f_locals]
        named = [f.f_globals for f in frames]
        until_s = time.thread_time() + limit_s
        survey = Survey(self.carried(), self.trained.ignored, scopes, named, until_s, _MOST_TENSOR_BYTES, trusting=True)
        survey.look(list(variables(frames)))
        self._unseen = tuple(f"{name}: {what}"[:_MOST_CHARACTERS] for name, what in survey.unseen.items())
        return {name: fact for name, fact in survey.facts.items() if name != "model" and not name.startswith("model.")}


def recorded(data: bytes | None) -> tuple[str, ...]:
    """Changed names in a checkpoint's entry."""
    if not data:
        return ()
    try:
        return tuple(_recorded.decode(data).changed[:_MOST_NAMES])
    except msgspec.MsgspecError:
        return ("something that its manifest does not name",)


def _whole(name: str) -> str:
    """Name of the container, rather than of its element."""
    return name.split("[")[0]


def watching(view: WorkerView, dataset: Any, collate: Any, ignored: tuple[Any, ...]) -> LoopSurvey:
    """The survey of this worker's life."""
    parts = view.stages.only.parts
    given = parts.model, parts.optimizer, parts.scheduler

    def tell(reason: str) -> None:
        if view.is_main:
            view.publisher.emit("warning", step=view.step, cause=Cause.CONFIG, reason=reason)

    trained = Trained(*given, held(parts.extras), dataset, collate, is_run, ignored)
    return LoopSurvey(lambda: Carried.of(*given, *held(parts.extras)), trained, tell)
