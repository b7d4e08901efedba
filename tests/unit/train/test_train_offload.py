"""The optimizer's state in a file: the same bits, no page of it left in memory, and what a disk may refuse."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Adafactor, Adagrad, Adam, AdamW, Optimizer

from everstep.base.errors import ConfigError, DiskUnfit
from everstep.exact.accumulate import keep_freed_memory
from everstep.exact.seeding import seed_all
from everstep.exact.state import ModelState
from everstep.exact.state_memory import StateMemory
from everstep.train import offload, optimizer_trial, optimizer_update, update_probe
from everstep.train.offload import FarMemory, StateFile, memory_for
from everstep.train.optimizer_update import OptimizerUpdate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_update, "PART_ELEMENTS", 20_000)


def model() -> nn.Sequential:
    seed_all(4)
    return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100), nn.Linear(100, 5))


def gradients(trained: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in trained.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


class Noisy(torch.optim.SGD):
    """Cannot be divided."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


def places(optimizer: Optimizer, memory: StateFile) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of its state, in the file and elsewhere."""
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    inside = [v for v in kept if v.numel() * v.element_size() >= offload.LEAST_BYTES and not memory.lacks(v)]
    return inside, [v for v in kept if not any(v is other for other in inside)]


@pytest.mark.parametrize(
    ("make", "divides", "tensors"),
    [
        (lambda ps: AdamW(ps, amsgrad=True), "elements", 6),
        (lambda ps: Adagrad(ps), "elements", 2),
        (lambda ps: Adafactor(ps, beta2_decay=-0.7), "matrices", 0),
        (lambda ps: Noisy(ps, lr=0.1, momentum=0.9), "nothing", 2),
    ],
)
def test_the_bits_are_those_of_the_ordinary_update(make: Any, divides: str, tensors: int, tmp_path: Path) -> None:
    memory, mine, theirs = StateFile(tmp_path), model(), model()
    far, near = make(list(mine.parameters())), make(list(theirs.parameters()))
    update = OptimizerUpdate(far, memory)
    for step in range(4):
        gradients(mine, step)
        gradients(theirs, step)
        update.make(step, step)
        seed_all(step)
        near.step()
    assert update.kind is not None and update.kind.divides == divides
    assert ModelState(mine, far).state_digest(4) == ModelState(theirs, near).state_digest(4)
    inside, _ = places(far, memory)
    assert len(inside) == tensors
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_an_optimizer_that_counts_its_updates_makes_one(tmp_path: Path) -> None:
    class Counting(Adam):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["calls"] = self.param_groups[0].get("calls", 0) + 1
            return super().step()

    trained = model()
    optimizer = Counting(trained.parameters())
    update = OptimizerUpdate(optimizer, StateFile(tmp_path))
    for step in range(3):
        gradients(trained, step)
        update.make(step, step)
    assert optimizer.param_groups[0]["calls"] == 3
    assert update.kind is not None and update.kind[:3] == ("elements", "", True)


class Late(torch.optim.SGD):
    """From its fourth update on it does something that does not go with parts."""

    def __init__(self, params: Any, late: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.late, self.param_groups[0]["updates"] = late, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        if late_enough(self):
            if self.late == "counts":
                group["updates"] += 1
            else:
                torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step()


def late_enough(optimizer: Late) -> bool:
    return any("late" in state for state in optimizer.state.values())


@pytest.mark.parametrize("late", ["counts", "clips"])
def test_an_optimizer_that_is_another_one_later_is_refused_by_name(late: str, tmp_path: Path) -> None:
    trained = model()
    optimizer = Late(trained.parameters(), late)
    update = OptimizerUpdate(optimizer, StateFile(tmp_path), every=5 if late == "clips" else 0)
    for step in range(1, 5):
        gradients(trained, step)
        update.make(step, step)
    for parameter in trained.parameters():
        optimizer.state[parameter]["late"] = True
    gradients(trained, 5)
    with pytest.raises(ConfigError, match=r"Late treats its parameters otherwise at step 5 .* set zero\.offload=none"):
        update.make(5, 5)


def test_a_step_without_gradients_says_nothing_of_the_optimizer(tmp_path: Path) -> None:
    trained = model()
    update = OptimizerUpdate(Adam(trained.parameters()), StateFile(tmp_path), every=2)
    for step in range(1, 5):
        gradients(trained, step)
        if step == 2:
            trained.zero_grad()
        update.make(step, step)
    assert update.kind is not None and update.kind.divides == "elements"


def resident(memory: StateFile) -> int:
    """Bytes of the file in this process's memory, as the kernel counts them."""
    starts = {f"{slab.start:x}" for slab in memory._slabs}
    size, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            counted = line.split("-")[0] in starts
        elif counted and line.startswith("Rss:"):
            size += int(line.split()[1]) << 10
    return size


