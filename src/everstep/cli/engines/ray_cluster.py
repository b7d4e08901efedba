"""A job on a Ray cluster: one actor per host, in placement groups that keep them apart. Each actor runs an agent, and
the first the job itself, as a process of its own.

Ray starts the actors, and again elsewhere if a node is lost; it knows nothing of workers. Needs the extra `ray`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from everstep.base.below import write_atomically
from everstep.base.doors import at_port, host_of
from everstep.base.errors import ConfigError
from everstep.base.exit_codes import NO_HEAD, WORKERS_MISSING
from everstep.base.leaving import temporary_folder
from everstep.cli.coming_back import HEAD_MARK
from everstep.cli.engines.launch import (
    ENDS_JOB,
    FINAL,
    LED,
    NOBODY_LEADS,
    NOT_REACHED,
    Launch,
    LaunchedHost,
    completed,
    given_up,
    job_code,
)
from everstep.cli.engines.ray_placement import RayBundle, RayPlaces
from everstep.runtime.process import die_with_parent, own_command

MODULE = "everstep.cli.engines.ray_cluster"
_LOOK_S = 0.5
_END_WAIT_S = 60.0
_OVER = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, *FINAL, WORKERS_MISSING, NO_HEAD)
"""Ends of the first host after which no other try helps, where no other may lead."""


def arguments(launch: Launch, number: int, job_at: str, own: str) -> list[str]:
    """Arguments of `everstep` on host `number`. job_at: address of the job; own: this host's address."""
    if number == 0:
        return shlex.split(launch.job_words(job_at))
    return [*shlex.split(launch.agent_words(job_at, f"host-{number}")), "--address", own]


