"""How a worker is connected to its job: its identity, its messages, its files. With an agent, or alone.

Apart so that the session is the same in both cases.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from everstep.base.below import keep_to
from everstep.base.cause import Cause, Why
from everstep.base.config import Config
from everstep.base.errors import EverstepError
from everstep.base.given import read_json
from everstep.base.plan import Member, Plan, Rank, Seat, WorkerKey
from everstep.checkpoint.hosts_store import HostsStore
from everstep.checkpoint.store import DirectoryStore
from everstep.observe.logs import WorkerLog, set_up_worker_log
from everstep.protocol import messages as wire
from everstep.protocol.step_types import LaneSaid
from everstep.runtime.files.claim_files import claim
from everstep.runtime.files.file_sender import digest_of
from everstep.runtime.files.host_directory import ARRIVED_FILE, domains_there, others
from everstep.runtime.host.board import Board, Row
from everstep.runtime.host.cell import Head
from everstep.runtime.link.address import JOB_FILE, coordinator_here
from everstep.runtime.link.context import WorkerContext
from everstep.runtime.link.control_client import ControlClient, Unheard
from everstep.runtime.link.peer import PeerConnection, PeerServer, peer_connect
from everstep.runtime.link.tls import Tls

log = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0
_CLAIM_S = 2.0
FINAL_DIGEST = "final/digest.json"
Faults = Callable[[int, str, Plan], None]
FaultNow = Callable[[str, int, int, str, Plan | None], None]
Deliver = Callable[[wire.AnyMessage], None]
Hello = Callable[[], tuple[wire.AnyMessage, Plan | None]]


@dataclass
class WorkerLink:
    """One worker's connections to its job. The base class is that of a worker without peers.

    run_dir None: nothing is written. token: of the role `peer`; tls: certificates for connections to peers that need
    TLS. task: as in job.json, or "". flip: a scripted fault that changes one bit of the state. fault_now: faults
    requested while the job runs. regular_saves: checkpoints are taken regularly, not only on request. top: directory of
    the folder of checkpoints, None: run_dir.
    """

    me: WorkerKey
    task: str
    host: str
    config: Config
    run_dir: Path | None
    row: Row
    token: bytes
    log: WorkerLog
    faults: Faults = lambda step, phase, plan: None
    fault_now: FaultNow = lambda text, number, step, phase, plan: None
    flip: Callable[[], None] = lambda: None
    regular_saves: bool = True
    tls: Tls | None = None
    top: Path | None = None

    @cached_property
    def job(self) -> dict[str, Any]:
        """The facts in job.json; none where there is no such file."""
        path = None if self.run_dir is None else self.run_dir / JOB_FILE
        if path is None or not path.exists():
            return {}
        try:
            return dict(read_json(path))
        except (OSError, TypeError, ValueError):
            log.warning("%s cannot be read: checkpoints do not say which job they are of", JOB_FILE)
            return {}

    def on_flip(self, flip: Callable[[], None]) -> None:
        """Set the function that flips a bit of the state."""
        self.flip = flip

    @property
    def cell_head(self) -> Head | None:
        """The channels to the other processes of this worker, if it has any."""
        return None

    def limbs(self) -> tuple[Rank, ...]:
        """The other processes of this worker; waits until they have introduced themselves."""
        return ()

    def serve_peers(self, handler: Callable[[PeerConnection, dict[str, Any]], None]) -> str:
        """Listen for peers; returns the address they reach this worker at ("" if there are none)."""
        return ""

    def call_peer(self, address: str, request: dict[str, Any]) -> PeerConnection:
        """Connect to a peer. Raises: CollectiveAborted if no process listens there; ProtocolError if it is not a
        peer of this job."""
        return peer_connect(address, self.token, request, tls=self.tls)

    def connect(self, hello: Hello, deliver: Deliver, connected: Callable[[], None]) -> None:
        """Say hello, now and after each reconnect; messages go to `deliver`, from another thread.

        connected: called after each hello, from that thread too.
        """

    def tell(self, message: wire.AnyMessage) -> None:
        """Send to the coordinator; never blocks."""

    def checkpoints_at(self, path: Path) -> DirectoryStore:
        """The store of a job's checkpoints."""
        return DirectoryStore(path)

    def has_arrived(self, name: str) -> bool:
        """Whether a file of the run directory, as it is now, is in the job's own."""
        return True

    def refused(self, folder: str) -> tuple[str, str] | None:
        """A file of this folder that cannot come to the job's own directory, and why; None if there is none."""
        return None

    def waits(self) -> None:
        """The worker cannot go on before a message comes."""

    def turn(self, view: Any, over: bool) -> None:
        """The loop asks for the next step, or, if it is over, for no more. view: the `WorkerView`."""

    @property
    def watches(self) -> bool:
        """Whether `computed` wants each lane's results."""
        return False

    def computes(self, part: str) -> None:
        """A lane's batch goes to the loop for the first time ("first") or "again", or comes back ("")."""

    def computed(self, step: int, lane: int, said: LaneSaid) -> None:
        """A lane was computed."""

    def at_exit(self, act: Callable[[], None]) -> None:
        """Call this when the script has ended without an exception, if no agent does it."""

    def finished(self, step: int) -> bool:
        """Whether a script that is run again has nothing to do after this step; with a launcher the coordinator says
        so."""
        return False

    def stop_words(self, error: EverstepError, step: int) -> wire.WorkerFailed | None:
        """Words to tell at once of a loop that is to stop; None if the process that runs the loop tells."""
        return None

    def close(self) -> None:
        """Leave."""


