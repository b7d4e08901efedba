"""Things that differ from process to process, as the user's code reads them: clocks, ids, names of hosts, variables of
the environment, the order of a folder.

A life is told other values of all of them, or of the ones that certain lines read, and nothing else. So a comparison
shows which line's reading the training depends on. Only calls from the user's files are answered so, directly or by way
of the standard library.
"""

from __future__ import annotations

import builtins
import datetime
import itertools
import os
import platform
import random
import re
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch

from everstep.script.reachable import of_user

ALL = "all"
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
this_thread = threading.get_ident  # the original
_telling: set[int] = set()  # threads
_OURS = f"{os.path.dirname(os.path.dirname(__file__))}/"
_LATER_S = 100_003.37
_PINNED_S, _TICK_S = 1_700_000_000.0, 1e-3
RESEEDING = ("torch.seed", "torch.random.seed", "random.seed", "numpy.random.seed")
"""Functions that seed a generator by chance if they get no seed."""
_EXEMPT = ("EVERSTEP_", "PYTHON", "OMP_", "MKL_", "CUDA", "CUBLAS", "WANDB", "TORCH")
"""Beginnings of variables that stay as they are: what is pinned for all workers, and settings of libraries."""


@dataclass(frozen=True)
class Setting:
    """What a life is told. moved: sites whose readings are other values (`ALL`: every site). pinned: the rest do not
    change from life to life. still: pinned clocks do not even advance."""

    moved: tuple[str, ...] = ()
    pinned: bool = False
    still: bool = False


def site(source: str, file: str, line: int) -> str:
    """Name of one reading: what is read, and where."""
    return f"{source}\n{file}\n{line}"


def parts_of(name: str) -> tuple[str, str, int]:
    """Source, file and line of a site."""
    source, file, line = name.split("\n")
    return source, file, int(line)


