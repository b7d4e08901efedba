"""Checks of `everstep doctor` beyond addresses: the task's code and data, space, limits, bandwidth, etcd's latency."""

from __future__ import annotations

import contextlib
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.base.config import Config
from everstep.base.errors import EverstepError
from everstep.cli.early_server import PRELOAD
from everstep.protocol.identity import read_code
from everstep.protocol.lease.requests import Look, Unanswered
from everstep.runtime.host.fork_server_client import EarlyForkServer
from everstep.runtime.lead.etcd import Etcd
from everstep.runtime.link.head_facts import HeadFacts, bandwidth

_LOOK_HERE = "everstep.cli.lane_digest:look_here"
_LITTLE_DISK, _LITTLE_SHARED, _LITTLE_FILES = 2 << 30, 1 << 30, 4096
_NONE_LEFT, _FEW_FILES = 64 << 20, 256
_SLOW_BYTES_S = 1e6
_QUESTIONS, _SLOW_ETCD_S = 9, 0.1


@dataclass(frozen=True)
class Checked:
    """Result of one check. state: ok, warning, or wrong (the host could not join)."""

    name: str
    state: str
    text: str


def task_checks(heard: HeadFacts) -> Iterator[Checked]:
    """Compare the job's task with that of this host: it is imported, and its first batch is loaded, in a process of its
    own."""
    task, config = heard.job.get("task"), heard.job.get("config")
    if not isinstance(task, str) or not isinstance(config, dict):
        yield Checked("task", "warning", "the head does not say which task it runs: not checked")
        return
    if task.endswith(".py"):
        there = Path(task).is_file()
        text = f"{task} is a script: its modules and data are compared when its workers run"
        yield Checked("task", "ok" if there else "wrong", text if there else f"{task} is not on this host")
        return
    server = EarlyForkServer(1, PRELOAD)
    with contextlib.closing(server):
        try:
            found = server.call(_LOOK_HERE, {"task": task, "config": config})
        except EverstepError as error:
            found = {"error": f"the process that looked at it ended ({error})"}
    yield from compared(found, heard.job)


def compared(here: Mapping[str, Any], job: Mapping[str, Any]) -> Iterator[Checked]:
    """Findings about code and data. here: answer of `look_here`; job: as `HeadFacts` has it."""
    if "error" in here:
        yield Checked("task", "wrong", str(here["error"]))
        return
    own, theirs = read_code(here.get("code")), read_code(job.get("code"))
    if own is None or theirs is None:
        yield Checked("modules", "ok", "the task imports; no worker has reported the job's modules yet")
    else:
        words = own.unlike(theirs, "here", "in the job")
        yield Checked("modules", "wrong" if words else "ok", words or "all that both import are alike")
    if "data_error" in here:
        yield Checked("data", "wrong", f"its first batch cannot be loaded: {here['data_error']}")
        return
    digest, said = str(here.get("lane")), job.get("lane_digest")
    if not said:
        yield Checked("data", "ok", f"lane 0 of step 1 has digest {digest}; the job does not say its own")
    elif said != digest:
        text = f"lane 0 of step 1 has digest {digest} here, {said} on the job's host: bring the same data to this host"
        yield Checked("data", "wrong", text)
    else:
        yield Checked("data", "ok", f"lane 0 of step 1 has digest {digest}, as on the job's host")


def space_checks(folder: Path | None) -> Iterator[Checked]:
    """Free space for this host's files and for shared memory. folder: --run-dir, None: a private directory."""
    where = folder or Path(tempfile.gettempdir())
    while not where.exists() and where != where.parent:
        where = where.parent
    yield _space("disk", where, _LITTLE_DISK)
    if Path("/dev/shm").is_dir():
        yield _space("shared memory", Path("/dev/shm"), _LITTLE_SHARED)


def _space(name: str, where: Path, little: int) -> Checked:
    try:
        free = shutil.disk_usage(where).free
    except OSError as error:
        return Checked(name, "wrong", f"{where}: {error.strerror or error}")
    state = "wrong" if free < _NONE_LEFT else "warning" if free < little else "ok"
    more = "" if state == "ok" else f": models, copies and checkpoints may need more than {little / (1 << 30):g} GiB"
    return Checked(name, state, f"{free / (1 << 30):.1f} GiB are free in {where}{more}")


def files_check() -> Checked:
    """How many files a process of this host may open at once."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= _LITTLE_FILES:
        return Checked("open files", "ok", f"{'any number' if most == resource.RLIM_INFINITY else most} per process")
    state = "wrong" if most < _FEW_FILES else "warning"
    return Checked(
        "open files", state, f"{most} per process at most: raise the hard limit to {_LITTLE_FILES} (ulimit -Hn)"
    )


def bandwidth_check(where: tuple[str, int], config: Config, token: bytes, own: str) -> Checked:
    """Bytes per second between this host and the head, by a few megabytes."""
    try:
        found = bandwidth(where, token, config.security.tls, own)
    except (EverstepError, OSError) as error:
        return Checked("bandwidth", "warning", f"not measured: {error}")
    text = f"at least {found / 1e6:.1f} MB/s to the head and back, by a few megabytes over one connection"
    return Checked("bandwidth", "warning" if found < _SLOW_BYTES_S else "ok", text)


def etcd_latency(etcd: Etcd) -> Checked:
    """Median time of an answer of etcd."""
    times: list[float] = []
    for _ in range(_QUESTIONS):
        begin_s = time.monotonic()
        if isinstance(etcd.ask(Look()), Unanswered):
            return Checked("etcd's latency", "warning", etcd.trouble())
        times.append(time.monotonic() - begin_s)
    median_s = statistics.median(times)
    text = f"{median_s * 1e3:.1f} ms for an answer (median of {_QUESTIONS}, slowest {max(times) * 1e3:.1f} ms)"
    slow = "; a lease of 2 s (control.lease_s) wants less than 100 ms" if median_s > _SLOW_ETCD_S else ""
    return Checked("etcd's latency", "warning" if slow else "ok", text + slow)
