"""The checkpoint before a worker's part in a job ends: nobody goes on before it is durable, or its time is over.

Apart from other checkpoints since those are waited for by nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everstep.protocol.driver.operations import Finish, Linger, SaveLast
from everstep.train.saving import PartSaver
from everstep.train.view import WorkerView


class LastCheckpoint:
    """One worker's last checkpoint, be it that a plan asks for it, or that all steps are done."""

    def __init__(self, view: WorkerView, saver: PartSaver) -> None:
        self._view = view
        self._saver = saver
        self._grace_s = view.config.checkpoint.grace_s

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        """What it does for the driver."""
        return {SaveLast: self.save, Linger: self.linger}

    def save(self, operation: SaveLast) -> str:
        """A plan asks for one; returns where that of the step is, empty if there is none."""
        saver, number = self._saver, operation.step
        there = saver.has(number)
        self._take(operation, uploads=True)
        return saver.where(number) if there or saver.has(number) else ""

    def linger(self, operation: Linger) -> None:
        """Until the generation is over, or for as long as the checkpoint before might have taken."""
        deadline = time.monotonic() + self._grace_s
        while not self._view.cutter.over(operation.generation) and time.monotonic() < deadline:
            self._view.tick()
            time.sleep(0.005)

    def at_end(self, operation: Finish) -> None:
        """After the last step, in all workers: leave a checkpoint of it, and wait for what is being written."""
        self._take(operation, uploads=self._view.is_main)

    def _take(self, operation: SaveLast | Finish, *, uploads: bool) -> None:
        """Once those that began before are on disk, as nobody writes parts of two at a time."""
        now_s, generation = time.monotonic(), operation.generation
        self._wait(generation, now_s + self._grace_s / 2, uploads=False)
        if operation.save is not None:
            self._saver.save(operation.save)
        self._wait(generation, now_s + self._grace_s, uploads=uploads)

    def _wait(self, generation: int, deadline: float, *, uploads: bool) -> None:
        """Until what began is durable; not longer than the generation."""
        view, checkpointer = self._view, self._saver.checkpointer
        while checkpointer is not None and time.monotonic() < deadline and not view.cutter.over(generation):
            if checkpointer.drain(0.005) and not (uploads and checkpointer.uploading):
                return
            view.tick()
