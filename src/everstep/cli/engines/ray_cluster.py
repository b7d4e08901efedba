"""A job on a Ray cluster: one actor per host, in a placement group that keeps them apart, and in each actor an agent
(in the first the job itself) as a process of its own.

Ray starts the actors, again elsewhere when a node is lost; it knows nothing of workers. Needs the extra `ray`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from everstep.base.errors import ConfigError
from everstep.cli.engines.launch import Launch
from everstep.runtime.process import die_with_parent, own_command

MODULE = "everstep.cli.engines.ray_cluster"
_LOOK_S = 0.5
_END_WAIT_S = 45.0


def arguments(launch: Launch, number: int, job_at: str, own: str) -> list[str]:
    """Of `everstep` on host `number`. job_at: where the job listens; own: this host's address."""
    if number == 0:
        return shlex.split(launch.job_words(job_at))
    return [*shlex.split(launch.agent_words(job_at, f"host-{number}")), "--address", own]


class HostProcess:
    """What an actor runs: a process that ends with it, and whose exit code it tells."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._process: subprocess.Popen[bytes] | None = None

    def where(self, towards: str) -> tuple[str, int]:
        """This host's address on its way to another one, and a port that is free there."""
        from everstep.runtime.meeting import address_towards

        own = address_towards(towards)
        with socket.socket() as sock:
            sock.bind((own, 0))
            return own, int(sock.getsockname()[1])

    def run(self, launch: tuple[Any, ...], job_at: str, towards: str, token: str) -> int:
        """Run until it ends. Returns the exit code."""
        found = Launch(*launch)
        words = arguments(found, self._number, job_at, self.where(towards)[0])
        command = own_command(MODULE, str(os.getpid()), *words)
        environment = {**_own_environment(), "EVERSTEP_TOKEN": token}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        return self._process.wait()

    def tell(self, number: int) -> None:
        """Send it a signal."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _own_environment() -> dict[str, str]:
    """What it runs is no worker of Ray's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def start(launch: Launch, token: bytes, address: str | None, gpus: int) -> int:
    """Run the job on a cluster. address: of the cluster, None for that of the environment. gpus: of each worker.

    Returns the exit code. Raises: ConfigError if Ray is not installed, or no cluster is there.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("expected ray here: pip install 'everstep[ray]'") from None
    try:
        ray.init(address=address or "auto", log_to_driver=True, logging_level="ERROR", namespace="everstep")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster at {address or 'auto'}: {str(error).splitlines()[0]}") from None
    try:
        return _Driver(ray, launch, token, gpus).run()
    finally:
        ray.shutdown()


class _Driver:
    """Keeps each host's process running until the job is over; a host whose actor is lost begins anew where its bundle
    has come to lie."""

    def __init__(self, ray: Any, launch: Launch, token: bytes, gpus: int) -> None:
        from ray.util.placement_group import placement_group

        bundle = {"CPU": float(launch.slots), **({"GPU": float(gpus * launch.slots)} if gpus else {})}
        self._ray = ray
        self._launch = launch
        self._token = token.hex()
        self._bundle = bundle
        self._group = placement_group([bundle] * launch.hosts, strategy="STRICT_SPREAD")
        self._actors: dict[int, Any] = {}
        self._running: dict[int, Any] = {}
        self._job_at = ""
        self._head = ""

    def run(self) -> int:
        """Returns the job's exit code."""
        self._say(f"waiting for {self._launch.hosts} nodes with {self._bundle} each")
        self._ray.get(self._group.ready())
        before = {n: signal.signal(n, lambda number, _: self._tell(number)) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._begin(0)
            for number in range(1, self._launch.hosts):
                self._begin(number)
            while True:
                done, _ = self._ray.wait(list(self._running.values()), timeout=_LOOK_S)
                for ref in done:
                    code = self._ended(next(n for n, found in self._running.items() if found == ref))
                    if code is not None:
                        return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end()

    def _begin(self, number: int) -> None:
        """Start the actor of a host, and its process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, number)
        kind = self._ray.remote(max_concurrency=2, max_restarts=0, num_cpus=0)(HostProcess)
        actor = kind.options(scheduling_strategy=place).remote(number)
        self._actors[number] = actor
        towards = self._head or self._ray.get_runtime_context().gcs_address.rpartition(":")[0]
        if number == 0:
            own, port = self._ray.get(actor.where.remote(towards))
            self._job_at, self._head = f"{own}:{port}", own
        self._running[number] = actor.run.remote(tuple(self._launch), self._job_at, towards, self._token)

    def _ended(self, number: int) -> int | None:
        """A host's process or actor has ended. Returns the job's exit code if it is over."""
        try:
            code = int(self._ray.get(self._running.pop(number)))
        except self._ray.exceptions.RayActorError:
            self._say(f"host {number} is lost: its actor begins anew as soon as there is a node for it")
            self._again(number)
            return None
        if number == 0 and code in (0, 1, 2, 3, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            return code
        if number == 0 or code not in (0, 2):
            self._say(f"what ran on host {number} ended with {code}: again")
            self._again(number)
        return None

    def _again(self, number: int) -> None:
        if number:
            self._begin(number)
            return
        for other in list(self._running):  # they know the job by an address that is no more
            self._ray.kill(self._actors[other])
            del self._running[other]
        self._head = ""
        for again in range(self._launch.hosts):
            self._begin(again)

    def _tell(self, number: int) -> None:
        """In a signal handler: the call is made elsewhere."""
        threading.Thread(target=lambda: self._actors[0].tell.remote(number), daemon=True).start()

    def _end(self) -> None:
        """Agents have heard of the job's end; what is left goes with the actors."""
        with contextlib.suppress(Exception):
            agents = [ref for number, ref in self._running.items() if number]
            if agents:
                self._ray.wait(agents, num_returns=len(agents), timeout=_END_WAIT_S)
            self._ray.util.remove_placement_group(self._group)

    def _say(self, text: str) -> None:
        print(f"everstep launch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of what an actor starts: `everstep` that ends with it. Arguments: the actor's pid, the words."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent(int(words[0]))  # stays in force when the process goes on as another program
    command = own_command("everstep", *words[1:])
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
