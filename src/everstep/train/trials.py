"""Lives beside the rehearsal's, for `everstep check`: does the training depend on what differs from process to process?

A life whose surroundings are all different must do the same work, to the same state. If it does not, lives in which one
line reads something else show which line is to blame; and if none is, two lives whose lines are followed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from everstep.base.errors import Restructured
from everstep.runtime.link.address import CHECKPOINTS_DIR
from everstep.script.ambient import ALL, RESEEDING, Setting, parts_of
from everstep.script.line_trace import Divergence, first_divergence, where_restructured, where_written
from everstep.script.restarts import TRAINING, Finding, differing
from everstep.script.stretches import set_cursor, unrun
from everstep.script.watched_life import BEFORE, RUN, LifeWatch, read_rows
from everstep.train.rehearsal import LEFT, Fork, Judgement, LifeLink, Rehearsal, Rehearsed, Sighting, fork_life

_MOST_SITES, _MOST_STRETCHES = 24, 5
_PINNED, _STILL = Setting(pinned=True), Setting(pinned=True, still=True)
_WORDS = {
    "time": ("the clock", "let it follow from step.number, or from the generators that are seeded for every lane"),
    "dat": ("the clock", "let it follow from step.number, or from the generators that are seeded for every lane"),
    "os.environ": (
        "a variable that other hosts and workers may have another value of",
        "give it to the script as an argument, which all workers get alike",
    ),
    "hash": ("the hash of a text, which differs from process to process", "use hashlib, which gives the same anywhere"),
    "os.listdir": ("the order of a folder's files, which differs from host to host", "sort the names"),
    "os.scandir": ("the order of a folder's files, which differs from host to host", "sort the names"),
    "glob": ("the order of a folder's files, which differs from host to host", "sort the names"),
    "pathlib": ("the order of a folder's files, which differs from host to host", "sort the names"),
    "os.walk": ("the order of a folder's files, which differs from host to host", "sort the names"),
    "uuid": ("random bytes that no seed governs", "draw from the global generators, which are seeded for every step"),
    "os.urandom": ("random bytes that no seed governs", "draw from the global generators, which are seeded"),
    **dict.fromkeys(RESEEDING, ("a seed that differs from run to run", "delete it: every lane has seeds of its own")),
    "random.": ("random bytes that no seed governs", "draw from the global generators, which are seeded"),
    "secrets": ("random bytes that no seed governs", "draw from the global generators, which are seeded"),
}
_WHO = ("which process or host this is", "let all workers compute the same, whichever of them computes a lane")
_TWICE = "let the results of a batch depend on the batch, the model and step.number alone"
_MEND = "mend that, for a job would end, or lose a worker, in the same way"
_OF_STATE = ("IndexError", "KeyError", "StoreError", "CheckpointCorrupt", "BlobMissing")
"""Errors that may follow from a cursor that was set beside a state of another step."""
_BUFFER = "do not write to it in the forward pass; change it after the batches, from step.number or step.metrics"
_OF_LANES = ("DeterminismError", "LaneCarried", "TaskError", "Misused", "Uncarried")
_TOLD_TWICE = ("DeterminismError", "LaneCarried")
_KEPT = "keep no values from batch to batch, or only in buffers of the model"


@dataclass
class Trials:
    """Trials of one script or task. apart: begins a life in a process with other hashes. deaths: all lives that have
    died of themselves, also those of the rehearsal; each is a finding, whatever else is found."""

    what: Rehearsed
    body: Callable[[LifeLink], None]
    apart: Fork
    limit_s: float
    notes: list[str] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)
    deaths: list[Sighting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._until_s = time.monotonic() + self.limit_s
        self._stranger = self._rehearsal(LifeWatch(work=True, covered=True, setting=Setting(moved=(ALL,))), hashed=True)

    def begin(self) -> None:
        """Begin the life whose surroundings are all different."""
        self._stranger.begin("s")

    def close(self) -> None:
        self._stranger.close()

    def findings(self, verdict: Judgement, rehearsal: Rehearsal) -> list[Finding]:
        """All that the trials find, after the rehearsal."""
        first = verdict.seen
        if first.known:
            return [self._refused(first)]
        lives = [rehearsal.seen[life] for life in "bc" if life in rehearsal.seen]
        if first.late or any(life.late for life in lives) or (verdict.note and not first.error and not lives):
            return []
        control = rehearsal.seen.get("c") or rehearsal.result("c")
        if first.error:
            same = bool(verdict.findings) or control.late or control.error == first.error
            return [] if same else self._unsteady("one of them ends early: " + first.error, first)
        how = unlike(first, rehearsal.seen["b"])
        found = self._surroundings(first, control, how)
        if not found and not verdict.findings and how:
            why = "a worker that is resumed differs"
            found = self._followed(how, why, self._traced_lives("a", "b")) or [_somewhere(how, why, first)]
        return found if verdict.note else [*found, *self._stretches(first, steady=not found)]

    def died(self) -> list[Finding]:
        """A finding for each way in which lives have died of themselves."""
        ways = {death.error: death.place for death in self.deaths}
        name = os.path.basename(self.what.script)
        return [_ended(name, f"a run of a few steps died: {how}", place) for how, place in ways.items()]

    # ---- further steps

    def _stretches(self, first: Sighting, steady: bool) -> list[Finding]:
        """Go through other steps, to which the cursor is set. steady: nothing is known to make two runs differ."""
        steps = self.what.steps
        self.covered.append(f"steps 1 to {first.step} of {first.total}: resumed after step {max(1, first.step - 2)}")
        wanted = {at: why for why, at in first.ends.items()} | {first.total: "the last step"}
        missing = unrun(self._stranger.seen["s"].noted.lines, first.numbers, first.total)
        wanted |= {code.at: f"{os.path.basename(code.file)}:{code.line}: {code.text}" for code in missing if code.at}
        found: list[Finding] = []
        chosen = sorted(at for at in wanted if first.step < at <= first.total)
        for at in chosen[:_MOST_STRETCHES]:
            found += [f for f in self._stretch(at, wanted[at], steady) if f.object not in {g.object for g in found}]
        each_s = first.noted.seconds / max(1, first.step)
        reached = set(chosen[:_MOST_STRETCHES])
        for code in missing:
            if code.at not in reached:
                where = f"{os.path.basename(code.file)}:{code.line}"
                cost = (
                    f"--steps {code.at}: about {code.at * each_s:.0f} s a life" if code.at else "not by a step's number"
                )
                self.notes.append(f"{where}: {code.text}: no step came to it ({cost})")
        if first.total > steps:
            cost = f"--steps {first.total} would take about {first.total * each_s:.0f} s for each of five lives"
            self.notes.append(f"{first.total - steps} more steps: {cost}")
        return found

    def _stretch(self, at: int, why: str, steady: bool) -> list[Finding]:
        steps = self.what.steps
        folder = self.what.path(f"at{at}")
        origin = folder / "origin"
        folder.mkdir()
        set_cursor(self.what.path("b") / CHECKPOINTS_DIR, origin, max(1, at - steps + 1))
        watch = replace(self.what.watch, origin=str(origin))
        piece = replace(self.what, folder=str(folder), steps=at + 1, watch=watch)
        left_s = max(1.0, self._until_s - time.monotonic())
        lives = Rehearsal(piece, self.body, left_s, deaths=self.deaths)
        with closing(lives):
            verdict = lives.verdict()
        first, resumed = verdict.seen, lives.seen.get("b", verdict.seen)
        failed = next((life for life in (first, resumed) if life.error), None)
        if failed is not None and not ((failed is first and (first.late or first.kind in _OF_STATE)) or resumed.late):
            who = "a worker that goes on there" if failed is first else "a worker that is resumed"
            says = f"around step {at} ({why}) {who} ends early: {failed.error}"
            return [] if failed.died else [_ended(os.path.basename(self.what.script), says, failed.place)]
        if verdict.note or failed is not None:
            self.notes.append(f"steps around {at} ({why}): {verdict.note or first.error}")
            return []
        self.covered.append(f"steps {max(1, at - steps + 1) + 1} to {first.step} ({why}): resumed in between")
        found = list(verdict.findings)
        if steady and not found and (how := unlike(first, resumed)):
            found.append(_somewhere(how, f"around step {at} ({why}) a worker that is resumed differs", first))
        return found

    # ---- surroundings

    def _surroundings(self, first: Sighting, control: Sighting, resumed: str) -> list[Finding]:
        """resumed: how a resumed life differs, "" if it does not."""
        strange = self._stranger.result("s")
        natural = unlike(first, control)
        how = natural or ("" if strange.error else unlike(first, strange))
        self.covered.append(f"{len(strange.noted.sites)} readings of clocks, ids, variables and folders in the code")
        if not how and not resumed and not strange.error:
            return []
        sites = strange.noted.sites or self._life("n", Setting()).noted.sites
        found = self._by_site(sites)
        if strange.error and not (found and strange.kind == LEFT):
            self.notes.append(f"other surroundings, all at once: {strange.error}")
        if not found and how and not strange.error and not natural:
            found = self._followed(how, "it depends on the order or the hash of texts", self._hashed_lives())
        return found or (self._unsteady(natural, first) if natural else [])

    def _unsteady(self, how: str, first: Sighting) -> list[Finding]:
        why = "two undisturbed runs differ"
        return self._followed(how, why, self._traced_lives("t", "u")) or [_somewhere(how, why, first)]

    def _by_site(self, sites: Sequence[str], pinned: Setting = _PINNED) -> list[Finding]:
        if not sites:
            return []
        plain = self._life("p", pinned)
        if plain.error:
            self.notes.append(f"a run whose clocks stand still: {plain.error}")
            return []
        every = plain if pinned.still else self._life("q", replace(pinned, moved=(ALL,)))
        if every is not plain and not every.error and not unlike(plain, every):
            return []  # (where clocks stand still, a difference of two that have moved is the same)
        found = []
        for k, name in enumerate(sites[:_MOST_SITES]):
            source, file, line = parts_of(name)
            other = self._life(f"q{k}", replace(pinned, moved=(name,)))
            if other.error and other.kind != LEFT:
                where = f"{os.path.basename(file)}:{line}"
                self.notes.append(f"{source} ({where}): with another value the script ends early ({other.error})")
            elif how := unlike(plain, other):
                found.append(_reading(source, file, line, how))
        if len(sites) > _MOST_SITES:
            self.notes.append(f"{len(sites) - _MOST_SITES} more readings of clocks, ids and variables")
        return found

    # ---- lines that are followed

    def _refused(self, first: Sighting) -> Finding:
        """The finding for Everstep's own objection, at the line that causes it if following the lines shows it."""
        file, line = first.place
        script = self.what.script
        name, followed = file or os.path.basename(script), bool(first.buffer) or first.kind in _OF_LANES
        remedy = _TWICE if first.kind in _TOLD_TWICE else ""
        plain = Finding("refused", name, "", True, remedy, file, line, first.error)
        if first.kind == Restructured.__name__:
            whole = script if os.path.basename(script) == file else file
            at = where_restructured(whole, line, first.error)
            return plain if at is None else replace(plain, object=at.object, line=at.line)
        if not followed:
            return plain
        with self._lives(LifeWatch(trace="lane", buffer=first.buffer, setting=Setting())) as lives:
            seen = lives.result("l")
        at = seen.noted.diverged
        if first.buffer:
            says = f"{first.error}; this is the first line that writes to it"
            return plain if at is None else Finding("lane", first.buffer, "", True, _BUFFER, at.file, at.line, says)
        if at is None:  # nothing that differs has a name
            return next(iter(self._by_site(seen.noted.sites, _STILL)), plain)
        sites = [parts_of(name) for name in seen.noted.sites]
        causes = [s for s in sites if s[1:] == (at.file, at.line)] or [s for s in sites if s[0] in RESEEDING]
        if causes:
            return _reading(*causes[0], "the same batch, computed twice, gives other results")
        line = at.line if at.made else where_written(at.object, at.file, at.line)
        says = f"{first.error}; the first difference is in {at.object}, in line {at.line}"
        return Finding("lane", at.object, "", True, _KEPT, at.file, line, says)

    def _followed(self, how: str, why: str, at: Divergence | None) -> list[Finding]:
        if at is None:
            return []
        says = f"{why}: {how}; the first difference is in {at.object}, in line {at.line}"
        remedy = "sort what has no order of its own, and draw from generators that are seeded"
        line = at.line if at.made else where_written(at.object, at.file, at.line)
        return [Finding("followed", at.object, "", True, remedy, at.file, line, says)]

    def _hashed_lives(self) -> Divergence | None:
        watch = LifeWatch(trace=RUN, setting=_PINNED)
        with self._lives(watch) as one, self._lives(watch, hashed=True) as other:
            other.begin("v")
            one.result("u")
            other.result("v")
        return self._compared("u", "v")

    def _traced_lives(self, one: str, other: str) -> Divergence | None:
        with self._lives(LifeWatch(trace=RUN, setting=_PINNED)) as lives:
            lives.result(one)
            lives.result(other)
        return self._compared(one, other)

    def _compared(self, one: str, other: str) -> Divergence | None:
        mine, theirs = (read_rows(self.what.path(f"{life}.lines")) for life in (one, other))
        both = [part for part in mine if part in theirs and (part != BEFORE or other != "b")]
        found = (first_divergence(mine[part], theirs[part]) for part in both)
        return next(filter(None, found), None)

    # ---- lives

    def _life(self, name: str, setting: Setting) -> Sighting:
        with self._lives(LifeWatch(work=True, setting=setting)) as lives:
            return lives.result(name)

    @contextmanager
    def _lives(self, watch: LifeWatch, hashed: bool = False) -> Iterator[Rehearsal]:
        lives = self._rehearsal(watch, hashed)
        try:
            yield lives
        finally:
            lives.close()

    def _rehearsal(self, watch: LifeWatch, hashed: bool = False) -> Rehearsal:
        left_s = max(1.0, self._until_s - time.monotonic())
        fork = self.apart if hashed else lambda what, life: fork_life(what, life, self.body)
        return Rehearsal(replace(self.what, watch=watch), self.body, left_s, fork=fork, deaths=self.deaths)


