"""An S3 server for the tests: Ceph RGW where it is installed and may run, else moto. And a proxy that spoils things."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_ATTEMPTS = 3
KEY, SECRET = "test", "testsecret"
SMALL_KEY, SMALL_SECRET = "small", "smallsecret"


@dataclass
class ObjectServer:
    """endpoint: its URL. kind: rgw or moto (which checks no keys and knows no quota)."""

    endpoint: str
    kind: str

    def bucket(self, key: str = KEY, secret: str = SECRET) -> str:
        """A new, empty bucket."""
        import obstore
        from obstore.store import S3Store

        name = f"everstep-{uuid.uuid4().hex[:12]}"
        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=key,
            secret_access_key=secret,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(seconds=60))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60) as answer:
            assert answer.status == 200
        return name

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find it."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@contextlib.contextmanager
def running_object_server(folder: Path) -> Iterator[ObjectServer]:
    """A server of its own for the time of a session."""
    wanted = os.environ.get("EVERSTEP_TEST_OBJECT_SERVER")
    installed = all(shutil.which(name) for name in ("radosgw", "ceph-mon", "ceph-osd", "radosgw-admin"))
    if wanted is not None and wanted.startswith("http"):  # one that runs already: an RGW made by start_rgw.sh
        yield ObjectServer(wanted, "rgw")
    elif wanted == "moto" or (wanted is None and not (installed and os.getuid() == 0)):
        with _moto() as server:
            yield server
    else:
        with _rgw(folder) as server:
            yield server


@contextlib.contextmanager
def _moto() -> Iterator[ObjectServer]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield ObjectServer(f"http://{host}:{port}", "moto")
    finally:
        server.stop()


@contextlib.contextmanager
def _rgw(folder: Path) -> Iterator[ObjectServer]:
    for attempt in range(_ATTEMPTS):
        home = folder / str(attempt)
        port, mon_port = _free_ports(2)
        command = [str(HERE / "start_rgw.sh"), str(home), str(port), str(mon_port)]
        try:
            began = subprocess.run(command, timeout=240, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if began.returncode == 0:
                yield ObjectServer(f"http://127.0.0.1:{port}", "rgw")
                return
        finally:
            for path in (home / "run").glob("*.pid"):
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGKILL)  # nothing of it is wanted any more
            shutil.rmtree(home / "osd", ignore_errors=True)
    raise RuntimeError(f"Ceph RGW did not start: {began.stderr[-2000:]}")


def _free_ports(count: int) -> list[int]:
    """Below the range from which the kernel takes the ports of outgoing connections: a server that starts for long
    would meet one of these on a busy machine."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            s = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                s.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
                found.append(s.getsockname()[1])
    return found


@dataclass
class Proxy:
    """Passes bytes on to a server, as `mode` says: pass; refuse (nobody listens there, in effect: connections are
    closed at once); silent (accepts, answers nothing); slow (bytes_per_s towards the server); error (answers 503);
    cut (after cut_bytes towards the server, each connection is reset).
    """

    upstream: str
    mode: str = "pass"
    bytes_per_s: float = 1e6
    cut_bytes: int = 0
    endpoint: str = ""
    connections: int = 0
    passed_bytes: int = 0
    _loop: Any = field(default_factory=asyncio.new_event_loop)
    _writers: set[Any] = field(default_factory=set)

    def __enter__(self) -> Proxy:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def set(self, mode: str, reset: bool = True, **more: Any) -> None:
        """From now on; connections that are open are reset, if it is so wished."""
        self.mode = mode
        for name, value in more.items():
            setattr(self, name, value)
        if reset:
            self._loop.call_soon_threadsafe(lambda: [_reset(w) for w in list(self._writers)])

    def wait_for_connections(self, more: int, timeout_s: float = 60.0) -> None:
        """Until so many more came."""
        wanted, deadline = self.connections + more, time.monotonic() + timeout_s
        while self.connections < wanted:
            assert time.monotonic() < deadline, "nobody connected"
            time.sleep(0.01)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            if self.mode == "refuse":
                _reset(writer)
            elif self.mode == "silent":
                await asyncio.Event().wait()
            elif self.mode == "error":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass  # the request's body: what is closed with it unread is reset, and the answer lost
                writer.close()
            else:
                host, _, port = self.upstream.removeprefix("http://").partition(":")
                up_reader, up_writer = await asyncio.open_connection(host, int(port))
                await asyncio.gather(self._up(reader, writer, up_writer), _down(up_reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        finally:
            self._writers.discard(writer)

    async def _up(self, reader: Any, writer: Any, up_writer: Any) -> None:
        seen = 0
        while data := await reader.read(1 << 16):
            seen += len(data)
            self.passed_bytes += len(data)
            if self.mode == "cut" and seen > self.cut_bytes:
                _reset(up_writer)
                _reset(writer)
                return
            if self.mode == "slow":
                await asyncio.sleep(len(data) / self.bytes_per_s)
            up_writer.write(data)
            await up_writer.drain()
        up_writer.close()


async def _down(reader: Any, writer: Any) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


def _reset(writer: Any) -> None:
    writer.transport.abort()
