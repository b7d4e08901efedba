"""One generation's NCCL group, for gradients on CUDA devices. Records go over sockets beside it.

Apart from the mesh because NCCL orders transfers by stream and needs them grouped, and because it has an `abort` that
works.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from everstep.base.errors import CollectiveAborted
from everstep.parallel.fence import Fence
from everstep.parallel.mesh import Transfer

_FOREVER = timedelta(hours=12)
_POLL_S = 0.0005


class NcclLinks:
    """The NCCL side of a generation; see `GlooMesh` for what its methods promise."""

    def __init__(
        self, worker_ids: Sequence[int], me: int, store: Store, device: torch.device, fence: Fence, name: str = ""
    ) -> None:
        self.worker_ids = tuple(worker_ids)
        self.me = me
        self._device = device
        self._fence = fence
        self._generation = fence.generation
        self._store = PrefixStore(f"generation{fence.generation}{name}/nccl", store)
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
                time.sleep(_POLL_S)
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
        group = self._group
        if group is not None:
            group.abort()

    def retire(self) -> None:
        """Give the group back."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None
