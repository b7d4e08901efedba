"""Checkpoints, as a worker goes on from them: which can be read here, and what one says."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.cause import Why
from everstep.base.errors import CheckpointCorrupt, StoreError
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.manifest import Manifest
from everstep.protocol.driver.records import decode_records
from everstep.protocol.step_types import Record
from everstep.train.executor import Unusable
from everstep.train.view import WorkerView

_STATED = 2


class Restorer:
    """One worker's reading of checkpoints."""

    def __init__(self, view: WorkerView, checkpointer: Checkpointer | None) -> None:
        """checkpointer: None where none are taken."""
        self._view = view
        self._checkpointer = checkpointer
        self._refused: set[int] = set()

    def restorable(self, limit: int | None) -> tuple[int, ...]:
        """The newest steps, up to the limit if there is one, that can be read from disk here.

        Raises: ConfigError if the checkpoints are of another job.
        """
        if self._checkpointer is None:
            return ()
        found = self._checkpointer.restorable(verify=False, most=_STATED, limit=limit)
        return tuple(s for s in found if s not in self._refused)

    def restore(self, number: int, stages: Sequence[int]) -> Manifest:
        """Give these stages what the checkpoint of a step says. If it cannot be read, nothing has changed.

        Raises: Unusable then, or, torn, if an unsplit model has been overwritten in part.
        """
        view, checkpointer = self._view, self._checkpointer
        trained = view.step > 0
        written: list[int] = []
        replicas = [view.stages[stage] for stage in stages]

        def ready() -> None:
            written.extend(() if trained else stages)
            for replica in replicas:  # before, for it puts the buffers of the step under way back
                replica.abandon()
                replica.prove_update()

        states = {stage: replica.state for stage, replica in zip(stages, replicas, strict=True)}
        try:
            if checkpointer is None:
                raise StoreError("checkpoint.enabled is false")
            return checkpointer.load(number, states, ready=ready, twice=trained)
        except (CheckpointCorrupt, StoreError) as error:
            self._refused.add(number)
            torn = bool(written) and not view.stages.split
            if not torn:
                for stage in written:
                    view.stages.rebuild(stage)
            why = Why(error.cause, f"the checkpoint of step {number} cannot be used: {error}")
            raise Unusable(why, torn) from error

    @staticmethod
    def records_of(restored: Manifest) -> dict[int, Record]:
        """The records of the step's decision; plans that they were prepared for are long gone."""
        if not restored.records:
            return {}
        return {w: Record(0, r.payload) for w, r in decode_records(restored.records).items()}
