"""A worker without torch: follows plans and counts steps, so that job and agent can be tested on their own.

Files in the run directory steer it: `finish` (the leader says that the job is done), `crash-<id>` (raise at start),
`stubborn` (do not leave when told to). As a cell its head has its limbs count the steps, and says what they have
counted; `bad-limb-<id>` (they raise).
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from pathlib import Path

from everstep.base.plan import Member, Plan
from everstep.observe.logs import set_up_worker_log
from everstep.protocol import messages as m
from everstep.protocol.following import PlanAsked, PlanShown, name_of
from everstep.runtime.host.board import Board
from everstep.runtime.host.cell import Head, Limb
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.control_client import ControlClient


class FakeWorker:
    """One life."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.run_dir = Path(context.run_dir)
        self.row = Board.attach(context.board_fd).row(context.worker_id)
        self.cell = Head(context, self.row.tick)
        who = context.worker_id, context.incarnation, context.host, os.getpid()
        self.member = Member(*who, "127.0.0.1:1", "", self.cell.meet())
        self.plan: Plan | None = None
        self.step = 0
        self.inbox: queue.Queue[m.AnyMessage] = queue.Queue()
        self.client = ControlClient(
            context.coordinator_file, context.token_bytes(), "worker", str(context.key), self.hello, self.inbox.put
        )
        self.row.set(phase="idle")

    def hello(self) -> tuple[m.AnyMessage, Plan | None]:
        plan = self.plan
        return m.WorkerHello(member=self.member, step=self.step, follows=name_of(plan)), plan

    def who(self) -> dict[str, int]:
        return {"worker_id": self.context.worker_id, "incarnation": self.context.incarnation}

    def run(self) -> int:
        while True:
            try:
                code = self.handle(self.inbox.get(timeout=0.01))
            except queue.Empty:
                code = self.work()
            if code is not None and not (self.run_dir / "stubborn").exists():
                self.client.close()
                self.cell.close()
                return code

    def handle(self, message: m.AnyMessage) -> int | None:
        match message:
            case m.PlanNow(plan=plan) | m.PlanPrepared(plan=plan):
                self.plan = plan
                self.row.set(generation=plan.generation, phase="settle")
                self.client.send(
                    m.GenerationEntered(**self.who(), generation=plan.generation, step=self.step + 1, phases_ms={})
                )
            case PlanAsked():
                self.client.send(PlanShown(**self.who(), plan=self.plan))
            case m.Heal(ticket=ticket):
                self.client.send(m.WorkerHealed(**self.who(), ticket=ticket, step=self.step))
            case m.Dismissed(drained=drained):
                return 0 if drained else 1
            case m.JobEnded():
                return 0
        return None

    def work(self) -> int | None:
        plan = self.plan
        if plan is None or not plan.has(self.member.key):
            return None
        self.step += 1
        self.row.set(step=self.step, phase="forward", samples=self.step)
        if self.cell.command("count") != [self.step] * len(self.member.limbs):
            raise RuntimeError("a limb has miscounted")
        if plan.leader(0) == self.context.worker_id:
            message = m.Progress(**self.who(), generation=plan.generation, step=self.step, step_ms=10.0)
            self.client.send(message)
            if (self.run_dir / "finish").exists():
                done = m.WorkerDone(**self.who(), generation=plan.generation, step=self.step, final_written=True)
                self.client.send(done)
        return None


def main(context: WorkerContext) -> int:
    """The entry point that the agent names."""
    set_up_worker_log(2, context.worker_id, context.incarnation)
    (Path(context.run_dir) / f"pid-{context.key}").write_text(str(os.getpid()))
    (Path(context.run_dir) / f"board-{context.key}").write_text(str(context.board_fd))
    print(f"life {context.key} starts, hash seed {os.environ['PYTHONHASHSEED']}", flush=True)
    if (Path(context.run_dir) / f"crash-{context.worker_id}").exists():
        raise ImportError("no module named 'nonsense'")
    if "--with-child" in context.argv:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        (Path(context.run_dir) / f"child-{context.key}").write_text(str(child.pid))
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    (Path(context.run_dir) / f"fds-{context.key}").write_text(" ".join(map(str, fds)))
    return FakeWorker(context).run()


def in_cells(context: WorkerContext) -> int:
    """An entry point for heads and limbs."""
    if context.cell_rank == 0:
        return main(context)
    run_dir = Path(context.run_dir)
    (run_dir / f"pid-{context.key}-{context.cell_rank}").write_text(str(os.getpid()))
    print(f"limb {context.cell_rank} of {context.key} of {context.cell_size} starts", flush=True)
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        if (run_dir / f"bad-limb-{context.worker_id}").exists():
            raise ValueError("this limb is bad")
        return counted

    Limb(context).serve({"count": count})
    (run_dir / f"left-{context.key}-{context.cell_rank}").touch()
    return 0


def quick(context: WorkerContext) -> int:
    """An entry point that leaves at once."""
    time.sleep(0)
    return 0


def trains(context: WorkerContext) -> int:
    """An entry point that finds torch there already, and uses it."""
    if "torch" not in sys.modules:
        return 3
    import torch

    model = torch.nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return 0 if torch.get_num_threads() == 1 else 4
