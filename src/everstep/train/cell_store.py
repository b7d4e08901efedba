"""What the processes of one worker share: parameters and the optimizer's state lie in their memory once, and each
lane's gradient goes through it unit by unit.

Places follow from the model, the number of processes and that of the lanes, so all processes find the same ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from everstep.base.errors import ConfigError, check
from everstep.exact.digest import digest_bytes
from everstep.exact.layout import ALIGN_BYTES, BLOCK_ELEMENTS, GradientLayout, memory_of, round_up
from everstep.exact.trees import Bundle, from_wire, to_wire
from everstep.exact.wrapping import wrapped
from everstep.parallel.cell_memory import CellMemory, PassBroken, SharedPlace
from everstep.parallel.frame import HEAD_LENGTHS, frame_of, head_size, parse_head
from everstep.parallel.mapping import PAGE, pages
from everstep.parallel.shard_boxes import SHARD_BOX_BYTES, BoxExchange
from everstep.runtime.host.cell_doors import PartLines
from everstep.train.cell_elsewhere import NoOthers, OtherParts, notes_bytes, owned

_places = msgspec.msgpack.Decoder(tuple[SharedPlace, dict[str, int]])

_NOTE_BYTES = 64 << 20
_HOP_BYTES = 1 << 30
_MOST_STATE = 16
"""Tensors like its parameter that an optimizer may keep for each one."""
_FLOAT = 4
_GIVE_BACK_BYTES = 64 << 20
CAME, GOES = 0, 1


class CellPlaces:
    """Extents in the memory of one worker. model: whole, with its parameters and buffers as they are before the first
    step; n_slots: sums that are kept at a time, at most; wrap: elements of the modules that are exchanged together,
    None for units. degree: ranks that compute each lane together, which have a box together, and boxes for their
    shards. parameters: where these are not the model's alone; hops: whether lanes come from other workers and go to
    them, so that each seat has a box for what comes, and one for what goes."""

    def __init__(
        self,
        layout: GradientLayout,
        model: nn.Module,
        ranks: int,
        n_slots: int,
        wrap: int | None = None,
        degree: int = 1,
        shards: int = 1,
        *,
        parameters: Sequence[nn.Parameter] | None = None,
        hops: bool = False,
    ) -> None:
        trained = list(model.parameters()) if parameters is None else parameters
        self.size = PAGE
        self.units = wrapped(layout, wrap)
        self.notes = [self._take(_NOTE_BYTES) for _ in range(ranks)]
        self.rows = [[self._take(len(layout.entries)) for _ in range(2)] for _ in range(ranks)]
        largest = max((unit.stop - unit.start for unit in self.units), default=0)
        seats = ranks // degree
        self.boxes = [[self._take(_FLOAT * largest) for _ in range(2)] for _ in range(seats)]
        self.shard_boxes: list[list[list[SharedPlace]]] = [
            [[self._take(SHARD_BOX_BYTES) for _ in range(2)] for _ in range(shards)]
            for _ in range(seats * (degree > 1))
        ]
        self.slots = [self._take(_FLOAT * layout.numel) for _ in range(n_slots)]
        self.hops = [[self._take(_HOP_BYTES) for _ in range(2)] for _ in range(seats * hops)]
        self.parameters = [self._take(_within(group[0])) for group in leaves_of(trained)]
        self.uses = self._take(notes_bytes(len(self.parameters), ranks))
        first = self.parameters[0].offset if self.parameters else self.size
        self.extent = [first, self.uses.offset - first]
        self.forms = forms_of(model)
        self.buffers = self._take(sum(round_up(b.nbytes, ALIGN_BYTES) for b in model.buffers()))
        elements = sum(round_up(p.numel() * _FLOAT, BLOCK_ELEMENTS) for p in trained)
        self.state = self._take(_MOST_STATE * elements)
        named = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        self.likeness = digest_bytes(
            repr((layout.fingerprint(), named, ranks, degree, shards, n_slots, wrap, self.size)).encode()
        )

    def _take(self, size: int) -> SharedPlace:
        found = SharedPlace(self.size, size)
        self.size += round_up(size, PAGE)
        return found


class CellStore:
    """The content of that memory, as one process sees it."""

    def __init__(
        self,
        memory: CellMemory,
        places: CellPlaces,
        tick: Callable[[], None],
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        """tick: called while it waits for the others. broken: called when one has left a pass; it may raise why."""
        self.memory, self.places = memory, places
        self.rank = memory.rank
        self._tick, self._broken = tick, broken
        self._boxes = [[memory.tensor(one, torch.float32) for one in pair] for pair in places.boxes]
        self._rows = [[memory.tensor(one, torch.uint8) for one in pair] for pair in places.rows]
        self._slots: dict[int, Tensor] = {}
        self.others = NoOthers()
        self._notes = [memory.tensor(one, torch.uint8) for one in places.notes]

    # ---- as `exact.rank_sums.Shelves`

    def box(self, seat: int, turn: int) -> Tensor:
        """The box for this turn of the ranks that compute a lane."""
        return self._boxes[seat][turn]

    def row(self, rank: int, turn: int) -> Tensor:
        """The presence of what a rank has put into that box."""
        return self._rows[rank][turn]

    def slot(self, number: int) -> Tensor:
        """A slot for a sum."""
        if number not in self._slots:
            self._slots[number] = self.memory.tensor(self.places.slots[number], torch.float32)
        return self._slots[number]

    def meet(self, point: int, ranks: Sequence[int]) -> None:
        """Wait until all these ranks have come to this point. Raises: PassBroken."""
        self._meet(point, ranks, inner=False)

    def bring(self, turn: int, seats: Iterable[int], ranks: Sequence[int], start: int, stop: int) -> None:
        """Have here what ranks of other hosts have put into rows, and seats into these elements of their boxes."""
        degree = len(self.places.rows) // len(self.places.boxes)
        for rank in ranks:
            self.others.bring(rank, *self.places.rows[rank][turn])
        for seat in seats:
            self.others.bring(
                seat * degree, self.places.boxes[seat][turn].offset + start * _FLOAT, (stop - start) * _FLOAT
            )

    def bring_sum(self, number: int, rank: int, start: int, stop: int) -> None:
        """Have here these elements of a slot, which this rank has made."""
        self.others.bring(rank, self.places.slots[number].offset + start * _FLOAT, (stop - start) * _FLOAT)

    def exchange(self, shards: int, degree: int) -> BoxExchange:
        """How this rank learns of the shards of the ranks that compute its lanes with it."""
        seat, rank = divmod(self.rank, degree)
        boxes = [[self.memory.tensor(one, torch.uint8) for one in pair] for pair in self.places.shard_boxes[seat]]
        mine = range(rank * shards // degree, (rank + 1) * shards // degree)
        ranks = range(seat * degree, (seat + 1) * degree)
        return BoxExchange(boxes, mine, lambda point: self._meet(point, ranks, inner=True))

    def _meet(self, point: int, ranks: Sequence[int], *, inner: bool) -> None:
        try:
            self.memory.meet(point, ranks, self._tick, inner=inner)
        except PassBroken:
            self._broken()
            raise

    # ---- notes: what is too large for a command or an answer

    def write_note(self, said: Any) -> int:
        """Leave plain data for the others; returns its size. Raises: ConfigError if it is too large."""
        data = msgspec.msgpack.encode(said)
        if len(data) > _NOTE_BYTES:
            raise ConfigError(
                f"cell.fsdp: expected at most {_NOTE_BYTES} bytes for the processes of a worker to tell each other at "
                f"once, got {len(data)}: set cell.fsdp=1"
            )
        if data:
            ctypes.memmove(self._notes[self.rank].data_ptr(), data, len(data))
        return len(data)

    def read_note(self, rank: int, size: int) -> Any:
        """The values that a rank has left."""
        check(0 < size <= _NOTE_BYTES, f"a note has 1 to {_NOTE_BYTES} bytes, not {size}")
        self.others.bring(rank, self.places.notes[rank].offset, size)
        return msgspec.msgpack.decode(ctypes.string_at(self._notes[rank].data_ptr(), size))

    # ---- what lanes bring from other workers, and what goes to them

    def put_hop(self, seat: int, way: int, sent: Bundle) -> None:
        """Leave what comes for a seat's lane (`CAME`), or what its lane gives (`GOES`). Raises: ConfigError for what is
        too large."""
        tensors, meta = to_wire(sent)
        frame = frame_of(tensors, meta)
        if frame.size > _HOP_BYTES:
            raise ConfigError(
                f"cell.fsdp: expected at most {_HOP_BYTES} bytes of a lane between two stages, got {frame.size}: make "
                "micro_batch smaller, or cut the model elsewhere"
            )
        frame.fill(self.memory.tensor(self.places.hops[seat][way], torch.uint8)[: frame.size], tensors)

    def take_hop(self, seat: int, way: int) -> Bundle:
        place, degree = self.places.hops[seat][way], len(self.places.rows) // len(self.places.boxes)
        rank = 0 if way == CAME else seat * degree
        box = self.memory.tensor(place, torch.uint8)
        self.others.bring(rank, place.offset, HEAD_LENGTHS)
        size = head_size(bytes(box[:HEAD_LENGTHS].tolist()))
        self.others.bring(rank, place.offset, size)
        frame = parse_head(bytes(box[:size].tolist()))
        self.others.bring(rank, place.offset, frame.size)
        with torch.no_grad():
            tensors = [place.fresh(torch.device("cpu")).copy_(place.view(box)) for place in frame.places]
        return from_wire(tensors, frame.meta)

    # ---- parameters and buffers

    def write_places(self, named: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Leave a note of where parameters lie, for `parameters_in`; returns its size."""
        at = self.memory.address + self.places.extent[0]
        return self.write_note([self.places.extent, {name: one.data_ptr() - at for name, one in named if one.numel()}])

    def move_in(self, parameters: Sequence[nn.Parameter], *, made: bool = True) -> None:
        """Put these parameters where all processes have them; the head's values are those that count, if it has made
        them."""
        moved = 0
        for group, place in zip(leaves_of(parameters), self.places.parameters, strict=True):
            first = group[0]
            moved += place.size
            if moved > _GIVE_BACK_BYTES:
                moved = 0
                give_back()
            flat = self.memory.tensor(place, first.dtype)
            shared = flat.as_strided(first.shape, first.stride(), 0) if first.numel() else first.detach()
            if self.rank == 0 and first.numel() and made:
                shared.copy_(first.detach())
            for leaf in group:
                leaf.data = shared
        give_back()

    def give_buffers(self, model: nn.Module) -> None:
        """Leave the model's buffers, which are the step's, for the others."""
        self._each_buffer(model, lambda buffer, shared: shared.copy_(buffer))

    def take_buffers(self, model: nn.Module) -> None:
        """Take the buffers that the head has left."""
        self.others.bring(0, *self.places.buffers)
        self._each_buffer(model, lambda buffer, shared: buffer.copy_(shared))

    def _each_buffer(self, model: nn.Module, act: Callable[[Tensor, Tensor], object]) -> None:
        at, forms = self.places.buffers.offset, forms_of(model)
        if forms != self.places.forms:
            name = next(iter(forms.items() ^ self.places.forms.items()))[0]
            raise ConfigError(
                f"cell.fsdp: expected buffers of the shapes and dtypes that they had before the first step, but {name} "
                f"is {forms.get(name, 'gone')} and was {self.places.forms.get(name, 'not there')}: keep it as it is, "
                "or set cell.fsdp=1"
            )
        with torch.no_grad():
            for _, buffer in model.named_buffers():
                if buffer.numel():
                    shared = self.memory.tensor(SharedPlace(at, buffer.nbytes), buffer.dtype)
                    act(buffer, shared.view(buffer.shape))
                at += round_up(buffer.nbytes, ALIGN_BYTES)

    # ---- of a worker that spans hosts

    def spread(
        self, lines: PartLines, divided: Mapping[int, Sequence[Sequence[tuple[int, int]]]], *, made: bool
    ) -> OtherParts:
        """From now on each part holds its ranges of the parameters. divided: elements that each rank has, by the
        addresses of their parameters; all others are the head's. made: all parameters are here."""
        found = []
        for place in self.places.parameters:
            runs = divided.get(self.memory.address + place.offset)
            found.append(owned(lines.plan, place, runs, pages(place.offset + place.size)))
        self.others = others = OtherParts(self.memory, lines, found, self.places.uses, made=made)
        return others

    def close(self) -> None:
        """Let nobody else attach."""
        self.others.close()
        self.memory.close()


