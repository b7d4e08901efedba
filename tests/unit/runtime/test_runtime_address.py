"""Where a coordinator is, and whether it is a process of this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.runtime.address import COORDINATOR_MODULE, address_of, announce, coordinator_here


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
