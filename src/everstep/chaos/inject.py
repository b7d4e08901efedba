"""Faults that strike from inside: a worker that reaches the step and phase of a fault kills, stops or breaks itself.

From inside, because only the worker knows which step and phase it is in. Each fault strikes at most once per job,
although steps are redone and workers return: whoever strikes first claims it with a file under `chaos/`, created
exclusively. Who is struck follows from the plan alone, so that all workers agree without talking.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.base.errors import EverstepError
from everstep.base.plan import Plan, WorkerKey
from everstep.chaos.spec import AnyFault, Fault, RandomFaults, choose
from everstep.runtime.process import OUTLIVES_WORKERS

Report = Callable[..., Any]


class ChaosError(EverstepError):
    """The exception of a `raise` fault.

    `signature` differs from fault to fault, so that the coordinator never takes it for an error of the user's task
    that every restart would repeat.
    """

    def __init__(self, message: str, signature: str) -> None:
        super().__init__(message)
        self.signature = signature


class Injector:
    """Strikes this worker (and, for it, the coordinator) when a fault is due.

    `report(kind, **fields)` writes an event; it must have reached the file when it returns. With no faults `at`
    returns at once.
    """

    def __init__(
        self, faults: Sequence[AnyFault], run_dir: Path, worker: WorkerKey, report: Report, seed: int = 0
    ) -> None:
        self._once = [fault for fault in faults if isinstance(fault, Fault)]
        self._random = [fault for fault in faults if isinstance(fault, RandomFaults)]
        self._run_dir = run_dir
        self._worker = worker
        self._report = report
        self._seed = seed
        self._drawn: dict[tuple[int, int, tuple[int, ...]], Fault | None] = {}
        self._idle = not faults

    def at(self, step: int, phase: str, plan: Plan) -> None:
        """The worker enters `phase` of `step` under this plan: strike if a fault is due.

        Raises: ChaosError for a `raise` fault. Does not return from a kill.
        """
        if self._idle:
            return
        for fault in tuple(self._once):
            if fault.at <= step and self._phase_fits(fault, phase) and self._is_mine(fault, plan):
                self._once.remove(fault)
                self._strike(fault, step, phase, plan, f"{fault.index}")
        for source in self._random:
            drawn = self._draw(source, step, plan)
            if drawn is not None and self._phase_fits(drawn, phase) and self._is_mine(drawn, plan):
                self._strike(drawn, step, phase, plan, f"{source.index}-{step}")

    def _draw(self, source: RandomFaults, step: int, plan: Plan) -> Fault | None:
        key = (source.index, step, plan.worker_ids)
        if key not in self._drawn:
            self._drawn = {k: v for k, v in self._drawn.items() if k[1] == step}
            self._drawn[key] = source.draw(step, plan.worker_ids)
        return self._drawn[key]

    @staticmethod
    def _phase_fits(fault: Fault, phase: str) -> bool:
        return phase == fault.phase or (fault.phase is None and phase != "heal")

    def _is_mine(self, fault: Fault, plan: Plan) -> bool:
        me = self._worker.worker_id
        target = fault.target
        if target.kind == "worker":
            return target.number == me
        if target.kind == "random":
            ids = plan.worker_ids
            return bool(ids) and ids[choose(len(ids), self._seed, fault.index, fault.at)] == me
        stage = target.number if target.kind == "leader" and target.number is not None else 0
        return bool(plan.pool(stage)) and plan.leader(stage) == me

    def _strike(self, fault: Fault, step: int, phase: str, plan: Plan, name: str) -> None:
        if not self._claim(name):
            return
        pid = self._coordinator_pid() if fault.target.kind == "coordinator" else os.getpid()
        if pid is None:
            return
        victim = "coordinator" if fault.target.kind == "coordinator" else f"worker {self._worker}"
        self._report(
            "fault_injected",
            generation=plan.generation,
            step=step,
            worker_id=None if victim == "coordinator" else self._worker.worker_id,
            incarnation=None if victim == "coordinator" else self._worker.incarnation,
            pid=pid,
            reason=f"chaos fault {str(fault)!r} strikes {victim} in phase {phase} of step {step}",
            fault=fault.kind,
            target=str(fault.target),
            phase=phase,
        )
        if fault.kind == "raise":
            raise ChaosError(
                f"chaos fault {str(fault)!r} raised in phase {phase} of step {step}",
                f"chaos:{name}:{self._worker}:{step}",
            )
        if fault.kind == "stop" and fault.for_s is not None:
            continue_later(pid, fault.for_s)
        try:
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            pass  # a coordinator that is dead already cannot die again

    def _claim(self, name: str) -> bool:
        folder = self._run_dir / "chaos"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{self._worker}\n")
        return True

    def _coordinator_pid(self) -> int | None:
        try:
            pid = int(json.loads((self._run_dir / "coordinator.json").read_text())["pid"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._report("warning", reason=f"chaos: cannot strike the coordinator, no pid in coordinator.json: {error}")
            return None
        return pid if pid > 1 else None


def continue_later(pid: int, after_s: float) -> None:
    """Send SIGCONT to `pid` after so many seconds, from a process of its own that outlives the caller.

    Its name tells the fork server, which ends what dead workers leave running, to let this one be.
    """
    subprocess.run(
        [OUTLIVES_WORKERS, "-c", f"(sleep {after_s:.3f}; kill -CONT {pid}) >/dev/null 2>&1 &"],
        executable="/bin/sh",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
