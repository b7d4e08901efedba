"""Reports and comparisons: complete, self-contained, escaped; figures that are well-formed; pictures."""

from __future__ import annotations

import html.parser
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from test_report_history import T0, event, killed_run, plan

from everstep.base.config import load_config, to_dict
from everstep.cli.main import run_command
from everstep.observe.logs import WorkerLog
from everstep.report.figures import figures
from everstep.report.history import History
from everstep.report.page import Proof, compare_page, report_page
from everstep.report.style import standalone
from everstep.report.svg import Curve, columns_chart, line_chart, ticks

NASTY = "<script>alert('x')</script>\" onload=\"alert(1)"


def run_directory(base: Path, name: str, lines: list[bytes] | None = None, task: str = "mlp-digits") -> Path:
    run_dir = base / name
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_bytes(b"".join(killed_run() if lines is None else lines))
    config = to_dict(load_config([("test", {"workers": 3, "steps": 10})]))
    job = {"task": task, "argv": [], "config": config, "dataset_size": 80, "versions": {"torch": "2"}}
    (run_dir / "job.json").write_text(json.dumps(job))
    return run_dir


def scaled_run() -> list[bytes]:
    """Long enough with 2 workers, and then with 3, for both to be measured."""
    more = [event("step_committed", 3.5 + s, step=s, loss=1 / s, samples=8) for s in range(11, 24)]
    more.append(plan(27, 3, {0: [0, 1], 1: [2], 2: [3]}))
    more += [event("step_committed", 4 + s, step=s, loss=1 / s, samples=8) for s in range(24, 37)]
    return [*killed_run(), *more]


