"""The coordinator's part in profiles: which workers record which steps, and which have not finished. Pure.

One at a time. A worker that dies, or leaves, while it records is missing from the profile; the others go on. A
restarted coordinator knows of no profile: workers that still record one refuse another.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.agreement import Agreement, JobProgress
from everstep.protocol.coordinator.environment import MILLISECOND_NS, SECOND_NS, Environment, describe, listed
from everstep.protocol.coordinator.membership import Membership, Worker
from everstep.protocol.messages import Profiled, ProfileNow

MOST_STEPS = 1000
STANDSTILL_NS = 120 * SECOND_NS
"""Time that a worker may stand still while it writes a long trace."""
_LEAD_NS = 500 * MILLISECOND_NS
"""Time until all workers have surely heard of the profile, so that they begin with the same step."""
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


@dataclass
class _Profile:
    """A recording by some workers. ended: those that have finished, with a reason if there is no trace."""

    request: ProfileNow
    workers: dict[int, WorkerKey]
    ended: dict[int, str] = field(default_factory=dict)


class Profiling:
    """The newest profile, and the workers that have not finished."""

    def __init__(self, env: Environment, membership: Membership, agreement: Agreement, progress: JobProgress) -> None:
        self._env, self._membership, self._agreement, self._progress = env, membership, agreement, progress
        self._newest: _Profile | None = None

    def ask(self, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Have the next steps recorded by the members in `args`, or by all. Returns an error, or the request."""
        plan, known = self._agreement.plan, self._newest
        if not self._agreement.running:
            return "no worker trains now: try again when the job runs", {}
        if known is not None and (pending := self._pending(known)):
            there = f"{known.request.name}; workers yet to end: {listed(pending)}"
            return f"a profile is being recorded already ({there}): wait for it", {}
        steps, name = args.get("steps"), args.get("folder")
        if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
            return f"expected a number of steps from 1 to {MOST_STEPS}, got {steps!r}", {}
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return f"expected letters, digits, - and _ as the profile's folder, got {name!r}", {}
        members = plan.worker_ids
        wanted = args.get("workers")
        ids = members if wanted is None else wanted
        known_ids = set(members)
        if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int and i in known_ids for i in ids):
            return f"expected some of the workers that train now ({listed(members)}), got {wanted}", {}
        first = self._progress.step + 3  # a step is told of when the next one is decided, and by then another has begun
        if self._progress.step_times_ms:
            first += int(_LEAD_NS / MILLISECOND_NS / max(0.1, median(self._progress.step_times_ms)))
        flags = {what: bool(args.get(what)) for what in ("memory", "stacks")}
        request = ProfileNow(name=name, first_step=first, steps=steps, **flags)
        keys = {member.worker_id: member.key for member in plan.members if member.worker_id in ids}
        self._newest = _Profile(request, keys)
        for worker in self._agreement.survivors():
            self.remind(worker)
        rows = [
            {**asdict(key), "stages": list(plan.stages_of(i)), "role": plan.role_of(i)}
            for i, key in sorted(keys.items())
        ]
        return "", {"name": name, "first_step": first, "steps": steps, "workers": rows}

    def remind(self, worker: Worker) -> None:
        """Tell a worker its part of the profile, if it has not done it; an earlier message may have been lost."""
        known = self._newest
        if known is not None and worker.key in self._pending(known).values():
            self._env.send(worker.connection, known.request)

    def profiled(self, worker: Worker, message: Profiled) -> None:
        known, key = self._newest, worker.key
        if known is not None and (known.request.name, known.workers.get(key.worker_id)) == (message.name, key):
            known.ended[key.worker_id] = "" if message.ok else message.reason or "it gave no reason"

    def records(self, key: WorkerKey) -> bool:
        """Whether this worker records, or is about to."""
        known = self._newest
        return known is not None and known.workers.get(key.worker_id) == key and key.worker_id not in known.ended

    def status(self) -> dict[str, Any]:
        """For the status: the newest profile, the workers that have not finished, and those that failed, with the
        reason."""
        known = self._newest
        if known is None:
            return {}
        pending = self._pending(known)
        failed = {str(i): why for i, why in sorted(known.ended.items()) if why}
        left = {i: key for i, key in known.workers.items() if i not in {*pending, *known.ended}}
        failed |= {str(i): f"{describe(key)} has left" for i, key in left.items()}
        return {"profile": {"name": known.request.name, "pending": sorted(pending), "failed": failed}}

    def _pending(self, known: _Profile) -> dict[int, WorkerKey]:
        """Living workers that have not finished the recording."""
        left = {i: key for i, key in known.workers.items() if i not in known.ended}
        return {i: key for i, key in left.items() if self._membership.alive(key) is not None}
