"""`everstep chaos` as a user types it: one scenario, one's own faults, and the report of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["--set", "steps=12", "--set", "lanes=4", "--set", "micro_batch=2"]


def _everstep(*argv: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "everstep", *argv], capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.longer
def test_one_scenario_and_its_report(tmp_path: Path) -> None:
    code, said = _everstep("chaos", "suite", "death_in_update", "--json", "--run-dir", str(tmp_path / "s"))
    assert code == 0, said
    result, summary = (json.loads(line) for line in said.splitlines())
    assert result["name"] == "death_in_update" and result["bitwise_equal"] is True
    assert result["recoveries"] == 1 and result["faults"][0]["phase"] == "update"
    assert (summary["passed"], summary["failed"]) == (1, [])
    code, said = _everstep("chaos", "report", str(tmp_path / "s"))
    assert code == 0, said
    assert "update" in said and "bits equal" in said and "next step committed after" in said


@pytest.mark.longer
def test_ones_own_faults(tmp_path: Path) -> None:
    run = ["chaos", "run", "mlp-digits", "--run-dir", str(tmp_path / "r"), "--workers", "2", *SMALL]
    code, said = _everstep(*run, "--chaos", "kill:target=worker:1,at=4,phase=backward")
    assert code == 0, said
    assert "bits equal" in said
    digest = tmp_path / "r" / "disturbed" / "final" / "digest.json"
    digest.write_text(digest.read_text().replace('"model": "', '"model": "0'))
    code, said = _everstep("chaos", "report", str(tmp_path / "r"))
    assert code == 1
    assert "NOT bitwise equal" in said
