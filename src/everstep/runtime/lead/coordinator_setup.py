"""The coordinator's beginning: its view of the job's config, and the facts that hosts are told."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from everstep.base.config import Config, inexact, pool_wish
from everstep.base.stage_map import devices_of, hosts_of, parse_map
from everstep.base.strikes import Strike
from everstep.observe.events import EventLog, last_committed_step, told_lately
from everstep.placement.cell_shapes import CellShape, shapes_of, shapes_over
from everstep.protocol.converter import converter
from everstep.protocol.coordinator.types import (
    Alike,
    CoordinatorConfig,
    HostRules,
)
from everstep.protocol.identity import Code, read_code, read_divides, read_kernels
from everstep.protocol.lease.candidate import GONE_PART
from everstep.protocol.messages import (
    JobEnded,
    JobFacts,
)
from everstep.runtime.files.host_directory import word_of
from everstep.runtime.link.address import (
    COORDINATOR_FILE,
)
from everstep.runtime.process import machine
from everstep.runtime.versions import task_digest, versions

RETURN_NS = 30_000_000_000


def coordinator_config(
    config: Config,
    term: int = 0,
    strikes: Sequence[Strike] = (),
    job: Mapping[str, Any] = MappingProxyType({}),
    *,
    sudden: bool = False,
) -> CoordinatorConfig:
    """The coordinator's view of the job's config. term: as `HostRules` has it. strikes: scripted faults of hosts and
    links. job: as job.json says it. sudden: as `Candidate` has it."""
    beat, cell, shape = config.heartbeat, config.cell, CellShape(config.cell.fsdp, config.cell.tp)
    # A successor was not there before the old lease ended: hosts had that time, too, or get it now.
    lacks_s = config.control.lease_s * (1 - GONE_PART) if sudden else 0.0
    return CoordinatorConfig(
        lanes=config.lanes,
        stages=config.stages,
        workers=config.workers,
        min_workers=config.min_workers,
        on_failure=config.on_failure,
        hang_limit_ns=_ns(config.hang_limit_s),
        heartbeat_floor_ns=int(beat.floor_s * 1e9),
        heartbeat_ceiling_ns=int(beat.ceiling_s * 1e9),
        heartbeat_interval_ns=_ns(beat.interval_s),
        quorum_wait_ns=int(config.quorum_wait_s * 1e9),
        wish=pool_wish(config),
        save_ns=int(config.checkpoint.grace_s * 1e9) if config.checkpoint.enabled else 0,
        slots=(config.workers + config.spares) * config.cell.hosts,
        hosts=HostRules(
            grace_ns=int((beat.reconnect_s + lacks_s) * 1e9) if term else HostRules.grace_ns,
            reconnect_ns=int(beat.reconnect_s * 1e9),
            return_ns=RETURN_NS if config.hosts.return_ == "rebalance" and config.cell.hosts == 1 else None,
            device=config.device,
            devices=devices_of(parse_map(config.map, config.stages)),
            least=max(config.hosts.min, config.cell.hosts),
            named=_named_hosts(config),
            wait_ns=int(config.hosts.wait_s * 1e9),
            strikes=tuple(strikes),
            term=term,
            hang_first_ns=int(config.hang_first_s * 1e9),
            cells=shapes_of(shape, cell.shards) if cell.hosts == 1 else shapes_over(shape, cell.hosts),
            span=config.cell.hosts,
            alike=Alike(
                read_kernels(job.get("numerics")),
                read_code(job.get("code")) or Code(),
                read_code(job.get("code_before")) or Code(),
                inexact(config),
                read_divides(job.get("divides")),
            ),
        ),
    )


def _named_hosts(config: Config) -> dict[int, str]:
    """Host of each worker by the map; the job's own host, under any of its names, is replaced by its address."""
    node = os.uname().nodename
    own = {node, node.partition(".")[0], "localhost", "127.0.0.1", "::1"}
    named = hosts_of(parse_map(config.map, config.stages))
    return {i: config.network.address if name in own else name for i, name in named.items()}


def _ns(seconds: float | str) -> int | None:
    """The seconds in nanoseconds; None for 'auto'."""
    return None if isinstance(seconds, str) else int(seconds * 1e9)


def scripted_strikes(job: dict[str, Any]) -> list[Strike]:
    """Scripted faults of hosts and links. job: as job.json says it. Raises: ValueError if they are malformed."""
    return _strikes(job.get("strikes", []))


_strikes = converter(list[Strike])


def job_facts(run_dir: Path, job: dict[str, Any], job_pid: int) -> JobFacts:
    """Facts of the job for agents. job: as job.json says it. Raises: OSError."""
    return JobFacts(
        task=str(job.get("task", "")),
        argv=[str(word) for word in job.get("argv", ())],
        config=job["config"],
        run_dir=str(run_dir.resolve()),
        coordinator_file=str((run_dir / COORDINATOR_FILE).resolve()),
        job_pid=job_pid,
        machine=machine() if job_pid else "",
        versions={**versions(), "task file": task_digest(str(job.get("task", "")))},
        strikes=scripted_strikes(job),
        place=word_of(run_dir),
        job=job,
    )


def report_end(events: EventLog, ended: JobEnded) -> None:
    """Write the event of the job's end, if the coordinator that had decided it died before it told it."""
    try:
        told, step = {kind for kind, _ in told_lately(events.path)}, last_committed_step(events.path)
    except OSError:
        return  # where nobody can read it is no place for it
    if not told & {"job_completed", "job_failed"}:
        kind = "job_completed" if ended.state == "completed" else "job_failed"
        said: dict[str, Any] = {"state": ended.state, "exit_code": ended.exit_code, "step": step}
        events.write(kind, time_unix_ns=None, cause=ended.cause, reason=ended.reason, **said)
