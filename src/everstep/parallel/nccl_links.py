"""One generation's NCCL group, for gradients on CUDA devices: point-to-point transfers that can be cut off at any time.

Apart from our own sockets because NCCL orders transfers by stream and needs them grouped, and because it has an `abort`
that works. The process group is made directly, not as torch's default group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from everstep.base.errors import CollectiveAborted
from everstep.parallel.peers import Meeting

_FOREVER = timedelta(hours=12)
_POLL_S = 0.0005

Transfer = tuple[torch.Tensor, int, int]
"""(contiguous tensor, worker id of the other side, tag of 2 or more)."""


class NcclLinks:
    """The group of one generation; rank r is the r-th member by worker id."""

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
        """Make all transfers as one group of NCCL, which matches the transfers of two members by order. Waits for all
        of them.

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
                time.sleep(_POLL_S)
            work.wait()  # a failed work counts as completed until it is asked
            torch.cuda.current_stream(self._device).synchronize()
        except CollectiveAborted:
            self.cut()  # no writes to the receive buffers when the next generation uses them
            raise
        except RuntimeError as error:
            self.cut()
            self._fence.check()
            raise CollectiveAborted(f"generation {self._generation}: {str(error).splitlines()[0]}") from None

    def cut(self) -> None:
        """Thread-safe. End pending transfers."""
        if self._group is not None:
            self._group.abort()

    def retire(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
