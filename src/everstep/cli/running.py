"""`everstep scale | drain | checkpoint`: requests to a running job."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from everstep.base.errors import ConfigError, ProtocolError
from everstep.cli.job import read_job
from everstep.cli.main import complain
from everstep.cli.run_dir import read_digest
from everstep.cli.seconds import Seconds, timeout
from everstep.runtime import commands
from everstep.runtime.files.run_lock import is_locked
from everstep.runtime.link.address import COORDINATOR_FILE, read_address

_PATIENCE_S = 10.0
_LOOK_S = 0.2


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--workers", type=int, required=True, help="New number of workers.")
def scale(run_dir: Path, workers: int) -> int:
    """Change the number of workers of the running job in DIR."""
    config = read_job(run_dir).config
    most, what = config.lanes * config.stages, "lanes" if config.stages == 1 else "lanes in each stage"
    if not config.min_workers <= workers <= max(most, config.workers):
        raise ConfigError(
            f"--workers must be from {config.min_workers} (min_workers) to {most} ({what}), got {workers}"
        )
    result = ask_running(run_dir, "scale", {"workers": workers})
    print(f"{run_dir}: from {result.get('before', '?')} to {workers} workers")
    return 0


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("worker_id", type=int, required=False)
@click.option("--host", help="Drain all workers of this host, and its agent; replacements start on hosts with room.")
@click.option("--grace", "grace_s", type=Seconds(), help="With --host: wait this many seconds until it has left.")
def drain(run_dir: Path, worker_id: int | None, host: str | None, grace_s: float | None) -> int:
    """Make WORKER_ID, or all workers of a host, leave the running job in DIR in order, for good.

    A host leaves after its last worker. With --grace, exit code 1: the host did not leave in time.
    """
    if grace_s is not None and host is None:
        raise ConfigError("--grace: expected --host NAME with it: add it, or drop --grace")
    if (worker_id is None) == (host is None):
        raise ConfigError("expected the number of a worker, or --host NAME, got " + ("both" if host else "neither"))
    if host is not None:
        result = ask_running(run_dir, "drain", {"host": host})
        left = ", ".join(map(str, result.get("left", []))) or "none"
        print(f"{run_dir}: host {host} hands over: worker {left}; {result.get('moved', 0)} start elsewhere")
        if (_named(run_dir, host) or {}).get("is_head"):
            print(f"{run_dir}: host {host} leads the job, and goes on leading it without workers")
        return 0 if grace_s is None else _wait_until_gone(run_dir, host, grace_s)
    result = ask_running(run_dir, "drain", {"worker_id": worker_id})
    print(f"{run_dir}: worker {worker_id} is leaving, {result.get('workers', '?')} stay")
    return 0


def _wait_until_gone(run_dir: Path, host: str, grace_s: float) -> int:
    end_s = time.monotonic() + grace_s
    while (one := _named(run_dir, host)) is not None and one["state"] not in ("gone", "leads"):
        if time.monotonic() >= end_s:
            complain(f"host {host} has not left within {grace_s:g} s; it goes on leaving")
            return 1
        time.sleep(_LOOK_S)
    left = one is None or one["state"] == "gone"
    print(f"{run_dir}: host {host} {'has left' if left else 'has no workers any more'}")
    return 0


def _named(run_dir: Path, host: str) -> dict[str, Any] | None:
    """Facts of the host with this name, id or address."""
    return next((one for one in listed_hosts(run_dir) if host in (one["name"], one["id"], one["address"])), None)


def listed_hosts(run_dir: Path) -> list[dict[str, Any]]:
    """Facts of each host of the running job, as `hosts --json` prints them. A host that was drained and still decides
    is not gone: its state is "leads".

    Raises: ConfigError, NoAnswer as `ask_running`.
    """
    answer = ask_running(run_dir, "hosts", {}).get("hosts")
    found: list[dict[str, Any]] = answer if isinstance(answer, list) else []
    head = ""
    with contextlib.suppress(OSError, ProtocolError):  # the job may have ended since it answered
        head = _head(found, read_address(run_dir / COORDINATOR_FILE).host)
    for host in found:
        host["is_head"] = host["id"] == head
        host["state"] = "leads" if host["is_head"] and host["state"] == "gone" else host["state"]
    return found


def _head(found: Sequence[Mapping[str, Any]], address: str) -> str:
    """Id of the host that runs the coordinator, "" if none does. The job's own agent has its address as id."""
    there = [str(host["id"]) for host in found if host["address"] == address]
    return address if address in there else next(iter(there), "")


@click.command()
@click.argument("run_dir", metavar="DIR", type=click.Path(path_type=Path))
@timeout("Seconds to wait for the checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def checkpoint(run_dir: Path, timeout_s: float, as_json: bool) -> int:
    """Take a checkpoint of the running job in DIR after its current step, and print its path."""
    result = ask_running(run_dir, "checkpoint", {}, timeout_s)
    if as_json:
        print(json.dumps(result))
    else:
        print(f"checkpoint of step {result.get('step')} in {result.get('path')}")
    return 0


def ask_running(
    run_dir: Path, name: str, args: dict[str, Any], timeout_s: float = _PATIENCE_S, *, once: bool = False
) -> dict[str, Any]:
    """Ask the job that runs in this directory; a coordinator that is being restarted gets some time.

    timeout_s: for the reply. once: do not ask again if the coordinator ends before it answers.

    Raises: ConfigError if no job runs there, or it refuses; NoAnswer if its coordinator is silent; with `once`
    GoneUnanswered.
    """
    read_job(run_dir)
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return commands.ask(run_dir, name, dict(args), timeout_s)
        except commands.NoJobRunning as error:
            if once and isinstance(error, commands.GoneUnanswered):
                raise
            if not is_locked(run_dir):
                ended = "; it has finished" if read_digest(run_dir) is not None else ""
                raise ConfigError(f"{error}{ended}") from None
            if time.monotonic() > end:
                where = error.where or "does not run at the moment"
                raise commands.NoAnswer(f"the coordinator of {run_dir} {where}: try again") from None
        time.sleep(0.1)
