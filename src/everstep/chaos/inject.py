"""Faults that strike from inside: a worker that reaches the step and phase of a fault kills, stops or breaks itself.

From inside, because only the worker knows which step and phase it is in. Each fault strikes at most once per job,
although steps are redone and workers return: the first worker to strike claims it with a file under `chaos/` in the
job's directory, by the wire if that is elsewhere. The plan alone decides who is struck, so that all workers agree
without talking.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause
from everstep.base.given import parse_json
from everstep.base.plan import Plan, WorkerKey
from everstep.chaos.fault import COMPUTE_PHASES, Fault
from everstep.chaos.fault_kinds import KINDS, Blow, Lasting, OnCut
from everstep.chaos.spec import AnyFault, RandomFaults, choose, parse_now
from everstep.runtime.files.claim_files import claim
from everstep.runtime.link.address import EVENTS_FILE

OnFault = Callable[..., Any]
OnClaim = Callable[[str, str], tuple[bool, str] | None]
NO_PLAN = Plan(0, "none yet", (), (), 0)


def _cannot(for_s: float, lose: bool, peers: bool) -> None:
    """Refuse a cut in a worker that has no link to cut."""


class Injector:
    """Strikes this worker (and, for it, the coordinator) when a fault is due.

    `report(kind, **fields)` writes an event; it must have reached the file when it returns. With no faults `at` returns
    at once. The maker of the worker's link sets the other callables. `cut_off`: called with the seconds of the cut,
    whether the connection is to break (else it is only mute), and whether the other workers are cut off, too; it
    returns when the worker may go on. `claim`: asks whether no other worker has struck; None if that is not known now.
    `flip`: flips a bit of the worker's state. `pids`: of all processes of the worker; the first one strikes.
    `coordinator_pid`: PID of the coordinator, if it is a process of this host; else 0. `strike_due`: called with index,
    step, phase and plan when a fault of a host, a link, or a coordinator elsewhere is due; the coordinator has others
    carry it out, once.
    """

    def __init__(
        self, faults: Sequence[AnyFault], run_dir: Path, worker: WorkerKey, report: OnFault, seed: int = 0
    ) -> None:
        self._once: list[Fault] = []
        self._lasting: list[Lasting] = []
        self._places: list[Fault] = []
        self._random = [fault for fault in faults if isinstance(fault, RandomFaults)]
        self._run_dir = run_dir
        self._worker = worker
        self._report = report
        self._seed = seed
        self._drawn: dict[tuple[int, int, tuple[int, ...]], Fault | None] = {}
        self._idle = not faults
        self.cut_off: OnCut = _cannot
        self.flip: Callable[[], None] = lambda: None
        self.strike_due: Callable[[int, int, str, Plan], None] = lambda index, step, phase, plan: None
        self.claim: OnClaim = lambda name, text: claim(run_dir, name, text)
        self.pids: Callable[[], Sequence[int]] = lambda: (os.getpid(),)
        self.coordinator_pid: Callable[[], int] = lambda: 0
        for fault in faults:
            if isinstance(fault, Fault):
                self._expect(fault)

    def _expect(self, fault: Fault) -> None:
        if fault.target.name:
            self._places.append(fault)
        elif KINDS[fault.kind].strike is None:
            self._lasting.append(Lasting(fault, self._run_dir / EVENTS_FILE))
        else:
            self._once.append(fault)

    def at(self, step: int, phase: str, plan: Plan) -> None:
        """The worker enters `phase` of `step` under this plan: strike if a fault is due.

        Raises: ChaosError for a `raise` fault. Does not return from a kill.
        """
        if self._idle:
            return
        for fault in tuple(self._once):
            if fault.at <= step and self._phase_fits(fault, phase) and self._is_meant(fault, plan):
                self._once.remove(fault)
                if self._strike(fault, step, phase, plan, f"{fault.index}") is None:
                    self._once.append(fault)
        for fault in tuple(self._places):
            if fault.at <= step and self._phase_fits(fault, phase):
                self._places.remove(fault)
                self.strike_due(fault.index, step, phase, plan)
        for lasting in self._lasting:
            if lasting.due(step, phase) and self._is_meant(lasting.fault, plan):
                if self._claim(f"{lasting.fault.index}", None):
                    self._tell(lasting.fault, step, phase, plan, os.getpid())
                lasting.act()
        for source in self._random:
            drawn = self._draw(source, step, plan)
            if drawn is not None and self._phase_fits(drawn, phase) and self._is_meant(drawn, plan):
                self._strike(drawn, step, phase, plan, f"{source.index}-{step}")

    def now(self, text: str, number: int, step: int, phase: str, plan: Plan | None) -> None:
        """Strike a fault that was requested while the job runs, the `number`-th; called in a thread of its own.

        A fault that kills or stops strikes its target wherever it is, idle spares included; any other waits until the
        target next enters a phase. step, phase, plan: of this worker at the moment.

        Raises: ConfigError if the text is no fault.
        """
        fault = replace(parse_now(text), index=number)
        known = plan if plan is not None else NO_PLAN
        anywhere = KINDS[fault.kind].by_signal and not fault.at and fault.phase is None
        if not (anywhere and self._is_meant(fault, known) and self._strike(fault, step, phase, known, f"{number}")):
            self._expect(fault)
            self._idle = False

    def _draw(self, source: RandomFaults, step: int, plan: Plan) -> Fault | None:
        key = (source.index, step, plan.worker_ids)
        if key not in self._drawn:
            self._drawn = {k: v for k, v in self._drawn.items() if k[1] == step}
            self._drawn[key] = source.draw(step, plan.worker_ids)
        return self._drawn[key]

    @staticmethod
    def _phase_fits(fault: Fault, phase: str) -> bool:
        return phase == fault.phase or (fault.phase is None and phase in COMPUTE_PHASES)

    def _victims(self, fault: Fault, plan: Plan) -> tuple[int, ...]:
        return fault.target.victims(plan, lambda n: choose(n, self._seed, fault.index, fault.at))

    def _is_meant(self, fault: Fault, plan: Plan) -> bool:
        return self._worker.worker_id in self._victims(fault, plan)

    def _strike(self, fault: Fault, step: int, phase: str, plan: Plan, name: str) -> bool | None:
        """Strike if this worker may. Returns False if it may not, being struck before; None if that is not known."""
        mine = self._claim(name, self._victims(fault, plan) if fault.target.several else None)
        if not mine:
            return mine
        of_coordinator = fault.target.kind == "coordinator"
        pid = self.coordinator_pid() if of_coordinator else self._pid_of(fault.target.rank)
        if of_coordinator and not pid:
            self.strike_due(fault.index, step, phase, plan)
            return True
        strike = KINDS[fault.kind].strike
        if pid is not None:
            self._tell(fault, step, phase, plan, pid)
            if strike is not None:
                signature = f"chaos:{name}:{self._worker}:{step}"
                strike(Blow(fault, pid, f"phase {phase} of step {step}", signature, self.cut_off, self.flip))
        return True

    def _tell(self, fault: Fault, step: int, phase: str, plan: Plan, pid: int) -> None:
        rank = f"rank {fault.target.rank} of " if fault.target.rank else ""
        key = None if fault.target.kind == "coordinator" else self._worker
        victim = f"{rank}worker {key}" if key is not None else "coordinator"
        self._report(
            "fault_injected",
            generation=plan.generation,
            step=step,
            worker_id=key.worker_id if key is not None else None,
            incarnation=key.incarnation if key is not None else None,
            pid=pid,
            cause=Cause.INJECTED,
            reason=f"chaos fault {str(fault)!r} strikes {victim} in phase {phase} of step {step}",
            fault=fault.kind,
            target=str(fault.target),
            phase=phase,
        )

    def _claim(self, name: str, victims: tuple[int, ...] | None) -> bool | None:
        """Whether this worker may be struck: no worker was yet, or, of several targets, not this one. None if it is not
        known.

        victims: the targets at the first strike. Only they are struck, not workers that take their places afterwards.
        """
        found = self.claim(name, f"{self._worker}\n" if victims is None else f"{json.dumps(victims)}\n")
        if found is None or victims is None:
            return None if found is None else found[0]
        first, said = found
        me = self._worker.worker_id
        if me not in (victims if first else parse_json(said)):
            return False
        found = self.claim(f"{name}.{me}", f"{self._worker}\n")
        return None if found is None else found[0]

    def _pid_of(self, rank: int) -> int | None:
        pids = self.pids()
        if rank < len(pids):
            return pids[rank]
        text = f"chaos: cannot strike rank {rank} of worker {self._worker}, it has {len(pids)}, counted from 0"
        self._report("warning", cause=Cause.INJECTED, reason=text)
        return None
