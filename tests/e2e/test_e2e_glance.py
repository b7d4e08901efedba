"""The five-second test: jobs that are hurt on purpose, as the page shows them in headless Chromium.

Of each: the sentence and its colour, and the states of the workers, held against the events. One of the cases
by default, the others in `make extended`; pictures of each, for a desk and a phone, in light and dark, go to the folder
that SCREENSHOTS names.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2e_cli import TASK_FILE, Running, everstep
from test_e2e_dashboard import CAUGHT, CHROMIUM, Dashboard, Page, browser, serious, sync_api  # noqa: F401

import recorded_run
from sampling import mostly_longer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: see tests/install_browser.sh")
SLOW_S = "0.4"
UNITS = """

class Staged(Small):
    def loss(self, model, batch):
        if os.path.exists(os.environ["E2E_HOLD"] + "-raise"):
            raise ValueError("no such label: 17")
        worth = float("nan") if os.path.exists(os.environ["E2E_HOLD"] + "-nan") else 1.0
        return worth * super().loss(model, batch)

    def build_model(self):
        while os.path.exists(os.environ["E2E_HOLD"] + "-back"):
            time.sleep(0.05)
        return super().build_model()

    def units(self, model):
        return list(model)
"""
AT_ONCE = """([says, level, states]) => {
  const sentence = document.getElementById("sentence");
  const state = (id) => document.querySelector(`.worker[data-id="${id}"]`)?.dataset.state ?? "";
  const right = new RegExp(says).test(sentence.textContent) && new RegExp(level).test(sentence.dataset.level);
  return right && states.every(([id, wanted]) => new RegExp(wanted).test(state(id)));
}"""


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

    def kill_for_good(self, worker_id: int) -> None:
        """Its next life never gets ready."""
        self.hold.with_name(self.hold.name + "-back").touch()
        self.kill(worker_id)

    def let_it(self, what: str) -> None:
        """From now on the task's loss is not finite (`nan`), or raises (`raise`)."""
        self.hold.with_name(f"{self.hold.name}-{what}").touch()

    def stop(self, worker_id: int) -> None:
        os.kill(self.pid_of(worker_id), signal.SIGSTOP)

    def fault(self, text: str) -> None:
        done = everstep("chaos", "inject", self.run_dir, text)
        assert done.returncode == 0, done.stderr

    def fill(self) -> None:
        """Again and again until the job ends, for an older checkpoint that is deleted makes room."""

        def filling() -> None:
            with open(self.run_dir / "filler", "ab", buffering=0) as file:
                while self.job.process.poll() is None:
                    with contextlib.suppress(OSError):
                        file.write(b"\0" * 65536)
                        continue
                    time.sleep(0.05)

        threading.Thread(target=filling, daemon=True).start()

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


