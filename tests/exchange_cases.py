"""A small model with everything that is awkward to exchange, and checkpoints of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from everstep.checkpoint.interchange import NAMES, names_record
from everstep.checkpoint.manifest import JobIdentity
from everstep.checkpoint.manifest_writer import write_whole
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.reader import Checkpoint, open_checkpoint
from everstep.checkpoint.store import BlobStore, DirectoryStore
from everstep.exact.state import ModelState


class Awkward(nn.Module):
    """Ties, bf16, a scalar, a transposed parameter, an empty one, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(4, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("wide", torch.randn(2, 3, dtype=torch.complex64))

    def total(self) -> Tensor:
        """Something with a gradient for every parameter."""
        return sum((p.float() ** 2).sum() for p in self.parameters())  # type: ignore[return-value]


def trained(seed: int = 1, steps: int = 2) -> tuple[Awkward, torch.optim.AdamW]:
    """A model with some AdamW steps behind it, in two groups."""
    torch.manual_seed(seed)
    model = Awkward()
    optimizer = torch.optim.AdamW(
        [{"params": [model.embed.weight, *model.low.parameters()], "lr": 0.01}, {"params": rest(model)}], lr=0.02
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model.total().backward()
        optimizer.step()
    return model, optimizer


def rest(model: Awkward) -> list[nn.Parameter]:
    return [*model.norm.parameters(), model.turned, model.scale, model.nothing]


def write_step(store: DirectoryStore, step: int, seed: int = 1, job: str = "job") -> Checkpoint:
    """A checkpoint of `trained(seed)` as step `step`."""
    model, optimizer = trained(seed)
    identity = JobIdentity("task", {"lanes": 8}, job=job)
    write_whole(
        store,
        ModelState(model, optimizer, units=[model]),
        identity,
        step=step,
        application={NAMES: names_record(model)},
    )
    return open_checkpoint(store, step)


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> Checkpoint:
    """A checkpoint of step 5 in a directory."""
    store = DirectoryStore(path)
    write_whole(
        store,
        ModelState(model, optimizer, units=[model]),
        JobIdentity("task", {}),
        step=5,
        application={NAMES: names_record(model)},
    )
    return open_checkpoint(store, 5)


def copy_of(source: BlobStore, target: BlobStore) -> None:
    """All blobs of a store."""
    for name in source.list():
        data = source.read(name)
        target.write(name, [data], len(data))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and bytes."""
    raw_a, raw_b = (torch.view_as_real(t) if t.is_complex() else t for t in (a.contiguous(), b.contiguous()))
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(raw_a.reshape(-1).view(torch.uint8), raw_b.reshape(-1).view(torch.uint8))
    )


def write_unchanged(store: DirectoryStore, base: Checkpoint, step: int) -> Checkpoint:
    """A checkpoint in which nothing changed: it refers to the files of another, and has none of its own."""
    text = replace(base.manifest, step=step, base=base.step, depth=base.manifest.depth + 1, written_bytes=0).encode()
    store.write(manifest_name(step), [text], len(text))
    return open_checkpoint(store, step)
