"""The optimizer's state outside the device's memory: in the host's memory, or in a file on disk.

The file is memory-mapped, so code that reads or copies a state works as always, and the kernel writes out and drops
pages that are not in use. `optimizer_update` goes from one part of the parameters to the next: the state of a part
is read ahead while the part before it is updated, and then dropped.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.base.errors import DiskUnfit
from everstep.exact.layout import round_up
from everstep.exact.state_memory import StateMemory

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""Smaller tensors stay where they are."""
_LEAST_SLAB_BYTES = 1 << 20
_SLAB_BYTES = 1 << 26
"""Sizes of the first slab and of the largest that holds several tensors: each is as large as all before it."""
_PAGE = mmap.ALLOCATIONGRANULARITY


class FarMemory(StateMemory):
    """Page-locked memory of the host, for a device with memory of its own."""

    where = "the host's memory"

    def make(self, like: Tensor) -> Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, pin_memory=True)

    def lacks(self, tensor: Tensor) -> bool:
        """Whether a tensor that belongs in it lies elsewhere."""
        return tensor.is_cuda

    def ahead(self, tensor: Tensor) -> None:
        """The tensor will be read soon."""


class _Slab(NamedTuple):
    start: int
    """Its address."""
    size: int
    memory: mmap.mmap


class StateFile(FarMemory):
    """Memory of one process in files without a name, which are gone when the process ends. The one of the optimizer's
    state grows as it is used; each copy of a state has a file of its own, for as long as it is kept."""

    def __init__(self, folder: Path) -> None:
        """Raises: DiskUnfit if no file can be written there."""
        self.where = str(folder)
        self._slabs: list[_Slab] = []
        self._copies: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._lock = threading.Lock()  # threads that write or copy a state let go of it while the job goes on
        self._used = self._size = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise DiskUnfit(_refusal(folder, error), folder) from None
        self._grow(_LEAST_SLAB_BYTES)

    def room_for(self, nbytes: int) -> None:
        """Raises: DiskUnfit if the disk has no room for so much more."""
        free = self._free() + self._size - self._used
        if free < nbytes:
            raise self._no_room(nbytes, _megabytes(free))

    def _free(self) -> int:
        try:
            found = os.fstatvfs(self._file.fileno())
        except OSError as error:
            raise DiskUnfit(_refusal(Path(self.where), error), self.where) from None
        return found.f_bavail * found.f_frsize

    def _no_room(self, nbytes: int, got: str) -> DiskUnfit:
        return DiskUnfit(
            f"zero.offload: expected {_megabytes(nbytes)} of free space in {self.where} for each worker, got {got}: "
            "make room, or name another folder",
            self.where,
        )

    def make(self, like: Tensor) -> Tensor:
        """Raises: DiskUnfit if the disk is full."""
        if like.numel() * like.element_size() < LEAST_BYTES:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        nbytes = like.numel() * like.element_size()
        if self._used + nbytes > self._size:
            self._grow(nbytes)
        slab = self._slabs[-1]
        at = self._used - (self._size - slab.size)
        self._used += round_up(nbytes, _PAGE)  # no page belongs to two tensors
        flat = torch.frombuffer(slab.memory, dtype=torch.uint8, count=nbytes, offset=at)
        return flat.view(like.dtype).as_strided(like.shape, like.stride(), 0)

    def flat(self, nbytes: int) -> Tensor:
        """Ordinary memory if the disk is full: the job goes on."""
        try:
            with tempfile.TemporaryFile(dir=self.where) as file:
                memory = _mapped(file.fileno(), 0, max(nbytes, 1))
        except OSError as error:
            log.warning("a copy of the state does not fit in %s (%s)", self.where, error.strerror)
            return super().flat(nbytes)
        with self._lock:
            self._copies.add(memory)
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes) if nbytes else super().flat(0)

    def _grow(self, nbytes: int) -> None:
        """Begin a new slab, of so many bytes at least, and more if there is room; the rest of the one before stays
        unused. Raises: DiskUnfit if the disk is full."""
        least = round_up(nbytes, _PAGE)
        size = max(least, min(self._size, _SLAB_BYTES))
        free = self._free()  # what does not fit may take all of it
        try:
            try:
                memory = _mapped(self._file.fileno(), self._size, size)
            except OSError:
                size = least
                memory = _mapped(self._file.fileno(), self._size, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise DiskUnfit(_refusal(Path(self.where), error), self.where) from None
            raise self._no_room(least, f"{_megabytes(free)} ({error.strerror})") from None
        start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._slabs.append(_Slab(start, size, memory))
        self._used = self._size
        self._size += size

    def lacks(self, tensor: Tensor) -> bool:
        return tensor.numel() * tensor.element_size() >= LEAST_BYTES and self._place(tensor) is None

    def _place(self, tensor: Tensor) -> tuple[_Slab, int] | None:
        if not tensor.is_cuda:
            for slab in self._slabs:
                at = tensor.data_ptr() - slab.start
                if 0 <= at < slab.size:
                    return slab, at
        return None

    def ahead(self, tensor: Tensor) -> None:
        place = self._place(tensor)
        if place is not None and tensor.numel():
            slab, at = place
            first = at // _PAGE * _PAGE
            slab.memory.madvise(mmap.MADV_WILLNEED, first, at - first + tensor.numel() * tensor.element_size())

    def let_go(self) -> None:
        """The pages stay in the file, and in the kernel's cache while there is room."""
        with self._lock:
            copies = list(self._copies)
        for memory in (*(slab.memory for slab in self._slabs), *copies):
            memory.madvise(mmap.MADV_DONTNEED)


def _mapped(fd: int, offset: int, size: int) -> mmap.mmap:
    """A part of a file in memory. Its blocks on disk are taken now: a page without one would end the process."""
    os.posix_fallocate(fd, offset, size)
    return mmap.mmap(fd, size, offset=offset)


def memory_for(offload: str | None, device: torch.device) -> StateMemory:
    """The memory that `zero.offload` names, for a job on this device. Raises: DiskUnfit if it cannot be had."""
    if offload is None or (offload == "cpu" and device.type == "cpu"):
        return StateMemory()
    return FarMemory() if offload == "cpu" else StateFile(Path(offload))


def _refusal(folder: Path, error: OSError) -> str:
    why = error.strerror or str(error)
    if isinstance(error, FileExistsError):
        why = f"a link to {os.readlink(folder)}, which is no folder" if folder.is_symlink() else "it is no folder"
    return (
        f"zero.offload: expected a folder in which a file can be written, got {folder} ({why}): name another one, or "
        "set zero.offload=none"
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.{int(nbytes < 1e7)}f} MB"
