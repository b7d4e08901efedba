"""What a loop has changed by the time of a checkpoint: told once, recorded, and refused where a loop begins anew."""

from __future__ import annotations

import json
import linecache
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carried_loops
import everstep
from everstep.base.errors import ConfigError
from everstep.train.loop_survey import CHANGED, recorded, watching
from rehearsed_scripts import Loop
from sampling import mostly_longer


def surveyed(folder: Path, loop: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """The survey of a loop that has done six steps, of which the fifth took a checkpoint, and what it told."""
    join, surveys, told = everstep.join, [], []

    def watched(model: Any, optimizer: Any, dataset: Any, **given: Any) -> Iterator[Any]:
        run = join(model, optimizer, dataset, **given)
        survey = watching(run._session.view, dataset, given.get("collate"), tuple(given.get("ignore", ())))
        run._survey, survey.tell = survey, told.append
        surveys.append(survey)
        return Watching(run, survey)

    class Watching:
        def __init__(self, run: Any, survey: Any) -> None:
            self.run, self.survey = run, survey

        def __getattr__(self, name: str) -> Any:
            return getattr(self.run, name)

        def __iter__(self) -> Iterator[Any]:
            for step in self.run:
                yield step
                if step.number == 5:
                    self.survey.begin(sys._getframe())
                    self.survey.record()

    script = folder / "script.py"
    script.write_text(loop.text)
    module = types.ModuleType("script")
    module.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "script", module)
    monkeypatch.setattr(everstep, "join", watched, raising=False)
    monkeypatch.setattr("everstep.train.loop_survey.LIMIT_S", 60.0)
    monkeypatch.setattr("everstep.train.loop_survey._FIRST_LIMIT_S", 60.0)
    monkeypatch.chdir(folder)
    linecache.checkcache()
    with pytest.raises(SystemExit, match="beyond the loop"):
        exec(compile(loop.text, str(script), "exec"), vars(module))
    return surveys[0], told


EVERY_OTHER = carried_loops.CLEAN[::2]


@pytest.mark.parametrize(
    "loop", mostly_longer(carried_loops.CLEAN, lambda loop: loop in EVERY_OTHER), ids=lambda loop: loop.name
)
def test_nothing_is_told_of_loops_that_do_no_harm(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey, told = surveyed(tmp_path, loop, monkeypatch)
    assert not told and not survey.changed and not survey.record()


def test_a_look_that_has_only_just_begun_can_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes the checkpoint asks for the look's record at any moment."""
    survey, _ = surveyed(tmp_path, carried_loops.CLEAN[0], monkeypatch)
    begin, asked = threading.Thread.start, list[Any]()

    def start(thread: threading.Thread) -> None:
        asked.append(survey.record())
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    survey.begin(sys._getframe())
    survey.record()
    assert asked == [{}]


HIDDEN = Loop(
    "hidden",
    "box = argparse.Namespace(level=1.0)\nlevels = [1.0]",
    batch="x = x * eval('box.level') * eval('levels[-1]')",
    after="if step.number > 3: exec('box.level *= 0.9; levels.append(0.5)')",
)


def test_what_code_that_is_not_read_changes_is_told_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey, told = surveyed(tmp_path, HIDDEN, monkeypatch)
    assert survey.changed == ("box.level", "levels") and len(told) == 2
    names = recorded(survey.record()[CHANGED])
    assert names == survey.changed
    with pytest.raises(ConfigError, match=r"step 5: the loop had changed box.level, levels, which join does not carry"):
        survey.refuse(names, "step 5")
    allowed = HIDDEN._replace(given="ignore=['box', 'levels']")
    survey, told = surveyed(tmp_path, allowed, monkeypatch)
    assert not told and not survey.changed
    survey.refuse(names, "step 5")


def test_memory_of_the_trained_model_is_refused_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = "if step.number > 3: kept.best = model.state_dict()"
    loop = Loop("shared", "kept = everstep.state(best=None)", "state=kept", after=after)
    with pytest.raises(ConfigError, match=r"best\['0.weight'\] shares memory with what is trained: store a clone"):
        surveyed(tmp_path, loop, monkeypatch)


def test_what_a_class_says_that_another_object_carries_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "class Box:\n    __everstep_carried__ = ('level',)\nbox, levels = Box(), [1.0]\nbox.level = 1.0"
    survey, _ = surveyed(tmp_path, HIDDEN._replace(setup=setup), monkeypatch)
    assert survey.changed == ("levels",)


def test_a_record_is_read_with_care() -> None:
    assert recorded(None) == recorded(b"") == ()
    assert recorded(b"[]") == recorded(b"{") == ("something that its manifest does not name",)
    assert len(recorded(json.dumps({"changed": ["n"] * 1000}).encode())) == 50
