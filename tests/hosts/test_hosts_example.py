"""The example of three hosts: one is lost, and the bits are those of one worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "examples" / "three_hosts.sh"


@pytest.mark.longer
def test_stages_with_backups_on_three_hosts(hosts_possible: None, tmp_path: Path) -> None:
    command = ["sh", str(_SCRIPT), str(tmp_path / "three"), "6"]
    variables = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "bitwise equal" in done.stdout, done.stdout + done.stderr
    lines = (tmp_path / "three" / "job" / "events.jsonl").read_text().splitlines()
    kinds = [event["kind"] for event in map(json.loads, lines)]
    assert kinds.count("worker_evicted") >= 2 and "leader_changed" in kinds, done.stdout
    again = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    assert again.returncode == 2 and "expected a new folder" in again.stderr
