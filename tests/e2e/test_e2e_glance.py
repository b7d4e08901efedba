"""The five-second test: jobs that are hurt on purpose, as the page shows them in headless Chromium.

Of each: the sentence and its colour, and the states of the workers, held against the events. Three of the cases by
default, all of them with EVERSTEP_TEST_GLANCE=all (`make extended`); pictures of each, for a desk and a phone, in light
and dark, go to the folder that SCREENSHOTS names.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_cli import Running, everstep
from test_e2e_dashboard import CAUGHT, CHROMIUM, Dashboard, Page, browser, sync_api  # noqa: F401

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: see tests/install_browser.sh")
SLOW_S = "0.4"
VIEWS = {f"{width}-{scheme}": (width, scheme) for width in (1440, 390) for scheme in ("light", "dark")}


@dataclass(frozen=True)
class Hurt:
    """A job, and what may be done to it."""

    job: Running
    run_dir: Path
    hold: Path

    def pid_of(self, worker_id: int) -> int:
        return max((e for e in self._of("worker_joined", worker_id)), key=lambda e: int(e["incarnation"]))["pid"]

    def _of(self, kind: str, worker_id: int) -> Iterator[dict[str, Any]]:
        return (e for e in self.job.events if e["kind"] == kind and e["worker_id"] == worker_id)

    def kill(self, worker_id: int) -> None:
        os.kill(self.pid_of(worker_id), signal.SIGKILL)

    def stop(self, worker_id: int) -> None:
        os.kill(self.pid_of(worker_id), signal.SIGSTOP)

    def fault(self, text: str) -> None:
        done = everstep("chaos", "inject", self.run_dir, text)
        assert done.returncode == 0, done.stderr

    def fill(self) -> None:
        with open(self.run_dir / "filler", "wb") as file, open("/dev/zero", "rb") as zeros:
            try:
                while True:
                    file.write(zeros.read(65536))
                    file.flush()
            except OSError:
                pass

    def finish(self) -> None:
        self.hold.unlink()
        assert self.job.process.wait(CAUGHT / 1000) == 0


@dataclass(frozen=True)
class Case:
    """options: of `everstep run`. do: what is done to it after step 3. says: what the sentence matches. states: of
    workers, by id, as patterns. disk: on a small disk of its own."""

    options: str
    do: Callable[[Hurt], None]
    says: str
    level: str
    states: Mapping[int, str] = field(default_factory=dict)
    disk: bool = False


SLOWLY = "--set backoff.initial_s=8"
CASES = {
    "worker killed": Case(
        f"--workers 4 {SLOWLY}", lambda h: h.kill(2), "worker 2 (was )?killed", "warning", {2: "dead", 0: "leader"}
    ),
    "leader of a stage killed, with a spare": Case(
        "--stages 2 --workers 2 --spares 1", lambda h: h.kill(1), "worker 1 (was )?killed", "warning"
    ),
    "leader of a stage killed, without a spare": Case(
        f"--stages 2 --workers 2 {SLOWLY}", lambda h: h.kill(1), "worker 1 (was )?killed", "warning", {1: "dead"}
    ),
    "hang": Case("--workers 3 --set hang_limit_s=6", lambda h: h.stop(1), "worker 1", "warning"),
    "partition": Case(
        "--workers 3 --set heartbeat.ceiling_s=6", lambda h: h.fault("cut:target=worker:1,for=20"), "worker 1", "warning"
    ),
    "launcher dead": Case(
        "--workers 2", lambda h: h.job.process.kill(), "process of the job died.*To go on: everstep run", "bad", {0: "ended", 1: "ended"}
    ),
    "disk full": Case("--workers 2", Hurt.fill, "disk is full", "warning", disk=True),
    "waiting for workers": Case(
        "--workers 2 --min-workers 2 --set on_failure=wait --set backoff.initial_s=60",
        lambda h: h.kill(1),
        "Waiting for .*worker",
        "warning|bad",
        {1: "dead"},
    ),
    "going back after a flip": Case(
        "--workers 3 --set verify_every=2", lambda h: h.fault("flip:target=worker:1"), "Doing steps .* again|redoing step", "warning"
    ),
    "finished": Case("--workers 2 --steps 6", Hurt.finish, "Finished: all 6 steps", "good", {0: "ended", 1: "ended"}),
}
ORDINARY = ("leader of a stage killed, without a spare", "launcher dead", "finished")
CHOSEN = list(CASES) if os.environ.get("EVERSTEP_TEST_GLANCE") == "all" else list(ORDINARY)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A disk of 12 MB, as root."""
    mounted: list[Path] = []

    def mount() -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_wrong_is_said_at_a_glance(
    name: str, small_task: str, browser: Any, tmp_path: Path, small_disk: Callable[[], Path]  # noqa: F811
) -> None:
    case = CASES[name]
    run_dir = (small_disk() if case.disk else tmp_path) / "job"
    hold = tmp_path / "hold"
    hold.touch()
    options = case.options.split()
    steps = () if "--steps" in options else ("--steps", "500")
    pace = {"E2E_LANE_S": SLOW_S, "E2E_HOLD": str(hold)}
    with Running(small_task, "--run-dir", run_dir, *options, *steps, **pace) as job, ExitStack() as stack:
        job.wait_for(lambda e: e["kind"] == "job_started")
        dashboard = Dashboard(run_dir)
        stack.callback(dashboard.close)
        views = {}
        for view, (width, scheme) in VIEWS.items():
            views[view] = Page(browser, dashboard.owners, width, color_scheme=scheme)
            stack.callback(views[view].close)
        job.wait_for_step(3)
        case.do(Hurt(job, run_dir, hold))
        for view in views.values():
            sentence = sync_api.expect(view.page.locator("#sentence"))
            sentence.to_have_text(re.compile(case.says), timeout=CAUGHT)
            sentence.to_have_attribute("data-level", re.compile(f"^({case.level})$"))
        folder = os.environ.get("SCREENSHOTS")
        for at, view in views.items():
            if folder:
                view.page.screenshot(path=f"{folder}/{name.replace(' ', '-').replace(',', '')}-{at}.png", full_page=True)
        for worker_id, states in case.states.items():
            for view in views.values():
                view.expect_state(worker_id, states)
        for view in views.values():
            assert view.wrong == []
