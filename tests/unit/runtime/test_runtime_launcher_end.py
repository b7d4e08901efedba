"""The end of a launcher: whatever a part of it raises, the rest is done, and the error is not hidden."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.runtime.address import COORDINATOR_FILE
from everstep.runtime.launcher import Launcher


def test_all_of_the_end_is_done_whatever_a_part_of_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    launcher = Launcher(tmp_path, load_config([("test", {"workers": 1})]), "task", [], "module:entry")

    class Breaks:
        def close(self, *_: float) -> None:
            done.append("agent")
            raise BrokenPipeError("within")

    launcher._agent = Breaks()  # type: ignore[assignment]
    monkeypatch.setattr(launcher._coordinator, "end", lambda: done.append("coordinator"))
    (tmp_path / COORDINATOR_FILE).touch()
    with pytest.raises(BrokenPipeError, match="within"):
        launcher._tear_down()
    assert done == ["agent", "coordinator"]
    assert not (tmp_path / COORDINATOR_FILE).exists()
    assert not launcher._collector._thread.is_alive()
    launcher.board.close()
    for fd in (launcher._wake_r, launcher._wake_w):
        os.close(fd)
