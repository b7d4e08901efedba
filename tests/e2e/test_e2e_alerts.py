"""The alert rules, in a real Prometheus, beside a job that really breaks and one that only has faults.

A job that breaks for half an hour is no test: beside the rules as they are it has the same with all times 120 times
shorter, and of those each must fire. Of the rules as they are none may fire, for either: nothing lasts as long.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_cli import TASK_FILE, Running

from prometheus_server import DEPLOY, PrometheusServer, needs_prometheus

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")
pytest.importorskip("uvicorn", reason="the extra [dashboard] is not installed")

SHORTER = 120
UNITS_S = {"s": 1, "m": 60}
LIVES = 6
GATED = """

class Gated(Small):
    def build_model(self):
        while os.path.exists(os.environ["E2E_GATE"]):
            time.sleep(0.05)
        return super().build_model()

    def loss(self, model, batch):
        factor = float(os.environ["E2E_FACTOR"])
        loss = super().loss(model, batch)
        return loss + (factor * loss).detach()
"""


def quicker(rules: str) -> str:
    """The same rules, with names of their own, and all times shorter."""
    rules = re.sub(r"alert: (\w+)", r"alert: Quick\1", rules).replace("name: everstep", "name: quick")
    rules = re.sub(r"\b(\d+)([sm])\b", lambda m: f"{int(m[1]) * UNITS_S[m[2]] * 1000 // SHORTER}ms", rules)
    return re.sub(r"> (600|3600)\b", lambda m: f"> {int(m[1]) // SHORTER}", rules)


def firing(data: Any) -> dict[str, set[str]]:
    """run -> the alerts that fire."""
    found: dict[str, set[str]] = {}
    for alert in data["alerts"]:
        if alert["state"] == "firing":
            found.setdefault(alert["labels"]["run"], set()).add(alert["labels"]["alertname"])
    return found


def break_down(job: Running, run_dir: Path, gate: Path) -> None:
    """Its loss is no number (all the time), its disk is away, worker 1 and the coordinator are killed again and again,
    and the last life never gets ready."""
    for number in itertools.count():  # the job writes there meanwhile
        (run_dir / "checkpoints").rename(run_dir / f"away-{number}")
        with contextlib.suppress(FileExistsError):
            (run_dir / "checkpoints").touch(exist_ok=False)
            break
    for life in range(LIVES):
        joined = job.wait_for(lambda e, life=life: e["kind"] == "worker_joined" and of_life(e) == (1, life))
        since_ns = joined["time_unix_ns"]
        job.wait_for(lambda e, since_ns=since_ns: e["kind"] == "step_committed" and e["time_unix_ns"] > since_ns)
        if life < 2:
            os.kill(json.loads((run_dir / "coordinator.json").read_text())["pid"], signal.SIGKILL)
            job.wait_for(lambda e, ns=since_ns: e["kind"] == "coordinator_restarted" and e["time_unix_ns"] > ns)
        if life == LIVES - 1:
            gate.touch()
        os.kill(joined["pid"], signal.SIGKILL)


def of_life(event: dict[str, Any]) -> tuple[int, int]:
    return event["worker_id"], event["incarnation"]


@pytest.mark.longer
@needs_prometheus
def test_each_rule_fires_when_something_breaks_and_none_without(tmp_path: Path) -> None:
    gate, file = tmp_path / "gate", tmp_path / "gated.py"
    file.write_text(TASK_FILE + GATED)
    small_task = f"{file}:Gated"
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    names = set(re.findall(r"alert: (\w+)", rules))
    runs, folder = tmp_path / "runs", tmp_path / "prometheus"
    runs.mkdir(mode=0o700)
    folder.mkdir()
    settings = ("checkpoint.disk.every_steps=2", "backoff.initial_s=0.1", "hang_limit_s=600", "nonfinite_limit=0")
    options = ["--metrics", "--steps", "100000", *(word for setting in settings for word in ("--set", setting))]
    breaks = ("--workers", "2", "--min-workers", "2")
    faults = ("--workers", "3", "--spares", "1", "--chaos", "kill:target=worker:1,at=6; kill:target=coordinator,at=12")
    fired: set[str] = set()
    false: set[str] = set()

    def all_fired(data: Any) -> bool:
        found = firing(data)
        fired.update(found.get("broken", ()))
        false.update(names & found.get("healthy", set()))
        return {f"Quick{name}" for name in names} <= fired or bool(false)

    with (
        Running(
            small_task,
            "--run-dir",
            runs / "broken",
            *options,
            *breaks,
            E2E_LANE_S="0.05",
            E2E_GATE=str(gate),
            E2E_FACTOR="nan",
        ) as broken,
        Running(
            small_task,
            "--run-dir",
            runs / "healthy",
            *options,
            *faults,
            E2E_LANE_S="0.05",
            E2E_GATE="no",
            E2E_FACTOR="0",
        ) as healthy,
    ):
        server = PrometheusServer(folder, runs, quicker(rules))
        try:
            server.wait_for("query", lambda data: len(data["result"]) == 2, query="everstep_steps_total > 0")
            broken.wait_for(lambda e: e["kind"] == "checkpoint_completed")
            break_down(broken, runs / "broken", gate)
            names.remove("EverstepGone")
            server.wait_for("alerts", all_fired)
            broken.signal(signal.SIGKILL)
            names.add("EverstepGone")
            server.wait_for("alerts", all_fired)
            assert false == set()
            assert healthy.wait_for(lambda e: e["kind"] == "recovery_completed")["cause"] == "killed"
        finally:
            server.close()
            print("fired:", sorted(fired))
        healthy.signal(signal.SIGTERM)
        assert (broken.end()[0], healthy.end()[0]) == (-signal.SIGKILL, 143)
