"""Parsers of what comes in conversations: what members tell each other and feed, what pages ask, what stores answer.

Apart from those of files and frames because each needs somebody at the other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from checkpoint_saving import make_state
from everstep.base.errors import CollectiveAborted, EverstepError, InvariantViolation
from everstep.base.extents import WHOLE, Extents
from everstep.checkpoint.object_store import ObjectOptions
from everstep.checkpoint.stores.s3 import open_s3
from everstep.dashboard.app import make_app
from everstep.dashboard.feed import Feeds
from everstep.exact.layout import BLOCK_ELEMENTS, Entry, GradientLayout, UnitRange
from everstep.parallel.reduction import BlockFinisher
from everstep.parallel.socket_mesh import _HEAD, BlockNote
from everstep.parallel.streaming import BlockStream, Reach
from everstep.placement.shards import Division
from everstep.protocol.driver import records
from everstep.protocol.step_types import Holding, Key, Record
from everstep.runtime.link.peer import PeerConnection
from everstep.runtime.link.wire import frame
from everstep.train import heal

TOKEN = "a-token-of-many-characters"
_NUMEL = 6


# ---- members


def holding() -> bytes:
    """What one states."""
    part = Extents.part((("model", 4), ("exp_avg", 4)), [("model", 1, 3)])
    given = {"stages": {0: WHOLE, 1: part}, "snapshots": {(0, 2): WHOLE, (1, 2): part}, "first": {0: "ab"}}
    return records.encode_holding(Holding(Key(3, 1), {0: Record(0, b"x")}, 4, **given))


def agree() -> bytes:
    """What one says of a step, of one stage and two lanes."""
    lanes = [records.LaneReport(k, 0.5, 1.0, 2, 7) for k in range(2)]
    section = records.StageSection(0, lanes, (0, 1), bytes(8), [0.25], [b"", b"x"], "ab", {"w": "cd"})
    return records.encode(records.AgreePayload([section], 5, 2, (("disk",), "why")))


def concluded(data: bytes) -> Any:
    """What is made of it."""
    given = {0: Record(0, data)}
    return records.conclude(3, 2, given), records.committed_unix_ns(given, True)


def gathered(data: bytes) -> Any:
    """What is made of a gather."""
    given = {0: Record(0, data)}
    return records.gathered(given), records.committed_unix_ns(given, False)


def offer() -> bytes:
    """What a donor says first."""
    said = {0: Record(0, b"abc")}
    part = Extents.part((("model", 4),), [("model", 1, 3)]).encoded()
    told = {"position": Key(3, 0), "records": said, "gathers": {Key(3, 1): said}, "application": b"loop"}
    return msgspec.msgpack.encode(heal.OfferHead(**told, manifests=["{}"], there={0: part, 1: None}, changed=("name",)))


def offered(data: bytes) -> Any:
    """What is made of it."""
    head = heal.receive_head(_Runs([data]))  # type: ignore[arg-type]
    return head, head.place([0, 1])


class _Runs:
    """A connection over which these runs of bytes come."""

    def __init__(self, runs: list[bytes]) -> None:
        self._runs = runs[::-1]

    def recv_bytes(self, max_bytes: int) -> bytearray:
        if not self._runs:
            raise CollectiveAborted("receiving from a peer failed: the connection ended")
        return bytearray(self._runs.pop())


def fed() -> bytes:
    """A step that a donor feeds, and that it has no more."""
    told = {"presence": 2, "numel": _NUMEL, "ranges": [[0, _NUMEL]], "tied": [["w", 0, 1, 2]], "absent": [["v", 0, 1]]}
    common = [records.encode({0: Record(0, b"abc")}), b"loop"]
    header = {"kind": "step", "step": 4, "nbytes": [len(p) for p in common], "stages": {"0": told}}
    runs = [*common, b"\x01\x01", bytes(4 * _NUMEL), bytes(8)]
    tag = bytes(16)
    body = b"".join(frame(len(run).to_bytes(8, "big")) + tag + run for run in runs)
    last = frame(json.dumps({"kind": "caught_up", "step": 4}).encode()) + tag
    return frame(json.dumps(header).encode()) + tag + body + last


def followed(data: bytes, seals: Any) -> int:
    """How many steps a joiner makes of it, up to its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    found = 0
    with theirs, PeerConnection(ours, seals, timeout_s=5.0) as connection:
        writer = threading.Thread(target=_say, args=(theirs, data))
        writer.start()
        try:
            while found < 100:
                heal.next_item(connection, {0: _NUMEL})
                found += 1
        except CollectiveAborted:
            if not found:
                raise
        finally:
            connection.abort()
            writer.join()
    return found


