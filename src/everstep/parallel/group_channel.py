"""Messages between workers of several hosts: over the gloo group in which all members of a generation meet anyway.

gloo moves bytes only when both sides have named them, and kills a process that receives another size than what was
sent. So each *edge* (sender, receiver, kind, part) first says in a small *lead* how large its frames are, once in a
generation; all its frames have that size, and a receiver can ask for many of them before it needs them. A message that
is larger than its edge's frames says so in the frame, and its content follows as a message of its own.

Tensors on other devices pass through host memory: gradients have NCCL, but single messages in any order would have to
be paired by order on both sides, with each direction in a communicator of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from everstep.base.errors import check
from everstep.base.plan import Plan, WorkerKey
from everstep.base.ports import Hop
from everstep.exact.layout import ALIGN_BYTES
from everstep.parallel.channel import KINDS
from everstep.parallel.fence import Fence
from everstep.parallel.frame import HEAD_LENGTHS, Frame, frame_of, fresh_bytes, head_size, parse_head
from everstep.parallel.group import GroupTransport
from everstep.parallel.mesh import Batch, GlooMesh

_HEADER = struct.Struct("<qiiiiQ")
_LEAD = struct.Struct("<Q")
_PARTS, _LANES = 1 << 10, 1 << 13
_TAGS = 1 << 28
_FRAME, _MORE = 0, 2
"""Each hop has four tags: its frame and the marker behind it, and the same for content that the frame cannot hold."""
_LEADS = _TAGS + 4 * len(KINDS) * _PARTS * _LANES


class _Edge(NamedTuple):
    peer: int
    kind: str
    part: int


class _Coming(NamedTuple):
    content: torch.Tensor
    batch: Batch

    def complete(self) -> bool:
        works = (*self.batch.works, *(marker for _, marker in self.batch.markers))
        return all(work.is_completed() for work in works)


class GroupChannel:
    """Satisfies `everstep.base.ports.Channel` over the mesh of `carrier`, a gloo transport of all members.

    The carrier is opened before the channel, and aborted with it. device: where received tensors are put.
    """

    segment = ""

    def __init__(self, me: WorkerKey, carrier: GroupTransport, *, device: torch.device | str = "cpu") -> None:
        self._me = me
        self._carrier = carrier
        self._device = torch.device(device)
        self._fence = Fence()
        self._mesh: GlooMesh | None = None
        self._members: tuple[int, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._rooms: dict[_Edge, int] = {}
        self._leads: dict[_Edge, _Coming] = {}
        self._frames: dict[_Edge, int] = {}
        self._wanted: dict[_Edge, list[Hop]] = {}
        self._coming: dict[tuple[int, Hop], _Coming] = {}
        self._own: dict[Hop, tuple[torch.Tensor, Frame]] = {}
        self._sent: list[tuple[int, list[object]]] = []

    def open(self, plan: Plan) -> None:
        """Use the carrier's new mesh."""
        check(plan.has(self._me), f"{self._me} is no member of generation {plan.generation}")
        self._fence.enter(plan.generation)
        self._clear()
        self._members = plan.worker_ids
        self._mesh = self._carrier.mesh
        self._fence.check()

    def send(self, to: int, key: Hop, tensors: Sequence[torch.Tensor], meta: bytes = b"") -> None:
        """One copy into a frame that is kept until `forget`. Raises: CollectiveAborted."""
        mesh = self._checked(to, key)
        layout = frame_of(tensors, meta)
        if to == self._me.worker_id:
            content = fresh_bytes(layout.size)
            layout.fill(content, tensors)
            self._own[key] = content, layout
            return
        edge = _Edge(to, key.kind, key.part)
        if edge not in self._rooms:
            self._rooms[edge] = layout.size
            lead = fresh_bytes(_LEAD.size)
            _write(lead, _LEAD.pack(layout.size))
            self._post(mesh, key.step, lead, to, _lead_tag(edge))
        room = self._rooms[edge]
        frame = fresh_bytes(ALIGN_BYTES + room)
        _write(frame, _HEADER.pack(key.step, KINDS.index(key.kind), key.part, key.lane, 0, layout.size))
        if layout.size <= room:
            layout.fill(frame[ALIGN_BYTES:], tensors)
        self._post(mesh, key.step, frame, to, _tag(key) + _FRAME)
        if layout.size > room:
            content = fresh_bytes(layout.size)
            layout.fill(content, tensors)
            self._post(mesh, key.step, content, to, _tag(key) + _MORE)

    def expect(self, source: int, key: Hop) -> None:
        """Ask for it now, if the size of the edge's frames is known, and as soon as it is otherwise.

        Raises: CollectiveAborted.
        """
        mesh = self._checked(source, key)
        if source == self._me.worker_id or (source, key) in self._coming:
            return
        edge = _Edge(source, key.kind, key.part)
        wanted = self._wanted.setdefault(edge, [])
        if key not in wanted:
            wanted.append(key)
        if edge not in self._frames and edge not in self._leads:
            self._leads[edge] = _receive(mesh, _LEAD.size, source, _lead_tag(edge))
        self._ask(mesh)

    def recv(self, source: int, key: Hop) -> tuple[list[torch.Tensor], bytes]:
        """Raises: CollectiveAborted after `abort`, and when the connection with the sender broke."""
        mesh = self._checked(source, key)
        if source == self._me.worker_id:
            check(key in self._own, f"{key} was not sent by the only one who could, this worker")
            content, layout = self._own.pop(key)
            return self._tensors(layout, content), layout.meta
        self.expect(source, key)
        edge = _Edge(source, key.kind, key.part)
        with self._carrier.ticking():
            if edge in self._leads:
                mesh.wait(self._leads[edge].batch)
                self._ask(mesh)
            coming = self._coming.pop((source, key))
            mesh.wait(coming.batch)
            step, kind, part, lane, _, size = _HEADER.unpack(coming.content[: _HEADER.size].numpy().tobytes())
            found = Hop(step, KINDS[kind], part, lane)  # type: ignore[arg-type]
            check(found == key, f"expected {key} of worker {source}, got {found}")
            content = coming.content[ALIGN_BYTES:]
            if size > content.numel():
                content, batch = _receive(mesh, size, source, _tag(key) + _MORE)
                mesh.wait(batch)
        length = head_size(content[:HEAD_LENGTHS].numpy().tobytes())
        layout = parse_head(content[:length].numpy().tobytes())
        return self._tensors(layout, content), layout.meta

    def forget(self, step: int) -> None:
        """Lets go of what was sent for steps up to this one."""
        self._sent = [sent for sent in self._sent if sent[0] > step]
        self._own = {key: kept for key, kept in self._own.items() if key.step > step}

    def abort(self, generation: int) -> None:
        """Thread-safe. Who is already waiting is freed by the abort of the carrier."""
        self._fence.abort(generation)

    def close(self) -> None:
        """Forget everything; the mesh is the carrier's."""
        self._fence.abort(1 << 62)
        self._clear()
        self._mesh = None

    # ---- inside

    def _checked(self, peer: int, key: Hop) -> GlooMesh:
        self._fence.check()
        check(peer in self._members, f"worker {peer} is no member of generation {self._fence.generation}")
        fits = 0 <= key.part < _PARTS and 0 <= key.lane < _LANES
        check(fits, f"{key}: at most {_PARTS} parts and {_LANES} lanes")
        mesh = self._mesh
        check(mesh is not None, "a message before the channel was opened")
        return mesh  # type: ignore[return-value]

    def _post(self, mesh: GlooMesh, step: int, content: torch.Tensor, to: int, tag: int) -> None:
        """What is sent is kept until the step is forgotten."""
        self._sent.append((step, [content, *mesh.send_apart((content, to, tag))]))

    def _ask(self, mesh: GlooMesh) -> None:
        """Begin to receive all that is wanted and whose size is known by now."""
        for edge in [e for e, lead in self._leads.items() if lead.complete()]:
            lead = self._leads.pop(edge)
            (self._frames[edge],) = _LEAD.unpack(lead.content.numpy().tobytes())
        for edge in [e for e in self._wanted if e in self._frames]:
            for key in self._wanted.pop(edge):
                size = ALIGN_BYTES + self._frames[edge]
                self._coming[edge.peer, key] = _receive(mesh, size, edge.peer, _tag(key) + _FRAME)

    def _tensors(self, layout: Frame, content: torch.Tensor) -> list[torch.Tensor]:
        """On the CPU without a copy: each over its part of the content, which is nobody else's."""
        if self._device.type == "cpu":
            return [place.adopt(content) for place in layout.places]
        return [place.fresh(self._device).copy_(place.view(content)) for place in layout.places]


def _receive(mesh: GlooMesh, size: int, source: int, tag: int) -> _Coming:
    content = fresh_bytes(size)
    return _Coming(content, mesh.receive_apart((content, source, tag)))


def _write(target: torch.Tensor, content: bytes) -> None:
    target[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _tag(key: Hop) -> int:
    return _TAGS + 4 * ((KINDS.index(key.kind) * _PARTS + key.part) * _LANES + key.lane)


def _lead_tag(edge: _Edge) -> int:
    return _LEADS + 4 * (KINDS.index(edge.kind) * _PARTS + edge.part)
