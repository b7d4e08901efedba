"""Where a coordinator is, and whether it is a process of this host."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.base.below import drafted, write_atomically
from everstep.runtime.files.private import close_run_dir
from everstep.runtime.link.address import (
    COORDINATOR_MODULE,
    address_of,
    announce,
    coordinator_here,
)


def test_only_a_coordinator_of_this_host_is_here(tmp_path: Path) -> None:
    """A number of another host's is somebody else's here."""
    path = tmp_path / "coordinator.json"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", COORDINATOR_MODULE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        announce(path, address_of("10.0.0.1", 1, pid=process.pid))
        while not coordinator_here(path, "10.0.0.1"):  # the kernel is about to know what was started
            assert process.poll() is None
        assert coordinator_here(path, "10.0.0.1") == process.pid
        assert coordinator_here(path, "10.0.0.2") == 0
        announce(path, address_of("10.0.0.1", 1, pid=os.getpid()))
        assert coordinator_here(path, "10.0.0.1") == 0, "another process has that number"
    finally:
        process.communicate()
    announce(path, address_of("10.0.0.1", 1, pid=process.pid))
    assert coordinator_here(path, "10.0.0.1") == 0


@pytest.mark.parametrize("text", ["", "{}", "[", json.dumps({"pid": -1, "host": "h", "port": 1})])
def test_nobody_has_announced_itself(tmp_path: Path, text: str) -> None:
    assert coordinator_here(tmp_path / "none", "h") == 0
    (tmp_path / "coordinator.json").write_text(text)
    assert coordinator_here(tmp_path / "coordinator.json", "h") == 0


def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.json"
    write_atomically(path, "old")

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr(Path, "write_bytes", full)
        write_atomically(path, "new")
    assert [one.name for one in tmp_path.iterdir()] == ["job.json"] and path.read_text() == "old"


def test_drafts_of_two_processes_of_one_number_are_two(tmp_path: Path) -> None:
    """Hosts with a directory in common count their processes each by itself."""
    with drafted(tmp_path / "job.json") as one, drafted(tmp_path / "job.json") as other:
        assert one != other
        for draft in (one, other):
            draft.touch()
            draft.chmod(0o666)
        close_run_dir(tmp_path)  # what a kill has left is known as a job's
        assert {draft.stat().st_mode & 0o777 for draft in (one, other)} == {0o600}
    assert list(tmp_path.iterdir()) == []