CASES = {
    "worker killed": Case(
        "--workers 4",
        lambda h: h.kill_for_good(2),
        "Training with 3 of 4 workers: worker 2 was killed",
        "warning",
        {2: "dead|spare|healing", 0: "leader"},
    ),
    "leader of a stage killed, with a spare": Case(
        "--stages 2 --workers 2 --spares 1", lambda h: h.kill(1), "worker 1 (was )?killed", "warning"
    ),
    "leader of a stage killed, without a spare": Case(
        "--stages 2 --workers 2",
        lambda h: h.kill(1),
        "worker 1 (was )?killed",
        "warning",
        {1: "dead|spare|healing"},
    ),
    "hang": Case("--workers 3 --set hang_limit_s=6", lambda h: h.stop(1), "worker 1", "warning"),
    "partition": Case(
        "--workers 3 --set heartbeat.ceiling_s=6",
        lambda h: h.fault("partition:target=worker:1,for=20"),
        "worker 1",
        "warning",
    ),
    "launcher dead": Case(
        "--workers 2",
        lambda h: h.job.process.kill(),
        "process of the job died.*To go on: everstep run",
        "bad",
        {0: "ended", 1: "ended"},
    ),
    "disk full": Case("--workers 2", Hurt.fill, "disk is full", "warning", disk=True),
    "waiting for workers": Case(
        "--workers 2 --min-workers 2 --set on_failure=wait",
        lambda h: h.kill_for_good(1),
        "Waiting for .*worker",
        "warning|bad",
    ),
    "going back after a flip": Case(
        "--workers 3 --set verify_every=2",
        lambda h: h.fault("flip:target=worker:1"),
        "Doing steps .* again|redoing step",
        "warning",
    ),
    "exception": Case(
        "--workers 2",
        lambda h: h.let_it("raise"),
        "^Failed after step \\d+: Staged.loss raised ValueError: no such label: 17",
        "bad",
        {0: "dead|ended", 1: "dead|ended"},
    ),
    "not finite": Case(
        "--workers 2", lambda h: h.let_it("nan"), "not finite for \\d+ steps, since step", "bad", {0: "leader"}
    ),
    "epochs": Case(
        "--workers 2 --epochs 1 --set steps=null", Hurt.finish, "Finished: all 7 steps are done", "good", {0: "ended"}
    ),
    "finished": Case("--workers 2 --steps 6", Hurt.finish, "Finished: all 6 steps", "good", {0: "ended", 1: "ended"}),
}
ORDINARY = "exception"
BLOCK = re.compile(
    r"^Staged.loss raised ValueError: no such label: 17 \(\w+\.py:\d+\)\n"
    r"at \S+task.py:\d+, in lane \d of step \d+ \(samples \d+, \d+\), in worker \d(, as in worker \d)?\n"
    r"the job ended after step \d+, with a checkpoint of step \d+\n"
    r"traceback and log: everstep logs \S+ --worker \d --level error$"
)
SEEN = """() => {
  const sentence = document.getElementById("sentence");
  const workers = [...document.querySelectorAll(".worker")].map((w) => w.ariaLabel);
  return [sentence.textContent, sentence.dataset.level, workers];
}"""


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


@pytest.mark.parametrize("name", mostly_longer(CASES, lambda name: name == ORDINARY))
def test_what_is_wrong_is_said_at_a_glance(
    name: str,
    browser: Any,  # noqa: F811
    tmp_path: Path,
    small_disk: Callable[[], Path],
) -> None:
    case = CASES[name]
    task = tmp_path / "task.py"
    task.write_text(TASK_FILE + UNITS)
    run_dir = (small_disk() if case.disk else tmp_path) / "job"
    hold = tmp_path / "hold"
    hold.touch()
    options = case.options.split()
    steps = () if {"--steps", "--epochs"} & set(options) else ("--steps", "500")
    pace = {"E2E_LANE_S": SLOW_S, "E2E_HOLD": str(hold)}
    with Running(f"{task}:Staged", "--run-dir", run_dir, *options, *steps, **pace) as job, ExitStack() as stack:
        job.wait_for(lambda e: e["kind"] == "job_started")
        dashboard = Dashboard(run_dir)
        stack.callback(dashboard.close)
        view = Page(browser, dashboard.owners, 1440)
        stack.callback(view.close)
        job.wait_for_step(3)
        case.do(Hurt(job, run_dir, hold))
        wanted = [case.says, f"^({case.level})$", [[i, f"^({states})$"] for i, states in case.states.items()]]
        try:
            view.page.wait_for_function(AT_ONCE, arg=wanted, polling=50, timeout=CAUGHT)
        except sync_api.TimeoutError:
            pytest.fail(f"expected {wanted}, the page says {view.page.evaluate(SEEN)}")
        if name == "exception":
            block = view.page.locator("#raised")
            sync_api.expect(block).to_have_text(BLOCK, timeout=CAUGHT)
            assert serious(view.page) == []
        if name == "launcher dead":
            sync_api.expect(view.page.locator("#incidents li")).to_contain_text("the launcher of the job died")
            sync_api.expect(view.page.locator("#incidents .cause")).to_have_count(0)
        if name == "epochs":
            sync_api.expect(view.page.locator("#tiles div").first).to_contain_text("7 / 7")
            sync_api.expect(view.page.locator("#progress")).to_have_attribute("aria-valuenow", "100")
        photograph(view.page, name)
        assert view.wrong == []


