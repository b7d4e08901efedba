"""Checkpoints that others prepared, by every way in: exit code 2, one line that names the file, nothing outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep.base.config import load_config
from everstep.base.errors import CheckpointCorrupt, ConfigError
from everstep.cli.checkpoint_import import initial_replica
from everstep.cli.job import JobFile, Request, effective_config
from everstep.cli.main import run_command
from everstep.cli.run_dir import Trust, find_start
from everstep.cli.task_loading import make_task, parse_task
from everstep.report.history import newest_step
from foreign_checkpoints import ESCAPE, PART, escaping, idle, prepare, renamed, tree_of

Prepared = Callable[[Path], None]


def link_to_file(folder: Path) -> None:
    prepare(folder, lambda body: None)
    outside = folder.parents[2] / "secret"
    (folder / PART).rename(outside)
    (folder / PART).symlink_to(outside)


def link_to_folder(folder: Path) -> None:
    prepare(folder, lambda body: None)
    outside = folder.parents[2] / "elsewhere"
    (folder / PART).parent.rename(outside)
    (folder / PART).parent.symlink_to(outside)
    (folder / "latest.json").unlink()


def absolute(folder: Path) -> None:
    escaping(folder, str(folder.parents[2] / "uvloop.py"))


WAYS: list[tuple[Prepared, str]] = [
    (escaping, ESCAPE),
    (absolute, "uvloop.py"),
    (lambda folder: escaping(folder, "step-0000000001/../../../../uvloop.py"), "step-0000000001/../../../../uvloop.py"),
    (link_to_file, PART),
    (lambda folder: prepare(folder, idle), PART.replace("-w0-", "-w1-")),
    (lambda folder: prepare(folder, renamed(["nested"])), "files[0][0]"),
]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("error: "), told
    return told


@pytest.mark.parametrize(("way", "named"), WAYS, ids=lambda value: getattr(value, "__name__", None))
def test_what_is_prepared_comes_in_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: Prepared, named: str
) -> None:
    evil, new = tmp_path / "evil" / "a" / "b" / "checkpoints", tmp_path / "job" / "a" / "b" / "run"
    way(evil)
    new.mkdir(parents=True)
    before = tree_of(tmp_path)
    for argv in (
        ["copy", evil, new / "copy"],
        ["copy", evil, new / "copy", "--all"],
        ["export", evil, "--to", new / "out.safetensors", "--format", "safetensors"],
        ["export", evil, "--to", new / "out", "--format", "dcp", "--optimizer"],
    ):
        assert run_command(["checkpoints", *map(str, argv)]) == 2
        assert named in one_line(capsys)
    for source in (evil, evil / "step-0000000001"):
        job = JobFile("task", (), load_config([("test", {"resume_from": str(source)})]))
        with pytest.raises(CheckpointCorrupt) as caught:
            find_start(new, job, script=True)
        assert named in str(caught.value) and "\n" not in str(caught.value)
    assert run_command(["checkpoints", "verify", str(evil)]) == 1
    assert named in capsys.readouterr().out
    assert tree_of(tmp_path) == before


def test_a_step_behind_a_link_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "a" / "b" / "evil"
    link_to_folder(evil)
    before = tree_of(tmp_path)
    assert run_command(["checkpoints", "copy", str(evil), str(tmp_path / "copy")]) == 2
    assert "there is no checkpoint in" in one_line(capsys)
    assert run_command(["checkpoints", "copy", str(evil / "step-0000000001"), str(tmp_path / "copy")]) == 2
    assert "step-0000000001/manifest.json is a symbolic link, or lies behind one" in one_line(capsys)
    assert tree_of(tmp_path) == before


def test_an_older_good_one_is_taken(tmp_path: Path) -> None:
    prepare(tmp_path / "evil", lambda body: None, 1)
    prepare(tmp_path / "evil", renamed(ESCAPE), 2)
    job = JobFile("task", (), load_config([("test", {"resume_from": str(tmp_path / "evil")})]))
    start = find_start(tmp_path / "run", job, script=True)
    assert start.step == 1 and start.brought
    assert start.words.startswith("passed over step 2: ") and ESCAPE in start.words


def test_checkpoints_that_cannot_be_looked_at_are_no_reason_to_start_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match=r"cannot look for checkpoints in .*: Not a directory: make it readable"):
        find_start(tmp_path, JobFile("task", (), load_config([("test", {})])), script=True)


def test_no_older_one_is_taken_where_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who can write there may damage the newest, or put an old one back, however it is signed."""
    run_dir = tmp_path / "run"
    for folder in (tmp_path / "evil", run_dir / "checkpoints"):
        prepare(folder, lambda body: None, 1)
        prepare(folder, lambda body: None, 2)
        newest = folder / PART.replace("step-0000000001", "step-0000000002")
        newest.write_bytes(newest.read_bytes()[:-1])
    brought = JobFile("task", (), load_config([("test", {"resume_from": str(tmp_path / "evil")})]))
    own = JobFile("task", (), load_config([("test", {})]))
    for where, job in ((tmp_path / "new", brought), (run_dir, own)):
        where.mkdir(exist_ok=True)
        with pytest.raises((ConfigError, CheckpointCorrupt), match=r"not-before 2|passed over step 2"):
            find_start(where, job, script=True, trust=Trust(not_before=2))
    assert find_start(run_dir, own, script=True, trust=Trust(not_before=1)).step == 2, (
        "workers pass over what is damaged"
    )
    with pytest.raises(ConfigError, match="--not-before 3"):
        find_start(tmp_path / "new", brought, script=True, trust=Trust(not_before=3))
    verify = ["checkpoints", "verify", str(run_dir / "checkpoints"), "--json", "--not-before"]
    found = [(run_command([*verify, step]), "of step 2 or later" in capsys.readouterr().out) for step in ("1", "2")]
    assert found == [(1, False), (1, True)]


def test_nothing_is_written_where_a_target_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path / "good", lambda body: None)
    outside = tmp_path / "outside"
    outside.mkdir()
    for step in (0, 1):
        (tmp_path / "target").mkdir(exist_ok=True)
        (tmp_path / "target" / f"step-{step:010d}").symlink_to(outside)
    assert run_command(["checkpoints", "copy", str(tmp_path / "good"), str(tmp_path / "target")]) == 2
    assert "step-0000000001/" in one_line(capsys)
    task = make_task(parse_task("mlp-digits"))
    model = initial_replica(task, effective_config(task.defaults, Request(()), script=True)).parts.model
    torch.save(model.state_dict(), tmp_path / "good.pt")
    words = ["import", tmp_path / "good.pt", "--task", "mlp-digits", "--to", tmp_path / "target"]
    assert run_command(["checkpoints", *map(str, words)]) == 2
    assert "step-0000000000/" in one_line(capsys)
    assert list(outside.iterdir()) == []


def test_names_of_steps_are_ours(tmp_path: Path) -> None:
    for name in ("step-" + "9" * 200, "step-\u0661\u0662", "step-12", "step-0000000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert newest_step(tmp_path) == 7
