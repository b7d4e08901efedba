"""One generation's gloo group: point-to-point transfers among its members that can be cut off at any time.

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

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from everstep.base.errors import CollectiveAborted, InvariantViolation, StaleGeneration
from everstep.parallel.cutting import Address, cut, listeners
from everstep.parallel.fence import Fence

_FOREVER = timedelta(hours=12)
_CUT_AGAIN_S = 0.005
_GRACE_S = 0.1
_DEVICE_LOCK = threading.Lock()
_DEVICE_ATTEMPTS = 5
_MARKER = 1
_DEVICES = 2
"""gloo moves all bytes of a device in one thread; with two, sending and receiving go on at the same time."""

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

    def __init__(
        self, worker_ids: Sequence[int], me: int, store: Store, host: str, fence: Fence, name: str = ""
    ) -> None:
        self.worker_ids = tuple(worker_ids)
        self.me = me
        self._fence = fence
        self._generation = fence.generation
        self._addresses: frozenset[Address] = frozenset()
        self._group: Any = None
        self._opening = False
        self._sent: list[Any] = []
        self._posted: list[Batch] = []
        self._empty = torch.empty(0)
        self._store = PrefixStore(f"generation{fence.generation}{name}", store)
        self._host = host

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
        try:
            for tensor, w, tag in transfers:
                batch.works.append(self._group.recv([tensor], self._rank(w), self._wire_tag(tag, w, self.me)))
            for w in _workers(transfers):
                marker = self._group.recv([self._empty], self._rank(w), self._wire_tag(_MARKER, w, self.me))
                batch.markers.append((w, marker))
        except RuntimeError as error:
            self._failed(None, error)
        return batch

    def send(self, transfers: Sequence[Transfer]) -> None:
        """Begin to send contiguous tensors, as one batch for each receiver.

        They must not change until a later exchange: whoever wrote a record has received all.

        Raises: CollectiveAborted.
        """
        try:
            for tensor, w, tag in transfers:
                self._sent.append(self._group.send([tensor], self._rank(w), self._wire_tag(tag, self.me, w)))
            for w in _workers(transfers):
                self._sent.append(self._group.send([self._empty], self._rank(w), self._wire_tag(_MARKER, self.me, w)))
        except RuntimeError as error:
            self._failed(None, error)

    def receive_apart(self, transfer: Transfer) -> Batch:
        """Begin one receive outside of the order of batches; its marker bears the tag after the transfer's.

        The caller keeps the batch, and so the memory, until it has come or is given up.

        Raises: CollectiveAborted.
        """
        tensor, w, tag = transfer
        try:
            work = self._group.recv([tensor], self._rank(w), self._wire_tag(tag, w, self.me))
            marker = self._group.recv([self._empty], self._rank(w), self._wire_tag(tag + 1, w, self.me))
        except RuntimeError as error:
            self._failed(w, error)
        return Batch([work], [(w, marker)])

    def send_apart(self, transfer: Transfer) -> list[Any]:
        """The other side of `receive_apart`. The caller keeps works and tensor until all has been received.

        Raises: CollectiveAborted.
        """
        tensor, w, tag = transfer
        try:
            work = self._group.send([tensor], self._rank(w), self._wire_tag(tag, self.me, w))
            return [work, self._group.send([self._empty], self._rank(w), self._wire_tag(tag + 1, self.me, w))]
        except RuntimeError as error:
            return self._failed(w, error)

    def wait(self, batch: Batch) -> None:
        """Until all of the batch has come.

        Raises: CollectiveAborted.
        """
        accused: int | None = None
        try:
            for worker_id, marker in batch.markers:
                accused = worker_id
                marker.wait()
            for work in batch.works:
                work.wait()
        except RuntimeError as error:
            self._failed(accused, error)

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

    def _failed(self, worker_id: int | None, error: RuntimeError) -> NoReturn:
        """Leave the group for good, and say whose fault it was unless the generation has ended anyway.

        A peer that leaves because of a new plan closes its connections too: that plan may be on its way to us.
        """
        until = time.monotonic() + _GRACE_S
        while not self._fence.down and time.monotonic() < until:
            time.sleep(0.001)
        self.cut()
        self._fence.check()
        accused = [] if worker_id is None else [worker_id]
        raise CollectiveAborted(
            f"generation {self._generation}: transfer with {accused}: {_first_line(error)}", accused
        )

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

    def _rank(self, worker_id: int) -> int:
        return self.worker_ids.index(worker_id)

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