def test_nothing_of_it_is_in_memory_after_an_update(tmp_path: Path) -> None:
    memory, trained = StateFile(tmp_path), model()
    optimizer = Adam(trained.parameters())
    update = OptimizerUpdate(optimizer, memory)
    gradients(trained, 1)
    update.make(1, 1)
    assert resident(memory) == 0
    (inside, _) = places(optimizer, memory)
    total = sum(float(v.sum()) for v in inside)  # reading it brings it back
    assert total and resident(memory) >= sum(v.numel() * 4 for v in inside)
    gradients(trained, 2)
    update.make(2, 2)
    assert resident(memory) == 0


def test_a_state_that_is_loaded_and_snapshots_lie_there_too(tmp_path: Path) -> None:
    memory, trained, other = StateFile(tmp_path), model(), model()
    optimizer, near = Adam(trained.parameters()), Adam(other.parameters())
    gradients(other, 1)
    near.step()
    source, state = ModelState(other, near), ModelState(trained, optimizer, memory=memory)
    state.load(source.manifest(), source.read_block)
    assert len(places(optimizer, memory)[0]) == 4
    used = memory._used
    snapshot = state.clone_snapshot()
    snapshot.start()
    assert snapshot.manifest() == source.manifest() and memory._used == used and len(memory._copies) == 1
    del snapshot  # its file goes with it: no copy of a state stays on the disk
    gc.collect()
    assert not memory._copies


@pytest.mark.parametrize("noisy", [False, True])
def test_an_optimizer_that_makes_its_state_anew_in_each_update_takes_no_more_of_the_disk(
    noisy: bool, tmp_path: Path
) -> None:
    class Anew(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                parameter.sub_(state["mean"] + noisy * torch.randn_like(parameter), alpha=0.1)

    memory, trained = StateFile(tmp_path), model()
    update = OptimizerUpdate(Anew(trained.parameters(), lr=0.1), memory)
    used = []
    for step in range(1, 5):
        gradients(trained, step)
        update.make(step, step)
        used.append(memory._used)
    assert update.kind is not None and update.kind.divides == ("nothing" if noisy else "elements")
    assert used[0] and len(set(used)) == 1, used


def test_small_tensors_stay_where_they_are(tmp_path: Path) -> None:
    memory = StateFile(tmp_path)
    small = memory.make(torch.zeros(100))
    assert not memory.lacks(small) and memory._used == 0
    like = torch.zeros(200, 300, device="meta", dtype=torch.bfloat16).t()
    large = memory.make(like)
    assert (large.shape, large.stride(), large.dtype) == ((300, 200), (1, 300), torch.bfloat16)
    assert not memory.lacks(large) and memory.lacks(torch.zeros(200, 300))
    assert large.data_ptr() % 64 == 0


def test_it_grows_by_slabs_and_reads_ahead_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_SLAB_BYTES", 1 << 20)
    memory = StateFile(tmp_path)
    made = [memory.make(torch.empty(200_000)).fill_(k) for k in range(5)]
    assert len(memory._slabs) == 5 and [int(t[7]) for t in made] == [0, 1, 2, 3, 4]
    asked: list[tuple[int, ...]] = []

    class Slab:
        def madvise(self, *what: int) -> None:
            asked.append(what)

    memory._slabs[3] = memory._slabs[3]._replace(memory=Slab())  # type: ignore[arg-type]
    memory.ahead(made[3][5000:6000])
    memory.ahead(torch.zeros(5))
    memory.ahead(made[3][:0])
    assert asked == [(mmap.MADV_WILLNEED, 16384, 20_000 - 16384 + 4000)]


@pytest.mark.parametrize("folder", ["/proc/nowhere/", "/dev/null/x/"])
def test_a_folder_that_cannot_be_written_is_named(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"zero\.offload: expected a folder .* set zero\.offload=none"):
        memory_for(folder, CPU)


def test_a_file_or_a_link_to_nothing_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"file \(it is no folder\)"):
        memory_for(str(tmp_path / "file"), CPU)
    with pytest.raises(ConfigError, match=r"link \(a link to .*gone, which is no folder\)"):
        memory_for(str(tmp_path / "link"), CPU)