class Outline(html.parser.HTMLParser):
    """Collects tags, attributes and text; checks that tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_its_numbers_are_those_of_run_itself(tmp_path: Path) -> None:
    """The middle of two recoveries, and the time in which the job ran."""
    more = event("recovery_completed", 13.5, worker_id=1, duration_s=0.2, phases_s={}, generation=2, step=10)
    again = [event("job_started", 100, step=10, workers=3), event("job_completed", 103, step=10, state="completed")]
    history = History(run_directory(tmp_path, "twice", [*killed_run(), more, *again])).load()
    text = Outline(report_page(history, Proof())).text
    assert "600 msmedian recovery" in text and "16.5 swall time" in text


def test_the_report_says_everything_and_needs_nothing(tmp_path: Path) -> None:
    history = History(run_directory(tmp_path, "calm")).load()
    page = report_page(history, Proof({"clean": True, "steps": 10, "problems": []}, reference="other", differences=[]))
    outline = Outline(page)
    for words in ("worker 0 was evicted", "generation 2", "recovery: redo", "100.00 %", "bitwise equal to other"):
        assert words in outline.text, words
    assert "clean: every sample counted exactly once" in outline.text
    attributes = {name for _, attributes in outline.tags for name in attributes}
    assert not attributes & {"src", "href", "style", "onload", "onclick"}
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "img", "iframe"}
    assert "://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", page)


def test_shares_add_up(tmp_path: Path) -> None:
    history = History(run_directory(tmp_path, "calm")).load()
    page = report_page(history, Proof())
    shares = [float(x) for x in re.findall(r"(\d+\.\d+) %</td></tr>", page.partition("Where the time went")[2])]
    assert shares[-1] == 100.0
    assert sum(shares[:-1]) == pytest.approx(100.0, abs=0.05)


def test_everything_is_escaped(tmp_path: Path) -> None:
    lines = [
        event("job_started", 0, workers=2, reason=NASTY),
        event("worker_joined", 1, worker_id=0, host=NASTY),
        plan(2, 1, {0: [0], 1: [1]}, NASTY),
        event("step_committed", 3, step=1, loss=1.0, samples=4),
        event("evaluated", 4, step=1, metrics={NASTY: 0.5}),
        event("worker_evicted", 5, worker_id=0, reason=NASTY),
        event("recovery_completed", 6, worker_id=0, reason=NASTY, duration_s=1, phases_s={NASTY: 1}),
        event("checkpoint_failed", 7, tier=NASTY, step=1, reason=NASTY),
        event(NASTY, 8, reason=NASTY),
        event("job_failed", 9, reason=NASTY, state=NASTY),
    ]
    history = History(run_directory(tmp_path, "nasty", lines, task=NASTY)).load()
    history.usage.take({"t": 1, "workers": [{"worker_id": 0, "seconds": {NASTY: 1.0}, "step": 1}]})
    proof = Proof({"clean": False, "steps": 1, "problems": [NASTY]}, NASTY, NASTY, [NASTY])
    for page in (report_page(history, proof), compare_page([history, history])):
        outline = Outline(page)
        assert not {tag for tag, _ in outline.tags} & {"script"}
        assert not any("onload" in attributes for _, attributes in outline.tags)
        assert "<script>alert" in outline.text


def test_figures_are_well_formed_and_stand_alone(tmp_path: Path) -> None:
    for name, svg in figures(History(run_directory(tmp_path, "calm", scaled_run())).load()).items():
        for text in (svg, standalone(svg)):
            assert ElementTree.fromstring(text).tag.endswith("svg"), name
        assert "var(" not in standalone(svg)


def test_runs_with_nothing_in_them(tmp_path: Path) -> None:
    for name, lines in (("empty", []), ("started", [event("job_started", 0, workers=1)])):
        history = History(run_directory(tmp_path, name, lines)).load()
        assert "nothing was recorded" in Outline(report_page(history, Proof())).text


def test_curves_with_gaps_and_odd_ranges() -> None:
    nan = float("nan")
    for values in ([1.0], [nan, None], [2.0, 2.0], [nan, 1.0, None, -3.0], [0.0, 1e-12], [1e30, -1e30]):
        xs = [float(i) for i in range(len(values))]
        ElementTree.fromstring(line_chart("t", [Curve("a", xs, values)], "x"))
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]


def test_parts_stand_on_each_other_and_gaps_stay_empty() -> None:
    parts = [("low", "f0", [1.0, None, 2.0]), ("high", "f1", [3.0, None, 0.0])]
    svg = ElementTree.fromstring(columns_chart("t", [1.0, 2.0, 3.0], parts, 1.0, "x"))
    low, high = (path.attrib["d"] for path in svg if path.tag.endswith("path"))
    boxes = [re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)H([\d.]+)", d) for d in (low, high)]
    assert [len(found) for found in boxes] == [2, 1]
    x0, bottom, middle, x1 = map(float, boxes[0][0])
    floor, top = map(float, boxes[1][0][1:3])
    assert floor == middle and bottom - top == pytest.approx(4 * (bottom - middle), abs=0.5)
    assert float(boxes[0][1][0]) - x1 == pytest.approx(x1 - x0, abs=0.2), "the second column is missing"


def test_what_workers_spend_is_shown(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, "calm")
    (run_dir / "metrics").mkdir()
    rows = [
        {"worker_id": 1, "incarnation": 0, "step": step, "samples": 8 * step, "rss_bytes": 210_000_000, "cpu_s": step}
        | {"seconds": {"forward": 3.0 * step, "reduce": 1.0 * step}, "bytes": {"reduce": 5_000_000 * step}}
        for step in (2, 4)
    ]
    lines = [json.dumps({"t": T0 + 10**9 * row["step"], "host": "h", "workers": [row]}) + "\n" for row in rows]
    (run_dir / "metrics" / "h.jsonl").write_text("".join(lines))
    history = History(run_dir).load()
    text = Outline(report_page(history, Proof())).text
    for words in ("210.0 MB", "forward 75 %, reduce 25 %", "Communication", "20.0 MB", "2.0 MB"):
        assert words in text, words
    assert {"steptime", "busy", "communication"} <= figures(history).keys()


def test_the_command_writes_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("resvg_py", reason="the extra [report] is not installed")
    run_dir = run_directory(tmp_path, "calm", scaled_run())
    assert run_command(["report", str(run_dir), "--out", str(tmp_path / "r.html")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written[0] == tmp_path / "r.html"
    names = {"loss", "throughput", "workers", "recoveries", "goodput", "scaling"}
    assert {path.stem for path in written[1:]} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", str(tmp_path / "nowhere")]) == 2
    assert run_command(["report", str(tmp_path)]) == 2
    assert run_command(["compare", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error: ") == 3


def test_compare_overlays_and_names_differences(tmp_path: Path) -> None:
    first, second = run_directory(tmp_path, "first"), run_directory(tmp_path, "second")
    job = json.loads((second / "job.json").read_text())
    job["config"]["seed"] = 7
    (second / "job.json").write_text(json.dumps(job))
    assert run_command(["compare", str(first), str(second), "--out", str(tmp_path / "c.html")]) == 0
    outline = Outline((tmp_path / "c.html").read_text())
    assert "seed" in outline.text and "first" in outline.text and "second" in outline.text
    assert sum(attributes.get("class") in ("curve l0", "curve l1") for _, attributes in outline.tags) == 4
    (first / "final").mkdir(exist_ok=True)
    (first / "final" / "digest.json").write_text('{"step": 300, "model": "ab", "state": ["cd"]}')
    assert run_command(["compare", str(first), str(second), "--out", str(tmp_path / "c.html")]) == 0
    assert "Of second there is no final state to compare" in Outline((tmp_path / "c.html").read_text()).text
    (second / "final").mkdir(exist_ok=True)
    (second / "final" / "digest.json").write_text('{"step": 3, "model": "ab", "state": ["cd"]}')  # of an earlier step
    assert run_command(["compare", str(first), str(second), "--out", str(tmp_path / "c.html")]) == 0
    assert "Of second there is no final state to compare" in Outline((tmp_path / "c.html").read_text()).text
    (second / "final" / "digest.json").write_text('{"version": 2, "step": 300, "model": "ab", "state": "cd"}')
    assert run_command(["compare", str(first), str(second), "--out", str(tmp_path / "c.html")]) == 0
    assert "digests are of different versions" in Outline((tmp_path / "c.html").read_text()).text


def test_runs_of_one_name_are_told_apart_and_their_time_is_that_in_which_they_ran(tmp_path: Path) -> None:
    stopped = [*killed_run(), event("job_started", 1000, step=7, workers=3)]
    histories = []
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        histories.append(History(run_directory(tmp_path / place, "same", stopped)).load())
    page = compare_page(histories)
    assert all(f"<th>{tmp_path}/{place}/same</th>" in page for place in ("x", "y"))
    assert "<td>wall time</td><td>13.5 s</td><td>13.5 s</td>" in page


def test_what_steps_tell_beside_the_loss_is_compared_too(tmp_path: Path) -> None:
    one = run_directory(tmp_path, "one", [*killed_run(), event("evaluated", 13, step=10, metrics={"accuracy": 0.5})])
    more = [
        event("step_committed", 14, step=11, loss=1.0, grad_norm=0.5),
        event("logged", 14, step=11, metrics={"a": 1}),
    ]
    other = run_directory(tmp_path, "other", [*killed_run(), *more])
    page = compare_page([History(one).load(), History(other).load()])
    assert all(f'aria-label="{title}"' in page for title in ("Evaluated: accuracy", "Gradient norm", "a"))


def test_the_death_of_a_launcher_is_marked_in_the_figures(tmp_path: Path) -> None:
    drawn = figures(History(run_directory(tmp_path, "dead")).load())
    said = "the launcher of the job died without a word"
    assert [name for name, svg in drawn.items() if said in svg] == ["loss", "throughput", "workers"]


def test_what_may_be_a_secret_is_not_shown(tmp_path: Path) -> None:
    run_dir = run_directory(tmp_path, "a")
    job = json.loads((run_dir / "job.json").read_text())
    job["config"]["env"] = {"HF_TOKEN": "hf_123", "NCCL_DEBUG": "INFO"}
    job["config"]["notify"]["command"] = "mail.sh me@here"
    job["explicit"] = ["env.HF_TOKEN", "env.NCCL_DEBUG", "notify.command"]
    (run_dir / "job.json").write_text(json.dumps(job))
    known = History(run_dir).load()
    page = report_page(known, Proof())
    assert "INFO" in page and "hf_123" not in page and "me@here" not in page
    assert known.resume.endswith(" --set env.NCCL_DEBUG=INFO # and give env.HF_TOKEN, notify.command again")
    assert "HF_TOKEN" not in " ".join(shlex.split(known.resume, comments=True))  # a pasted line leaves the user's own


def test_of_what_workers_say_a_report_shows_warnings_and_errors(tmp_path: Path) -> None:
    run_dir, said = run_directory(tmp_path, "a"), WorkerLog(1, 0)
    (run_dir / "logs").mkdir()
    lines = [
        said.line(level, "mine", f"this is {level}", time_ns=T0) for level in ("debug", "info", "warning", "error")
    ]
    (run_dir / "logs" / "worker-1.jsonl").write_bytes(b"".join(lines))
    page = report_page(History(run_dir).load(), Proof())
    assert "The last 2 warnings in the workers' logs" in page
    assert [f"this is {level}" in page for level in ("debug", "info", "warning", "error")] == [False, False, True, True]
