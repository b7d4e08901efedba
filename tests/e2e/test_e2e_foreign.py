"""A working directory and a checkpoint that others prepared: no process of a job takes code from the one, or writes
what the other lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_cli import TASK_FILE, digest_of, one_error, together

from foreign_checkpoints import ESCAPE, escaping

LIBRARIES = (
    *("uvloop", "msgspec", "click", "yaml", "xxhash", "safetensors", "rich", "numpy", "torch"),
    *("starlette", "uvicorn", "h11", "anyio", "prometheus_client"),
)
POISON = """
import os, sys
with open({mark!r}, "a") as file:
    file.write(f"{{__name__}} in {{sys.orig_argv}}\\n")
os._exit(9)
"""
OWN = """
import json, sys
from beside_it import HERE

class Mine(Small):
    def loss(self, model, batch):
        with open({told!r}, "w") as file:
            json.dump([sys.flags.safe_path, HERE, sys.path], file)
        import also_beside_it
        return super().loss(model, batch)
"""


@pytest.mark.longer
def test_no_process_takes_what_lies_in_the_working_directory(tmp_path: Path) -> None:
    work, mark, told = tmp_path / "work", tmp_path / "mark", tmp_path / "told"
    work.mkdir()
    for name in LIBRARIES:
        (work / f"{name}.py").write_text(POISON.format(mark=str(mark)))
    (work / "beside_it.py").write_text("HERE = 'found'\n")
    (work / "also_beside_it.py").write_text("")
    (work / "own_task.py").write_text(TASK_FILE + OWN.format(told=str(told)))
    before = {path.name: path.read_bytes() for path in work.glob("*.py")}
    escaping(tmp_path / "evil" / "a" / "b" / "checkpoints")
    settings = ("--set", "metrics.listen=127.0.0.1:0", "--dashboard")
    good, evil = together(
        ("run", "own_task:Mine", "--steps", "3", "--workers", "2", "--run-dir", "run", *settings),
        ("run", "mlp-digits", "--run-dir", "x/run", "--resume-from", tmp_path / "evil" / "a" / "b" / "checkpoints"),
        cwd=work,
    )
    assert not mark.exists(), mark.read_text()
    assert good.returncode == 0, good.stderr
    assert "could not be started" not in good.stdout + good.stderr
    assert digest_of(work / "run")["step"] == 3
    safe_path, here, path = json.loads(told.read_text())
    assert (safe_path, here) == (True, "found")
    assert path.index(str(work)) == len(path) - 1, "what is installed comes first"
    assert evil.returncode == 2
    assert ESCAPE in one_error(evil) and "evil/a/b/checkpoints/step-0000000001/manifest.json" in one_error(evil)
    assert {path.name: path.read_bytes() for path in work.glob("*.py")} == before
    assert not list((work / "x").rglob("step-*"))
