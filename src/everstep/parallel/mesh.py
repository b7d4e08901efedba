"""One generation's gloo or NCCL group: point-to-point transfers among its members that can be cut off at any time.

Apart from the transport so that what lives and dies with a generation is one object. The process group is made
directly, not as torch's default group, over a device of its own, so that the connections of two generations can be told
apart by their listening ports.

When a connection breaks, gloo tells the transfers that have not begun, and leaves those whose bytes are under way
waiting until their timeout (measured: sends and receives of megabytes with a stopped peer; gloo's
`Pair::signalException` passes them by). So nobody waits for those here: behind each batch goes an empty message, a
*marker*, which cannot be half under way. Receivers wait for it, and then their transfers are complete; senders wait
for nothing, and learn from a later exchange that all has been received.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from everstep.base.errors import CollectiveAborted, InvariantViolation, StaleGeneration
from everstep.parallel.peers import Meeting

_FOREVER = timedelta(hours=12)
_CUT_AGAIN_S = 0.005
_GRACE_S = 0.1
_DEVICE_LOCK = threading.Lock()
_DEVICE_ATTEMPTS = 5
_MARKER = 1
_NCCL_POLL_S = 0.0005
_SYN_SENT = "02"
_DEVICES = 2
"""gloo moves all bytes of a device in one thread; with two, sending and receiving go on at the same time."""

Address = tuple[str, int]
Transfer = tuple[torch.Tensor, int, int]
"""(contiguous tensor, worker id of the other side, tag of 2 or more)."""


class Batch(NamedTuple):
    """Receives that are waited for together: the works, and (sender, work) of the markers behind them."""

    works: list[Any]
    markers: list[tuple[int, Any]]


class GlooMesh:
    """The group of one generation; rank r is the r-th member by worker id.

    Raises (constructor): CollectiveAborted if the generation ends or a member cannot be reached.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.worker_ids, self.me, self._store, self._host, self._fence, *_ = meeting
        self._generation = self._fence.generation
        self._addresses: frozenset[Address] = frozenset()
        self._group: Any = None
        self._opening = False
        self._sent: list[Any] = []
        self._posted: list[Batch] = []
        self._empty = torch.empty(0)

    def connect(self) -> None:
        """Meet the others. `cut` works from the moment when the first of them may connect."""
        self._opening = True
        try:
            self._fence.check()
            own = [_listening_device(self._host) for _ in range(_DEVICES)]
            rank = self.worker_ids.index(self.me)
            self._addresses = frozenset(address for _, address in own)
            self._store.set(f"listens{rank}", "\n".join(f"{host} {port}" for _, (host, port) in own))
            met = self._store.multi_get([f"listens{r}" for r in range(len(self.worker_ids))])
            lines = [line.split() for text in met for line in text.decode().splitlines()]
            self._addresses = frozenset((host, int(port)) for host, port in lines)
            self._fence.check()
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = _FOREVER
            options._threads = 1
            options._devices = [device for device, _ in own]
            self._group = ProcessGroupGloo(self._store, rank, len(self.worker_ids), options)
        except StaleGeneration as error:
            raise CollectiveAborted(str(error)) from None
        except RuntimeError as error:
            self._fence.check()
            raise CollectiveAborted(f"generation {self._generation}: no group: {_first_line(error)}") from None
        finally:
            self._opening = False

    def receive(self, transfers: Sequence[Transfer]) -> Batch:
        """Begin to receive contiguous tensors; `wait` says when they are there.

        Batches between two members must be received in the order in which they are sent, and so must transfers of one
        batch that bear the same tag. Who receives another size than what is sent is killed by gloo.

        Raises: CollectiveAborted.
        """
        batch = Batch([], [])
        self._posted.append(batch)
        with self._group_fails():
            for transfer in transfers:
                batch.works.append(self._recv(*transfer))
            for w in _workers(transfers):
                batch.markers.append((w, self._recv(self._empty, w, _MARKER)))
        return batch

    def send(self, transfers: Sequence[Transfer]) -> None:
        """Begin to send contiguous tensors, as one batch for each receiver.

        They must not change until a later exchange: whoever wrote a record has received all.

        Raises: CollectiveAborted.
        """
        with self._group_fails():
            for transfer in transfers:
                self._sent.append(self._send(*transfer))
            for w in _workers(transfers):
                self._sent.append(self._send(self._empty, w, _MARKER))

    def receive_apart(self, transfer: Transfer) -> Batch:
        """Begin one receive outside of the order of batches; its marker bears the tag after the transfer's.

        The caller keeps the batch, and so the memory, until it has come or is given up.

        Raises: CollectiveAborted.
        """
        _, w, tag = transfer
        with self._group_fails(w):
            return Batch([self._recv(*transfer)], [(w, self._recv(self._empty, w, tag + 1))])

    def send_apart(self, transfer: Transfer) -> list[Any]:
        """The other side of `receive_apart`. The caller keeps works and tensor until all has been received.

        Raises: CollectiveAborted.
        """
        _, w, tag = transfer
        with self._group_fails(w):
            return [self._send(*transfer), self._send(self._empty, w, tag + 1)]

    def wait(self, batch: Batch) -> None:
        """Until all of the batch has come.

        Raises: CollectiveAborted.
        """
        worker_id = None
        for worker_id, marker in batch.markers:
            with self._group_fails(worker_id):
                marker.wait()
        with self._group_fails(worker_id):
            for work in batch.works:
                work.wait()

    def forget(self) -> None:
        """Afterwards nothing writes to receive buffers any more, whether or not the batches have come.

        A traceback keeps frames alive; gloo leaves the memory of a transfer alone once its work is gone.
        """
        for batch in self._posted:
            batch.works.clear()
            batch.markers.clear()
        self._posted.clear()

    def settled(self) -> None:
        """All members are known to have received all that was sent here."""
        self._sent.clear()

    @contextlib.contextmanager
    def _group_fails(self, worker_id: int | None = None) -> Iterator[None]:
        """When a transfer (with this worker) fails, leave the group for good, and say whose fault it was unless the
        generation has ended anyway.

        A peer that leaves because of a new plan closes its connections too: that plan may be on its way to us.
        """
        try:
            yield
        except RuntimeError as error:
            until = time.monotonic() + _GRACE_S
            while not self._fence.down and time.monotonic() < until:
                time.sleep(0.001)
            self.cut()
            self._fence.check()
            accused = [] if worker_id is None else [worker_id]
            text = f"generation {self._generation}: transfer with {accused}: {_first_line(error)}"
            raise CollectiveAborted(text, accused) from None

    def cut(self) -> None:
        """Thread-safe. All pending transfers raise within milliseconds, here and only here."""
        cut(self._addresses)
        if self._opening:
            threading.Thread(target=self._keep_cutting, name="everstep-cut", daemon=True).start()

    def retire(self) -> None:
        """Give the group back; takes 10 to 500 ms, so call it from a thread of no importance."""
        self._sent.clear()
        self.forget()
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _recv(self, tensor: torch.Tensor, w: int, tag: int) -> Any:
        return self._group.recv([tensor], self.worker_ids.index(w), self._wire_tag(tag, w, self.me))

    def _send(self, tensor: torch.Tensor, w: int, tag: int) -> Any:
        return self._group.send([tensor], self.worker_ids.index(w), self._wire_tag(tag, self.me, w))

    def _wire_tag(self, tag: int, sender: int, receiver: int) -> int:
        """torch takes the device by the tag's remainder: one for the way up the ranks, one for the way down."""
        return _DEVICES * tag + (sender < receiver)

    def _keep_cutting(self) -> None:
        while self._opening:
            cut(self._addresses)
            time.sleep(_CUT_AGAIN_S)


