"""Lives that die, end early or differ while a script is checked are findings, whatever the others do."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.base.errors import Misused
from everstep.cli.check import _print, answer
from everstep.cli.check_jobs import deaths, lanes_of
from everstep.train.rehearsal import Judgement, Rehearsal, Rehearsed, Sighting, stood_at
from everstep.train.task import place_of
from everstep.train.trials import Trials
from rehearsed_scripts import Loop
from sampling import mostly_longer

_SETUP = "import signal; life = os.environ.get('EVERSTEP_REHEARSAL')"
_FAULT = "signal.raise_signal(signal.SIGSEGV)"
DYING = {
    "resumed": (Loop("resumed", _SETUP, before=f"if life == 'b': {_FAULT}"), "SIGSEGV"),
    "leaves": (Loop("leaves", _SETUP, before="if life == 'b': os._exit(3)"), "exit code 3"),
    "left": (Loop("left", _SETUP, before="if life == 'b': raise SystemExit(4)"), "exit code 4"),
    "strange": (Loop("strange", _SETUP, before=f"if life == 's': {_FAULT}"), "SIGSEGV"),
    "later": (Loop("later", _SETUP, before=f"if step.number > 4 and life == 'a': {_FAULT}"), "SIGSEGV"),
    "raises": (Loop("raises", _SETUP, before="if life == 'b': raise ValueError('no luck')"), "ValueError: no luck"),
    "other model": (Loop("other", _SETUP + "\nif life == 'b': model.append(nn.ReLU())"), ""),
    "early": (Loop("early", _SETUP, before="if life == 'a': raise ValueError('early')"), "ValueError: early"),
}


def checked(folder: Path, text: str) -> dict[str, Any]:
    """What a check without short jobs says of a script."""
    script, out = folder / "script.py", folder / "said.json"
    script.write_text(text)
    (folder / "lives").mkdir()
    question = {
        "task": str(script),
        "argv": (),
        "settings": {},
        "folder": str(folder / "lives"),
        "steps": 3,
        "until_s": time.monotonic() + 600.0,
    }
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            out.write_text(json.dumps(answer(question)))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    said: dict[str, Any] = json.loads(out.read_text())
    return said


@pytest.mark.parametrize("name", mostly_longer(DYING, lambda name: name in ("raises", "early", "resumed")))
def test_a_life_that_ends_otherwise_is_a_finding(name: str, tmp_path: Path) -> None:
    loop, how = DYING[name]
    said = checked(tmp_path, loop.text)
    assert not said["ok"] and not said["note"], said
    assert any(how in finding["says"] for finding in said["findings"]), said["findings"]


def test_a_script_that_never_runs_through_is_not_checked(tmp_path: Path) -> None:
    said = checked(tmp_path, "import os\nos._exit(3)")
    assert "exit code 3" in said["note"] and not said["findings"]


def test_workers_that_died_of_themselves_are_told(tmp_path: Path) -> None:
    told = [
        {"kind": "worker_evicted", "worker_id": 1, "incarnation": 0, "cause": "killed", "reason": "killed by SIGKILL"},
        {"kind": "worker_evicted", "worker_id": 0, "incarnation": 0, "cause": "crashed", "reason": "killed by SIGSEGV"},
        {"kind": "worker_evicted", "worker_id": 2, "incarnation": 0, "cause": "scaled", "reason": "on request"},
    ]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps({"time_unix_ns": 1, **event}) + "\n" for event in told))
    assert deaths(events, (1, 0)) == ["a worker died of itself: killed by SIGSEGV"]
    assert len(deaths(events, None)) == 2


def test_where_a_process_died_is_read_from_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    stack = (
        f'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "{os.__file__}'
    )
    assert stood_at(f'x\n{stack}", line 4 in g\n  File "{script}", line 12 in f\n') == (str(script), 12)
    assert stood_at("nothing") == ("", 0)


def test_short_jobs_have_no_more_workers_than_lanes(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rows = [{"kind": "job_started"}, {"kind": "generation_started", "lanes": {"0": [0, 1], "1": [2]}}]
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lanes_of(events) == 3


def test_a_reading_that_is_used_without_a_name_is_found(tmp_path: Path) -> None:
    """The lane that is computed twice differs, and no variable does."""
    text = Loop("clock", batch="step.backward(model(x).sum() * (time.perf_counter() % 1))").text
    (found,) = checked(tmp_path, text)["findings"]
    assert found["object"] == "time.perf_counter"
    assert "perf_counter" in text.splitlines()[found["line"] - 1]


def refused(script: Path, kind: str, says: str, line: int) -> list[str]:
    """Rows that a check prints of a script that Everstep itself refuses."""
    what = Rehearsed(str(script), (), str(script.parent))
    seen = Sighting(error=says, known=True, kind=kind, place=(script.name, line))
    unused: Any = None
    found = Trials(what, unused, unused, 1.0).findings(Judgement(refused=says, seen=seen), Rehearsal(what, unused))
    return [f"{f.object}:{f.line}" for f in found] + [f.remedy for f in found]


def test_a_changed_module_is_told_with_its_line_wherever_the_script_is(tmp_path: Path) -> None:
    script = tmp_path / "elsewhere.py"
    script.write_text("run = join(model, optimizer)\nfor step in run:\n    group['lr'] = lr()\n    model.head = new()")
    says = "module head (Linear) was made a ReLU in the loop; do it before the loop"
    assert refused(script, "Restructured", says, 2) == ["model.head:4", ""]
    script.write_text("for step in run:\n    group['lr'] = lr()\n    change(model)")
    assert refused(script, "Restructured", says, 1) == ["elsewhere.py:1", ""]


@pytest.mark.longer
def test_what_is_read_behind_the_batches_is_told_with_its_line(tmp_path: Path) -> None:
    text = Loop("unset", batch="got = x", after="print(got)").text
    (found,) = checked(tmp_path, text)["findings"]
    assert text.splitlines()[found["line"] - 1] == "    print(got)" and not found["remedy"]
    assert found["says"].startswith(f"line {found['line']} of script.py needs got, which only the loop")


def test_a_refusal_is_told_alone_and_with_the_line_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Misused) as told:
        raise Misused("line 12 reads loss", 12)
    assert place_of(told.value) == (Path(__file__).name, 12)
    row = {"object": "train.py", "file": "train.py", "line": 12, "says": "line 12 reads loss", "remedy": ""}
    _print("train.py", {"findings": [row, {**row, "line": 0}], "covered": [], "not_covered": []})
    assert capsys.readouterr().out.splitlines()[:2] == [
        "train.py:12: line 12 reads loss",
        "train.py: line 12 reads loss",
    ]
