"""coordinator.json: the address of a run directory's coordinator. Written whole, by rename."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from everstep.base.below import write_atomically
from everstep.base.errors import ProtocolError
from everstep.base.given import read_given, read_json
from everstep.runtime.process import command_words

LOCK_FILE = "lock"
COORDINATOR_FILE = "coordinator.json"
COORDINATOR_MODULE = "everstep.runtime.lead.coordinator_main"
JOURNAL_FILE = "coordinator.journal"
NEWEST_FILE = "journal-newest"
"""File with the newest entry of a journal in etcd that this host has seen."""
LOGS_FOLDER = "logs"
METRICS_FOLDER = "metrics"
METRICS_FILE = "metrics.json"
METRICS_TOKEN_FILE = "metrics-token"
PROFILES_FOLDER = "profiles"
TOKEN_FILE = "token"
"""File of the job's token. Tokens of single roles lie beside it: `role_file`."""
EVENTS_FILE = "events.jsonl"
JOB_FILE = "job.json"
DATASET_FILE = "dataset.json"
NOTES_FILE = "notes.json"
CHECKPOINTS_DIR = "checkpoints"
TRACE_KEY = "everstep"
"""Key of a worker's trace under which it names the worker, its steps and its phases."""


def role_file(role: str) -> str:
    """File name of the token of one role of people."""
    return f"{TOKEN_FILE}-{role}"


@dataclass(frozen=True)
class CoordinatorAddress:
    """The coordinator's process and its address. tls: where it expects TLS, as `security.tls.mode` has it; ca: CA of
    its certificates then."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tls: Literal["auto", "on", "off"] = "off"
    ca: str = ""


_decoder = msgspec.json.Decoder(CoordinatorAddress)  # made here: two threads that make one at once end the process


def address_of(host: str, port: int, tls: str = "off", ca: str = "", pid: int = 0) -> dict[str, Any]:
    """Address of this process as the coordinator; or of another one, by its pid."""
    return {"pid": pid or os.getpid(), "host": host, "port": port, "tls": tls, "ca": ca}


def announce(path: Path, where: dict[str, Any], *, anew: bool = False) -> None:
    """Write the coordinator's address there. anew: only if the file has another one."""
    if anew:
        with contextlib.suppress(OSError, ProtocolError):
            if vars(read_address(path)) == where:
                return
    write_atomically(path, json.dumps({**where, "started_unix_ns": time.time_ns()}))


def read_address(path: Path) -> CoordinatorAddress:
    """The address in a file. Raises: FileNotFoundError if there is none; ProtocolError if the file is malformed."""
    text = read_given(path)
    try:
        return _decoder.decode(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"expected a coordinator's address in {path}, found {text[:80]!r}") from None


def coordinator_here(path: Path, own: str) -> int:
    """PID of the coordinator that is announced there, if it listens at this host's address and its process can be seen
    from here; else 0. Elsewhere the number may be any process's."""
    try:
        there = read_address(path)
    except (OSError, ProtocolError):
        return 0
    known = there.host == own and COORDINATOR_MODULE.encode() in command_words(there.pid)
    return there.pid if known else 0


def remember(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Add to the facts of a job in job.json; a disk that refuses forgets them."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        job = read_json(run_dir / JOB_FILE)
        write_atomically(run_dir / JOB_FILE, json.dumps({**job, **facts}, indent=2) + "\n")
