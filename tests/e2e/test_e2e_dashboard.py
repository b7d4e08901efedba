"""The dashboard's real page, in headless Chromium, over a real run in which the leader is killed from the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_cli import COMMAND, Running, environment, everstep

from sampling import mostly_longer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: see tests/install_browser.sh")

TOKEN = "a-token-for-the-tests"
WIDTHS = {"phone": 390, "tablet": 768, "wide": 1440}
CAUGHT = 60_000
STEPS = 30
SHRINKS = ("--workers", "3", "--set", "on_failure=shrink")


class Dashboard:
    """`everstep dashboard` as a process; `address` is where it listens, `owners` the one that it prints."""

    def __init__(self, *run_dirs: Path, public: bool = False, port: int = 0) -> None:
        command = [*COMMAND, "dashboard", *map(str, run_dirs), "--token", TOKEN, *(["--public"] if public else [])]
        command += ["--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.endswith(f"/?token={TOKEN}"), line
        self.owners, self.address = line, line.partition("?")[0]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page that remembers what went wrong on it."""

    def __init__(self, browser: Any, address: str, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(CAUGHT)
        self.wrong: list[str] = []
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.goto(address)

    def worker(self, worker_id: int) -> Any:
        return self.page.locator(f'.worker[data-id="{worker_id}"]')

    def expect_state(self, worker_id: int, states: str) -> None:
        tile = sync_api.expect(self.worker(worker_id))
        tile.to_have_attribute("data-state", re.compile(f"^({states})$"), timeout=CAUGHT)

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory, small_task: str) -> Path:
    """A run of 3 workers whose leader was killed; it is over."""
    run_dir = tmp_path_factory.mktemp("jobs") / "watched"
    chaos = ("--chaos", "kill:target=leader:0,at=10")
    done = everstep("run", small_task, "--run-dir", run_dir, *SHRINKS, "--steps", str(STEPS), *chaos)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.longer
def test_a_page_looks_on_until_the_job_is_over(small_task: str, browser: Any, run_dir: Path) -> None:
    hold = run_dir.with_name("hold")
    hold.touch()
    pace = {"E2E_LANE_S": "0.4", "E2E_HOLD": str(hold)}
    with Running(small_task, "--run-dir", run_dir, *SHRINKS, "--steps", "300", "--dashboard", **pace) as job:
        job.wait_for(lambda e: e["kind"] == "job_started")
        dashboard = Dashboard(run_dir)
        view = Page(browser, dashboard.owners)
        try:
            watch(view, job)
            hold.unlink()
            code, _, errors = job.end()
            assert code == 0, errors
            assert f"to look again: everstep dashboard {run_dir}" in errors
            sync_api.expect(view.page.locator("#state")).to_have_text("completed", timeout=CAUGHT)
            sync_api.expect(view.page.locator("#ledger")).to_contain_text("Clean", timeout=CAUGHT)
            assert view.wrong == []
        finally:
            view.close()
            dashboard.close()


def watch(view: Page, job: Running) -> None:
    """Killed by an action, the leader turns dead, the next one leads, the charts mark it; a wrong action is refused."""
    page = view.page
    view.expect_state(0, "leader")
    view.expect_state(1, "active")
    sync_api.expect(page.locator("#state")).to_have_text(re.compile("running|recovering"), timeout=CAUGHT)
    job.wait_for_step(3)
    page.locator("#fault-kind").select_option("kill")
    page.locator("#fault-target").select_option("leader:0")
    twice(page, "Inject")
    sync_api.expect(page.locator("#answer")).to_contain_text("kill:target=leader:0 is on its way", timeout=CAUGHT)
    assert job.wait_for(lambda e: e["kind"] == "fault_injected")["worker_id"] == 0
    job.wait_for(lambda e: e["kind"] == "worker_evicted")
    view.expect_state(0, "dead")
    view.expect_state(1, "leader")
    chart = page.locator("#charts .plot").first
    sync_api.expect(chart).to_have_attribute("aria-label", re.compile("[1-9][0-9]* faults marked"), timeout=CAUGHT)
    sync_api.expect(page.locator("#recoveries .fall")).not_to_have_count(0, timeout=CAUGHT)
    sync_api.expect(page.locator("#log")).to_contain_text("worker 0 was evicted", timeout=CAUGHT)
    page.locator("#scale-workers").fill("99")
    twice(page, "Scale")
    sync_api.expect(page.locator("#answer")).to_contain_text("expected a number of workers", timeout=CAUGHT)