class LaunchedLink(WorkerLink):
    """A worker that an agent started, as the head of its cell."""

    def __init__(self, context: WorkerContext, config: Config, faults: Faults) -> None:
        row = Board.attach(context.board_fd).row(context.worker_id)
        log = set_up_worker_log(2, context.worker_id, context.incarnation)
        token, run_dir = context.peer_token_bytes(), context.run_path
        keep_to(run_dir)
        super().__init__(context.key, context.task, context.host, config, run_dir, row, token, log, faults)
        self.tls = context.tls_shown()
        self.top = Path(context.around) if context.around else None
        self.cell = Head(context, lambda: self.row.tick())
        self._context = context
        self._control: ControlClient | None = None
        self._unheard = Unheard()
        self._peers: PeerServer | None = None
        self._claims = 0
        self._answers: queue.SimpleQueue[wire.FaultClaimed] = queue.SimpleQueue()

    def fill_up(self, config: Config) -> None:
        """A script has said what the job's config left open: this is all of it."""
        self.config = config

    @property
    def cell_head(self) -> Head | None:
        return self.cell if self._context.cell_size > 1 or self.cell.deputies is not None else None

    def limbs(self) -> tuple[Rank, ...]:
        return self.cell.meet()

    def serve_peers(self, handler: Callable[[PeerConnection, dict[str, Any]], None]) -> str:
        own = self._context.address or self.config.network.address
        self._peers = PeerServer(own, self.token, handler, self.tls)
        return self._peers.address

    def connect(self, hello: Hello, deliver: Deliver, connected: Callable[[], None]) -> None:
        self._control = ControlClient(
            self._context.coordinator_file,
            self._context.token_bytes(),
            "worker",
            str(self.me),
            hello=hello,
            on_message=lambda message: self._hear(message, deliver),
            on_connected=lambda there: connected() if there else None,
            tls=self.tls,
        )

    def tell(self, message: wire.AnyMessage) -> None:
        if self._control is not None:
            self._control.send(message)

    def claim(self, name: str, text: str) -> tuple[bool, str] | None:
        """Claim a scripted fault: whether this is the first claim of that name in the job, and the text of the
        first; None if no coordinator answers."""
        if not self._context.apart:
            return claim(self._context.run_path, name, text)
        self._claims += 1
        request = self._claims
        me = self.me
        self.tell(
            wire.ClaimFault(worker_id=me.worker_id, incarnation=me.incarnation, request=request, name=name, text=text)
        )
        end_s = time.monotonic() + _CLAIM_S
        while time.monotonic() < end_s:
            with suppress(queue.Empty):
                answer = self._answers.get(timeout=max(0.0, end_s - time.monotonic()))
                if answer.request == request:
                    return answer.first, answer.text
        return None

    def _hear(self, message: wire.AnyMessage, deliver: Deliver) -> None:
        if isinstance(message, wire.FaultClaimed):
            self._answers.put(message)
        else:
            deliver(message)

    def checkpoints_at(self, path: Path) -> DirectoryStore:
        run_dir, host = self._context.run_path, self.host
        there, domains = lambda: others(run_dir, host), lambda: domains_there(run_dir)
        return HostsStore(path, host, there, self.call_peer, apart=self._context.apart, domains=domains)

    def has_arrived(self, name: str) -> bool:
        if not self._context.apart:
            return True
        try:
            arrived, path = read_json(self._context.run_path / ARRIVED_FILE), self._context.run_path / name
            return bool(arrived["files"].get(name) == digest_of(path, name.count("/")))
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return False

    def refused(self, folder: str) -> tuple[str, str] | None:
        with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            found = read_json(self._context.run_path / ARRIVED_FILE)["refused"] if self._context.apart else {}
            return next(((name, str(why)) for name, why in found.items() if name.startswith(folder)), None)
        return None

    def waits(self) -> None:
        words = self._unheard.look(self._control is None or self._control.connected, time.monotonic())
        if words:
            log.warning(words)

    def cut_off(self, for_s: float, breaks: bool, peers: bool) -> None:
        """A scripted fault: for so many seconds nothing reaches the coordinator, and nothing comes from it.

        breaks: the connection ends, and cannot be made again meanwhile. Otherwise it falls silent, and so does this
        worker's row for its agent. peers: returns only when it is over, for no transfer gets through either.
        """
        end_ns = time.monotonic_ns() + int(for_s * 1e9)
        if not breaks:
            self.row.hide(end_ns)
        if self._control is not None:
            self._control.cut(for_s, breaks)
        if peers and self._peers is not None:
            self._peers.deaf_until(end_ns)
            time.sleep(for_s)

    def coordinator_pid(self) -> int:
        """PID of the coordinator, if it is a process of this host; else 0."""
        own = self._context.address or self.config.network.address
        return coordinator_here(Path(self._context.coordinator_file), own)

    def strike_due(self, index: int, step: int, phase: str, plan: Plan) -> None:
        """A scripted fault of a host, a link or a coordinator elsewhere is to strike, at this place in the
        specification."""
        life, generation = vars(self.me), plan.generation
        self.tell(wire.StrikeDue(**life, index=index, generation=generation, step=step, phase=phase))

    def announce(self, words: Callable[[], wire.AnyMessage]) -> None:
        """Say one last thing, even if this worker never said hello."""
        if self._control is not None:
            self._control.send(words())
            self._control.flush(_LAST_WORDS_S)
        else:
            last = ControlClient(
                self._context.coordinator_file,
                self._context.token_bytes(),
                "worker",
                str(self.me),
                hello=words,
                on_message=lambda message: None,
                tls=self.tls,
            )
            last.wait_connected(_LAST_WORDS_S)
            last.close()

    def turn(self, view: Any, over: bool) -> None:
        pass

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._peers is not None:
            self._peers.close()
        self.cell.close()


