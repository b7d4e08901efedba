"""A real Prometheus for tests, where it is there: tests/install_prometheus.sh. Its config is the example in deploy/."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
LIMIT_S = 120.0


def _find(name: str) -> str | None:
    unpacked = Path(sys.prefix) / "prometheus" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name)


PROMETHEUS, PROMTOOL = _find("prometheus"), _find("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="Prometheus is not there: see tests/install_prometheus.sh"
)


class PrometheusServer:
    """A Prometheus server on a port of the kernel's, with the example config, quicker. runs: the folder of run
    directories; more_rules: a file of rules beside ours."""

    def __init__(self, folder: Path, runs: Path, more_rules: str = "") -> None:
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("runs/", f"{runs}/")
        if more_rules:
            (folder / "more.yml").write_text(more_rules)
            text = text.replace("  - alerts.yml", "  - alerts.yml\n  - more.yml")
        config = folder / "prometheus.yml"
        config.write_text(re.sub(r"(_interval): \d+s", r"\1: 200ms", text))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = folder / "log"
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(PROMETHEUS), *options, f"--web.listen-address={self.address}"], stdout=log, stderr=log, cwd=folder
            )

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers to; None while it does not listen yet."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise AssertionError(f"{url}: {error.read().decode()}") from None
        except OSError:
            return None

    def wait_for(self, path: str, wanted: Any, **parameters: str) -> Any:
        """The first answer that satisfies."""
        deadline = time.monotonic() + LIMIT_S
        while (found := self.ask(path, **parameters)) is None or not wanted(found):
            assert self.process.poll() is None and time.monotonic() < deadline, (found, self.log.read_text()[-3000:])
            time.sleep(0.05)
        return found

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()
