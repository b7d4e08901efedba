"""One generation's gloo group: point-to-point transfers among its members that can be cut off at any time.

Apart from the transport so that what lives and dies with a generation is one object. The process group is made
directly, not as torch's default group, over a device of its own, so that the connections of two generations can be told
apart by their listening ports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from everstep.base.errors import CollectiveAborted, EverstepError, InvariantViolation
from everstep.parallel.cutting import Address, cut, listeners
from everstep.parallel.fence import Fence

_FOREVER = timedelta(hours=12)
_CUT_AGAIN_S = 0.005
_GRACE_S = 0.1
_DEVICE_LOCK = threading.Lock()
_DEVICE_ATTEMPTS = 5


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
        self._opening = True
        self._store = PrefixStore(f"generation{fence.generation}", store)
        self._host = host

    def connect(self) -> None:
        """Meet the others. `cut` works from the moment when the first of them may connect."""
        try:
            device, own = _listening_device(self._host)
            rank = self.worker_ids.index(self.me)
            self._addresses = frozenset([own])
            self._store.set(f"listens{rank}", f"{own[0]} {own[1]}")
            met = [self._store.get(f"listens{r}").decode().split() for r in range(len(self.worker_ids))]
            self._addresses = frozenset((host, int(port)) for host, port in met)
            self._fence.check()
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = _FOREVER
            options._threads = 1
            options._devices = [device]
            self._group = ProcessGroupGloo(self._store, rank, len(self.worker_ids), options)
        except EverstepError:
            raise
        except RuntimeError as error:
            self._fence.check()
            raise CollectiveAborted(f"generation {self._generation}: no group: {_first_line(error)}") from None
        finally:
            self._opening = False

    def send(self, tensor: torch.Tensor, worker_id: int, tag: int) -> tuple[int, Any]:
        """Begin to send a contiguous tensor; pass the result to `wait`."""
        return worker_id, self._begin(self._group.send, tensor, worker_id, tag)

    def recv(self, tensor: torch.Tensor, worker_id: int, tag: int) -> tuple[int, Any]:
        """Begin to receive into a contiguous tensor. Of another size than what is sent, it kills the process (gloo)."""
        return worker_id, self._begin(self._group.recv, tensor, worker_id, tag)

    def wait(self, works: Sequence[tuple[int, Any]]) -> None:
        """Until all are done. Afterwards none of the buffers is touched any more, also if this raises.

        Raises: CollectiveAborted.
        """
        failed: tuple[int, str] | None = None
        for worker_id, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                if failed is None:
                    failed = worker_id, _first_line(error)
                    self._grace()
                    self.cut()
        if failed is not None:
            self.fail(*failed)

    def fail(self, worker_id: int, reason: str) -> None:
        """Raise for a failed transfer: as the end of the generation, if it was that; else accuse the peer."""
        self._fence.check()
        raise CollectiveAborted(
            f"generation {self._generation}: transfer with worker {worker_id}: {reason}", [worker_id]
        )

    def cut(self) -> None:
        """Thread-safe. All pending transfers raise within milliseconds, here and only here."""
        cut(self._addresses)
        if self._opening:
            threading.Thread(target=self._keep_cutting, name="everstep-cut", daemon=True).start()

    def retire(self) -> None:
        """Give the group back; takes 10 to 500 ms, so call it from a thread of no importance."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _begin(self, operation: Any, tensor: torch.Tensor, worker_id: int, tag: int) -> Any:
        try:
            return operation([tensor], self.worker_ids.index(worker_id), tag)
        except RuntimeError as error:
            return _Failed(error)

    def _grace(self) -> None:
        """A peer that leaves because of a new plan closes its connections too: its plan may be on the way to us."""
        until = time.monotonic() + _GRACE_S
        while not self._fence.down and time.monotonic() < until:
            time.sleep(0.001)

    def _keep_cutting(self) -> None:
        while self._opening:
            cut(self._addresses)
            time.sleep(_CUT_AGAIN_S)


class _Failed:
    """A transfer that could not even begin."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


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


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
