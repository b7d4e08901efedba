"""`everstep run` under a foreign launcher (torchrun, srun, mpirun, ...): the processes that it started become one job.

On each host the first process becomes the job, or the agent of that host. The others wait for it and end with its exit
code. The launcher therefore sees processes that end well whatever happens to workers, which are not the launcher's own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from everstep.base.config import Config
from everstep.base.doors import at_port, split_at_port
from everstep.base.errors import ConfigError, EverstepError, ProtocolError
from everstep.base.foreign import LAUNCHED_MARK, Foreign, derived_ports, first_host, left_alone
from everstep.cli.agent import start_of_agent, take_part_in
from everstep.cli.main import complain, exit_code_of, run_command
from everstep.cli.run_dir import RUNS
from everstep.cli.tokens import TOKEN_VARIABLE, strong
from everstep.runtime.link import wire
from everstep.runtime.link.rendezvous import address_towards, is_reachable, reserve
from everstep.runtime.link.waiting import Waited, wait_for
from everstep.runtime.process import parent_began_s
from everstep.train.launcher_store import ask_store


class LauncherPlace(NamedTuple):
    """Host of the job, the ports at one of which it listens, and the socket that keeps such a port until the end."""

    host: str
    ports: list[int]
    kept: socket.socket | None = None


def adopt(foreign: Foreign, name: str, args: Sequence[str], config: Config) -> int:
    """Do this process's part of the one job that all processes of the launcher become. Returns the exit code.

    name: of the task, fit for a directory. args: of `everstep run`; they win over the launcher's settings. config: the
    keys that an agent needs to find the job.

    Raises: ConfigError if the processes cannot be one job; NoHead if the others do not come.
    """
    foreign.check()
    token = None if foreign.one_host else _token(foreign)
    if foreign.part == "waiting":
        return wait_for(foreign.key)
    waited, code = Waited(foreign.key), 1
    try:
        code = _run(foreign, name, args) if token is None else _meet(foreign, name, args, token, config)
        return code
    except EverstepError as error:
        code = exit_code_of(error)
        raise
    finally:
        waited.tell(code)


def _run(foreign: Foreign, name: str, args: Sequence[str], listen: str = "") -> int:
    run_dir = RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(parent_began_s()))}"
    own = ["--workers", str(foreign.size), "--run-dir", str(run_dir)]
    own += ["--listen", listen, "--slots", str(foreign.local_size)] if listen else []
    _leave_launcher()
    return run_command(["run", *own, *args], becomes=False)


def _meet(foreign: Foreign, name: str, args: Sequence[str], token: bytes, config: Config) -> int:
    """Be the job, or an agent of it, on one of several hosts."""
    place = _place(foreign)
    with contextlib.ExitStack() as open_still:
        if place.kept is not None:
            open_still.enter_context(place.kept)
        if foreign.part == "job":
            return _run(foreign, name, args, at_port(place.host, place.ports[0]))
        host_name = os.environ.get("SLURMD_NODENAME") or f"{os.uname().nodename}-{foreign.rank}"
        _leave_launcher()
        where = ",".join(at_port(place.host, port) for port in place.ports)
        begun = start_of_agent(config, where, room=foreign.local_size, host=host_name)
        # Until the job is there, other programs may listen at these ports. mpirun would kill it for another's bad end.
        try:
            return take_part_in(begun, patient=True, apart=True)
        except EverstepError as error:
            complain(str(error))
            return 0


def _place(foreign: Foreign) -> LauncherPlace:
    """Place of the job; for the job itself, a port on its host is kept.

    A launcher with a store (torchrun) passes address and port on. Other launchers name the host of rank 0 (MASTER_ADDR;
    Slurm's list of hosts). The port is MASTER_PORT, or the first free one of a few that all hosts know.
    """
    job = foreign.part == "job"
    if foreign.store:
        kept = reserve("") if job else None
        port = kept.getsockname()[1] if kept is not None else 0
        prefix = f"everstep-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        host, found = split_at_port(ask_store(foreign.address, foreign.port, prefix, port))
        return LauncherPlace(host, [found], kept)
    named = foreign.address or first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
    if not named:
        raise ConfigError(f"{foreign.words()} on several hosts: set MASTER_ADDR to the address of the host of rank 0")
    ports = [foreign.port] if foreign.port else derived_ports(_start_of(foreign))
    if not job:
        return LauncherPlace(named, ports)
    own = address_towards(named)
    if not is_reachable(own):
        raise ConfigError(
            f"{named}, the host of rank 0, has the address {own or 'none'} there, which other hosts cannot reach: set "
            "MASTER_ADDR to its address"
        )
    kept = reserve(own, ports)
    return LauncherPlace(own, [kept.getsockname()[1]], kept)


def _start_of(foreign: Foreign) -> str:
    """Text that names this start of the launcher and is the same on all hosts."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE")
    return " ".join([foreign.launcher, foreign.address, *(os.environ.get(name, "") for name in names)])


def _token(foreign: Foreign) -> bytes:
    """Token from the environment; it stays there for processes that run here. Raises: ConfigError if there is none."""
    text = os.environ.get(TOKEN_VARIABLE, "")
    if not text:
        raise ConfigError(
            f"{foreign.words()} on several hosts: expected the job's token in {TOKEN_VARIABLE} on all of them, got "
            f"none: set it to the same 64 hex digits everywhere (openssl rand -hex 32)"
        )
    try:
        return strong(wire.token_of(text, f"${TOKEN_VARIABLE}"), f"${TOKEN_VARIABLE}")
    except ProtocolError as error:
        raise ConfigError(str(error)) from None


def _leave_launcher() -> None:
    """Remove the launcher's variables: processes started from here on do not belong to the launcher. A mark stays, as
    the launcher passes on what this process prints."""
    rest = left_alone(os.environ)
    for name in os.environ.keys() - rest.keys():
        del os.environ[name]
    os.environ[LAUNCHED_MARK] = "1"
