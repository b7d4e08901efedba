"""`Run` and `Step`: what the user's loop sees of a job.

The inner iterator does reduction, agreement and recovery: after a failure it hands out further lanes, and it ends only
when the update has been applied. So the user's other lines run once per step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from everstep.base.errors import TaskError
from everstep.data.loader import to_device
from everstep.protocol import messages as wire
from everstep.train.evaluation import evaluate, evaluate_split
from everstep.train.session import Session


class Step:
    """One update. `number`: updates applied once it is done. `loss`: over the global batch, known after the loop."""

    def __init__(self, session: Session, number: int, done: bool = False) -> None:
        self._session = session
        self._done = done
        self._count = 0
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        """This worker's batches: one per lane; more of them after a failure."""
        session = self._session
        while not self._done:
            taken = session.next_batch(self.number)
            if taken is None:
                self._done = True
                return
            lane, batch, self._count, use = taken
            if session.should_probe():
                yield batch
                first = session.probe_digest()
                session.replica.enter_lane(self.number, lane)
                yield batch
                session.compare_probe(first, session.replica.lane_digest(), lane, self.number)
            else:
                yield batch
            session.end_lane(self.number, lane, self._count, use)

    def run_split(self) -> None:
        """Compute the lanes of a split model wherever they pass through this worker, until the update is done.

        Raises: WentBack if the step was left for another one.
        """
        if not self._done:
            self._session.run_lanes(self.number)
            self._done = True

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward of this batch. `loss` is its mean; or its sum, with `weight` (number of tokens, say).

        Raises: TaskError if it is no scalar with a gradient, or if called twice for one batch.
        """
        self._session.backward(self.number, loss, weight, self._count)

    @property
    def loss(self) -> float:
        """Mean loss over the global batch; nan before the step is done."""
        outcome = self._session.outcome
        return outcome.loss if outcome is not None and outcome.step == self.number else math.nan


class Run:
    """A job, as its user's loop sees it. Iterate it for steps."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self.model = model
        self._stopped = False
        self._kept: Generator[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        """One iteration per update that is applied here, up to the last; ends when the job has ended."""
        steps = self._steps()
        if self._session.saver.on:
            self._kept = steps  # a loop that raises must not close what could still be saved
        return steps

    def _steps(self) -> Generator[Step]:
        session = self._session
        try:
            session.open()
            while True:
                if session.engine.arrived():
                    self._stopped = False
                    if session.engine.position.step > session.past:
                        yield Step(session, session.engine.position.step, done=True)
                elif not self._stopped and session.engine.position.step < self.total_steps:
                    yield Step(session, session.begin_step())
                elif session.finish():
                    return
        finally:
            session.close()

    def hold(self, words: wire.WorkerFailed) -> None:
        """The user's loop has raised; see `Saver.hold`. Nothing if the session is closed already."""
        if self._kept is not None and inspect.getgeneratorstate(self._kept) != inspect.GEN_CLOSED:
            self._session.saver.hold(words)

    def close(self) -> None:
        """The loop is over, be it that it raised."""
        if self._kept is not None:
            self._kept.close()

    @property
    def is_split(self) -> bool:
        """Whether each worker holds a part of the model only; `Step.run_split` computes its lanes then."""
        return self._session.stages.split

    @property
    def total_steps(self) -> int:
        """Number of the last step."""
        return self._session.order.total_steps

    @property
    def is_main(self) -> bool:
        """Whether this worker is the leader at the moment."""
        return self._session.is_main

    @property
    def leads(self) -> bool | None:
        """As `is_main`; None before there is a plan."""
        return None if self._session.engine.plan is None else self._session.is_main

    def report(self, kind: str, **fields: Any) -> None:
        """An event of the job at this step, told once: by the leader, or by the next one if it died meanwhile."""
        session = self._session
        step = fields.pop("step", session.engine.position.step)
        fields.setdefault("generation", session.engine.machine.generation)
        session.publisher.report(kind, step, self.is_main, fields)

    def stop(self) -> None:
        """End after this step. Every worker must come to the same conclusion (from a loss or a metric, say)."""
        self._stopped = True

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._session.gather(b"")

    def evaluate(
        self, fn: Callable[[Any], Mapping[str, Any]], dataset: Any, *, batch_size: int = 64, collate: Any = None
    ) -> dict[str, float]:
        """Run `fn(batch) -> {name: tensor([sum, count])}` over the dataset, shared among the workers.

        The model is in eval mode and no gradients are kept. The result, sum / count by name, is the same everywhere
        and for any number of workers. After the last step each worker evaluates by itself.
        """
        session = self._session
        if session.engine.ended is None:
            session.phase("evaluate", session.engine.position.step, session.engine.plan)
        chunks = -(-len(dataset) // batch_size)
        if chunks == 0:
            raise TaskError("evaluate was given an empty dataset")
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                found = evaluate(
                    fn,
                    chunks,
                    lambda i: self._chunk(dataset, i, batch_size, collate),
                    gather=session.gather,
                    members=session.members,
                    seed=session.config.seed,
                )
        finally:
            self.model.train(was_training)
        session.saver.evaluated(found)
        return found

    def evaluate_split(
        self,
        metrics: Callable[[Any, Any], Mapping[str, Any]],
        dataset: Any,
        *,
        batch_size: int = 64,
        collate: Any = None,
    ) -> dict[str, float]:
        """As `evaluate`, for a split model, with the same result: `metrics(model, batch)` is the task's.

        Raises: WentBack if the state is another one meanwhile.
        """
        session = self._session
        if session.engine.ended is None:
            session.phase("evaluate", session.engine.position.step, session.engine.plan)
        chunks = -(-len(dataset) // batch_size)
        if chunks == 0:
            raise TaskError("evaluate was given an empty dataset")
        found = evaluate_split(session, metrics, chunks, lambda i: self._chunk(dataset, i, batch_size, collate))
        session.saver.evaluated(found)
        return found

    def _chunk(self, dataset: Any, index: int, batch_size: int, collate: Any) -> Any:
        self._session.tick()
        first = index * batch_size
        samples = [dataset[i] for i in range(first, min(first + batch_size, len(dataset)))]
        return to_device((collate or torch.utils.data.default_collate)(samples), self._session.device)
