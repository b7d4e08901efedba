"""What is closed to others in a directory, and a lock that nobody who looks is in the way of."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.base import below
from everstep.base.config import load_config
from everstep.base.errors import ConfigError
from everstep.cli.run_dir import RUNS, close_to_others
from everstep.runtime.files import private
from everstep.runtime.files.host_directory import checkpoints_in
from everstep.runtime.files.private import close_run_dir, close_store, owner_words, refuse_foreign
from everstep.runtime.files.run_lock import is_locked, run_lock
from everstep.runtime.link.address import LOCK_FILE

OTHER = 4711


def make(folder: Path, *names: str) -> None:
    """Files, as everybody's; folders where the name ends in a slash."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.touch()
    for top, folders, files in os.walk(folder):
        for name in (".", *folders):
            os.chmod(os.path.join(top, name), 0o777)
        for name in files:
            os.chmod(os.path.join(top, name), 0o666)


def modes(folder: Path) -> dict[str, int]:
    found = [folder, *folder.rglob("*")]
    return {str(p.relative_to(folder)): p.lstat().st_mode & 0o777 for p in found if not p.is_symlink()}


def test_a_directory_with_nothing_but_a_job_is_closed_altogether(tmp_path: Path) -> None:
    names = ["job.json", "lock", "ledger/worker-0-0.jsonl", "checkpoints/step-0000000001/manifest.json"]
    names += ["previous-1/final/digest.json", ".metrics.json.77", "tensorboard/", "report.html", "metrics-token"]
    make(tmp_path, *names)
    close_run_dir(tmp_path)
    expected = {name: 0o700 if (tmp_path / name).is_dir() else 0o600 for name in modes(tmp_path)}
    assert modes(tmp_path) == expected
    assert len(expected) == 15


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    make(elsewhere, "step-0000000001/manifest.json")
    make(run, "job.json", "train.py", "mine/notes", "logs/x")
    (run / "checkpoints").symlink_to(elsewhere)
    (run / "logs" / "link").symlink_to(elsewhere / "step-0000000001")
    close_run_dir(run)
    assert modes(run) == {
        ".": 0o777,
        "job.json": 0o600,
        "train.py": 0o666,
        "mine": 0o777,
        "mine/notes": 0o666,
        "logs": 0o700,
        "logs/x": 0o600,
    }
    assert set(modes(elsewhere).values()) == {0o777, 0o666}


def test_checkpoints_elsewhere_and_the_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    make(store, "step-0000000001/manifest.json", "damaged-1/x", "latest.json")
    make(Path(RUNS), "mine/job.json", "others/job.json")
    assert close_to_others(RUNS / "mine", load_config([("x", {"checkpoint.disk.path": str(store), "steps": 1})])) == ""
    assert set(modes(store).values()) == {0o700, 0o600}
    runs = modes(RUNS)
    assert (runs["."], runs["mine"], runs["mine/job.json"], runs["others"]) == (0o700, 0o700, 0o600, 0o777)
    make(store, "notes")
    close_store(store)
    assert (modes(store)["."], modes(store)["notes"], modes(store)["latest.json"]) == (0o777, 0o666, 0o600)


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_reader_that_holds_the_file_is_in_nobodys_way(tmp_path: Path, how: int) -> None:
    with run_lock(tmp_path):
        pass
    with open(tmp_path / LOCK_FILE, "rb") as reader:
        fcntl.flock(reader, how)
        assert not is_locked(tmp_path)
        with run_lock(tmp_path):
            assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_readers_that_poll_are_in_nobodys_way(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from everstep.runtime.files.run_lock import is_locked\n"
        "print(flush=True)\nwhile True: is_locked(Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        for _ in range(600):  # a reader that took the lock was met after 50 turns
            with run_lock(tmp_path):
                assert is_locked(tmp_path)
        assert reader.poll() is None
        reader.kill()


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match=rf"still running in .*\(process {os.getpid()}\)"), run_lock(tmp_path):
            pass
        (tmp_path / LOCK_FILE).write_text("")
        with pytest.raises(ConfigError, match=r"another --run-dir$"), run_lock(tmp_path):
            pass


@pytest.mark.parametrize("name", ["lock", "events.jsonl", "logs", "final", "ledger", "report.html", ".job.json.1"])
def test_a_job_begins_in_no_directory_with_links_of_its_names(tmp_path: Path, name: str) -> None:
    make(tmp_path / "elsewhere", "x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(ConfigError, match=r"symbolic link|cannot write"), run_lock(tmp_path / "run"):
        pass
    assert (tmp_path / "elsewhere" / "x").read_bytes() == b""


def test_linked_checkpoints_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match=f"checkpoint.disk.path={tmp_path}/disk"), run_lock(tmp_path / "run"):
        pass
    with pytest.raises(ConfigError, match=r"checkpoint\.disk\.path"):
        checkpoints_in(tmp_path / "run")


def test_a_job_begins_in_no_directory_with_names_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(below, "_makers", {tmp_path.stat().st_dev: OTHER})
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    if os.getuid() == 0:
        os.chown(tmp_path, OTHER, OTHER)
        refuse_foreign(tmp_path)  # what is root's is no other user's
        os.chown(tmp_path / "checkpoints", OTHER + 1, OTHER + 1)
    with pytest.raises(ConfigError, match="belongs to another user") as caught:
        refuse_foreign(tmp_path)
    assert os.getuid() or f"cannot use {tmp_path}/checkpoints: " in str(caught.value)


def test_a_link_of_another_name_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to("/dev/null")
    with run_lock(tmp_path):
        pass


def test_drafts_of_killed_writers_are_swept(tmp_path: Path) -> None:
    make(
        tmp_path,
        ".coordinator.json.77",
        "final/.model.safetensors.5",
        "final/.model.safetensors.partial",
        ".mine",
        ".young.1",
        "mine/.x.1",
        "final/.young.2",
    )
    for path in tmp_path.rglob("*"):
        if path.is_file() and "young" not in path.name:
            os.utime(path, (1, 1))
    with run_lock(tmp_path):
        pass
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {".mine", ".young.1", "mine/.x.1", "lock"}


def test_whose_a_directory_is_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owner_words(tmp_path) == ""
    monkeypatch.setattr(private, "whose", lambda _: (0, 1000))
    assert "belongs to root" in owner_words(tmp_path) and "user 1000" in owner_words(tmp_path)
