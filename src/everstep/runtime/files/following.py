"""A host that stands by without the job's directory follows the head: it fills a replica by what that sends.

Also which directory a coordinator would lead in, and whether it may.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from everstep.observe.events import say
from everstep.protocol.messages import AnyMessage
from everstep.protocol.messages_base import ReplicaHeld, ReplicaHello, ReplicaPieces
from everstep.protocol.roles import JOB
from everstep.runtime.files.places import leave_word, new_word, word_in
from everstep.runtime.files.replica import Replica, ReplicaState
from everstep.runtime.link.address import COORDINATOR_FILE
from everstep.runtime.link.control_client import ControlClient
from everstep.runtime.link.handshake import role_token
from everstep.runtime.link.tls import Tls

MOVED = 5
"""Exit code of a coordinator whose directory is not the job's any more, as another host leads it in its own."""


class ReplicaLink:
    """Fills the replica in this folder until it is closed. host: name of this one. tls: as `ControlClient` has it. The
    head is where the coordinator.json in the folder says, which others keep up."""

    def __init__(self, folder: Path, token: bytes, host: str, tls: Tls | None) -> None:
        self._host = host
        self._replica = Replica(folder)
        self._in_step_s: float | None = None
        self._changed = threading.Condition()
        self._client = ControlClient(
            *(folder / COORDINATOR_FILE, role_token(token, JOB), JOB, f"replica-{host}"),
            *(self._hello, self._receive),
            tls=tls,
        )

    def state(self) -> ReplicaState:
        """How the replica stands now. Any thread."""
        with self._changed:
            return self._replica.state(self._in_step_s)

    def wait_in_step(self, timeout_s: float) -> bool:
        """Until it has all that there was a moment ago; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_step_s is not None, timeout_s)

    def close(self) -> None:
        """Nothing is written into the folder any more."""
        self._client.close(0.0)

    def fall_back(self) -> None:
        """As `Replica` does, once this is closed."""
        self._replica.fall_back()

    # ---- the connection's thread

    def _hello(self) -> ReplicaHello:
        return ReplicaHello(host=self._host[:100], place=self._replica.place, held=self._replica.held())

    def _receive(self, message: AnyMessage) -> None:
        if not isinstance(message, ReplicaPieces):
            return
        asked_s = time.monotonic()
        try:
            lacking = self._replica.take(message)
        except OSError:  # a full disk, say
            lacking = self._replica.there(message.pieces) or {"": 0}
        if not message.rest and not lacking:
            with self._changed:
                self._in_step_s = asked_s
                self._changed.notify_all()
        self._client.send(ReplicaHeld(number=message.number, lacking=lacking))


# ---- where a coordinator would lead


class Premises:
    """The directory that a coordinator would lead in. word: by which it is known. Whose it is not any more, as another
    host leads in one of its own, never leads again: it is stale."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.word = word_in(run_dir)

    def saw(self, word: str) -> None:
        """Somebody leads now, in the directory that this is the word of; "" if it is not said."""
        if word and word not in (self.word, word_in(self._run_dir)):
            say(
                f"another host leads the job, in a directory of its own: what is in {self._run_dir} is of before; "
                "everstep agent --join etcd://... --standby takes part again, and catches up"
            )
            os._exit(MOVED)

    def may_lead(self) -> bool:
        """Whether this host may take the lease now."""
        return True

    def taken(self, checkpoints: str | None) -> str:
        """This host leads from now on. Returns what its files may lack, in words. checkpoints: as `leave_word` has it.

        Raises: OSError."""
        return ""


class ReplicaPremises(Premises):
    """A directory that is filled by whoever leads, until this host does. lease_s: so long a lease outlives a holder."""

    def __init__(self, run_dir: Path, token: bytes, host: str, tls: Tls | None, lease_s: float) -> None:
        super().__init__(run_dir)
        self._lease_s = lease_s
        self.word = new_word()
        self._link = ReplicaLink(run_dir, token, host, tls)
        self._led_s = time.monotonic()

    def saw(self, word: str) -> None:
        self._led_s = time.monotonic()

    def may_lead(self) -> bool:
        return self._link.state().may_lead(self._led_s, time.monotonic())

    def taken(self, checkpoints: str | None) -> str:
        self._link.close()
        words = self._link.state().words(self._led_s - self._lease_s)
        self._link.fall_back()
        leave_word(self._run_dir, checkpoints, self.word)
        return words


def premises_of(run_dir: Path, replica: str, token: bytes, tls: Tls | None, lease_s: float) -> Premises:
    """replica: as `Succession` has it. One that has been led in is the job's directory like any other."""
    if replica and not word_in(run_dir):
        return ReplicaPremises(run_dir, token, replica, tls, lease_s)
    return Premises(run_dir)