def parameters_in(memory: CellMemory, note: int) -> Callable[[str, nn.Parameter], Tensor | None]:
    """Finds parameters by their names where the head has them. What is written to them, as code that makes an optimizer
    may, changes nothing there: after `move_in` it is gone. note: the size of the head's, of `write_places`."""
    box = memory.tensor(SharedPlace(PAGE, note), torch.uint8)
    said = ctypes.string_at(box.data_ptr(), note)
    extent, offsets = _places.decode(said)
    copied = memory.copied(extent)

    def found(name: str, like: nn.Parameter) -> Tensor | None:
        if name not in offsets:
            return None
        count = _within(like) // like.element_size()
        flat = torch.frombuffer(copied, dtype=like.dtype, count=count, offset=offsets[name])
        return flat.as_strided(like.shape, like.stride(), 0)

    return found


def give_back() -> None:
    """Give memory that this process has freed back to the system: the allocator would keep it for ever."""
    ctypes.CDLL(None).malloc_trim(0)


def forms_of(model: nn.Module) -> dict[str, str]:
    """Shape and dtype of each buffer, for people, too."""
    return {name: f"{tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()}


def leaves_of(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by their memory: the leaves of a tie together."""
    found: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(memory_of(parameter), []).append(parameter)
    return list(found.values())


def _within(parameter: Tensor) -> int:
    """Bytes from its first element to its last."""
    if not parameter.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (last + 1) * parameter.element_size()
