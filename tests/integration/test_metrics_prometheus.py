"""A real Prometheus scrapes an exporter over a recorded run; rules, example config and dashboard fit what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import recorded_run as recorded
from prometheus_server import DEPLOY, LIMIT_S, PROMTOOL, ROOT, PrometheusServer, needs_prometheus

pytest.importorskip("prometheus_client", reason="the extra [dashboard] is not installed")
pytest.importorskip("uvicorn", reason="the extra [dashboard] is not installed")

from prometheus_client.parser import text_string_to_metric_families

from everstep.cli.beside import ANY_PORT, metrics_beside
from everstep.report.history import History
from everstep.report.prometheus import Device, device_families, expose, families
from everstep.runtime.link.address import METRICS_FILE
from everstep.runtime.targets import TARGETS_FILE, TARGETS_TOKEN_FILE, put_target

RATE_INTERVAL = "1m"


def promtool(*argv: str | Path, text: str = "") -> str:
    done = subprocess.run(
        [str(PROMTOOL), *map(str, argv)], input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def exposition(run_dir: Path) -> str:
    """Everything there can be, a GPU included."""
    given = families(History(run_dir).load(), True, None, time.time_ns())
    return expose([*given, *device_families([Device(0, 10, 20, 0.5)])])[0].decode()


def dashboard_expressions() -> list[str]:
    """All queries of the Grafana dashboard, its variables filled in."""
    found: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            found.extend([node["expr"]] if isinstance(node.get("expr"), str) else [])
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(json.loads((DEPLOY / "grafana" / "everstep.json").read_text()))
    return [text.replace("$__rate_interval", RATE_INTERVAL).replace("$run", ".*") for text in found]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.make_run(tmp_path_factory.mktemp("runs") / "recorded")


@pytest.fixture
def server(tmp_path: Path, run_dir: Path) -> Iterator[PrometheusServer]:
    with metrics_beside(run_dir, ANY_PORT) as address:
        assert re.match(r"http://127\.0\.0\.1:\d+/metrics\?token=\S{32} \(credentials_file.*: ", address), address
        server = PrometheusServer(tmp_path, run_dir.parent)
        try:
            yield server
        finally:
            server.close()
    assert not (run_dir / METRICS_FILE).exists()
    assert len(json.loads((run_dir.parent / TARGETS_FILE).read_text())) == 1, "until its job has ended in order"
    put_target(run_dir, None)
    assert json.loads((run_dir.parent / TARGETS_FILE).read_text()) == []


def test_every_metric_that_is_asked_for_exists(run_dir: Path) -> None:
    series, names = set[str](), set[str]()
    for family in text_string_to_metric_families(exposition(run_dir)):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        series |= {family.name + end for end in ends}
        names.add(family.name)
    rules = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    alerts = [rule["expr"] for rule in yaml.safe_load(rules)["groups"][0]["rules"]]
    assert (len(dashboard_expressions()) > 30, len(alerts)) == (True, 10)
    (age,) = (text for text in dashboard_expressions() if text.startswith("time() - max by"))
    durable = 'tier=~"disk|object"'
    assert durable in age and any(durable in text for text in alerts)  # those in memory are lost with the processes
    asked = [(text, series) for text in (*dashboard_expressions(), *alerts)]
    asked += [(text, series | names) for text in (rules, (ROOT / "docs" / "watching.md").read_text())]
    for text, known in asked:
        found = set(re.findall(r"\beverstep_[a-z_]+", text))
        assert found <= known, found - known


@needs_prometheus
def test_promtool_finds_nothing_wrong(run_dir: Path, tmp_path: Path) -> None:
    promtool("check", "metrics", text=exposition(run_dir))
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / TARGETS_TOKEN_FILE).touch()  # promtool looks for it
    promtool("check", "config", tmp_path / "prometheus.yml")
    assert "10 rules found" in promtool("check", "rules", DEPLOY / "prometheus" / "alerts.yml")
    promtool("test", "rules", ROOT / "tests" / "integration" / "alerts_test.yml")


@needs_prometheus
def test_a_real_server_scrapes_a_run(server: PrometheusServer) -> None:
    def value(query: str) -> float:
        found = server.wait_for("query", lambda data: data["result"], query=query)["result"]
        assert len(found) == 1, found
        return float(found[0]["value"][1])

    assert value('everstep_steps_total{run="recorded",job="everstep"}') == 10
    assert value('everstep_recoveries_total{cause="killed"}') == 1
    assert value('histogram_quantile(0.5, everstep_step_seconds_bucket{phase="backward"})') > 0.1
    assert value('sum(everstep_workers{state=~"leader|active"})') == 0, "nothing runs there"
    assert value("everstep_running") == 0
    for query in dashboard_expressions():
        assert server.ask("query", query=query) is not None, query

    def evaluated(data: Any) -> bool:
        return all(rule["health"] != "unknown" for group in data["groups"] for rule in group["rules"])

    groups = server.wait_for("rules", lambda data: data["groups"] and evaluated(data))["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
