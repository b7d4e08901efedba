"""The entry of a worker process: where the task, the scripted faults and the training loop meet.

Here and not in `train`, because faults and the naming of tasks are above it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from everstep.base.config import Config
from everstep.base.doors import parse_ports
from everstep.chaos.inject import Injector
from everstep.chaos.spec import parse
from everstep.cli.task_loading import load_task
from everstep.observe.events import EventLog
from everstep.runtime.host.board import Board
from everstep.runtime.host.cell_doors import Deputies
from everstep.runtime.host.cell_search import CellSearch
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.interfaces import bind_collectives
from everstep.runtime.link.listening import keep_within
from everstep.runtime.process import AGAIN

if TYPE_CHECKING:
    from everstep.train.task import Task
    from everstep.train.worker_link import LaunchedLink

ENTRY = f"{__name__}:main"
FILES = "everstep.checkpoint.host_files:HostFiles"


def main(context: WorkerContext) -> int:
    """Run one life of one worker; returns its exit code."""
    from everstep.train.cell_deputy import run_deputy
    from everstep.train.cell_limb import run_limb
    from everstep.train.first_place import expected
    from everstep.train.worker import run_worker

    config = context.load_config()
    for name, value in bind_collectives(context.address or config.network.address).items():
        os.environ.setdefault(name, value)  # the user of the host may have set another value
    os.environ.update({**expected(context, config), **config.env})
    keep_within(parse_ports(config.network.ports))
    is_script = context.task.endswith(".py")
    if context.cell_rank:
        return run_limb(context, None if is_script else lambda effective: load_task(context.task, effective))
    deputies = None
    if config.cell.hosts > 1:
        search = CellSearch(context, config)
        plan = search.find(Board.attach(context.board_fd).row(context.worker_id).tick)
        if plan is None:
            return 0 if search.over.is_set() else AGAIN
        context = replace(context, cell_hosts=len(plan.doors))
        if plan.part:
            return run_deputy(context, plan, search, None if is_script else lambda now: load_task(context.task, now))
        search.leave()
        if context.cell_hosts > 1:
            deputies = Deputies(plan, search.door, context.call_peer)
        else:
            search.door.close()
    events = EventLog(context.run_path / EVENTS_FILE)
    injector = Injector(parse(config.chaos), context.run_path, context.key, events.write, config.seed)

    def linked(link: LaunchedLink) -> None:
        link.cell.deputies = deputies
        injector.cut_off = link.cut_off
        injector.claim = link.claim
        link.fault_now = injector.now
        injector.flip = lambda: link.flip()
        injector.pids = lambda: link.cell.pids
        injector.coordinator_pid = link.coordinator_pid
        injector.strike_due = link.strike_due

    def load(effective: Config) -> Task:
        return load_task(context.task, effective)

    try:
        if is_script:
            return run_worker(context, None, context.task, injector.at, linked)
        return run_worker(context, load, None, injector.at, linked)
    finally:
        events.close()
