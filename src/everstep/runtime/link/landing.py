"""Where the processes of a host find its ferry, which carries their connections to other hosts over MPI.

An abstract socket, which ends with the ferry, and whose name nobody can guess, or see before it is taken. The kernel
says whose process is at the other end of it: only those of the same user count. Whoever calls says where to; from then
on the connection is one with who listens there.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from everstep.base.errors import ConfigError, ProtocolError
from everstep.base.readable import readable
from everstep.runtime.link.waiting import user_of
from everstep.runtime.process import lasting_command

VARIABLE = "EVERSTEP_FERRY"
"""In the environment of a host's processes: the rank of its ferry, and the socket's name."""
READY = "ready"
MAX_DIAL_BYTES = 64
_PATIENCE_S = 10.0
_DIAL = struct.Struct(">IB")
_LANDING = re.compile(r"(\d{1,7}) ([0-9a-f]{32})")


class Landing(NamedTuple):
    """Of the ferry with this rank."""

    rank: int
    name: str

    @staticmethod
    def here(environ: Mapping[str, str]) -> Landing | None:
        """That of this process's host, if it has one."""
        found = _LANDING.fullmatch(environ.get(VARIABLE, ""))
        return None if found is None else Landing(int(found[1]), found[2])

    def text(self) -> str:
        """What stands in the environment."""
        return f"{self.rank} {self.name}"

    def listen(self, backlog: int) -> socket.socket:
        """For the ferry."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address())
        listener.listen(backlog)
        listener.setblocking(False)
        return listener

    def cross(self, rank: int, address: str) -> socket.socket:
        """A connection with who listens at that address ("host:port") of the host of that rank's ferry, as far as this
        can be known at once. It does not block. Raises: OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._address())
            if not is_own(sock):
                raise ConnectionError("the ferry of this host is another user's")
            sock.send(_DIAL.pack(rank, len(address)) + address.encode())
        except BaseException:
            sock.close()
            raise
        return sock

    def _address(self) -> str:
        return f"\0everstep-{os.getuid()}-{self.name}"


def dialled(heard: bytes) -> tuple[int, str] | int:
    """Rank and address that a caller has said, or how many bytes more are to be heard first. Raises: ProtocolError."""
    if len(heard) < _DIAL.size:
        return _DIAL.size - len(heard)
    rank, size = _DIAL.unpack_from(heard)
    if size > MAX_DIAL_BYTES:
        raise ProtocolError(f"expected an address of at most {MAX_DIAL_BYTES} bytes, got {size}")
    if len(heard) < _DIAL.size + size:
        return int(_DIAL.size + size - len(heard))
    if not heard[_DIAL.size :].isascii():
        raise ProtocolError("expected an address, got something else")
    return int(rank), heard[_DIAL.size :].decode()


def is_own(sock: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    return user_of(sock) == os.getuid()


class FerryHere:
    """The ferry of this host, or what stands for a process that mpirun has started beside the host's first one: MPI
    waits for all. rank, size: as mpirun counts. Waits until all are there.

    Raises: ConfigError if MPI cannot be had.
    """

    def __init__(self, rank: int, size: int) -> None:
        check_mpi()
        landing = Landing(rank, secrets.token_hex(16))
        words = ["--rank", str(rank), "--size", str(size), "--parent", str(os.getpid())]
        command, named = (
            lasting_command("everstep.runtime.link.ferry", *words),
            {**os.environ, VARIABLE: landing.text()},
        )
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=named)
        stdout = self._process.stdout
        if not readable([stdout.fileno()], _PATIENCE_S):  # type: ignore[union-attr]
            print("waits until all that mpirun has started have begun with transport=mpi", file=sys.stderr, flush=True)
        said = stdout.readline(1000).strip()  # type: ignore[union-attr]
        if said != READY:
            if not said:
                self._process.wait()
            self.close(in_order=False)
            code = self._process.returncode
            raise ConfigError(
                f"transport: mpi: MPI has not begun: {said or f'exit code {code}'}, expected process {rank} of {size}: "
                "give transport=auto, which needs no MPI, under mpirun too"
            )
        os.environ[VARIABLE] = landing.text()

    def close(self, *, in_order: bool) -> None:
        """No process of this host needs it any more. in_order: wait until no other host does, as MPI lets nobody leave;
        else its end is the end of all that mpirun has started."""
        if not in_order:
            self._process.kill()
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def check_ferry(transport: str) -> None:
    """Raises: ConfigError if this transport needs a ferry and there is none."""
    if transport != "mpi":
        return
    check_mpi()
    if Landing.here(os.environ) is None:
        raise ConfigError(
            "transport: mpi: expected processes that mpirun has started (mpirun -N 1 --host A,B everstep run TASK "
            "--set transport=mpi, or a script that joins with transport='mpi'), got one that has no rank of MPI's: "
            "give transport=auto, which needs none"
        )


def check_mpi() -> None:
    """Raises: ConfigError if torch has no MPI."""
    import torch

    if not torch.distributed.is_mpi_available():
        raise ConfigError(
            f"transport: expected one that is to be had, got mpi, with which this torch ({torch.__version__}) was not "
            "built: give e.g. transport=auto, which needs no MPI, under mpirun too"
        )