def test_a_full_disk_is_named_and_no_page_is_promised_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = StateFile(tmp_path)

    def full(*of: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskUnfit, match=r"expected 134 MB of free .* MB \(No space left on device\): make room"):
        memory.make(torch.empty(1 << 25, device="meta"))
    assert memory.flat(1 << 27).numel() == 1 << 27  # a copy of the state may lie in ordinary memory
    with pytest.raises(DiskUnfit, match=r"expected 1\.0 MB of free space"):
        StateFile(tmp_path)


def test_a_small_state_needs_little_room(tmp_path: Path) -> None:
    memory, sizes = StateFile(tmp_path), []
    for n in (30, 4, 50, 50):
        memory.make(torch.empty(n << 16, device="meta", dtype=torch.float64))
        sizes.append([slab.size >> 19 for slab in memory._slabs])
    assert sizes == [[2, 30], [2, 30, 32], [2, 30, 32, 64], [2, 30, 32, 64, 128]]


@pytest.mark.parametrize(("code", "words"), [(errno.EDQUOT, "make room"), (errno.EIO, "a file can be written")])
@pytest.mark.parametrize("name", ["posix_fallocate", "fstatvfs"])
def test_whatever_the_disk_refuses_is_named(
    code: int, words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = StateFile(tmp_path)

    def refuses(*of: int) -> None:
        raise OSError(code, "it is so")

    monkeypatch.setattr(os, name, refuses)
    for use in (lambda: StateFile(tmp_path), lambda: memory.make(torch.empty(1 << 25, device="meta"))):
        with pytest.raises(DiskUnfit, match=words if name == "posix_fallocate" else r"it is so\)"):
            use()
    if name == "fstatvfs":
        with pytest.raises(DiskUnfit, match="it is so"):
            memory.room_for(1)


def test_a_tensor_for_which_there_is_room_needs_no_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, take = StateFile(tmp_path), os.posix_fallocate

    def small(fd: int, offset: int, size: int) -> None:
        if size > 1 << 19:
            raise OSError(errno.ENOSPC, "No space left on device")
        take(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", small)
    made = [memory.make(torch.empty(1 << 17, device="meta")) for _ in range(4)]
    assert [slab.size >> 19 for slab in memory._slabs] == [2, 1, 1] and not any(map(memory.lacks, made))


def test_a_disk_is_the_same_whatever_room_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(folder: str, free: int) -> DiskUnfit:
        memory = StateFile(tmp_path / folder)
        monkeypatch.setattr(memory, "_free", lambda: free)
        with pytest.raises(DiskUnfit) as caught:
            memory.room_for(1 << 40)
        return caught.value

    one, same, other = said("a", 1 << 30), said("a", 1 << 31), said("b", 1 << 30)
    assert one.signature == same.signature != other.signature and str(one) != str(same)


def test_room_for_the_whole_state_is_looked_for_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, trained = StateFile(tmp_path), model()
    before = [p.detach().clone() for p in trained.parameters()]
    update = OptimizerUpdate(Adam(trained.parameters()), memory)
    found = os.fstatvfs(memory._file.fileno())
    monkeypatch.setattr(memory, "_used", memory._size)
    sizes = os.statvfs_result((*found[:4], 100_000 // found.f_frsize, *found[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: sizes)
    gradients(trained, 1)
    with pytest.raises(ConfigError, match=r"expected \d\.\d MB of free space in .* for each worker, got 0\.1 MB"):
        update.make(1, 1)
    assert all(map(torch.equal, before, trained.parameters()))


def test_a_disk_that_takes_most_of_the_time_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model()
    update = OptimizerUpdate(Adam(trained.parameters()), StateFile(tmp_path))
    now, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    update._before = 0.0

    def after(computing: float, updating: float) -> None:
        began = now[0] = now[0] + computing
        now[0] += updating
        update._judge(began, now[0])
        said.append(update.complaint())

    for computing, updating in ((1, 2), (1, 2), (3, 2), (1, 2), (1, 2), (1, 2), (1, 2), (0.1, 0.9)):
        after(computing, updating)
    assert [bool(one) for one in said] == [False, False, False, False, False, True, False, False]
    assert "2.0 of 3.0 s" in said[5] and str(tmp_path) in said[5]


def test_where_the_state_lies_is_what_the_config_says(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    assert type(memory_for(None, cuda)) is StateMemory is type(memory_for("cpu", CPU))
    assert type(memory_for("cpu", cuda)) is FarMemory
    assert type(memory_for(f"{tmp_path}/new/", CPU)) is StateFile is type(memory_for(f"{tmp_path}/new/", cuda))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def _anonymous_mb() -> float:
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Anonymous:")) / 1024


def test_copies_on_which_updates_are_tried_take_no_memory_afterwards(tmp_path: Path) -> None:
    """malloc keeps what is freed: with several megabytes in a matrix, ten times as much for ever."""
    keep_freed_memory()
    trained = nn.Linear(1024, 1024)
    update = OptimizerUpdate(AdamW(trained.parameters()), StateFile(tmp_path))
    update.prove()
    gradients(trained, 1)
    before = _anonymous_mb()
    update.make(1, 1)
    assert _anonymous_mb() - before < 24


def test_memory_in_which_the_state_is_made_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_update, "PART_ELEMENTS", 1 << 20)
    keep_freed_memory()
    trained = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    update = OptimizerUpdate(AdamW(trained.parameters()), StateFile(tmp_path))
    update.prove()
    gradients(trained, 1)
    before = _anonymous_mb()
    update.make(1, 1)
    assert _anonymous_mb() - before < 8


class AtOnce(torch.optim.SGD):
    """Counts its updates in its group."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["updates"] = self.param_groups[0].get("updates", 0) + 1
        return super().step(closure)


class Knowing(torch.optim.SGD):
    """Knows a parameter by its own attribute, so none can be updated apart."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, **more)
        self.by_name = {"first": self.param_groups[0]["params"][0]}


@pytest.mark.parametrize("kind", [torch.optim.SGD, AtOnce, Knowing])
def test_parameters_on_a_device_with_memory_of_its_own_are_updated_again_and_again(
    kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without content, on a device that is none: what mixes it with the CPU raises, as it does on a GPU."""
    monkeypatch.setattr(FarMemory, "lacks", lambda self, tensor: tensor.device.type == "lazy")
    monkeypatch.setattr(FarMemory, "make", lambda self, like: like.to("cpu"))
    monkeypatch.setattr(optimizer_trial, "_digest", lambda tensor: "")
    monkeypatch.setattr(update_probe, "tensor_digest", lambda tensor: "")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("lazy"):
        parameters = [nn.Parameter(torch.empty(shape)) for shape in ((300, 200), (200,), ())]
        optimizer = kind(parameters, lr=0.1, momentum=0.9)  # type: ignore[call-arg]
        update = OptimizerUpdate(optimizer, FarMemory())
        for step in range(1, 4):
            for parameter in parameters:
                parameter.grad = torch.empty(parameter.shape)
            update.make(step, step)
            kept = [state["momentum_buffer"].device.type for state in optimizer.state.values()]
            assert kept == ["cpu"] * 3
    assert update.kind is not None
    expected = {torch.optim.SGD: ("elements", False), AtOnce: ("elements", True), Knowing: ("nothing", False)}
    assert (update.kind.divides, update.kind.at_once) == expected[kind], update.kind


def test_threads_let_go_of_copies_while_others_are_made(tmp_path: Path) -> None:
    memory, over, failed = StateFile(tmp_path), threading.Event(), list[RuntimeError]()

    def let_go() -> None:
        while not over.is_set():
            try:
                memory.let_go()
            except RuntimeError as error:
                failed.append(error)
                return

    kept = [memory.flat(1) for _ in range(500)]
    thread, before = threading.Thread(target=let_go), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        kept += [memory.flat(1) for _ in range(500)]
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not failed