def twice(page: Any, name: str) -> None:
    """Press a button that wants to be pressed twice."""
    button = page.get_by_role("button", name=name)
    button.click()
    button.click()


@pytest.fixture(scope="module")
def dashboard(over: Path) -> Iterator[Dashboard]:
    dashboard = Dashboard(over)
    yield dashboard
    dashboard.close()


def serious(page: Any) -> list[str]:
    """What keeps people out, by axe."""
    found = axe.Axe().run(page).response["violations"]
    grave = [v for v in found if v["impact"] in ("serious", "critical")]
    return [f"{v['id']}: {[n['target'] for n in v['nodes']][:3]}" for v in grave]


@pytest.mark.longer
@pytest.mark.parametrize("width", mostly_longer(WIDTHS, lambda width: width == "phone"))
@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.longer), "dark"])
def test_a_past_run_at_every_width(dashboard: Dashboard, browser: Any, width: str, scheme: str) -> None:
    view = Page(browser, dashboard.owners, WIDTHS[width], color_scheme=scheme)
    assert view.page.url == dashboard.address
    sync_api.expect(view.page.locator("#state")).to_have_text("completed")
    sync_api.expect(view.page.locator("#charts canvas").first).to_be_visible()
    sideways = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert view.page.evaluate(sideways) <= 0
    if width == "phone":
        assert view.page.evaluate("document.documentElement.scrollHeight") < 3500
        sync_api.expect(view.page.locator("#log")).to_be_hidden()
        view.page.evaluate("document.querySelectorAll('[data-folded] .fold').forEach((button) => button.click())")
        sync_api.expect(view.page.locator("#log")).to_be_visible()
        assert view.page.evaluate(sideways) <= 0
    sync_api.expect(view.page.locator("#actions")).to_be_visible()
    assert serious(view.page) == []
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        view.page.screenshot(path=f"{folder}/{width}-{scheme}.png", full_page=True)
    assert view.wrong == []
    view.close()


