"""Plain data that agents and workers get when they start: everything that they need to find their job."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from everstep.base.below import write_atomically
from everstep.base.cause import Cause, Why
from everstep.base.config import Config, load_config
from everstep.base.config_keys import TlsConfig
from everstep.base.doors import split_at_port
from everstep.base.errors import ConfigError, one_line
from everstep.base.given import parse_json, read_given
from everstep.base.plan import WorkerKey
from everstep.placement.cell_shapes import CellShape, shapes_of
from everstep.runtime.link.peer import PeerConnection, peer_connect
from everstep.runtime.link.tls import Shown, Tls


@dataclass(frozen=True)
class WorkerContext:
    """The start-up facts of one life of one worker; JSON-able.

    `token` is this life's for the coordinator in hex, `peer_token` that of the role `peer`: workers do not get the
    job's own. `address`: of its host, "" if as the config says; `tls`: the certificate that it shows to others (a
    `Shown`), None if it speaks without TLS. `coordinator_file` names coordinator.json, which is rewritten when the
    coordinator restarts. `board_fd`: of the progress board, where the row is that of `worker_id`. `config` is the
    effective config as `base.config.to_dict` makes it. `argv` are the task's own arguments. `cell_rank`, `cell_size`:
    rank of this process in its worker, 0 for the head, and the number of ranks; `cell_fds`: its ends of the sockets
    between head and limbs, the head's from rank 1 on; `cell_hosts`: hosts of this worker, 0 if it is not known yet or
    one. `local_rank`, `local_size`: rank of this slot among the slots of
    its host, and their number. `apart`: run_dir is not the job's own, but that of this host; `around`: as `Joining` has
    it.
    """

    run_dir: str
    worker_id: int
    incarnation: int
    host: str
    token: str
    coordinator_file: str
    board_fd: int
    config: dict[str, Any]
    task: str
    argv: list[str] = field(default_factory=list)
    cell_rank: int = 0
    cell_size: int = 1
    cell_fds: list[int] = field(default_factory=list)
    peer_token: str = ""
    address: str = ""
    tls: dict[str, Any] | None = None
    cell_hosts: int = 0
    local_rank: int = 0
    local_size: int = 1
    apart: bool = False
    around: str = ""

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker_id, self.incarnation)

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def last_words_path(self) -> Path:
        """File with the reason of this worker's death in its own words; the agent adds it to the reason."""
        return self.run_path / "logs" / f"worker-{self.worker_id}.error"

    def write_last_words(self, why: Why) -> None:
        """Raises: OSError."""
        write_atomically(self.last_words_path, json.dumps(vars(why)) + "\n", 1)

    def read_last_words(self) -> Why | None:
        """This worker's last words, None if it died without any."""
        try:
            found = parse_json(read_given(self.last_words_path, folders=1).decode(errors="replace"))
            return Why(Cause.read(found["cause"]), one_line(str(found["reason"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def token_bytes(self) -> bytes:
        """This life's token in the form that the control connection takes."""
        return bytes.fromhex(self.token)

    def peer_token_bytes(self) -> bytes:
        return bytes.fromhex(self.peer_token)

    def tls_shown(self) -> Tls | None:
        """Certificate that this worker shows its peers and the coordinator."""
        return None if self.tls is None else Tls(Shown(**self.tls))

    def call_peer(self, address: str, request: dict[str, Any]) -> PeerConnection:
        """Connect to a peer. Raises: as `peer_connect`."""
        return peer_connect(address, self.peer_token_bytes(), request, tls=self.tls_shown())

    def load_config(self) -> Config:
        """The effective config, with the shape that this worker's cell has. Raises: ConfigError."""
        config = load_config([("job.json", self.config)])
        cell = config.cell
        if cell.hosts > 1:
            return replace(config, cell=cell.over(self.cell_hosts or cell.hosts))
        for shape in shapes_of(CellShape(cell.fsdp, cell.tp), cell.shards):
            if shape.ranks == self.cell_size < cell.ranks:
                return replace(config, cell=replace(cell, **shape._asdict()))
        return config


@dataclass(frozen=True)
class Handed:
    """A fork server that one process hands to another.

    fd, board_fd: inherited. heard: unread bytes of its messages; greeting: its message that it is ready, if sent.
    """

    fd: int
    board_fd: int
    pid: int
    heard: str
    greeting: dict[str, Any]


@dataclass(frozen=True)
class Joining:
    """The job that an agent takes part in, and its role there.

    address: "host:port" of the coordinator, or the path of coordinator.json. entry: "module:function", called in each
    worker with its `WorkerContext`; its result is the worker's exit code, and 0 means that it left in order (done, or
    dismissed by request). preload: modules that the fork server imports. host: a name that no other agent of the job
    has. token_file: file of the token, for an agent that is a process of the job. room: most workers here, 0 for any
    number. run_dir: the job's directory as this host sees it, "" if as the job says. threads: number with which the
    fork server is started, as far as is known. server: a fork server that runs already. parent: pid of the process with
    which it dies, 0 for none. ranks: processes of each worker. files: "module:class" that serves this host's checkpoint
    directory to peers; "" for none. own: the address of this host that workers listen at and tell others, "" if as the
    job's config says. task: the only one that it runs, "" for any. tls: its settings for connections to others.
    domains: failure domains of this host, by label. said: the address in the user's words, "" if `address` is. around:
    the directory around run_dir in which this host leads the job or may have to, "" if there is none.
    """

    address: str
    entry: str
    preload: list[str]
    host: str
    token_file: str = ""
    room: int = 0
    run_dir: str = ""
    threads: int = 1
    server: Handed | None = None
    parent: int = 0
    ranks: int = 1
    own: str = ""
    task: str = ""
    files: str = ""
    tls: TlsConfig = field(default_factory=TlsConfig)
    domains: dict[str, str] = field(default_factory=dict)
    said: str = ""
    around: str = ""

    def where(self) -> Path | tuple[str, int]:
        """The address as a control connection takes it. Raises: ConfigError if it is no address."""
        if "/" in self.address:
            return Path(self.address)
        try:
            host, port = split_at_port(self.address)
        except ValueError:
            host, port = "", 0
        if not port:
            like = "[fd00::1]:29400" if self.address.count(":") > 1 else "127.0.0.1:29400"
            raise ConfigError(f"--join: expected ADDR:PORT like {like}, got {self.address!r}")
        return host, port

    def to_json(self) -> str:
        """As text; `from_json` undoes it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Joining:
        """Decode the text of `to_json`. Raises: ConfigError for any other text."""
        try:
            return _joining.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"expected what an agent is started with as JSON, got something else: {error}") from None


_joining = msgspec.json.Decoder(Joining)