def _say(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it has heard enough


def small_state() -> bytes:
    """Of a user's loop."""
    return heal.pack_state(make_state(1, {"weight": (3, 2)}))


def unpacked(data: bytes) -> None:
    """Taken on by another one."""
    heal.unpack_state(make_state(2, {"weight": (3, 2)}), data)


# ---- pages


REQUESTS = (
    b"GET /?token=a-token-of-many-characters\nhost: localhost\naccept: text/html\n\n",
    b"POST /api/runs/0/chaos\nhost: 127.0.0.1:80\nauthorization: Bearer a-token-of-many-characters\n"
    b'content-type: application/json\norigin: http://127.0.0.1:80\n\n{"fault":"kill:target=worker:2"}',
    b"POST /api/runs/0/scale\nhost: localhost\nx-everstep-token: a-token-of-many-characters\n"
    b'content-type: application/json\n\n{"workers":3}',
    b"GET /metrics?run=0\nhost: [::1]\ncookie: everstep-0=x; a=b\nsec-fetch-site: none\n\n",
    b"GET /static/%2e%2e%2fjob.json\nhost: localhost\nauthorization: bearer a-token-of-many-characters\n\n",
)


def page_server() -> Callable[[bytes], int]:
    """Answers a request with its status."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-fuzz-"))
    (folder / "job.json").write_text('{"task": "t", "config": {"steps": 9}}')
    app = make_app(Feeds([folder]), "127.0.0.1", TOKEN)
    return lambda data: asyncio.run(_ask(app, data))


async def _ask(app: Any, data: bytes) -> int:
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, target = first.partition(b" ")
    path, _, query = target.partition(b"?")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": path}
    scope |= {"method": method.decode("latin-1").upper(), "path": path.decode(errors="replace"), "headers": headers}
    scope |= {"query_string": query, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    said = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    status = 0

    async def receive() -> dict[str, Any]:
        return said.pop(0) if len(said) > 1 else said[0]

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        status = int(message.get("status", status))

    await asyncio.wait_for(app(scope, receive, send), 5.0)
    return status


# ---- stores


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: 404\r\n\r\n"
    b'<?xml version="1.0"?><ListBucketResult><Name>b</Name><Prefix></Prefix><KeyCount>1</KeyCount>'
    b"<MaxKeys>1000</MaxKeys>"
    b"<IsTruncated>false</IsTruncated><Contents><Key>step-0000000001/manifest.json</Key>"
    b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;a&quot;</ETag><Size>12</Size></Contents>"
    b"<Contents><Key>../x</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
    b"</ListBucketResult>",
    b'HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-3/12\r\nETag: "a"\r\nContent-Length: 4\r\n'
    b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\nabcd",
    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 53\r\n\r\n<Error><Code>AccessDenied</Code><Message>no</Message></E",
    b"HTTP/1.1 301 Moved\r\nLocation: http://localhost:1/x\r\nContent-Length: 0\r\n\r\n",
)


class _Answering(socketserver.ThreadingTCPServer):
    """Says the same to whoever asks anything."""

    daemon_threads = True
    answer = b""


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            self.request.settimeout(5.0)
            self.request.recv(1 << 16)
            self.request.sendall(self.server.answer)  # type: ignore[attr-defined]
        except OSError:
            pass


def store_client() -> Callable[[bytes], Any]:
    """What a store's client makes of an answer: a list of names, and some bytes."""
    server = _Answering(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "k")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "s")
    where = ObjectOptions(f"http://127.0.0.1:{server.server_address[1]}", "r", 2.0, 2.0, 0, 2.0)
    store = open_s3("s3://bucket", where)

    def ask(data: bytes) -> Any:
        server.answer = data
        problem: EverstepError | None = None
        found: list[Any] = []
        for want in (store.sizes, lambda: bytes(store.read("a", 0, 4)), lambda: store.fingerprint("a")):
            try:
                found.append(want())
            except EverstepError as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return found

    return ask


REFUSED = (EverstepError, InvariantViolation)
torch.set_num_threads(1)


# ---- blocks of gradients


_LAYOUT = GradientLayout((Entry("w", 0, "param", (5,), 5, 0, (1,), "float32"),), (UnitRange(0, 5, 5),), BLOCK_ELEMENTS)


def heads() -> list[bytes]:
    """What a member says of blocks that it sends: a node's, and a result."""
    return [_HEAD.pack(4, 1, 20, 0, 4, 0) + _HEAD.pack(3, 1, 20, 4, 8, 0), _HEAD.pack(4, 2, 20, 0, 0, 0)]


def blocks(data: bytes) -> int:
    """Find room for each, and take it in; returns how many bytes there was room for."""
    finisher = BlockFinisher(_LAYOUT, 8, lambda: None)
    out = torch.zeros(BLOCK_ELEMENTS)
    stream = BlockStream(
        *(1, [1], Division.whole({1: ((0, 1),)}, 1), _LAYOUT, 8, finisher),
        *(lambda _, n: torch.zeros(n), lambda _: out, Reach([1], [1])),
    )
    room = 0
    for at in range(0, len(data) - _HEAD.size + 1, _HEAD.size):
        kind, step, size, lo, hi, first = _HEAD.unpack_from(data, at)
        note = BlockNote(step, lo, hi, first, kind == 4)
        room += len(stream.space(1, note, size))
        stream.came(note, size)
    return room
