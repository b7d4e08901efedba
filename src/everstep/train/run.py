"""`Run` and `Step`: what the user's loop sees of a job.

The inner iterator does reduction, agreement and recovery: after a failure it hands out further lanes, and it ends only
when the update has been applied. So the user's other lines run once per step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from everstep.base.cause import Cause
from everstep.base.errors import DeterminismError, EverstepError, JobFailed, Misused, NonFinite, Uncarried
from everstep.base.plan import Plan
from everstep.data.batch import aligned, to_device
from everstep.data.given_loader import AsRead, read_data
from everstep.data.reading import by_index
from everstep.exact.gradient import gradient_norm
from everstep.exact.seeding import derive, preserve_rng, seed_all
from everstep.exact.settings import evaluating
from everstep.observe.logs import RAISED_IN
from everstep.order.cursor import SampleOrder
from everstep.order.ledger import use_digest
from everstep.placement.probes import owed
from everstep.protocol import messages as wire
from everstep.protocol.driver.operations import (
    Compute,
    Evaluate,
    EvaluateAsked,
    HoldAsked,
    JoinAsked,
    StepAsked,
)
from everstep.script.batch_names import unset_behind
from everstep.script.flow_sources import calls_in_file, names_attribute, prepares
from everstep.script.hidden_writes import may_hide_writes
from everstep.script.loop_guard import LoopGuard
from everstep.script.reachable import files_behind, loop_frames
from everstep.script.watched_life import IN_REHEARSAL, TRIED
from everstep.train.elastic import ElasticOrder
from everstep.train.evaluation import Waves, evaluate
from everstep.train.executor import StateJumped
from everstep.train.lane_witness import LaneWitness
from everstep.train.logged_values import numbers, sums
from everstep.train.loop_survey import LoopSurvey
from everstep.train.session import Session
from everstep.train.user_loop import UserLoop
from everstep.train.view import WorkerView

log = logging.getLogger(__name__)

_LOOP_SEED = 1 << 34
_OF_RUN = frozenset({"_session", "_given", "model", "_stopped", "_logged", "_survey", "_guard", "loop", "remarks"})
_UNDONE = (
    "the loop left step {number} before its batches were used up: iterate `for batch in step:` to its end in every step"
)
_UNSET = (
    "line {line} of {file} needs {name}, which only the loop over a step's batches sets: a worker that is resumed or "
    "healed may come there without a batch; use step.loss, or step.log and step.metrics, or set {name} before that loop"
)
_NOT_EXACT = (
    "batch is per_worker: the global batch follows the number of workers, so the result depends on which workers came "
    "and went when, and is not bitwise that of an undisturbed run; use batch: constant for exactness"
)


class Step:
    """One update. `number`: updates applied once it is done. `loss`: over the global batch, known after the loop."""

    def __init__(self, session: Session, number: int, done: bool = False, given: AsRead | None = None) -> None:
        self._session, self._given = session, given
        self._share = 0.0
        self.number = number
        self.done = done
        self._seed_loop(past=0)

    @property
    def epochs_over(self) -> int:
        """Epochs that are over after this step, if it is the last one of an epoch; else 0."""
        order = self._session.view.order
        return order.epochs_over(self.number) if isinstance(order, SampleOrder) else 0

    def __iter__(self) -> Iterator[Any]:
        """This worker's batches: one per lane; more of them after a failure."""
        try:
            yield from self._batches()
        except (NonFinite, Uncarried) as error:
            self._save_first(error)
            raise

    def _batches(self) -> Iterator[Any]:
        session = self._session
        session.judge(past=True)
        _reach(session)
        if not self.done:
            session.view.stages.only.state.settings.before_lanes()
            if self._given is not None:
                self._given.check(session.view.order.samples(self.number, 0)[0][0])
        turn = None if self.done else session.executor.ask(StepAsked(self.number))
        while isinstance(turn, Compute):
            own, told = self._begin(turn), owed(turn.trials, turn.plan, session.view.me)
            for lane in told:
                yield from self._trial(turn, lane, own)
            for lane in self._handed(turn, own, told):
                yield from self._lane(turn, lane, is_told=lane in told)
            turn = session.executor.computed()
        self.done = True
        if self._given is not None or session.loop.moves.known:  # else the loop is not the user's
            session.updates.stand_still(tick=session.view.tick)
        self._seed_loop(past=1)

    def _seed_loop(self, past: int) -> None:
        """Seed the loop's random numbers around its batches (0: before them, 1: past them) by the step alone.

        Who computed which lane last, and whether this life has computed any, makes no difference.
        """
        seed_all(derive(self._session.view.config.seed, self.number, _LOOP_SEED, past))

    def _begin(self, operation: Compute) -> tuple[int, ...]:
        """The lanes that are handed to the loop."""
        lanes, plan = self._session.lanes, operation.plan
        lacking = lanes.begin(self.number, plan, 0)
        if lacking:
            cell, mine = self._session.cell, plan.lanes_of(self._session.view.me)
            lanes.schedule(self.number, mine if cell is None else cell.own(lacking))
        for lane in operation.lanes:
            if lane not in lacking:
                lanes.done(self.number, 0, lane)
        return lacking

    def _handed(self, operation: Compute, own: Sequence[int], told: Collection[int]) -> Iterator[int]:
        """This process's lanes, while the generation lasts. Other processes of this worker compute the rest."""
        session, number = self._session, self.number
        lanes, cell = session.lanes, session.cell

        def over() -> bool:
            return session.view.cutter.over(operation.generation)

        if cell is None:
            yield from itertools.takewhile(lambda lane: not over(), own)
            return
        full = [lane for lane in own if lanes.samples(number, lane)]
        due = self._alone_due(operation.plan)
        yield from cell.passes(number, full, [lane for lane in told if lane in full], over, due=due)
        for report, said in cell.took():
            if said is not None:
                lanes.note(number, report.lane, 0, said)
            lanes.count(report.count)
            lanes.done(number, 0, report.lane)
        for lane in own:
            if lane not in full:
                lanes.pass_empty(number, 0, lane)

    def _lane(self, operation: Compute, lane: int, *, is_told: bool) -> Iterator[Any]:
        view, lanes, loop = self._session.view, self._session.lanes, self._session.view.stages.only.loop
        link = view.link
        view.phase("load", self.number, operation.plan)
        batch, samples = lanes.batch(self.number, lane)
        if not samples:
            lanes.pass_empty(self.number, 0, lane)
            return
        self._share = len(samples) / view.order.micro_batch
        view.phase("forward", self.number, operation.plan)
        due = self._alone_due(operation.plan)
        loop.enter(self.number, lane, apart=is_told or due or link.watches)
        lanes.hand_out((self.number, lane, samples))
        twice, waited = loop.probes(due), lanes.emulated()
        witness = LaneWitness(view.stages.only.parts.model, loop_frames(sys._getframe())) if twice else None
        link.computes("first")
        yield batch
        waited()
        if witness is not None:
            loop.again()
            link.computes("again")
            yield batch
            try:
                loop.compare()
            except DeterminismError as error:
                raise witness.explained(error) from None
        link.computes("")
        if (is_told or (due and twice)) and self._session.cell is not None:
            self._session.cell.gather_gradients()
        if is_told or (due and twice):
            self._session.lanes.note(self.number, lane, 0, loop.said(batch))
        if link.watches:
            link.computed(self.number, lane, loop.said(batch))
        loop.leave(lane, len(samples), use_digest(samples))
        lanes.hand_out(None)
        lanes.count(len(samples))
        lanes.done(self.number, 0, lane)

    def _trial(self, operation: Compute, lane: int, own: Collection[int]) -> Iterator[Any]:
        """A lane of another worker's, or an own lane that was computed before its result was requested: compute it
        again and report the result, which is not added up."""
        session, view = self._session, self._session.view
        if session.lanes.has_given(self.number, lane) or lane in own:
            return  # or it is about to be computed, and told of then
        view.phase("load", self.number, operation.plan)
        batch, samples = session.lanes.batch(self.number, lane)
        if not samples or view.cutter.over(operation.generation):
            return
        self._share = len(samples) / view.order.micro_batch
        view.phase("forward", self.number, operation.plan)
        with view.stages.only.loop.trial(self.number, lane):
            yield batch
            session.lanes.note(self.number, lane, 0, view.stages.only.loop.said(batch))

    def _alone_due(self, plan: Plan) -> bool:
        """Whether this worker has to compute a lane of this step twice, because no other worker can."""
        every = self._session.view.config.verify_every
        alone = sum(bool(seat.lanes) for seat in plan.pool(0)) == 1
        return alone and every > 0 and self.number % every == 0

    def run_split(self) -> None:
        """Compute the lanes of a split model wherever they pass through this worker, until the update is done.

        Raises: StateJumped if the step was left for another one. NonFinite.
        """
        try:
            if not self.done:
                self._session.executor.ask(StepAsked(self.number))
                self.done = True
        except NonFinite as error:
            self._save_first(error)
            raise

    def _save_first(self, error: EverstepError) -> None:
        """In a job of one worker: take a checkpoint before the loop ends; else the worker's process sees to that."""
        session = self._session
        words = session.view.link.stop_words(error, self.number)
        if words is not None and session.saver.on:
            with contextlib.suppress(JobFailed):  # the end that was told
                session.executor.ask(HoldAsked(words, session.view.hold_until_ns()))

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | torch.Tensor | None = None,
        *,
        optimizer: Any = None,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of this batch. `loss` is the batch's mean; or its sum, with `weight`, such as the
        number of tokens. Several calls for one batch add up their losses and gradients. `optimizer`: one that join got,
        or its name; then its parameters alone get a gradient. `retain_graph`: a later call uses the same graph.

        Raises: Misused if the loss is no scalar with a gradient, or the weights of several calls differ.
        """
        view = self._session.view
        view.phase("backward", self.number, view.plan)
        replica = view.stages.only
        inputs = None if optimizer is None else replica.trained_by(optimizer)
        replica.loop.backward(loss, weight, self._share, inputs, retain_graph=retain_graph)

    def log(self, **values: tuple[Any, Any]) -> None:
        """Log values of this batch, each as (sum, count): `step.log(accuracy=(hits, len(y)))`.

        The step's value is the sum over the global batch, divided by the count, for any number of workers the same. It
        is in `metrics`, and shown with the loss. Values of one name are added up.

        Raises: Misused outside the step's batches, or for something that is no sum and count.
        """
        self._session.view.stages.only.loop.log(sums(values))

    @property
    def loss(self) -> float:
        """Mean loss over the global batch; nan before the step is done."""
        outcome = self._session.updates.outcome
        return outcome.loss if outcome is not None and outcome.step == self.number else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Logged values over the global batch, by name; empty before the step is done."""
        outcome = self._session.updates.outcome
        return outcome.logged() if outcome is not None and outcome.step == self.number else {}