class HostProcess:
    """An actor's process: it ends with the actor, which reports its exit code."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._process: subprocess.Popen[bytes] | None = None

    def where(self, towards: str) -> tuple[str, int]:
        """This host's address on its way to another one, and a port that is free there."""
        from everstep.runtime.link.rendezvous import address_towards, reserve

        own = address_towards(towards)
        with reserve(own) as sock:
            return own, int(sock.getsockname()[1])

    def run(self, launch: tuple[Any, ...], job_at: str, towards: str, token: str, leads: bool = False) -> int:
        """Run the process until it ends. leads: even before it says so. Returns the exit code, as `job_code` takes
        it."""
        found = Launch(*launch)
        words = arguments(found, self._number, job_at, self.where(towards)[0])
        command = own_command(MODULE, str(os.getpid()), *words)
        command[0] = found.python or command[0]
        environment = {**_own_environment(), **dict(found.variables), "EVERSTEP_TOKEN": token}
        folder = found.folder if os.path.isdir(found.folder) else None
        with temporary_folder("everstep-launch-") as kept:
            mark = kept / "leads"
            if leads:
                write_atomically(mark, "")
            environment[HEAD_MARK] = str(mark)
            try:
                self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, cwd=folder)
                code = self._process.wait()
            except (FileNotFoundError, PermissionError) as error:  # as a shell would say it
                print(f"everstep launch: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
                code = 127 if isinstance(error, FileNotFoundError) else 126
            return code + LED if found.etcd and code in ENDS_JOB and mark.exists() else code

    def tell(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _own_environment() -> dict[str, str]:
    """Environment without Ray's variables for its workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def start(launch: Launch, token: bytes, address: str | None, gpus: int, least: int) -> int:
    """Run the job on a cluster. address: of the cluster, None for that of the environment. gpus: of each worker. least:
    number of hosts with which the job may begin.

    Returns the exit code. Raises: ConfigError if Ray is not installed, or no cluster is there.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("expected ray here: pip install 'everstep[ray]'") from None
    try:
        ray.init(address=address or "auto", log_to_driver=True, logging_level="ERROR", namespace="everstep")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster at {address or 'auto'}: {_why(error, ray)}") from None
    try:
        return _Driver(ray, launch, token, gpus, least).run()
    finally:
        ray.shutdown()


def _why(error: BaseException, ray: Any) -> str:
    """Reason of a failed connection: Ray's own words, or the missing token that they only hint at."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, getattr(ray.exceptions, "AuthenticationError", ())) or "InvalidAuthToken" in str(cause):
            return (
                "it requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH (~/.ray/auth_token if not set)"
            )
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]


class _RayGroups:
    """`Groups` of a cluster."""

    def __init__(self, ray: Any) -> None:
        from ray.util import placement_group, placement_group_table, remove_placement_group

        self._ray, self._make = ray, placement_group
        self._table, self._remove = placement_group_table, remove_placement_group

    def make(self, bundles: list[RayBundle]) -> Any:
        return self._make(bundles, strategy="STRICT_SPREAD")

    def nodes(self, group: Any) -> list[tuple[str, str]]:
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self._ray.nodes()}
        found = self._table(group)["bundles_to_node_id"]
        return [(node, addresses.get(node, "")) for node in (str(found[index] or "") for index in sorted(found))]

    def remove(self, group: Any) -> None:
        with contextlib.suppress(Exception):  # it goes with the job in any case
            self._remove(group)


class _Driver:
    """Keeps each host's process running until `job_code` says that the job is over; `LaunchedHost` says what begins
    again. A host whose actor is lost begins again on the node that its bundle gets."""

    def __init__(self, ray: Any, launch: Launch, token: bytes, gpus: int, least: int) -> None:
        bundle = {"CPU": float(launch.slots), **({"GPU": float(gpus * launch.slots)} if gpus else {})}
        self._ray = ray
        self._launch = launch
        self._token = token.hex()
        self._bundle = bundle
        self._places = RayPlaces(_RayGroups(ray), bundle, launch.hosts, least, time.monotonic())
        self._due: dict[int, float] = {}  # host -> the time from which it is to begin
        self._actors: dict[int, Any] = {}
        self._where: Any = None  # what the first host answers when it is asked for its address
        self._leads = False
        self._running: dict[int, Any] = {}
        self._job_at = ""
        self._head = ""
        self._signal, self._again = 0, False
        self._hosts = [LaunchedHost(f"host {number}", bool(launch.etcd)) for number in range(launch.hosts)]

    def run(self) -> int:
        self._say(f"waiting for {self._launch.hosts} nodes with {self._bundle} each")
        before = {n: signal.signal(n, lambda number, _: self._tell(number)) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                code = self._turn()
                if code is not None:
                    return self._last(code)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            with contextlib.suppress(Exception):  # they go with the job in any case
                self._places.close()

    def _turn(self) -> int | None:
        """Start hosts that have a node, and take in ends. Returns the job's exit code if it is over."""
        parted = self._places.alone
        now_s, last = time.monotonic(), self._signal or completed(self._hosts)
        self._due.update({number: max(now_s, self._hosts[number].due_s) for number in self._places.look(now_s)})
        if self._places.alone and not parted:
            self._say("some nodes are missing: the job begins without them, and they join when they come")
        for number in sorted(number for number, at_s in self._due.items() if at_s <= now_s and not last):
            etcd = self._launch.etcd and (self._where is None or self._head)
            if number == 0 or 0 in self._running or etcd:  # that one knows where the job is
                del self._due[number]
                self._begin(number, now_s)
        if self._signal and (self._again or 0 not in self._running):
            return 128 + self._signal
        if completed(self._hosts) and self._where is not None:  # there may be no node for it any more
            self._take_end(0, NOT_REACHED)
            self._give_up(0)
        if (code := given_up(self._hosts, self._launch.wait_s, now_s)) is not None:
            if code:
                self._say(NOBODY_LEADS)
            return code
        awaited = [*self._running.values(), *([] if self._where is None else [self._where])]
        if not awaited:
            time.sleep(_LOOK_S)
            return None
        done, _ = self._ray.wait(awaited, timeout=_LOOK_S)
        for ref in done:
            if ref == self._where:
                self._found()
                continue
            code = self._ended(next((n for n, found in self._running.items() if found == ref), None))
            if code is not None:
                return code
        return None

    def _begin(self, number: int, now_s: float) -> None:
        """Start the actor of a host, and its process; the first host is asked for its address before that."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        leads = number == 0 and self._hosts[number].due_s == -inf
        self._hosts[number].begun(now_s)
        place = PlacementGroupSchedulingStrategy(*self._places.of(number))
        room = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        kind = self._ray.remote(max_concurrency=2, max_restarts=0, **room)(HostProcess)
        self._actors[number] = kind.options(scheduling_strategy=place).remote(number)
        if number == 0:
            self._leads, self._where = leads, self._actors[0].where.remote(self._towards())
        else:
            self._run(number, leads=False)

    def _found(self) -> None:
        """Take in where the first host is, and start its process."""
        where, self._where = self._where, None
        try:
            own, port = self._ray.get(where)
        except self._failures as error:
            self._lost(0, error)
            return
        self._job_at, self._head = at_port(own, port), own
        self._run(0, leads=self._leads)

    def _towards(self) -> str:
        return self._head or host_of(self._ray.get_runtime_context().gcs_address)

    def _run(self, number: int, *, leads: bool) -> None:
        words = tuple(self._launch), self._job_at, self._towards(), self._token, leads
        self._running[number] = self._actors[number].run.remote(*words)

    def _ended(self, number: int | None) -> int | None:
        """Take in the end of a host's process or actor. Returns the job's exit code if it is over."""
        if number is None:  # given up meanwhile
            return None
        try:
            code = int(self._ray.get(self._running.pop(number)))
        except self._failures as error:
            self._lost(number, error)
            return None
        over = job_code(number, code, alike=bool(self._launch.etcd))
        if over is not None and (self._launch.etcd or over in _OVER):
            return over
        host = self._take_end(number, code)
        if host.left is None:
            self._give_up(number)
            self._due[number] = host.due_s
            self._first_again(number)
        return None

    def _lost(self, number: int, error: Exception) -> None:
        """Take in that a host's actor is gone, or could not do what it was asked; Ray has no exit code then."""
        if not isinstance(error, self._ray.exceptions.RayActorError):
            self._say(f"host {number}: {str(error).strip().splitlines()[-1]}")
        self._take_end(number, NOT_REACHED)
        self._give_up(number)
        self._places.lost(number)
        self._first_again(number)

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        """Ends of a call of an actor without an answer."""
        return self._ray.exceptions.RayActorError, self._ray.exceptions.RayTaskError

    def _take_end(self, number: int, code: int) -> LaunchedHost:
        host = self._hosts[number]
        words = host.ended(code, time.monotonic())
        if words and not (self._signal or completed(self._hosts)):
            self._say(words)
        return host

    def _first_again(self, number: int) -> None:
        """If the first host starts again, and no other one may lead: all others have to start again, too."""
        if number == 0 and not self._launch.etcd:
            self._all_again()

    def _all_again(self) -> None:
        """Start all hosts again, because they know the job by an old address."""
        self._head = ""
        for other in list(self._running):
            self._give_up(other)
            self._due[other] = time.monotonic()

    def _give_up(self, number: int) -> None:
        """Give a host up, which frees its bundle."""
        self._running.pop(number, None)
        self._where = None if number == 0 else self._where
        actor = self._actors.pop(number, None)
        if actor is not None:
            self._ray.kill(actor)

    def _tell(self, number: int) -> None:
        """Pass a signal on; a second one ends all. In a signal handler, so the call is made elsewhere."""
        self._signal, self._again = number, bool(self._signal)
        if 0 not in self._running:
            return
        threading.Thread(target=lambda: self._actors[0].tell.remote(number), daemon=True).start()

    def _last(self, code: int) -> int:
        """Wait for the others, which have heard of the job's end, unless it was told to stop: those would wait for it,
        or lead it. The rest goes with the actors. Returns the code."""
        for number in self._running if code > 128 else ():
            self._actors[number].tell.remote(int(signal.SIGTERM))
        until_s = time.monotonic() + _END_WAIT_S
        for ref in self._running.values():
            with contextlib.suppress(Exception):  # it was lost, or does not end in time
                self._ray.get(ref, timeout=max(0.0, until_s - time.monotonic()))
        return code

    def _say(self, text: str) -> None:
        print(f"everstep launch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of an actor's process: `everstep` that ends with the actor. Arguments: the actor's pid, the words."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent(int(words[0]))  # stays in force when the process goes on as another program
    command = own_command("everstep", *words[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