def unlike(one: Sighting, other: Sighting) -> str:
    """How the work or the trained state of two lives differs, where both have been, or that one has not come so far;
    "" if they do not."""
    theirs = {(step, lane): (data, gave) for step, lane, data, gave in other.noted.work}
    for step, lane, data, gave in one.noted.work:
        there = theirs.get((step, lane))
        if there is not None and there != (data, gave):
            what = "the samples" if there[0] != data else "loss and gradient"
            return f"{what} of step {step}, lane {lane} are others"
    if other.error:
        return f"one of them ends early: {other.error}"
    if one.step == other.step:
        names = sorted(name for name in differing(one.facts, other.facts) if name.startswith(TRAINING))
        if names:
            return f"{names[0].removeprefix(f'{TRAINING}: ')} is another after step {one.step}"
    return ""


def _reading(source: str, file: str, line: int, how: str) -> Finding:
    about, remedy = next((words for start, words in _WORDS.items() if source.startswith(start)), _WHO)
    return Finding("surroundings", source, "", True, remedy, file, line, f"the training depends on {about}: {how}")


def _ended(name: str, says: str, place: tuple[str, int]) -> Finding:
    return Finding("ended", name, "", True, _MEND, *place, says)


def _somewhere(how: str, why: str, first: Sighting) -> Finding:
    file, line = first.place
    remedy = "seed every generator that the training draws from"
    return Finding("nondeterministic", TRAINING, "", True, remedy, file, line, f"{why}: {how}")