def _listening_device(host: str) -> tuple[Any, Address]:
    """A gloo device and the address where it listens, found as the one socket that was not there before."""
    with _DEVICE_LOCK:
        for _ in range(_DEVICE_ATTEMPTS):
            before = listeners()
            device = ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            found = [address for inode, address in listeners().items() if inode not in before]
            if len(found) == 1:
                return device, found[0]
    raise InvariantViolation(f"expected one new listening socket of gloo on {host}, found {found}")


def _workers(transfers: Sequence[Transfer]) -> list[int]:
    return sorted({worker_id for _, worker_id, _ in transfers})


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class NcclLinks:
    """One generation's NCCL group, for gradients on CUDA devices; see `GlooMesh` for what its methods promise.

    Apart from that because NCCL orders transfers by stream and needs them grouped, and because it has an `abort` that
    works.
    """

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.worker_ids, self.me, store, _, self._fence, *_ = meeting
        self._generation = self._fence.generation
        self._store = PrefixStore("nccl", store)
        self._device = device
        self._group: Any = None

    def connect(self) -> None:
        """Make the group. Its communicator comes with the first transfer."""
        group_class: Any = dist.ProcessGroupNCCL
        options = group_class.Options()
        options._timeout = _FOREVER
        options.config.blocking = 0
        self._group = group_class(self._store, self.worker_ids.index(self.me), len(self.worker_ids), options)

    def transfer(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        """All as one group of NCCL, which matches the transfers of two members by order. Waits for all of them.

        Raises: CollectiveAborted.
        """
        if not sends and not recvs:
            return
        try:
            self._group._start_coalescing()
            for tensor, worker_id, _ in sends:
                self._group.send([tensor], self.worker_ids.index(worker_id), 0)
            for tensor, worker_id, _ in recvs:
                self._group.recv([tensor], self.worker_ids.index(worker_id), 0)
            work = self._group._end_coalescing()
            while not work.is_completed():
                self._fence.check()
                time.sleep(_NCCL_POLL_S)
            work.wait()  # a work that failed counts as completed until it is asked
            torch.cuda.current_stream(self._device).synchronize()
        except CollectiveAborted:
            self.cut()  # nothing may write to the receive buffers any more when the next generation uses them
            raise
        except RuntimeError as error:
            self.cut()
            self._fence.check()
            raise CollectiveAborted(f"generation {self._generation}: {str(error).splitlines()[0]}") from None

    def settled(self) -> None:
        """All members have received all: so it is after each transfer."""

    def cut(self) -> None:
        """Thread-safe. Pending transfers end."""
        if self._group is not None:
            self._group.abort()

    def retire(self) -> None:
        """Give the group back."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None


# ---- freeing whoever waits in a gloo operation, by ending the connections beneath it: gloo's own `abort()` and
# `shutdown()` unblock nothing. What does is shutdown(2) on the group's connected sockets, found by address: one end is
# the listening address of a member. Never the listening socket itself (gloo would call std::terminate), and nothing
# else that the process has open. Source: measured on torch 2.13: pending operations raise within 3 ms.


def listeners() -> dict[int, Address]:
    """Inode and address of all TCP sockets on which this process listens."""
    return {inode: sock.getsockname()[:2] for inode, listens, sock in _sockets() if listens}


def cut(addresses: frozenset[Address]) -> None:
    """Ends every connection of this process of which one end is one of the addresses."""
    connecting = None
    for inode, listens, sock in _sockets():
        if listens:
            continue
        with contextlib.suppress(OSError):
            ends = {sock.getsockname()[:2]}
            try:
                ends.add(sock.getpeername()[:2])
            except OSError:  # not connected, or not yet
                connecting = _connecting() if connecting is None else connecting
                ends |= connecting.get(inode, set())
            if ends & addresses:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, bool, socket.socket]]:
    """(inode, whether it listens, duplicate) of the TCP sockets of this process; the duplicate is closed afterwards."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            copy = os.dup(int(name))
            try:
                sock = stack.enter_context(socket.socket(fileno=copy))
            except OSError:
                os.close(copy)
                continue
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                listens = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                yield int(target[8:-1]), listens, sock


def _connecting() -> dict[int, set[Address]]:
    """Where the sockets of this network namespace that are still connecting want to go, by inode."""
    found: dict[int, set[Address]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/self/net/{table}") as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _SYN_SENT:
                host, port = row[2].split(":")
                words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
                packed = b"".join(struct.pack("=I", word) for word in words)
                found.setdefault(int(row[9]), set()).add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