@pytest.mark.longer
def test_the_report_is_for_everyone(over: Path, browser: Any, tmp_path: Path) -> None:
    done = everstep("report", over, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    for scheme in ("light", "dark"):
        view = Page(browser, f"file://{tmp_path}/report.html", 820, color_scheme=scheme)
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            view.page.screenshot(path=f"{folder}/report-{scheme}.png", full_page=True)
        assert "Communication" in view.page.content()
        assert serious(view.page) == []
        assert view.wrong == []
        view.close()


@pytest.mark.longer
def test_keys_alone_reach_a_worker(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.owners)
    sync_api.expect(view.worker(2)).to_be_visible()
    view.page.keyboard.press("Tab")
    assert view.page.evaluate("document.activeElement.className") == "skip"
    view.page.keyboard.press("Enter")
    view.page.keyboard.press("Tab")  # the heading, which folds the panel
    view.page.keyboard.press("Tab")
    view.page.keyboard.press("ArrowRight")
    view.page.keyboard.press("ArrowRight")
    assert view.page.evaluate("document.activeElement.dataset.id") == "2"
    view.page.keyboard.press("Enter")
    drawer = view.page.locator("#drawer")
    sync_api.expect(drawer).to_contain_text("Worker 2")
    sync_api.expect(drawer).to_be_focused()
    assert serious(view.page) == []
    view.page.keyboard.press("Escape")
    sync_api.expect(drawer).to_be_hidden()
    sync_api.expect(view.worker(2)).to_be_focused()
    view.close()


@pytest.mark.longer
def test_a_moment_of_a_life_opens_its_log(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.owners)
    page = view.page
    dead = page.locator('.life-track[data-id="0"] i[data-state="dead"]')
    sync_api.expect(dead).to_have_count(1)
    sync_api.expect(page.locator(".lives-marks i.hard").first).to_be_attached()
    dead.hover(position={"x": 1, "y": 5})
    sync_api.expect(page.locator("#moment")).to_contain_text("worker 0, life 0: dead")
    step = page.locator("#charts .chart").first.locator(".now")
    sync_api.expect(step).to_have_text(re.compile(r"^step [0-9]+: "))  # the crosshair is on all of them
    dead.click(position={"x": 1, "y": 5})
    sync_api.expect(page.locator("#log-moment")).to_contain_text("what worker 0 said")
    sync_api.expect(page.locator("#log")).to_be_focused()
    sync_api.expect(page.locator("#log")).to_contain_text("worker 0 was evicted")
    sync_api.expect(page.locator("#log p.at")).to_be_in_viewport()
    page.locator("#log-moment button").click()
    sync_api.expect(page.locator("#log-moment")).to_be_hidden()
    page.locator('.life-track[data-id="0"]').focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#log-moment")).to_contain_text("what worker 0 said")
    page.locator("#recoveries .link-to", has_text="worker 0").first.click()
    sync_api.expect(page.locator("#drawer-title")).to_have_text("Worker 0")
    sync_api.expect(page.locator("#drawer-why")).to_contain_text("killed by SIGKILL")
    sync_api.expect(page.locator("#drawer-recoveries .fall")).to_have_count(1)
    assert view.wrong == []
    view.close()


@pytest.mark.longer
def test_charts_tell_values_and_show_what_is_switched_on(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.owners)
    page = view.page
    charts = page.locator("#charts .chart:visible")
    loss = charts.first
    rate_tile = page.locator("#tiles div", has_text="Samples/s").locator("dd span")
    sync_api.expect(rate_tile).not_to_be_empty()
    for place, meaning in (
        (".u-label >> text=/^agree$/", "exchange their records"),
        (".worker .facts", "fixed slot of"),
    ):
        sync_api.expect(page.locator(place).first).to_have_attribute("title", re.compile(meaning))
    loss.locator(".u-over").hover(position={"x": 60, "y": 60})
    sync_api.expect(loss.locator(".now")).to_have_text(re.compile(r"^step [0-9]+: [0-9.]+$"))
    said = loss.locator(".now").inner_text().partition(":")[0]
    sync_api.expect(charts.nth(1).locator(".now")).to_have_text(re.compile(f"^{said}: "))
    page.locator("#loss-log").click()
    page.locator("#loss-smoothing").select_option("0.9")
    sync_api.expect(loss.locator(".plot")).to_have_attribute("aria-label", re.compile("smoothed 0.9"))
    page.locator('[data-marks="faults"]').click()
    sync_api.expect(page.locator(".lives-marks i.hard")).to_have_count(0)
    sync_api.expect(loss.locator(".plot")).to_have_attribute("aria-label", re.compile("; 0 faults marked"))
    page.reload()  # what is switched on is remembered
    sync_api.expect(page.locator('[data-marks="faults"]')).to_have_attribute("aria-pressed", "false")
    assert view.wrong == []
    view.close()


@pytest.mark.longer
def test_a_speed_counts_the_workers_of_each_step_and_no_time_in_which_nothing_ran(
    dashboard: Dashboard, browser: Any
) -> None:
    """4 samples per second and worker: one of two is lost after step 4, and the job is started again after step 6."""
    view = Page(browser, dashboard.owners)
    none: list[float] = []
    times, workers = [1, 2, 3, 4, 6, 8, 110, 111], [2, 2, 2, 2, 1, 1, 2, 2]
    steps = {"x": list(range(1, 9)), "columns": [times, none, none, none, none, [8] * 8, workers]}
    starts = [[1, at_ms, 0, 2, [0], "all workers are there", "started"] for at_ms in (500, 109_500)]
    found = view.page.evaluate(
        "async (run) => (await import('/static/charts.js')).rates(run, 3)",
        {"curves": {"steps": steps}, "generations": starts},
    )
    assert found["each"] == [None, 4, 4, 4, 4, 4, None, 4]
    assert found["rate"] == [None, 8, 8, 8, 6, 4.8, None, 8]
    assert found["seconds"] == [None, 1, 1, 1, 4 / 3, 5 / 3, None, 1]
    said = view.page.evaluate(
        "async (run) => (await import('/static/charts.js')).Overlay.prototype.kinds([run])[3][3](0.6)",
        {"head": {}, "curves": {"steps": steps}, "generations": starts},
    )
    assert said == "600 ms"
    view.close()


def drag(page: Any, chart: Any) -> None:
    """Zoom into a part of a chart."""
    plot = chart.locator(".u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 60, steps=4)
    page.mouse.up()


@pytest.mark.longer
def test_a_chart_is_saved_and_a_link_keeps_zoom_and_moment(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.owners)
    page = view.page
    loss = page.locator("#charts .chart").first
    with page.expect_download() as download:
        loss.get_by_role("button", name="Loss as CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert (lines[0], len(lines)) == ("step,loss", STEPS + 1)
    with page.expect_download() as download:
        loss.get_by_role("button", name="Loss as PNG").click()
    assert Path(download.value.path()).read_bytes()[:4] == b"\x89PNG"
    assert download.value.suggested_filename == "watched-Loss.png"
    drag(page, loss)
    sync_api.expect(loss.locator(".plot")).to_be_visible()
    page.wait_for_function("() => location.hash.includes('steps=')")
    page.locator('.life-track[data-id="0"] i[data-state="dead"]').click(position={"x": 1, "y": 5})
    page.wait_for_function("() => location.hash.includes('at=')")
    link = page.evaluate("location.href")
    other = Page(browser, dashboard.owners)
    other.page.goto("about:blank")
    other.page.goto(link)
    sync_api.expect(other.page.locator("#log-moment")).to_contain_text("what worker 0 said")
    assert other.page.evaluate("location.href") == link
    ends = []
    for shown in (page, other.page):
        at = shown.locator("#charts .chart").first
        at.locator(".u-over").hover(position={"x": 2, "y": 60})
        sync_api.expect(at.locator(".now")).to_have_text(re.compile("^step [0-9]+: "))
        ends.append(at.locator(".now").inner_text())
    assert ends[0] == ends[1] and not ends[0].startswith("step 1:")
    other.page.locator("#log-moment button").click()
    other.page.wait_for_function("() => !location.hash.includes('at=')")
    assert view.wrong == other.wrong == []
    other.close()
    view.close()


def test_a_job_is_hurt_and_stopped_from_the_page(small_task: str, browser: Any, run_dir: Path) -> None:
    hold = run_dir.with_name("hold")
    hold.touch()
    pace = {"E2E_LANE_S": "0.2", "E2E_HOLD": str(hold)}  # a step that is shown costs more than one that is made
    with Running(small_task, "--run-dir", run_dir, *SHRINKS, "--steps", "100000", **pace) as job:
        job.wait_for_step(1)
        dashboard = Dashboard(run_dir)
        view = Page(browser, dashboard.owners)
        page = view.page
        try:
            watch(view, job)
            view.worker(1).click()
            page.get_by_role("button", name="Profile 5 steps").click()
            sync_api.expect(page.locator("#drawer-answer")).to_contain_text("are recorded", timeout=CAUGHT)
            sync_api.expect(page.locator("#drawer-traces a")).to_have_count(1, timeout=CAUGHT)
            with page.expect_download() as download:
                page.locator("#drawer-traces a").click()
            assert download.value.suggested_filename.endswith("worker-1.json.gz")
            page.keyboard.press("Escape")
            view.worker(2).click()
            twice(page.locator("#drawer"), "Kill")
            view.expect_state(2, "dead")
            sync_api.expect(page.locator("#drawer-state")).to_have_text("dead")
            page.locator("#drawer-close").click()
            tokens = [run_dir / "token", run_dir / "token-operate"]
            for token in tokens:
                token.rename(token.with_suffix(".away"))
            stop = page.get_by_role("button", name="Stop the job")
            sync_api.expect(stop).to_be_disabled(timeout=CAUGHT)
            sync_api.expect(stop).to_have_attribute("title", re.compile("no token for 'operate'"))
            for token in tokens:
                token.with_suffix(".away").rename(token)
            sync_api.expect(stop).to_be_enabled(timeout=CAUGHT)
            twice(page, "Stop the job")
            code, events, errors = job.end()
            assert code == 130, errors
            assert events[-1]["reason"].startswith("stopped from the dashboard; checkpoint of step")
            sync_api.expect(page.locator("#state")).to_have_text("interrupted", timeout=CAUGHT)
            assert view.wrong == []
        finally:
            view.close()
            dashboard.close()


def test_nothing_is_shown_without_the_token(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.address)
    sync_api.expect(view.page.locator("body")).to_contain_text("needs the token")
    assert view.page.locator("#state").count() == 0
    view.close()


def test_actions_of_a_public_page_are_locked_without_the_token(over: Path, browser: Any) -> None:
    dashboard = Dashboard(over, public=True)
    view = Page(browser, dashboard.address)
    sync_api.expect(view.page.locator("#state")).to_have_text("completed")
    sync_api.expect(view.page.locator("#ledger")).to_contain_text("Clean")
    sync_api.expect(view.page.locator("#actions")).to_be_hidden()
    view.page.locator("#token").fill("wrong")
    view.page.get_by_role("button", name="Unlock").click()
    sync_api.expect(view.page.locator("#answer")).to_contain_text("token")
    sync_api.expect(view.page.locator("#actions")).to_be_hidden()
    view.page.locator("#token").fill(TOKEN)
    at = view.page.evaluate("scrollY")
    view.page.get_by_role("button", name="Unlock").click()
    sync_api.expect(view.page.locator("#actions")).to_be_visible()
    sync_api.expect(view.page.locator("#actions-title")).to_be_focused()
    assert view.page.evaluate("scrollY") == at
    view.page.reload()
    sync_api.expect(view.page.locator("#actions")).to_be_visible()
    view.close()
    dashboard.close()


@pytest.mark.longer
def test_the_log_is_filtered(dashboard: Dashboard, browser: Any) -> None:
    view = Page(browser, dashboard.owners)
    lines = view.page.locator("#log p")
    sync_api.expect(lines).not_to_have_count(0)
    view.page.locator("#log-level").select_option("error")
    sync_api.expect(lines).to_have_count(1)
    sync_api.expect(lines).to_contain_text("evicted")
    view.page.locator("#log-text").fill("no such words")
    sync_api.expect(view.page.locator("#log")).to_have_text("nothing to show")
    view.close()


@pytest.mark.longer
def test_another_run_is_shown_whole_and_a_comparison_keeps_its_zoom(over: Path, browser: Any, tmp_path: Path) -> None:
    shutil.copytree(over, tmp_path / over.name)
    dashboard = Dashboard(over, tmp_path / over.name)
    view = Page(browser, dashboard.owners)
    page = view.page
    try:
        first = page.locator("#charts .chart").first
        drag(page, first)
        page.wait_for_function("() => location.hash.includes('steps=')")
        page.locator("#runs button").nth(1).click()
        page.wait_for_function("() => !location.hash.includes('steps=')")
        first.locator(".u-over").hover(position={"x": 1, "y": 60})
        sync_api.expect(first.locator(".now")).to_have_text(re.compile("^step 1: "))
        named = page.locator("#overlay .chart").first.locator(".u-label")
        sync_api.expect(named).to_have_text(["step", f"1 {over.name}", f"2 {over.name}"])
        sync_api.expect(page.locator("#settings tbody td:first-child")).to_have_text(
            [f"1 {over.name}", f"2 {over.name}"]
        )
        drag(page, page.locator("#overlay .chart").first)
        page.wait_for_function("() => location.hash.includes('compared=')")
        link = page.evaluate("location.href")
        page.reload()
        sync_api.expect(page.locator("#overlay canvas").first).to_be_visible()
        assert page.evaluate("location.href") == link
        assert view.wrong == []
    finally:
        view.close()
        dashboard.close()


def test_names_are_text_and_runs_stand_side_by_side(over: Path, browser: Any, tmp_path: Path) -> None:
    nasty = tmp_path / "<img src=x onerror=alert(1)>"
    shutil.copytree(over, nasty)
    events = (nasty / "events.jsonl").read_text()
    (nasty / "events.jsonl").write_text(events.replace("killed by SIGKILL", "<script>document.title='x'</script>"))
    dashboard = Dashboard(over, nasty)
    view = Page(browser, dashboard.owners)
    try:
        sync_api.expect(view.page.locator("#run-list tbody tr")).to_have_count(2)
        sync_api.expect(view.page.locator("#overlay canvas").first).to_be_visible()
        sync_api.expect(view.page.locator("#verdict")).to_have_text("The final states are bitwise equal.")
        view.page.get_by_role("button", name=nasty.name, exact=True).click()
        sync_api.expect(view.page.locator("#name")).to_have_text(nasty.name)
        sync_api.expect(view.page.locator("#log")).to_contain_text("<script>document.title='x'</script>")
        assert view.page.locator("img[onerror], main script").count() == 0
        assert "everstep" in view.page.title()
        above = [view.page.locator(part).bounding_box()["y"] for part in ("#overview", "#hero", "#lives", "#workers")]
        assert above == sorted(above)
        assert view.wrong == []
    finally:
        view.close()
        dashboard.close()


@pytest.mark.longer
def test_a_folder_of_runs_is_sorted_noted_and_compared(over: Path, browser: Any, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        shutil.copytree(over, tmp_path / name)
    (tmp_path / "c" / "final" / "digest.json").unlink()
    dashboard = Dashboard(tmp_path)
    view = Page(browser, dashboard.owners, 390)
    page = view.page
    try:
        names = page.locator("#run-list .run-name")
        sync_api.expect(names).to_have_count(3)
        sync_api.expect(page.locator("#hero")).to_be_hidden()
        page.get_by_role("button", name="run", exact=True).click()
        sync_api.expect(names).to_have_text(["a", "b", "c"])
        page.get_by_role("button", name="run", exact=True).click()
        sync_api.expect(names).to_have_text(["c", "b", "a"])
        assert serious(page) == []
        page.get_by_label("compare b").check()
        sync_api.expect(page.locator("#name")).to_have_text("b")
        page.get_by_label("compare b").uncheck()  # the list has stayed open
        sync_api.expect(page.locator("#hero")).to_be_hidden()
        names.nth(2).click()
        sync_api.expect(page.locator("#name")).to_have_text("a")
        sync_api.expect(page.locator("#state")).to_have_text("completed")
        sync_api.expect(page.locator("#compared")).to_be_hidden()
        sync_api.expect(page.locator("#run-list")).to_be_hidden()
        page.get_by_role("button", name="Runs", exact=True).click()
        page.get_by_label("compare b").check()
        sync_api.expect(page.locator("#verdict")).to_have_text("The final states are bitwise equal.")
        sync_api.expect(page.locator("#overlay canvas").first).to_be_visible()
        page.get_by_label("compare c").check()
        sync_api.expect(page.locator("#verdict")).to_have_text(
            "No final state to compare yet: c. a, b are equal to the bit."
        )
        sync_api.expect(page.locator("#overlay .chart:visible")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollHeight") < 3500
        page.get_by_text("More curves").click()
        sync_api.expect(page.locator("#overlay-more .chart:visible").first).to_be_visible()
        page.locator("#overlay-smoothing").select_option("0.9")
        page.locator("#columns").select_option("steps")
        sync_api.expect(page.get_by_role("button", name="steps", exact=True)).to_be_visible()
        for other in ("steps=31", "steps=3"):  # the whole value counts
            page.locator("#run-filter").fill(other)
            sync_api.expect(names).to_have_count(0)
        page.locator("#run-filter").fill(f"STEPS={STEPS} completed")
        sync_api.expect(names).to_have_text(["c", "b", "a"])
        page.locator("#run-filter").fill("")
        assert page.url.endswith("?run=a&run=b&run=c")
        page.get_by_label("tags and note of b").click()
        page.locator("#note-tags").fill("<i>fast</i>, good")
        page.locator("#note-note").fill("the best one")
        page.get_by_role("button", name="Keep").click()
        line = page.locator("#run-list tr", has=page.locator(".run-name", has_text="b"))
        sync_api.expect(line.locator(".tag")).to_have_text(["<i>fast</i>", "good"])
        sync_api.expect(line).to_contain_text("the best one")
        sync_api.expect(page.get_by_label("tags and note of b")).to_be_focused()
        page.locator("#run-filter").fill("best")
        sync_api.expect(names).to_have_text(["b"])
        page.reload()
        sync_api.expect(page.locator("#compared")).to_be_visible()
        assert view.wrong == []
    finally:
        view.close()
        dashboard.close()
