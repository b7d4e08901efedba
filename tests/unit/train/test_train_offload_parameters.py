"""Parameters and gradients in files: the same bits, little of them in memory, and what cannot go with it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import SGD, Adafactor, AdamW

from everstep.base.config import Config, load_config
from everstep.base.errors import ConfigError
from everstep.base.ports import Piece, Reduced
from everstep.exact.gradient import GradientHandOver
from everstep.exact.layout import GradientLayout
from everstep.exact.seeding import seed_all
from everstep.exact.state import ModelState
from everstep.train import offload_parameters, optimizer_update
from everstep.train.offload_parameters import ParameterFiles, parameter_files
from everstep.train.optimizer_update import OptimizerUpdate


def model(files: ParameterFiles | None = None) -> nn.Sequential:
    seed_all(4)
    hook = None if files is None else register_module_parameter_registration_hook(files.registered)
    try:
        return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100), nn.Linear(100, 5))
    finally:
        if hook is not None:
            hook.remove()


def held(tensor: Tensor) -> int:
    """Bytes of the pages of a tensor's mapping that are in this process's memory."""
    found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (head := line.split()[0]) and ":" not in head:
            first, last = (int(x, 16) for x in head.split("-"))
            inside = first <= tensor.data_ptr() < last
        elif head == "Rss:" and inside:
            found = int(line.split()[1]) << 10
    return found


class Whole(SGD):
    """Goes by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(given, 0.5)
        super().step()
        for parameter in given:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pytest.mark.parametrize(
    ("make", "divides"),
    [
        (lambda ps: AdamW(ps, amsgrad=True), "elements"),
        (lambda ps: Adafactor(ps, beta2_decay=-0.7), "matrices"),
        (lambda ps: Whole(ps, lr=0.1, momentum=0.9), "nothing"),
    ],
)
@pytest.mark.parametrize("absent", [None, 2])
def test_a_model_in_files_gets_the_bits_of_one_in_memory(
    make: Any, divides: str, absent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the optimizer looks at, and where a parameter has no gradient at first."""
    monkeypatch.setattr(optimizer_update, "PART_ELEMENTS", 20_000)
    files = ParameterFiles(tmp_path)
    mine, theirs = model(files), model()
    far, near = make(list(mine.parameters())), make(list(theirs.parameters()))
    layout = GradientLayout.build(theirs, list(theirs))
    update, hand, other = (
        OptimizerUpdate(far, files.memory),
        GradientHandOver(layout, mine),
        GradientHandOver(layout, theirs),
    )
    for step in range(4):
        flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step))
        there = bytes(step > 1 or number != absent for number in range(len(layout.entries)))
        reduced = Reduced(step, (Piece(0, layout.numel, flat),), there, ((0, layout.n_blocks),))
        hand.hand_over(reduced, 0.5, limit=0.7, later=True)
        update.make(step, step, give=hand.give)
        other.hand_over(reduced, 0.5, limit=0.7)
        seed_all(step)
        near.step()
        hand.clear()
        other.clear()
    assert update.kind is not None and update.kind.divides == divides
    assert ModelState(mine, far).state_digest(4) == ModelState(theirs, near).state_digest(4)


def test_a_parameter_moves_when_a_module_gets_it_and_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_parameters, "_AT_ONCE_BYTES", 1 << 17)
    files = ParameterFiles(tmp_path)
    mine, theirs = model(files), model()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    large, small = mine[0].weight, mine[2].weight
    assert not files.memory.lacks(large) and large.nbytes > 1 << 16
    assert files.memory._place(small) is None  # a page for it would be mostly empty
    files.watch(list(mine), list(mine.parameters()))
    mine(torch.randn(3, 200)).sum().backward()
    theirs_gradient = torch.autograd.grad(theirs(torch.randn(3, 200)).sum(), theirs[2].bias)
    assert torch.equal(mine[2].bias.grad, theirs_gradient[0])  # type: ignore[arg-type]
    assert held(large) < large.nbytes
    files.memory.let_go()
    assert held(large) == 0
    assert torch.equal(large, theirs[0].weight)


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = ParameterFiles(tmp_path)
    before, after = nn.Parameter(torch.ones(300, 300)), nn.Parameter(torch.full((300, 300), 2.0))
    files.take(before)
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(reads, 1)
            other = nn.Parameter(torch.zeros(300, 300))
            files.take(other)
            os._exit(int(files.memory.lacks(other)))
        finally:
            os._exit(9)
    files.take(after)
    os.write(writes, b"1")
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((before == 1).all()) and bool((after == 2).all())


def test_what_has_no_plain_memory_stays_where_it_is(tmp_path: Path) -> None:
    files = ParameterFiles(tmp_path)
    holed = nn.Parameter(torch.zeros(400, 400)[:, ::2])
    for parameter in (holed, nn.Parameter(torch.empty(400, 400, device="meta"))):
        before = parameter.data_ptr()
        files.take(parameter)
        assert parameter.data_ptr() == before
    files.registered(nn.Linear(1, 1), "lazy", nn.UninitializedParameter())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ParameterFiles(tmp_path)
    assert files.memory

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=f"expected 100 MB of free space in {tmp_path} for each worker"):
        files.take(nn.Parameter(torch.zeros(5000, 5000)))


def test_step_hooks_would_see_gradients_that_are_not_there_yet(tmp_path: Path) -> None:
    files = ParameterFiles(tmp_path)
    optimizer = SGD(model(files).parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"zero\.offload_params: expected no step hooks of SGD"):
        OptimizerUpdate(optimizer, files.memory).make(1, 1)


def config(**zero: Any) -> Config:
    return load_config([("test", {"zero": zero})])


def test_where_parameters_lie_is_what_the_config_says(tmp_path: Path) -> None:
    folder = str(tmp_path / "far")
    assert parameter_files(config(offload=folder)) is None
    assert parameter_files(config(offload="cpu", offload_params=True)) is None
    found = parameter_files(config(offload=folder, offload_params=True))
    assert found is not None and found is parameter_files(config(offload=folder, offload_params=True))
    with pytest.raises(ConfigError, match=r"zero\.offload_params: expected false with zero\.offload=none"):
        config(offload_params=True)
    with pytest.raises(ConfigError, match=r"zero\.offload_params: expected false with device cuda"):
        load_config([("test", {"device": "cuda", "zero": {"offload": folder, "offload_params": True}})])