@dataclass
class Ambient:
    """What one process reads of its surroundings. sites: all readings by the user's code so far, in order."""

    setting: Setting
    sites: dict[str, None] = field(default_factory=dict)
    _steps: int = 0
    _ids: dict[int, int] = field(default_factory=dict)
    _ticks: Iterator[int] = field(default_factory=itertools.count)
    _draws: Iterator[int] = field(default_factory=itertools.count)

    def install(self) -> None:
        """Stand between the user's code and its surroundings, for the rest of this process."""
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
            self._wrap(time, name, f"time.{name}", self._seconds, self._pinned_seconds)
            self._wrap(time, f"{name}_ns", f"time.{name}_ns", self._later_ns, self._pinned_ns)
        for name in ("localtime", "gmtime", "strftime", "ctime"):
            self._wrap(time, name, f"time.{name}", self._time_words(name), None)
        for owner, name, title in (
            (os, "getpid", "os.getpid"),
            (os, "getppid", "os.getppid"),
            (os, "cpu_count", "os.cpu_count"),
            (threading, "get_ident", "threading.get_ident"),
            (threading, "get_native_id", "threading.get_native_id"),
            (torch, "get_num_threads", "torch.get_num_threads"),
        ):
            self._wrap(owner, name, title, lambda value: (value or 0) + 1, self._counted(name))
        for owner, title in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
            other = lambda _: "another-host-1"  # noqa: E731
            self._wrap(owner, title, f"{owner.__name__}.{title}", other, None)
        self._wrap(os, "uname", "os.uname", lambda v: os.uname_result((v[0], "another-host-1", *v[2:])), None)
        self._wrap(os, "getloadavg", "os.getloadavg", lambda v: tuple(x + 1.0 for x in v), lambda _: (0.5, 0.5, 0.5))
        drawn = lambda v: random.Random(next(self._draws)).randbytes(len(v))  # noqa: E731
        turned = lambda v: bytes(b ^ 0x55 for b in v)  # noqa: E731
        self._wrap(os, "urandom", "os.urandom", turned, lambda v: bytes(len(v)))
        self._wrap(random, "_urandom", "os.urandom", turned, drawn)  # of SystemRandom and secrets, which may draw again
        self._wrap(os, "listdir", "os.listdir", lambda v: v[::-1], None)
        self._wrap(os, "scandir", "os.scandir", lambda found: _Entries(list(found)[::-1]), None)
        for name in ("stat", "lstat", "fstat"):
            self._wrap(os, name, f"os.{name}", _other_times, None)
        self._wrap(builtins, "hash", "hash", lambda value: value ^ 0x5BD1, None, texts_only=True)
        self._wrap(builtins, "id", "id", lambda value: value + 16 * 4099, self._numbered)
        for owner, title in zip((torch, torch.random, random, np.random), RESEEDING, strict=True):
            self._seed(owner, title)
        self._environment()
        self._datetime()

    def turn(self, step: int) -> None:
        """This step is done: clocks that are moved jump, so that spans of time are others, too."""
        self._steps = step

    # ---- one source

    def _wrap(
        self,
        owner: Any,
        name: str,
        source: str,
        moved: Callable[[Any], Any],
        pinned: Callable[[Any], Any] | None,
        texts_only: bool = False,
    ) -> None:
        """moved, pinned: from the real value to the one that is told."""
        real = getattr(owner, name, None)
        if real is None:
            return

        def told(*args: Any, **more: Any) -> Any:
            value, thread = real(*args, **more), this_thread()
            if (texts_only and not isinstance(args[0], str | bytes)) or thread in _telling:
                return value
            _telling.add(thread)  # whose file a caller is may be asked of the disk
            try:
                return self._told(source, value, moved, pinned, _caller(1))
            finally:
                _telling.discard(thread)

        vars(owner)[name] = told
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in able:
                able.add(told)

    def _told(
        self,
        source: str,
        value: Any,
        moved: Callable[[Any], Any],
        pinned: Callable[[Any], Any] | None,
        caller: tuple[str, str, int] | None,
    ) -> Any:
        if caller is None:
            return value
        by, file, line = caller
        name = site(by if by and source in ("os.scandir", "os.listdir", "os.urandom") else source, file, line)
        self.sites.setdefault(name)
        if self.setting.pinned and pinned is not None:
            value = pinned(value)
        return moved(value) if name in self.setting.moved or ALL in self.setting.moved else value

    def _seed(self, owner: Any, title: str) -> None:
        """Note calls that seed global generators with what no run has twice. They are left alone."""
        real = owner.seed

        def seed(*args: Any, **more: Any) -> Any:
            if not more and (not args or args[0] is None):
                self._told(title, None, lambda value: value, None, _caller(1))
            return real(*args, **more)

        vars(owner)["seed"] = seed

    # ---- values

    def _seconds(self, value: float) -> float:
        return value + _LATER_S * (1 + self._steps)

    def _later_ns(self, value: int) -> int:
        return value + int(_LATER_S * 1e9) * (1 + self._steps) + 12_345

    def _pinned_seconds(self, _: float) -> float:
        return _PINNED_S + (0.0 if self.setting.still else _TICK_S * next(self._ticks))

    def _pinned_ns(self, _: int) -> int:
        return int(self._pinned_seconds(0.0) * 1e9)

    def _counted(self, name: str) -> Callable[[Any], Any] | None:
        return None if name in ("cpu_count", "get_num_threads") else lambda _: 4_242

    def _numbered(self, value: int) -> int:
        return self._ids.setdefault(value, 140_000_000_000_000 + 64 * len(self._ids))

    def _time_words(self, name: str) -> Callable[[Any], Any]:
        real, plain = getattr(time, name), time.time
        later: dict[str, Callable[[], Any]] = {
            "localtime": lambda: real(self._seconds(plain())),
            "gmtime": lambda: real(self._seconds(plain())),
            "ctime": lambda: real(self._seconds(plain())),
        }
        return lambda value: later[name]() if name in later else f"{value}1"

    def _environment(self) -> None:
        real = type(os.environ).__getitem__

        def told(environ: Any, key: Any) -> Any:
            value = real(environ, key) if key in environ._data or _encoded(environ, key) in environ._data else None
            if isinstance(key, str) and not key.startswith(_EXEMPT):
                value = self._told(f"os.environ[{key!r}]", value, _other_text, None, _caller(1))
            if value is None:
                return real(environ, key)
            return value

        os.environ.__class__.__getitem__ = told  # type: ignore[method-assign]

    def _datetime(self) -> None:
        ambient, real, date = self, datetime.datetime, datetime.date
        later = datetime.timedelta(seconds=_LATER_S)
        pinned = real(2024, 1, 2, 3, 4, 5)

        def told(name: str, value: Any, fixed: Any) -> Any:
            return ambient._told(name, value, lambda v: v + later * (1 + ambient._steps), lambda _: fixed, _caller(2))

        def now(_: Any, tz: Any = None) -> Any:
            return told("datetime.now", real.now(tz), pinned if tz is None else pinned.replace(tzinfo=tz))

        def utcnow(_: Any) -> Any:
            return told("datetime.utcnow", real.now(datetime.UTC).replace(tzinfo=None), pinned)

        def today(_: Any) -> Any:
            return told("datetime.today", real.now(), pinned)

        def day(_: Any) -> Any:
            return told("date.today", date.today(), pinned.date())

        moment = {"now": classmethod(now), "utcnow": classmethod(utcnow), "today": classmethod(today)}
        told_so = ModuleType(datetime.__name__)
        vars(told_so).update(vars(datetime))
        vars(told_so)["datetime"] = _of(real)("datetime", (real,), moment)
        vars(told_so)["date"] = _of(date)("date", (date,), {"today": classmethod(day)})
        _import_for_users(told_so)


