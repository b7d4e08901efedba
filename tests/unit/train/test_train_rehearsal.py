"""Scripts are rehearsed: what their loops keep is found by name, and ordinary ones raise no alarm."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import carried_loops
import everstep
import rehearsed_scripts
from everstep.base.errors import ConfigError
from everstep.script.restarts import read_in_code
from everstep.train import rehearsal
from everstep.train.join import rehearsed_with
from everstep.train.rehearsal import Rehearsal, Rehearsed, Sighting, run_script
from sampling import mostly_longer


def rehearsed(folder: Path, text: str, limit_s: float = 120.0, in_turn: bool = False) -> dict[str, Any]:
    """The verdict on a script, from a process in which none of it has run."""
    script, out = folder / "script.py", folder / "verdict.json"
    script.write_text(text)
    piece = Rehearsed(str(script), (), str(folder / "rehearsal"))
    Path(piece.folder).mkdir()

    def body(link: Any) -> None:
        rehearsed_with(link)
        run_script(piece)

    def judge() -> None:
        out.write_text(json.dumps(asdict(Rehearsal(piece, body, limit_s, in_turn).verdict(listed=True))))

    in_a_fork(judge)
    verdict: dict[str, Any] = json.loads(out.read_text())
    return verdict


def in_a_fork(act: Callable[[], None]) -> None:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_lives_that_die_are_told_whether_their_results_are_asked_for_or_not(tmp_path: Path) -> None:
    def dead(piece: Rehearsed, life: str) -> int:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pid

    told: list[Sighting] = []
    lives = Rehearsal(Rehearsed("script.py", (), str(tmp_path)), lambda link: None, fork=dead, deaths=told)
    lives.begin("b")
    assert lives.result("a").died
    assert len(told) == 1
    lives.close()
    assert [one.error for one in told] == ["its process ended (killed by SIGTERM)"] * 2


IN_EVERY_RUN = {"plain", "plateau", "averaged", "ema_object", "scheduler_own", "scheduler_given", "second_optimizer"}
IN_EVERY_RUN |= {"arguments", "torch_generator", "random", "loader_feeds", "counter_object", "dataset", "eval_mode"}


@pytest.mark.parametrize(
    "script", mostly_longer(rehearsed_scripts.SCRIPTS, lambda s: s.name in IN_EVERY_RUN), ids=lambda s: s.name
)
def test_what_begins_anew_is_found_and_nothing_else(script: Any, tmp_path: Path) -> None:
    verdict = rehearsed(tmp_path, script.text)
    assert not verdict["note"], (verdict["note"], verdict["output"])
    assert not verdict["refused"]
    found = verdict["findings"]
    assert {f["object"] for f in found if f["refused"]} == set(script.refused), found
    assert {f["object"] for f in found if not f["refused"]} == set(script.listed), found


AWKWARD = {
    "it ended without calling everstep.join": "print('hello')",
    "ValueError: no data (script.py:2)": "\nraise ValueError('no data')",
    "it left with exit code 7": "raise SystemExit(7)",
    "its process ended (exit code 3)": "import os\nos._exit(3)",
    "it does fewer than two steps": rehearsed_scripts.Loop("short").text.replace("steps=6", "steps=1"),
    "its loop ended before its last step": rehearsed_scripts.Loop("breaks", after="break").text.replace("raise", "#"),
    "rehearse is false": rehearsed_scripts.Loop("off", given="rehearse=False").text,
    "a life that went on from step 1 ended early: NameError: name 'first' is not defined": rehearsed_scripts.Loop(
        "needs", before="if step.number == 1: first = 1", after="first"
    ).text,
}


@pytest.mark.parametrize("note", AWKWARD)
def test_why_there_is_no_rehearsal(note: str, tmp_path: Path) -> None:
    verdict = rehearsed(tmp_path, AWKWARD[note])
    assert verdict["note"].startswith(note) and not verdict["findings"]


def test_a_loop_that_ends_earlier_after_a_resume_is_found(tmp_path: Path) -> None:
    stops = rehearsed_scripts.Loop("stops", after="if os.environ['EVERSTEP_REHEARSAL'] == 'b': break")
    (found,) = rehearsed(tmp_path, stops.text.replace("raise", "#"))["findings"]
    assert (found["kind"], found["refused"], found["says"].startswith("its loop ends earlier")) == ("loop", True, True)
    assert "join" in stops.text.splitlines()[found["line"] - 1]


SAVES = "torch.save(model.state_dict(), PATH)"


def test_a_file_that_the_script_loads_and_its_loop_saves_is_named(tmp_path: Path) -> None:
    """Nothing differs in the first three steps."""
    setup = f"PATH = {str(tmp_path / 'kept.pt')!r}\nif os.path.exists(PATH): model.load_state_dict(torch.load(PATH))"
    loop = rehearsed_scripts.Loop("reread", setup, after=f"if step.number % 5 == 0: {SAVES}")
    (found,) = rehearsed(tmp_path, loop.text)["findings"]
    assert (found["object"], found["kind"]) == (str(tmp_path / "kept.pt"), "reread")
    only = tmp_path / "only saved"
    only.mkdir()
    assert not rehearsed(only, loop.text.replace("torch.load(PATH)", "torch.load('other.pt')"))["findings"]


def test_a_count_that_ends_the_loop_is_named(tmp_path: Path) -> None:
    """The life that goes on ends early, so the two states cannot be compared."""
    setup = "least = 9.0"
    loop = rehearsed_scripts.Loop("least", setup, after="if least == 9.0 and step.number > 1: break\nleast = step.loss")
    (found,) = rehearsed(tmp_path, loop.text.replace("raise", "#"))["findings"]
    assert (found["object"], found["kind"]) == ("least", "carried")


def test_what_takes_too_long_is_given_up(tmp_path: Path) -> None:
    verdict = rehearsed(tmp_path, "import time\ntime.sleep(600)", limit_s=0.5)
    assert verdict["note"] == "it was not through with 3 steps after 0.5 s"


def test_a_scheduler_is_missed_before_it_is_stepped(tmp_path: Path) -> None:
    setup = "s = lr_scheduler.StepLR(optimizer, 1)"
    verdict = rehearsed(tmp_path, rehearsed_scripts.Loop("epochs", setup).text)
    (found,) = verdict["findings"]
    assert (found["kind"], found["object"], found["refused"]) == ("scheduler", "s", True)
    assert "scheduler=s" in found["remedy"] and "state={'s': s}" in found["remedy"]


def test_join_refuses_a_scheduler_by_name() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = [(torch.zeros(4), torch.tensor(0))] * 64
    with pytest.raises(ConfigError, match=r"decay: join does not carry this StepLR: .*scheduler=decay"):
        everstep.join(model, optimizer, data, steps=1)
    everstep.join(model, optimizer, data, steps=1, ignore=[decay])
    everstep.join(model, optimizer, data, steps=1, ignore=["decay"])
    everstep.join(model, optimizer, data, steps=1, rehearse=False)
    everstep.join(model, optimizer, data, steps=1, scheduler=decay)
    everstep.join(model, optimizer, data, steps=1, state={"decay": decay})


def test_two_steps_are_enough(tmp_path: Path) -> None:
    loop = rehearsed_scripts.Loop("two", "n = 0", after="n += 1")
    verdict = rehearsed(tmp_path, loop.text.replace("steps=6", "steps=2"), in_turn=True)
    assert [f["object"] for f in verdict["findings"]] == ["n"] and not verdict["note"]


def test_lives_for_which_there_is_no_room_side_by_side_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "available_bytes", lambda: 0)
    told = tmp_path / "told"
    line = f"with open({str(told)!r}, 'a') as f: f.write(os.environ['EVERSTEP_REHEARSAL'])"
    verdict = rehearsed(tmp_path, rehearsed_scripts.Loop("tells", after=line).text)
    assert not verdict["note"] and told.read_text() == "aaabb"


def test_it_says_that_there_was_no_room_for_a_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal.MemoryKills, "lately", lambda self, now_s: True)
    verdict = rehearsed(tmp_path, "import os\nos.kill(os.getpid(), 9)")
    assert verdict["note"] == "there was not enough memory for it"


def test_what_first_matters_later_is_refused(tmp_path: Path) -> None:
    (loop,) = (one for one in carried_loops.BAD if one.name == "plateau")
    verdict = rehearsed(tmp_path, loop.text)
    assert {f["object"] for f in verdict["findings"]} == {"best", "wait"} and not verdict["note"]
    line = loop.text.splitlines().index("best, wait = 1e9, 0") + 1
    for found in verdict["findings"]:
        assert found["refused"] and (found["file"], found["line"]) == ("script.py", line)
        assert f"everstep.state({found['object']}=" in found["remedy"]


def test_what_the_code_says_counts_where_a_life_fails(tmp_path: Path) -> None:
    loop = rehearsed_scripts.Loop(
        "fails", "n = 0", after="n += 1\nif n > 40: halve()\nif n == 2: raise ValueError('x')"
    )
    (found,) = rehearsed(tmp_path, loop.text)["findings"]
    assert (found["object"], found["refused"]) == ("n", True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("late.default0", "keep the content of late's default argument in everstep.state(...), and give that to join"),
        ("os.environ", "keep that in everstep.state(...) instead, and give that to join as state="),
        ("box.best", "write kept = everstep.state(best=box.best), give it to join as state=kept"),
    ],
)
def test_remedies_can_be_written(name: str, says: str) -> None:
    assert says in read_in_code(name, "carried", "train.py", 3).remedy