class LoneLink(WorkerLink):
    """A job of one worker, without agent or coordinator: it plans for itself."""

    def __init__(self, config: Config, run_dir: Path | None = None, regular_saves: bool = True) -> None:
        task = "" if run_dir is None else Path(sys.argv[0]).name or "python"
        row, token = Board.create(1).row(0), secrets.token_bytes(16)
        super().__init__(WorkerKey(0, 0), task, socket.gethostname(), config, run_dir, row, token, WorkerLog(0, 0))
        self.regular_saves = regular_saves
        self._deliver: Deliver | None = None
        self._stopped: Why | None = None

    def connect(self, hello: Hello, deliver: Deliver, connected: Callable[[], None]) -> None:
        self._deliver = deliver
        deliver(wire.PlanNow(plan=self._plan(1, Why(Cause.STARTED, "a job of one worker"))))

    def _plan(self, generation: int, why: Why, save: str = "") -> Plan:
        member = Member(0, 0, self.host, os.getpid())
        seat = Seat(0, 0, "active", tuple(range(self.config.lanes)))
        return Plan(generation, why.reason, (member,), (seat,), self.config.lanes, cause=why.cause, save=save)

    def at_exit(self, act: Callable[[], None]) -> None:
        def ended() -> None:
            if getattr(sys, "last_value", None) is None:
                try:
                    act()
                except Exception as error:
                    sys.stdout.flush()
                    print(f"everstep: {error}", file=sys.stderr, flush=True)
                    os._exit(1)

        with suppress(RuntimeError):  # the interpreter ends already
            threading._register_atexit(ended)  # type: ignore[attr-defined]  # atexit's calls can start no thread

    def finished(self, step: int) -> bool:
        if self.run_dir is None:
            return False
        try:
            said = read_json(self.run_dir / FINAL_DIGEST)
            found = bool(said["left"]) and said["step"] == step
        except (OSError, ValueError, TypeError, KeyError):
            return False
        if found:
            text = f"this job has finished: its loop was left after step {step}, in {self.run_dir}"
            print(f"everstep: {text}; give another run_dir to train again", file=sys.stderr)
        return found

    def stop_words(self, error: EverstepError, step: int) -> wire.WorkerFailed:
        return wire.WorkerFailed(
            worker_id=0,
            incarnation=0,
            step=step,
            cause=error.cause,
            reason=str(error),
            signature="",
            fatal=True,
            holds=True,
        )

    def tell(self, message: wire.AnyMessage) -> None:
        """Answered as a coordinator would, where there is something to answer."""
        deliver = self._deliver
        if deliver is None:
            return
        if isinstance(message, wire.WorkerDone):
            why = "all steps are done"
            deliver(wire.JobEnded(state="completed", cause=Cause.COMPLETED, reason=why))
        elif isinstance(message, wire.WorkerFailed):  # a checkpoint comes first
            self._stopped = Why(message.cause, message.reason)
            deliver(wire.PlanNow(plan=self._plan(2, self._stopped, save=message.reason)))
        elif isinstance(message, wire.Saved) and self._stopped is not None:
            cause, reason = self._stopped.cause, self._stopped.reason
            deliver(wire.JobEnded(state="failed", cause=cause, reason=reason))

    def turn(self, view: Any, over: bool) -> None:
        pass

    def close(self) -> None:
        self._deliver = None
