"""Workers that end by an exception: chance, the user's code, or the last that hold the state. Pure.

A worker whose loop has raised still holds the state of the newest step, and stays until it is let go. If nobody else
holds it who could go on (all have raised, say), the members take a checkpoint first.
"""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import Agreement
from everstep.protocol.coordinator.alarms import FailedDue
from everstep.protocol.coordinator.desk import Desk
from everstep.protocol.coordinator.membership import Membership, Worker
from everstep.protocol.coordinator.progress import JobProgress
from everstep.protocol.coordinator.saving import Saving
from everstep.protocol.coordinator.words import describe
from everstep.protocol.messages import WorkerFailed


class Failures:
    """Which errors have come, and who stays in spite of one until a checkpoint is taken."""

    def __init__(
        self, desk: Desk, membership: Membership, agreement: Agreement, progress: JobProgress, saving: Saving
    ) -> None:
        self._desk, self._membership, self._agreement = desk, membership, agreement
        self._progress, self._saving = progress, saving
        # By step and signature: who failed like this first, and in which generation.
        self._first: dict[tuple[int, str], tuple[WorkerKey, int]] = {}
        self._staying: dict[WorkerKey, Why] = {}

    @property
    def staying(self) -> dict[WorkerKey, Why]:
        """The living whose loop has raised, and who stay until a checkpoint is taken."""
        return {key: why for key, why in self._staying.items() if self._membership.alive(key) is not None}

    def last_words(self, worker: Worker, message: WorkerFailed) -> bool:
        """A worker ends by an exception. Returns whether it can go at once.

        The same error at the same step is the user's code, not chance, if it comes in a later generation: in another
        life, or at whom the work of the first went to. Several at once are no proof of that.
        """
        who, why = describe(worker.key), Why(message.cause, message.reason)
        if message.fatal:
            self._progress.end("failed", Why(why.cause, f"{who}: {message.reason}"), message.exit_code)
            return False
        if message.sound >= 0 and self._agreement.has(worker.key):
            self._progress.in_doubt(why, message.sound)
        now = (worker.key, message.generation)
        first, generation = self._first.setdefault((message.step, message.signature), now)
        needed = message.holds and self._is_needed(worker)
        if first != worker.key and not 0 < message.generation <= generation:
            reason = f"{who} failed at step {message.step} as {describe(first)} did: {message.reason}"
            if self._saving.ending is None:
                why_end = Why(why.cause, reason)
                self._saving.end_after_saving("failed", why_end, 1, self._desk.config.save_ns)
            others = len(self._agreement.survivors()) > 1  # they hold the state
            return self._saving.ending is not None and not needed and others
        if not needed:
            return True
        self._staying[worker.key] = why
        self._desk.alarms.set(FailedDue(), self._desk.now + self._desk.config.save_ns)
        text = f"{who}: {message.reason}; nobody else holds its state, so a checkpoint is taken first"
        self._agreement.break_off(Why(why.cause, text))
        return False

    def _is_needed(self, worker: Worker) -> bool:
        """Whether it holds a stage that no other member holds who could go on."""
        plan = self._agreement.plan
        if not self._desk.config.save_ns or plan is None or not plan.has(worker.key):
            return False
        new, staying = self._agreement.empty_handed(), self.staying
        able = [w.key for w in self._agreement.survivors() if w.key != worker.key and w.key not in staying]
        held = {stage for key in able if key.worker_id not in new for stage in plan.stages_of(key.worker_id)}
        mine = plan.stages_of(worker.key.worker_id)
        return worker.key.worker_id not in new and any(stage not in held for stage in mine)

    def let_go(self) -> list[tuple[Worker, Why]]:
        """The checkpoint is there, or the time for it is over. Returns who can go now, and why."""
        staying, self._staying = self._staying, {}
        found = [(self._membership.alive(key), why) for key, why in sorted(staying.items())]
        return [(worker, why) for worker, why in found if worker is not None]
