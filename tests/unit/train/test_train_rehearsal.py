"""Scripts are rehearsed: what their loops keep is found by name, and ordinary ones raise no alarm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import rehearsed_scripts
from everstep.train.join import rehearsed_with
from everstep.train.rehearsal import Rehearsal, Rehearsed, run_script

SCRIPTS = [*rehearsed_scripts.LOOPS, *rehearsed_scripts.WHOLE]


def rehearsed(folder: Path, text: str, **options: Any) -> dict[str, Any]:
    """The verdict on a script, from a process in which none of it has run."""
    script, out = folder / "script.py", folder / "verdict.json"
    script.write_text(text)
    piece = Rehearsed(str(script), (), str(folder / "rehearsal"), **options)
    Path(piece.folder).mkdir()

    def body(link: Any) -> None:
        rehearsed_with(link)
        run_script(piece)

    def judge() -> None:
        out.write_text(json.dumps(asdict(Rehearsal(piece, body).verdict(listed=True))))

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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_what_begins_anew_is_found_and_nothing_else(script: Any, tmp_path: Path) -> None:
    verdict = rehearsed(tmp_path, script.text)
    assert not verdict["note"], (verdict["note"], verdict["output"])
    assert not verdict["refused"]
    found = verdict["findings"]
    assert {f["object"] for f in found if f["refused"]} == set(script.refused), found
    assert {f["object"] for f in found if not f["refused"]} == set(script.listed), found
