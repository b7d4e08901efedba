"""The entry of workers that are cells: heads train as any worker does, and have their limbs follow each update.

Limbs compute nothing. What each has followed is in `cells/<worker>.<life>-<rank>` of the run directory, step by step.
"""

from __future__ import annotations

import os
from pathlib import Path

from everstep.base.errors import check
from everstep.base.plan import Plan
from everstep.chaos.inject import Injector
from everstep.chaos.spec import parse
from everstep.cli.task_loading import load_task
from everstep.observe.events import EventLog
from everstep.runtime.host.cell import Limb
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.link.context import WorkerContext
from everstep.train.worker_link import LaunchedLink

ENTRY = f"{__name__}:main"
FOLLOWED = "cells"


def main(context: WorkerContext) -> int:
    """Run one process of one life of a worker."""
    folder = context.run_path / FOLLOWED
    folder.mkdir(exist_ok=True)
    (folder / f"{context.key}-{context.cell_rank}.pid").write_text(str(os.getpid()))
    return lead(context) if context.cell_rank == 0 else follow(context, folder / f"{context.key}-{context.cell_rank}")


def follow(context: WorkerContext, path: Path) -> int:
    """A limb's life."""
    steps: list[int] = []

    def update(step: int) -> int:
        steps.append(step)
        with open(path, "a") as file:
            file.write(f"{step}\n")
        return len(steps)

    Limb(context).serve({"update": update})
    return 0


def lead(context: WorkerContext) -> int:
    """A head's life: that of a worker, but for the limbs."""
    from everstep.train.worker import run_worker

    config = context.load_config()
    events = EventLog(context.run_path / EVENTS_FILE)
    injector = Injector(parse(config.chaos), context.run_path, context.key, events.write, config.seed)
    links: list[LaunchedLink] = []
    updates = 0

    def linked(link: LaunchedLink) -> None:
        links.append(link)
        injector.pids = lambda: link.cell.pids

    def at(step: int, phase: str, plan: Plan) -> None:
        nonlocal updates
        injector.at(step, phase, plan)
        if phase == "update":
            updates += 1
            followed = links[0].cell.command("update", step=step)
            check(followed == [updates] * (context.cell_size - 1), f"{updates} updates, limbs followed {followed}")

    try:
        return run_worker(context, lambda effective: load_task(context.task, effective), None, at, linked)
    finally:
        events.close()
