"""Below a run directory that somebody else prepared: no link is followed, and nothing but the right regular file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.base import below
from everstep.base.below import (
    ANEW,
    APPEND,
    NEW,
    drafted,
    folder_of,
    home,
    keep_to,
    leave,
    moved,
    open_below,
    placed,
    refuse_moved,
    whose,
    write_atomically,
)
from everstep.base.given import open_given, read_given, read_json

OTHER = 4711


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "authorized_keys"
    path.parent.mkdir()
    path.write_text("mine")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize("flags", [os.O_RDONLY, APPEND, ANEW, NEW, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("name", ["lock", "logs/x.log"])
def test_a_link_is_not_followed_below_and_what_it_leads_to_stays(
    run_dir: Path, victim: Path, flags: int, name: str
) -> None:
    (run_dir / name).symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic link|File exists"):
        open_below(run_dir / name, flags, name.count("/"))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("make", [False, True])
def test_nor_is_one_on_the_way(run_dir: Path, victim: Path, make: bool) -> None:
    (run_dir / "final").symlink_to(victim.parent)
    for act in (
        lambda path: open_below(path, ANEW, 1, make=make),
        lambda path: write_atomically(path, "x", 1, make=make),
        lambda path: read_given(path, folders=1),
    ):
        with pytest.raises(OSError, match="symbolic link") as caught:
            act(run_dir / "final" / victim.name)
        assert caught.value.filename == str(run_dir / "final")
    assert victim.read_text() == "mine" and os.listdir(victim.parent) == [victim.name]


def test_links_to_the_directory_are_followed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(run_dir)
    write_atomically(tmp_path / "alias" / "final" / "x", "1", 1, make=True)
    assert (run_dir / "final" / "x").read_text() == "1" and read_json(tmp_path / "alias/final/x", folders=1) == 1


def test_a_draft_replaces_a_link_and_leaves_nothing(run_dir: Path, victim: Path) -> None:
    (run_dir / "report.html").symlink_to(victim)
    write_atomically(run_dir / "report.html", "page")
    assert victim.read_text() == "mine" and (run_dir / "report.html").read_text() == "page"
    with pytest.raises(ZeroDivisionError), drafted(run_dir / "x"):
        raise ZeroDivisionError
    with drafted(run_dir / "y") as draft:
        draft.write_text("y")
        placed(draft, "y")
    assert sorted(os.listdir(run_dir)) == ["logs", "report.html", "y"]
    assert (run_dir / "y").stat().st_mode & 0o777 == 0o600


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize("make", [fifo, unix_socket, Path.mkdir])
@pytest.mark.parametrize("flags", [os.O_RDONLY, APPEND, os.O_RDWR | os.O_CREAT])
def test_what_is_no_regular_file_is_refused_without_waiting(
    run_dir: Path, make: Callable[[Path], None], flags: int
) -> None:
    make(run_dir / "events.jsonl")
    with pytest.raises(OSError, match=r"not a regular file|directory"):
        open_below(run_dir / "events.jsonl", flags)


def test_a_file_of_another_user_is_not_written_and_not_cut_but_read(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "lock").write_text("theirs")
    monkeypatch.setattr(below, "_makers", {run_dir.stat().st_dev: OTHER})
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    if run_dir.stat().st_uid:  # a directory of another user
        with pytest.raises(PermissionError, match=f"belongs to another user .* {OTHER}"):
            write_atomically(run_dir / "report.html", "page")
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_below(run_dir / "lock", ANEW)
    assert read_given(run_dir / "lock") == b"theirs"


def test_who_owns_is_seen_from_what_is_made_there(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File servers and user namespaces give files another owner than the process has."""
    monkeypatch.setattr(below, "_makers", {})
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    (run_dir / "lock").write_text("ours")
    os.close(open_below(run_dir / "lock", ANEW))
    assert (run_dir / "lock").read_bytes() == b"" and sorted(os.listdir(run_dir)) == ["lock", "logs"]
    owner = run_dir.stat().st_uid
    assert whose(run_dir) == (owner, owner)


def test_what_a_user_names_may_be_a_link(run_dir: Path, victim: Path) -> None:
    (run_dir / "key").symlink_to(victim)
    assert read_given(run_dir / "key", links=True) == b"mine"
    with open_given(run_dir / "key", links=True) as file:
        assert file.read() == b"mine"
    with drafted(run_dir / "key", None) as draft, folder_of(run_dir / "key") as folder:
        assert draft.parent.samefile(f"/proc/self/fd/{folder}")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_nothing_is_written_into_another_directory_of_the_same_name(tmp_path: Path, how: str, again: bool) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    keep_to(run_dir)
    try:
        assert moved(run_dir) == ""
        if how == "moved":
            run_dir.rename(tmp_path / "there")
        else:
            run_dir.rmdir()
        if again:
            run_dir.mkdir()
        assert moved(run_dir) == (f"was moved to {tmp_path / 'there'}" if how == "moved" else "was removed")
        there = home(run_dir)
        assert there is None if how == "removed" else there is not None and there.samefile(tmp_path / "there")
        for folders in (0, 1):
            with pytest.raises(OSError):
                open_below(run_dir.joinpath(*["logs"] * folders, "a.log"), APPEND, folders, make=True)
        with pytest.raises(OSError):
            refuse_moved(run_dir / "checkpoints")
        assert run_dir.exists() == again and not list(run_dir.glob("*"))
    finally:
        leave(run_dir)
