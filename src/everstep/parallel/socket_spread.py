"""Updated parameters between hosts: out of the parameters' memory, into that of others, over the sockets of a
generation. From and to other devices they pass through host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.base.ports import Portion
from everstep.parallel.socket_mesh import Parcel, Receipt, SocketMesh

MOST_ASKED_BYTES = 16 << 20
"""Host memory for what is on its way to another device."""


class _Coming(NamedTuple):
    content: Tensor
    target: Tensor
    receipt: Receipt


class SocketSpread:
    """What one worker sends and receives in one spread: all that it gives is offered at once, and what it lacks is
    asked for in order."""

    def __init__(self, mesh: SocketMesh, me: int, tag: int, portions: Sequence[Portion]) -> None:
        """tag: of all transfers. Raises: CollectiveAborted."""
        self._mesh, self._tag = mesh, tag
        self._leaving: list[Parcel] = []
        self._coming: deque[_Coming] = deque()
        self._wanted = deque(one for one in portions if me in one.takers)
        for one in portions:
            if one.source == me:
                content = one.data.cpu()
                self._leaving += [mesh.send((content, taker, tag)) for taker in one.takers]
        self._ask()

    def wait(self) -> None:
        """Wait until all has come, and what is given has left. Raises: CollectiveAborted."""
        while self._coming:
            one = self._coming.popleft()
            self._mesh.wait(one.receipt)
            if one.content is not one.target:
                one.target.copy_(one.content)
            self._ask()
        for parcel in self._leaving:
            self._mesh.wait(parcel)

    def _ask(self) -> None:
        """What has to pass through other memory waits for room there."""
        passing = sum(one.content.nbytes for one in self._coming if one.content is not one.target)
        while self._wanted and passing < MOST_ASKED_BYTES:
            one = self._wanted.popleft()
            target = one.data
            content = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
            passing += 0 if content is target else content.nbytes
            self._coming.append(_Coming(content, target, self._mesh.receive((content, one.source, self._tag))))