def _leave_if_tried() -> None:
    """Code after the loop is not run in a job that only tries a script out: it may write over results."""
    if os.environ.get(IN_REHEARSAL) == TRIED:
        raise SystemExit(0)


def _reach(session: Session) -> None:
    """The loop is through with what follows a step's batches. Raises: Uncarried."""
    loop = session.loop
    if not loop.reach():
        return
    session.updates.distrust()
    if session.view.config.zero.stage:
        raise Uncarried(
            f"{next(iter(loop.moves.told))} was changed by the loop after the batches, and with zero.stage "
            "each worker has a part of the state alone: set zero.stage=0"
        )


class Run:
    """A job, as the user's loop sees it. Iterate over it for steps."""

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        survey: LoopSurvey | None = None,
        given: AsRead | None = None,
    ) -> None:
        self._session, self._given = session, given
        self.model = model
        self._stopped = False
        self._logged: tuple[int, dict[str, float]] = (0, {})
        self._survey = survey
        self.remarks: list[str] = []  # warnings for the first step: their fault may end the job, and is told once
        self._guard: AbstractContextManager[None] = contextlib.nullcontext()
        if not session.view.stages.split:
            replica = session.view.stages.only
            under_way, use = lambda: replica.update.under_way, replica.loop.use_gradients
            self._guard = LoopGuard(model, replica.parts.optimizer, under_way, replica.schedule, use)
        self.loop = UserLoop(session, self._guard)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_RUN:
            raise Uncarried(
                f"the script has set run.{name}, which a worker that is resumed or healed would lack: write "
                f"kept = everstep.state({name}=...), give it to join as state=kept, and use kept.{name} instead"
            )
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[Step]:
        """One iteration per update that is applied here, up to the last; ends when the job has ended. A loop that is
        left before ends the job in order, which all workers must do after the same step."""
        return self.loop.begin(self._steps())

    def _steps(self) -> Generator[Step]:
        session = self._session
        try:
            with self._guard:
                if not session.view.stages.split:
                    frames = loop_frames(sys._getframe())
                    if frames and (found := unset_behind(frames[0])) is not None:
                        (name, line), file = found, os.path.basename(frames[0].f_code.co_filename)
                        raise Misused(_UNSET.format(file=file, name=name, line=line), line)
                    files = files_behind(frames[0]) if frames else set[str]()
                    session.loop.begin(not frames or prepares(frames[0]), hides=may_hide_writes(files))
                    if frames:
                        several = calls_in_file(frames[0], "backward") > 1
                        gradients = names_attribute(files, "grad")
                        session.view.stages.only.loop.expect(several=several, gradients=gradients)
                ends = self._join()
                if session.view.link.finished(session.view.step):
                    return
                while True:
                    session.view.link.turn(session.view, self._stopped)
                    if self._survey is not None:
                        self._survey.turn(sys._getframe())
                    if session.executor.arrived():
                        self._stopped = False
                        session.unasked.clear()
                        if session.view.step > session.transfers.past:
                            session.loop.enter_again(session.view.step)
                            yield Step(session, session.view.step, done=True, given=self._given)
                            _reach(session)
                    elif ends or (not self._stopped and session.view.step < self.total_steps):
                        ends = False
                        step = Step(session, self._begin_step(), given=self._given)
                        session.loop.enter(step.number)
                        yield step
                        if not step.done and not session.executor.jumped:
                            raise Misused(_UNDONE.format(number=step.number))
                        while self.remarks:
                            session.view.publisher.emit(
                                "warning", step=step.number, cause=Cause.CONFIG, reason=self.remarks.pop()
                            )
                    else:
                        with contextlib.suppress(StateJumped):
                            self.loop.end()
                            _leave_if_tried()
                            return
        finally:
            session.close()

    def _join(self) -> bool:
        """Say hello and become a settled member: from the start, or healed while the others train.

        Returns whether this worker has come to carry out the step with which the job ends. Then the next step raises
        that, in the loop's body: there, what a worker holds is still handed on and saved.
        """
        session, view = self._session, self._session.view
        session.membership.connect()
        try:
            session.executor.ask(JoinAsked())
        except NonFinite:
            return True
        if isinstance(view.order, ElasticOrder) and view.is_main and not view.step:
            view.publisher.emit("warning", step=0, cause=Cause.CONFIG, reason=_NOT_EXACT)
        return False

    def _begin_step(self) -> int:
        """Returns the next step's number."""
        session = self._session
        number = session.view.step + 1
        if session.profiling.wanted is not None:
            session.profiling.begin_step(number)
        session.updates.begin_step()
        return number

    def hold(self, words: wire.WorkerFailed) -> None:
        """The user's loop has raised. If the state is whole, say so, and stay a member, who computes nothing, until the
        coordinator lets this worker go: others may need the state, or a checkpoint be wanted of it first. Nothing if
        the session is closed already.

        Raises: what ends a member, such as Evicted.
        """
        if self.loop.begun and (at := self._session.lanes.at_work) is not None:
            step, lane, samples = at
            log.error("%s%d of step %d (samples %s)", RAISED_IN, lane, step, ", ".join(str(i) for _, i in samples[:8]))
        if self._session.saver.on and self.loop.begun:
            self._session.executor.ask(HoldAsked(words, self._session.view.hold_until_ns()))

    def close(self) -> None:
        """The loop is over, perhaps by an exception."""
        self.loop.close()

    @property
    def is_split(self) -> bool:
        """Whether each worker holds a part of the model only; `Step.run_split` computes its lanes then."""
        return self._session.view.stages.split

    @property
    def total_steps(self) -> int:
        """Number of the last step."""
        return self._session.view.order.total_steps

    @property
    def is_main(self) -> bool:
        """Whether this worker is the leader now."""
        return self._session.view.is_main

    @property
    def leads(self) -> bool | None:
        """As `is_main`; None before there is a plan."""
        return None if self._session.view.plan is None else self._session.view.is_main

    def report(self, kind: str, **fields: Any) -> None:
        """An event of the job at this step, told once: by the leader, or by the next one if it died meanwhile."""
        view = self._session.view
        step = fields.pop("step", view.step)
        fields.setdefault("generation", view.driver.machine.generation)
        view.publisher.report(kind, step, self.is_main, fields)

    def log(self, **values: Any) -> None:
        """Log numbers of this step: `run.log(test_accuracy=0.93)`. The leader's are shown with the loss, another
        worker's only if it becomes the leader before that. Raises: Misused for something that is no number."""
        step = self._session.view.step
        before = self._logged[1] if self._logged[0] == step else {}
        self._logged = step, {**before, **numbers(values)}
        self.report("logged", metrics=dict(self._logged[1]))

    def stop(self) -> None:
        """End the job after this step. All workers must do so at the same step, by a loss or a metric, say."""
        self._stopped = True

    def barrier(self) -> None:
        """Wait until all workers are here."""
        with self._session.loop.paused():
            self._session.membership.gather(b"")

    def evaluate(
        self, fn: Callable[[Any], Mapping[str, Any]], dataset: Any, *, batch_size: int = 64, collate: Any = None
    ) -> dict[str, float]:
        """Run `fn(batch) -> {name: tensor([sum, count])}` over the dataset, shared among the workers.

        The model is in eval mode and no gradients are kept. The result, sum / count by name, is the same everywhere
        and for any number of workers. After the last step each worker evaluates by itself. `dataset` may be a
        DataLoader, whose batch_size and collate_fn count then.
        """
        session, data = self._session, read_data(dataset, collate)
        collate, batch_size = data.collate, data.batch_size or batch_size
        dataset = by_index(data.dataset, batch_size, session.view.config.seed)
        chunks = self._begin_evaluation(dataset, batch_size)
        with looking(self):
            found = evaluate(
                fn,
                chunks,
                lambda i: _chunk(session, dataset, i, batch_size, collate),
                gather=session.membership.gather,
                members=session.membership.members,
                seed=session.view.config.seed,
            )
        self._judge(found)
        return found

    def evaluate_split(
        self,
        metrics: Callable[[Any, Any], Mapping[str, Any]],
        dataset: Any,
        *,
        batch_size: int,
        collate: Any = None,
    ) -> dict[str, float]:
        """As `evaluate`, for a split model, with the same result: `metrics(model, batch)` is the task's.

        Raises: StateJumped if the state is another one meanwhile.
        """
        session, collate = self._session, collate or torch.utils.data.default_collate
        dataset = by_index(dataset, batch_size, session.view.config.seed)
        chunks = self._begin_evaluation(dataset, batch_size)
        waves = Waves(session.view, metrics, chunks, lambda i: _chunk(session, dataset, i, batch_size, collate))
        session.executor.install({Evaluate: waves.pass_on})
        with preserve_rng():
            found = waves.run(session.membership.gather, lambda: session.executor.ask(EvaluateAsked()))
        self._judge(found)
        return found

    def _judge(self, metrics: Mapping[str, float]) -> None:
        """A checkpoint may follow from an evaluation: in a script after its round, which may put weights back."""
        session = self._session
        question = session.saver.question(metrics)
        if question is not None and not session.view.ended:
            session.unasked.append(question)
            if self._given is None:
                session.judge(past=False)

    def _begin_evaluation(self, dataset: Any, batch_size: int) -> int:
        """Returns the number of chunks."""
        view = self._session.view
        if not view.ended:
            view.phase("evaluate", view.step, view.plan)
        chunks = -(-len(dataset) // batch_size)
        if chunks == 0:
            raise Misused("evaluate was given an empty dataset")
        return chunks


def view_of(run: Run) -> WorkerView:
    """What this run's worker knows of the job: its directory, its order of samples."""
    return run._session.view


def gradient_norm_of(run: Run) -> float:
    """Norm of the newest step's gradient, before it was clipped; nan if it is not known (without clip_norm, or with a
    scaled loss)."""
    outcome, config = run._session.updates.outcome, run._session.view.config
    if outcome is None or not outcome.weight or config.clip_norm is None or config.scales_loss:
        return math.nan
    return gradient_norm(outcome.sumsq, 1.0 / outcome.weight)


@contextlib.contextmanager
def looking(run: Run) -> Iterator[Callable[[], None]]:
    """In the body, the model is in eval mode and what is computed leaves no trace, neither in buffers nor in random
    numbers. Yields what a long computation calls now and then, so that it is not taken for one that hangs."""
    session, view = run._session, run._session.view
    guard = view.stages.only.lanes.passes[0].guard
    if not view.ended:
        view.phase("evaluate", view.step, view.plan)
    with session.loop.paused(), evaluating(run.model), torch.no_grad(), preserve_rng(), guard.shielded():
        yield view.tick


def _chunk(session: Session, dataset: Any, index: int, batch_size: int, collate: Any) -> Any:
    """One batch of an evaluation, on the device."""
    session.view.tick()
    first = index * batch_size
    samples = [dataset[i] for i in range(first, min(first + batch_size, len(dataset)))]
    return to_device(aligned(collate(samples)), session.lanes.device)
