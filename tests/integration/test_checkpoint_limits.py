"""What a machine may refuse: space on the disk, permission, memory. Each ends in one line, and nothing is torn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_saving import make_state, save
from everstep.base.errors import StoreError
from everstep.checkpoint.reader import newest_complete, steps_in, verify_store
from everstep.checkpoint.store import DirectoryStore
from held_memory import Limit


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    state = make_state(1)  # 5.8 MB: two fit, with the third there is no room
    store = DirectoryStore(small_disk)
    for step in (1, 2):
        save(store, state, step, workers=2)
    with pytest.raises(StoreError, match=r"worker .*No space left on device"):
        save(store, state, 3, workers=2)
    assert steps_in(store) == [1, 2] and verify_store(store) == []
    assert not list(small_disk.rglob(".tmp-*"))
    assert newest_complete(store).step == 2  # type: ignore[union-attr]
    for path in (small_disk / "step-0000000001").iterdir():
        path.unlink()
    save(store, state, 4, workers=2)  # as soon as there is room, it works again
    assert newest_complete(store).step == 4  # type: ignore[union-attr]


def test_a_disk_too_full_for_the_manifest(small_disk: Path) -> None:
    store = DirectoryStore(small_disk)
    state = make_state(1)
    part = save(store, state, 1).files[0]
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - part.size))  # a page or two may remain
    with pytest.raises(StoreError, match=r"manifest.json: No space left"):
        save(store, state, 2)
    assert steps_in(store) == [1] and verify_store(store) == []


@pytest.mark.longer
def test_a_directory_without_permission(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    script = (
        "import os, sys; sys.path.insert(0, 'tests')\n"
        "from checkpoint_saving import make_state, save\n"
        "from everstep.base.errors import StoreError\n"
        "state = make_state(1)\n"
        "save(sys.argv[1] + '-warm', state, 1)\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: save(sys.argv[1], state, 1)\n"
        "except StoreError as error: print(error)\n"
    )
    for path in list(locked.parents)[:3]:  # the way to it is open to everybody
        path.chmod(path.stat().st_mode | 0o055)
    found = run(script, str(locked))
    assert "Permission denied" in found and found.count("\n") == 1
    assert list(locked.iterdir()) == []


@pytest.mark.longer
def test_memory_beyond_the_state(tmp_path: Path) -> None:
    """Writing 200 MB takes a block of memory, not the size of the state; loading takes a few pieces."""
    script = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from checkpoint_saving import Tensors, save, write_part\n"
        "from everstep.checkpoint.reader import newest_complete\n"
        "from everstep.checkpoint.store import DirectoryStore\n"
        "from everstep.exact.state import ModelState\n"
        "def peak():\n"
        "    text = open('/proc/self/status').read()\n"
        "    return int(text.split('VmHWM:')[1].split()[0]) / 1024\n"
        "small = ModelState(Tensors({'a': (1000, 1000)}))\n"
        "save(sys.argv[1] + '/warm', small, 1)\n"
        "newest_complete(DirectoryStore(sys.argv[1] + '/warm')).load_into({0: small})\n"
        "state = ModelState(Tensors({f'p{k}': (1000, 5000) for k in range(10)}))\n"
        "for p in state.model.parameters(): p.data.fill_(1)\n"
        "before = peak()\n"
        "write_part(DirectoryStore(sys.argv[1]), state, 1, limit_bytes=0)\n"
        "written = peak()\n"
        "save(sys.argv[1] + '/second', state, 1)\n"
        "saved = peak()\n"
        "newest_complete(DirectoryStore(sys.argv[1] + '/second'), verify=False).load_into({0: state})\n"
        "print(written - before, peak() - max(saved, written))\n"
    )
    writing, loading = map(float, run(script, str(tmp_path)).split())
    assert writing < 8, f"{writing} MB were needed to write"
    assert loading < 96, f"{loading} MB were needed to load"


@pytest.mark.longer
def test_memory_of_an_export(tmp_path: Path) -> None:
    """Of a state of 600 MB, no more than of one that is a hundred times smaller, and of a model that is filled from it
    the model."""
    make = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from checkpoint_saving import make_state, save\n"
        "from everstep.checkpoint.store import DirectoryStore\n"
        "for name, rows in (('small', 10), ('large', 1000)):\n"
        "    state = make_state(1, {f'p{k}': (rows, 5000) for k in range(10)})\n"
        "    save(DirectoryStore(sys.argv[1] + '/' + name), state, 1)\n"
    )
    fill = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from checkpoint_saving import Tensors\n"
        "from everstep.checkpoint.interchange import PassingWeights\n"
        "from everstep.checkpoint.reader import open_checkpoint\n"
        "from everstep.checkpoint.store import DirectoryStore\n"
        "rows = 1000 if sys.argv[1].endswith('large') else 10\n"
        "model = Tensors({f'p{k}': (rows, 5000) for k in range(10)})\n"
        "PassingWeights(open_checkpoint(DirectoryStore(sys.argv[1]), 1)).fill(model)\n"
    )
    run(make, str(tmp_path))
    export = [sys.executable, "-m", "everstep", "checkpoints", "export", "--optimizer"]
    small, large = (
        {
            "torch": most_mb(
                [*export, str(tmp_path / name), "--format", "torch", "--to", str(tmp_path / f"{name}.pt")]
            ),
            "dcp": most_mb([*export, str(tmp_path / name), "--format", "dcp", "--to", str(tmp_path / f"{name}.dcp")]),
            "fill": most_mb([sys.executable, "-c", fill, str(tmp_path / name)]) - (name == "large") * 200,
        }
        for name in ("small", "large")
    )
    assert {kind: max(0, round(large[kind] - small[kind] - 80)) for kind in small} == dict.fromkeys(small, 0)


def most_mb(argv: list[str]) -> float:
    """What a command and its children have of memory that is no file's, at the most."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=Path(__file__).resolve().parents[2])
    held = Limit(process.pid, kinds=("Pss_Anon",))
    with held.holds():
        assert process.wait(120) == 0
    return held.most_mb


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
