"""Sends new parts of a directory's files to another host: an agent's to the head, or the head's to a standby host.

The receiver says how many bytes of each file it has, and the sender goes on from that byte. The files themselves thus
store all that is on the way: a broken connection loses nothing, and an absent receiver costs only disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from everstep.base.given import open_given
from everstep.observe.events import say
from everstep.protocol.messages import FilePiece, FilePieces, FilesHeld
from everstep.runtime.files.file_sets import FileSet, comes_last

PIECE_BYTES = 512 << 10
MOST_PIECES = 100
"""Most pieces in one message."""
_MOST_LINE_BYTES = 8 << 20
_READ_BYTES = 1 << 20
_FIRST_BYTES = 4096
_LOOK_S = 0.1
_ANSWER_S = 5.0
_SHARE = 10
"""A sender to a standby host reads at most one part in so many of the time; at most two read at once."""
_READING = threading.Semaphore(2)


@dataclass
class _File:
    """One file. key: changes with the content of a file that is sent whole, as far as that shows without reading it,
    and with the first line of one that grows: a new file may get the number of one that is gone. version: as
    `FilePiece` has it, "" until it is needed. held: number of bytes that the receiver has; asked: whether the receiver
    has said so."""

    path: Path
    whole: bool
    key: tuple[int, ...]
    version: str
    size: int
    held: int = 0
    asked: bool = False


class FileSender:
    """Sends one message at a time, from a thread of its own. files: of the set `kind`, as `FileSet.found` lists them.

    source: the word of the directory. send: to the receiver; never blocks. mirrors: the receiver keeps identical files,
    so a file that shrank is sent again from its first byte, and the receiver is told if nothing is new, too. each_turn:
    called in the thread at each look with the digest, by name, of each file that has arrived whole.
    """

    def __init__(
        self,
        kind: FileSet,
        files: Callable[[], Iterable[tuple[str, Path]]],
        source: str,
        send: Callable[[FilePieces], None],
        *,
        mirrors: bool = False,
        each_turn: Callable[[dict[str, str]], None] = lambda arrived: None,
    ) -> None:
        self._kind, self._list, self._send = kind, files, send
        self._mirrors, self._each_turn = mirrors, each_turn
        self._files: dict[str, _File] = {}
        self._message = FilePieces(source=source, number=0)
        self._waits = False  # for the answer to that message
        self._began_s = self._pause_s = 0.0
        self._all_there_s = -1.0
        self._failed = ""
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="everstep-file-sender", daemon=True)
        self._thread.start()

    def answered(self, answer: FilesHeld) -> float | None:
        """Take in an answer. Any thread. Returns the (monotonic) moment as of which the receiver has all files; None if
        it lacks something, or if nobody waits for this answer."""
        with self._changed:
            if not self._waits or answer.number != self._message.number:
                return None
            self._waits = False
            self._changed.notify_all()
            moved = False
            for piece in self._message.pieces:
                file = self._files[piece.path]
                there = answer.held.get(piece.path)
                moved |= there is not None and (there > file.held or not file.asked)
                file.held, file.asked = file.held if there is None else there, there is not None
            if moved and (self._message.rest or not self._mirrors):
                self._pause_s = 0.0  # if nothing moved: its disk may be full
            return self._began_s if answer.has_all(self._message) else None

    def ask_again(self) -> None:
        """Ask again how much is there, over a new connection: messages sent over the old one may be lost."""
        with self._changed:
            self._waits = False
            self._ask_again(self._files)
            self._changed.notify_all()

    def held(self, name: str) -> int:
        """Number of bytes of a file that the receiver has."""
        with self._changed:
            file = self._files.get(name)
            return file.held if file is not None and file.asked else 0

    def finish(self, since_s: float, timeout_s: float) -> bool:
        """Wait until all bytes of this (monotonic) moment have arrived, and none are new; returns the result."""
        with self._changed:
            return self._changed.wait_for(lambda: self._all_there_s > since_s and not self._failed, timeout_s)

    def stop(self) -> None:
        """Send nothing more. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing more, and read no file."""
        self.stop()
        self._thread.join(timeout=5.0)

    # ---- the thread

    def _run(self) -> None:
        said = {""}
        while self._turn_comes():
            begin_s = time.monotonic()
            with _READING:
                files, pieces, rest, failed = self._look()
            if failed not in said:
                said.add(failed)
                say(f"warning: files cannot be sent to another host: {failed}")
            self._each_turn({n: f.version for n, f in files.items() if f.whole and f.asked and f.held >= f.size})
            with self._changed:
                self._files, self._failed, self._began_s = files, failed, begin_s
                self._pause_s = max(_LOOK_S, _SHARE * (time.monotonic() - begin_s) if self._mirrors else 0.0)
                if not pieces and not self._mirrors:
                    self._all_there_s = begin_s
                    self._changed.notify_all()
                    continue
                number = self._message.number + 1
                self._message = FilePieces(source=self._message.source, number=number, pieces=pieces, rest=rest)
                self._waits = True
            self._send(self._message)

    def _turn_comes(self) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._waits, _ANSWER_S):
                self._waits = False
                self._ask_again(piece.path for piece in self._message.pieces)
            if self._pause_s:
                self._changed.wait_for(lambda: self._closed, self._pause_s)
            return not self._closed

    def _ask_again(self, names: Iterable[str]) -> None:
        for name in names:
            self._files[name].asked = False

    def _look(self) -> tuple[dict[str, _File], list[FilePiece], bool, str]:
        """Look at the files: (the files now, the pieces to send next, whether there are more, why some file cannot be
        read). An unreadable file holds up nothing but the digest of the weights, if it is one of theirs."""
        files: dict[str, _File] = {}
        pieces: list[FilePiece] = []
        room, rest, lacking, failed = PIECE_BYTES, False, False, ""
        try:
            found = self._list()
        except OSError as error:
            return self._files, [], True, str(error)
        for name, path in found:
            try:
                file = self._seen(name, path)
                if file is None:
                    continue
                files[name] = file
                full = room <= 0 or len(pieces) >= MOST_PIECES
                before = lacking or any(files[piece.path].whole for piece in pieces)
                if full or (comes_last(name) and before):
                    rest |= file.held < file.size or not file.asked
                    continue
                piece = _piece(name, file)
            except FileNotFoundError:
                continue  # it has been replaced, or rotated away
            except OSError as error:
                failed = failed or f"{path}: {error.strerror or error}"
                lacking |= name.startswith("final/")
                continue
            if piece is not None:
                pieces.append(piece)
                room -= len(piece.data)
                rest |= not file.asked or piece.at + len(piece.data) < file.size
        return files, pieces, rest or bool(failed), failed

    def _seen(self, name: str, path: Path) -> _File | None:
        """State of a file; a replaced file begins again. None: it is not sent."""
        found = path.lstat()
        whole = self._kind.whole.fullmatch(name) is not None
        if not stat.S_ISREG(found.st_mode) or not (found.st_size or whole):
            return None
        file = self._files.get(name)
        key: tuple[int, ...] = (found.st_ino, found.st_size, found.st_mtime_ns)
        if not whole and file is not None and (file.key[0], file.size) == key[:2]:
            key = file.key
        elif not whole:
            line = _read(path, name.count("/"), 0, _FIRST_BYTES).partition(b"\n")
            if not line[1] and len(line[0]) < _FIRST_BYTES:
                return None
            key = (found.st_ino, zlib.crc32(line[0]))
        if file is None or file.key != key:
            version = "" if whole else "-".join(map(str, key))
            return _File(path, whole, key, version, found.st_size)
        if self._mirrors and found.st_size < file.held:
            return _File(path, whole, key, f"{found.st_ino}-{found.st_mtime_ns}", found.st_size)
        file.size = found.st_size
        return file


def _piece(name: str, file: _File) -> FilePiece | None:
    """The next piece of a file, None if nothing is to be sent. Raises: OSError."""
    if file.asked and file.held >= file.size:
        return None
    if not file.version:
        file.version = _digest_of(file.path, name.count("/"), file.key)
    where, data = (file.path, name.count("/"), file.held), b""
    if file.asked:
        data = _read(*where, PIECE_BYTES) if file.whole else whole_lines(*where)
        if not (data or file.whole):
            return None
    size = file.size if file.whole else 0
    return FilePiece(path=name, version=file.version, at=file.held, data=data, size=size)


def digest_of(path: Path, folders: int = 0) -> str:
    """BLAKE2b of a file, 32 hex digits. folders: as for `base.below`. Raises: OSError."""
    found = hashlib.blake2b(digest_size=16)
    with open_given(path, folders) as file:
        while data := file.read(_READ_BYTES):
            found.update(data)
    return found.hexdigest()


@functools.lru_cache(maxsize=10_000)
def _digest_of(path: Path, folders: int, key: tuple[int, ...]) -> str:
    """Digest as of `digest_of`, read once by all senders of a process."""
    return digest_of(path, folders)


def whole_lines(path: Path, folders: int, at: int) -> bytes:
    """Bytes of a file from `at` up to the end of a line; b"" if no line has ended yet. folders: as for `base.below`."""
    most = PIECE_BYTES
    while True:
        data = _read(path, folders, at, most)
        cut = data.rfind(b"\n") + 1
        if cut or len(data) < most or most > _MOST_LINE_BYTES:
            return data[:cut] if cut or most <= _MOST_LINE_BYTES else data
        most *= 2


def _read(path: Path, folders: int, at: int, most: int) -> bytes:
    with open_given(path, folders) as file:
        return os.pread(file.fileno(), most, at)