STILL = """() => [
  [...document.querySelectorAll("#gantt .life-track i")].map((bar) => bar.style.width).join(),
  [...document.querySelectorAll("#gantt .lives-axis span")].map((tick) => tick.style.left).join(),
  [...document.querySelectorAll("#tiles dd")].map((tile) => tile.textContent).join(),
]"""
"""What moves while a job runs: spans, the axis, the tiles with their clocks."""


@pytest.mark.longer
def test_a_page_whose_server_is_gone_says_so_and_stands_still_until_it_is_back(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    task, run_dir, hold = tmp_path / "task.py", tmp_path / "job", tmp_path / "hold"
    task.write_text(TASK_FILE)
    hold.touch()
    pace = {"E2E_LANE_S": SLOW_S, "E2E_HOLD": str(hold)}
    options = ("--run-dir", run_dir, "--workers", "2", "--steps", "500")
    with Running(f"{task}:Small", *options, **pace) as job, ExitStack() as stack:
        job.wait_for_step(2)
        dashboard = Dashboard(run_dir)
        stack.callback(dashboard.close)
        view = Page(browser, dashboard.owners, 1440)
        stack.callback(view.close)
        sentence, body = view.page.locator("#sentence"), view.page.locator("body")
        sync_api.expect(sentence).to_contain_text("All is well", timeout=CAUGHT)
        dashboard.process.kill()
        dashboard.process.wait()
        sync_api.expect(sentence).to_have_text(re.compile(r"^Last heard of \d+ s ago, at step"), timeout=CAUGHT)
        sync_api.expect(body).to_have_attribute("data-lost", "yes")
        sync_api.expect(view.page.locator("#state")).to_have_text("was running")
        before, said = view.page.evaluate(STILL), sentence.text_content()
        sync_api.expect(sentence).not_to_have_text(said, timeout=CAUGHT)  # it counts
        assert view.page.evaluate(STILL) == before
        assert serious(view.page) == []
        again = Dashboard(run_dir, port=urlsplit(dashboard.address).port)
        stack.callback(again.close)
        sync_api.expect(sentence).to_contain_text("All is well", timeout=CAUGHT)
        sync_api.expect(body).not_to_have_attribute("data-lost", "yes")
        sync_api.expect(view.page.locator("#state")).to_have_text("running")
        assert [text for text in view.wrong if "Failed to load resource" not in text] == []


@pytest.mark.longer
def test_a_list_whose_server_is_gone_says_so_until_it_is_back(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    task, hold = tmp_path / "task.py", tmp_path / "hold"
    task.write_text(TASK_FILE)
    hold.touch()
    pace = {"E2E_LANE_S": SLOW_S, "E2E_HOLD": str(hold)}
    with Running(f"{task}:Small", "--run-dir", tmp_path / "job", "--steps", "500", **pace) as job, ExitStack() as stack:
        job.wait_for_step(1)
        dashboard = Dashboard(tmp_path)
        stack.callback(dashboard.close)
        view = Page(browser, dashboard.owners, 1440)
        stack.callback(view.close)
        state, count = view.page.locator("#run-list td[data-state]"), view.page.locator("#run-count")
        sync_api.expect(state).to_have_text("running", timeout=CAUGHT)
        dashboard.process.kill()
        dashboard.process.wait()
        sync_api.expect(count).to_have_text(re.compile(r"^1 run, last heard of \d+ s ago$"), timeout=CAUGHT)
        sync_api.expect(state).to_have_text("was running")
        sync_api.expect(view.page).to_have_title("connection lost · everstep")
        again = Dashboard(tmp_path, port=urlsplit(dashboard.address).port)
        stack.callback(again.close)
        sync_api.expect(count).to_have_text("1 run", timeout=CAUGHT)
        sync_api.expect(state).to_have_text("running")
        sync_api.expect(view.page).to_have_title("everstep")
        assert [text for text in view.wrong if "Failed to load resource" not in text] == []


@pytest.mark.longer
def test_a_checkpoint_that_was_skipped_is_no_failure_to_onlookers(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir = recorded_run.make_run(tmp_path / "job")
    why = {"tier": "disk", "step": 6, "cause": "busy", "reason": "the one before is still on its way"}
    with open(run_dir / "events.jsonl", "ab") as file:
        file.write(recorded_run.event("checkpoint_skipped", 6.0, **why))
    with ExitStack() as stack:
        dashboard = Dashboard(run_dir)
        stack.callback(dashboard.close)
        view = Page(browser, dashboard.owners, 1440)
        stack.callback(view.close)
        told = view.page.locator("#checkpoints")
        sync_api.expect(told).to_contain_text("The last one was skipped (disk, step 6)", timeout=CAUGHT)
        sync_api.expect(told).to_contain_text(why["reason"])
        counts = told.locator("tr", has_text="disk").locator("td")
        sync_api.expect(counts.nth(-2)).to_have_text("1")
        sync_api.expect(counts.nth(-1)).to_have_text("0")
        sync_api.expect(told.locator(".bad")).to_have_count(0)


@pytest.mark.longer
def test_many_workers_fit_on_a_phone_and_a_moment_that_is_read_outlasts_the_connection(
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    run_dir = recorded_run.make_run(tmp_path / "job")
    with open(run_dir / "events.jsonl", "ab") as file:
        for i in range(3, 64):
            file.write(recorded_run.event("worker_joined", 13, worker_id=i, incarnation=0, pid=i, host="a"))
        for step in (11, 12):
            file.write(recorded_run.event("step_committed", 3 + step, step=step, samples=24, nonfinite="x"))
        file.write(recorded_run.commit(13, 16))
    with ExitStack() as stack:
        dashboard = Dashboard(run_dir)
        stack.callback(dashboard.close)
        view = Page(browser, dashboard.owners, 390)
        stack.callback(view.close)
        page, moment = view.page, view.page.locator("#log-moment")
        sync_api.expect(page.locator(".worker")).to_have_count(64)
        assert page.evaluate("document.documentElement.scrollHeight") < 3500
        gaps = page.evaluate(GAPS)
        assert len(gaps) == 1 and gaps[0] > 0, "no line leads through steps without a loss"
        page.goto(f"{dashboard.address}#at={recorded_run.T0_NS // 10**6 + 7500}")
        page.reload()
        sync_api.expect(moment).to_contain_text("Around", timeout=CAUGHT)
        dashboard.process.kill()
        dashboard.process.wait()
        sync_api.expect(page.locator("body")).to_have_attribute("data-lost", "yes", timeout=CAUGHT)
        again = Dashboard(run_dir, port=urlsplit(dashboard.address).port)
        stack.callback(again.close)
        sync_api.expect(page.locator("body")).not_to_have_attribute("data-lost", "yes", timeout=CAUGHT)
        sync_api.expect(moment).to_contain_text("Around")
        sync_api.expect(page.locator("#log p.at")).to_have_count(1)


GAPS = """async () => {
  const { Training } = await import("/static/charts.js"), training = new Training();
  const y = [1, 2, null, null, 3, 4], columns = [y, y, y, y, y, y, y];
  const steps = { x: [1, 2, 3, 4, 5, 6], columns };
  const efficiency = { measured: [] }, nothing = { generations: [], marks: [], usage: null };
  training.update({ head: {}, curves: { steps }, efficiency, ...nothing });
  await new Promise(requestAnimationFrame); // it is drawn
  return training.loss.plot.series[1]._paths.gaps.map(([from, to]) => to - from);
}"""
"""Widths of the gaps in the line of a loss that was not finite in the third and fourth step."""


def photograph(page: Any, name: str) -> None:
    """Where SCREENSHOTS is set: what is seen first, on a desk and on a phone, in light and dark."""
    folder = os.environ.get("SCREENSHOTS")
    for width in (1440, 390) if folder else ():
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=f"{folder}/{name.replace(' ', '-').replace(',', '')}-{width}-{scheme}.png")
