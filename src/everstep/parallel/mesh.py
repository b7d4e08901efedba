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
from typing import Any

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

Transfer = tuple[torch.Tensor, int, int]
"""(contiguous tensor, worker id of the other side, tag of 2 or more)."""


class GlooMesh:
    """The group of one generation; rank r is the r-th member by worker id.

    Raises (constructor): CollectiveAborted if the generation ends or a member cannot be reached.
    """

    def __init__(self, worker_ids: Sequence[int], me: int, store: Store, host: str, fence: Fence) -> None:
        self.worker_ids = tuple(worker_ids)
        self.me = me
        self._fence = fence
        self._generation = fence.generation
        self._addresses: frozenset[Address] = frozenset()
        self._group: Any = None
        self._opening = False
        self._sent: list[Any] = []
        self._store = PrefixStore(f"generation{fence.generation}", store)
        self._host = host

    def connect(self) -> None:
        """Meet the others. `cut` works from the moment when the first of them may connect."""
        self._opening = True
        try:
            self._fence.check()
            device, own = _listening_device(self._host)
            rank = self.worker_ids.index(self.me)
            self._addresses = frozenset([own])
            self._store.set(f"listens{rank}", f"{own[0]} {own[1]}")
            met = self._store.multi_get([f"listens{r}" for r in range(len(self.worker_ids))])
            self._addresses = frozenset((host, int(port)) for host, port in (m.decode().split() for m in met))
            self._fence.check()
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = _FOREVER
            options._threads = 1
            options._devices = [device]
            self._group = ProcessGroupGloo(self._store, rank, len(self.worker_ids), options)
        except StaleGeneration as error:
            raise CollectiveAborted(str(error)) from None
        except RuntimeError as error:
            self._fence.check()
            raise CollectiveAborted(f"generation {self._generation}: no group: {_first_line(error)}") from None
        finally:
            self._opening = False

    def transfer(self, sends: Sequence[Transfer], recvs: Sequence[Transfer]) -> None:
        """Send and receive contiguous tensors; returns when all that is to be received here has come.

        What is sent must not change until a later exchange: whoever wrote a record has received all. Who receives
        another size than what is sent is killed by gloo. Transfers between two members that bear the same tag keep
        their order.

        Raises: CollectiveAborted. Afterwards nothing writes to the receive buffers any more.
        """
        empty = torch.empty(0)
        works: list[Any] = []
        markers: list[tuple[int, Any]] = []
        try:
            works += [self._group.recv([t], self._rank(w), tag) for t, w, tag in recvs]
            markers += [(w, self._group.recv([empty], self._rank(w), _MARKER)) for w in _workers(recvs)]
            self._sent += [self._group.send([t], self._rank(w), tag) for t, w, tag in sends]
            self._sent += [self._group.send([empty], self._rank(w), _MARKER) for w in _workers(sends)]
            for w, marker in markers:
                self._wait(w, marker)
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._failed(None, error)
        finally:
            # A traceback keeps this frame alive; gloo leaves the memory of a transfer alone once its work is gone.
            works.clear()
            markers.clear()

    def settled(self) -> None:
        """All members are known to have received all that was sent here."""
        self._sent.clear()

    def _wait(self, worker_id: int, marker: Any) -> None:
        try:
            marker.wait()
        except RuntimeError as error:
            self._failed(worker_id, error)

    def _failed(self, worker_id: int | None, error: RuntimeError) -> None:
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
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _rank(self, worker_id: int) -> int:
        return self.worker_ids.index(worker_id)

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