def _import_for_users(other: ModuleType) -> None:
    """From now on the user's files import this in place of the module of its name. All others get that module: C
    extensions crash without its own classes."""
    real = builtins.__import__

    def imported(name: str, names: Any = None, *more: Any, **options: Any) -> Any:
        if name == other.__name__ and of_user((names or {}).get("__file__")):
            return other
        return real(name, names, *more, **options)

    vars(builtins)["__import__"] = imported


def _of(plain: type) -> Any:
    """Metaclass of a class that stands for `plain`: its objects count as the class's own."""

    class Kind(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, plain)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, plain)

    return Kind


class _Entry:
    """An entry of `os.scandir` with other times."""

    def __init__(self, entry: os.DirEntry[Any]) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self._entry.path

    def stat(self, **how: Any) -> Any:
        """As the original's, with other times."""
        return _other_times(self._entry.stat(**how))


class _Entries:
    """The entries of `os.scandir`, in another order, with other times."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return _Entry(next(self._entries))

    def close(self) -> None:
        """As the original's."""


def _other_times(value: os.stat_result) -> Any:
    """What is known of a file, with other times: the oldest file is the newest one."""
    made: Any = value.__reduce__()
    kind, (numbers, more) = made
    turned = {name: (4 * 10**18 if name.endswith("_ns") else 4e9) - at for name, at in more.items() if "time" in name}
    return kind((*numbers[:7], *(4_000_000_000 - at for at in numbers[7:])), {**more, **turned})


def _encoded(environ: Any, key: Any) -> Any:
    try:
        return environ.encodekey(key)
    except (TypeError, UnicodeError):
        return key


def _other_text(value: str | None) -> str:
    """Another value of a variable: the next number if it is one, else a longer text."""
    if value is None:
        return "1"
    try:
        return str(int(value) + 1)
    except ValueError:
        pass
    try:
        return str(float(value) * 1.5 + 0.25)
    except ValueError:
        return f"{value}-2"


@cache
def _kind_of(filename: str) -> str:
    """Our own files and the standard library's are told by their names: `of_user` reads the disk by way of them."""
    if filename.startswith(("<frozen importlib", _OURS)):
        return "other"
    if filename.startswith("<") or (filename.startswith(_STANDARD) and not _INSTALLED.search(filename)):
        return "standard"
    return "user" if of_user(filename) else "other"


def _caller(depth: int) -> tuple[str, str, int] | None:
    """The user's line that a call comes from, with the function of the standard library on the way ("" if none); None
    if it comes from elsewhere."""
    frame: FrameType | None = sys._getframe(depth + 1)
    by = ""
    while frame is not None:
        kind = _kind_of(frame.f_code.co_filename)
        if kind == "user":
            return by, frame.f_code.co_filename, frame.f_lineno
        if kind == "other":
            return None
        by = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None
