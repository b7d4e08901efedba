"""`make mutants`: plants each bug of mutants.json by itself, and shows which test notices it.

A bug is planted in a private copy of the tree, never here. The tests that are likely to notice it run first: those that
noticed it the last time, those of its package, all fast ones, and the simulator where it can meet the bug. The first
failure ends it, and counts if it comes again, and does not come without the bug. Rules about the source (tests/tidy)
and types do not count. What is known of a bug is kept in build/mutants until src or tests change; arguments are ids.

Entries: `id`; `file`, below src/everstep; `old`, which occurs there once, and `new`; `breaks`, what goes wrong. One
that changes nothing says why in `equivalent`, and one whose code is gone in `dropped`; these are not run.
"""

from __future__ import annotations

import ast
import contextlib
import json
import multiprocessing
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from extended import key

ROOT = Path(__file__).parents[1]
CATALOGUE = Path(__file__).with_name("mutants.json")
FOUND, KNOWN = ROOT / "build" / "mutants.json", ROOT / "build" / "mutants"
SIMULATED = ("base", "placement", "order", "protocol")
AT_ONCE = min(2, os.cpu_count() or 1)
OPTIONS = ["-x", "-n", "0", "--tb=short", "--timeout", "120", "-p", "no:cacheprovider"]
OUTPUT = "pytest.txt"
LIMIT_S = 3600
WARM = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Mutant:
    """One bug that may be planted."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    equivalent: str = ""
    dropped: str = ""

    @property
    def path(self) -> Path:
        """Of the file, below the tree that it is planted in."""
        return Path("src/everstep") / self.file


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; killed_by: the id of a test, None: it survived."""

    id: str
    file: str
    killed_by: str | None
    seconds: float


def catalogue() -> list[Mutant]:
    """All of them, in the order of the file."""
    return [Mutant(**entry) for entry in json.loads(CATALOGUE.read_text())]


def misplaced(mutants: Sequence[Mutant], root: Path = ROOT) -> Iterator[str]:
    """In words, what keeps each from being planted."""
    for mutant in mutants:
        where, path = f"{mutant.id} ({mutant.breaks})", root / mutant.path
        text = path.read_text() if path.exists() else ""
        if not mutant.dropped and text.count(mutant.old) != 1:
            yield (
                f"{where}: expected `old` once in {mutant.path}, found it {text.count(mutant.old)} times:\n"
                f"{mutant.old}\n  the code has changed: find where it does the same now, and write that into "
                f"tests/{CATALOGUE.name} as `old` (more of it, if it is there several times), with the same bug as "
                "`new`; if nothing does it any more, say why in `dropped`"
            )
        elif not mutant.dropped and (problem := _no_bug(text, mutant)):
            yield f"{where}: {problem}"


def _no_bug(text: str, mutant: Mutant) -> str:
    planted = text.replace(mutant.old, mutant.new)
    try:
        ast.parse(planted)
    except SyntaxError as error:
        return f"what it makes of {mutant.path} is no Python (line {error.lineno}): mend `new`"
    return "" if planted != text else "expected `new` to differ from `old`"


def ladder(mutant: Mutant, root: Path) -> Iterator[list[str]]:
    """Test files, from those that are likely to notice it quickly to all that have to."""
    package, module = mutant.file.split("/")[0], Path(mutant.file).stem
    tiers = [p for tier in ("unit", "property", "traces") for p in sorted((root / "tests" / tier).rglob("test_*.py"))]
    own = [p for p in tiers if p.parent.name == package or p.name.startswith(f"test_{package}_")]
    near = [p for p in own if module in p.stem]
    groups = [near, [p for p in own if p not in near], [p for p in tiers if p not in own]]
    if package in SIMULATED:
        groups.append(sorted((root / "tests" / "sim").rglob("test_*.py")))
    yield from ([str(p.relative_to(root)) for p in group] for group in groups if group)


class Trees:
    """Private copies of the tree: some to plant in, and one that stays as it is."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._sound = self._copy(folder / "sound")
        self._passes: dict[str, bool] = {}
        self._lock = threading.Lock()
        for number in range(count):
            self._free.put(self._copy(folder / f"planted-{number}"))

    def _copy(self, to: Path) -> Path:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, to / name)
        return to

    def judge(self, mutant: Mutant, hint: str | None) -> Verdict:
        """Plant one, and see."""
        began_s = time.monotonic()
        with self.planted(mutant.path, lambda sound: sound.replace(mutant.old, mutant.new)) as (tree, _):
            first = [[hint]] if hint and (tree / hint.split("::")[0]).exists() else []
            killed_by = self.noticing(tree, [*first, *ladder(mutant, tree)])
        return Verdict(mutant.id, mutant.file, killed_by, round(time.monotonic() - began_s, 1))

    @contextlib.contextmanager
    def planted(self, file: Path, change: Callable[[str], str]) -> Iterator[tuple[Path, str]]:
        """A tree in which one file is changed, inside alone; and the file's text as it was."""
        tree = self._free.get()
        sound = (tree / file).read_text()
        try:
            (tree / file).write_text(change(sound))
            yield tree, sound
        finally:
            (tree / file).write_text(sound)
            self._free.put(tree)

    def noticing(self, tree: Path, rungs: Iterable[list[str]]) -> str | None:
        """The first test of these that fails in this tree, again if it is run again, and not in the sound one."""
        for rung in rungs:
            passed_over: list[str] = []
            while found := failing(tree, rung, passed_over):
                if self._passes_unplanted(found) and failing(tree, [found], ()):
                    return found
                passed_over.append(found)  # by chance, or without the bug too
        return None

    def _passes_unplanted(self, test: str) -> bool:
        test = test.partition("[")[0]  # with all of its values: the bug may change how they are called
        with self._lock:
            if test not in self._passes:
                self._passes[test] = failing(self._sound, [test], ()) is None
                if not self._passes[test]:
                    print(f"  {test} fails without any mutant", file=sys.stderr, flush=True)
            return self._passes[test]


class NoEnd(RuntimeError):
    """Tests of which none has failed did not end in time, or their process died."""


def failing(tree: Path, tests: Sequence[str], without: Sequence[str]) -> str | None:
    """The first test that fails there, None if all pass. Raises: NoEnd, or RuntimeError if that cannot be said."""
    mine, its = WARM.Pipe(duplex=False)
    process = WARM.Process(target=_pytest, args=(its, str(tree), list(tests), list(without)))
    process.start()
    its.close()
    with mine:
        try:
            ended, failed = mine.recv() if mine.poll(LIMIT_S) else ("too late", None)
        except EOFError:
            ended, failed = "dead", None
    if ended == "too late":
        process.kill()
    process.join()
    if ended in (0, 5) or failed is not None:  # 5: nothing was left to run
        return failed
    kind = NoEnd if ended in ("too late", "dead") else RuntimeError
    raise kind(f"{tests[0]} and others: pytest ended ({ended}), but no test has failed: {tree / OUTPUT}")


def _pytest(told: Connection, tree: str, tests: list[str], without: list[str]) -> None:
    """In a process of its own, a fork of one that has imported what is slow, and nothing of ours."""
    os.chdir(tree)
    with open(OUTPUT, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ |= {"PYTHONPATH": f"{tree}/src", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:] = [f"{tree}/src", *(p for p in sys.path if Path(p) not in (ROOT / "src", ROOT / "tests"))]
    sys.modules["__main__"] = types.ModuleType("__main__")  # or tests of `join` take this file for the user's script
    first = _FirstFailure()
    ended = pytest.main([*OPTIONS, *(f"--deselect={name}" for name in without), *tests], plugins=[first])
    told.send((int(ended), first.id))


class _FirstFailure:
    """Hears of tests, and remembers which one failed."""

    id: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.id is None:
            self.id = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.id is None:
            self.id = report.nodeid


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    mutants, wanted = catalogue(), {name for argument in arguments for name in argument.split(",") if name}
    if unknown := wanted - {mutant.id for mutant in mutants}:
        print(f"expected ids of {CATALOGUE.name}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if problems := list(misplaced(mutants)):
        print("\n".join(problems), file=sys.stderr)
        return 2
    now = key()
    WARM.set_forkserver_preload(["torch", "pytest", "hypothesis", "msgspec", "click", "rich"])
    KNOWN.mkdir(parents=True, exist_ok=True)

    def verdict(mutant: Mutant) -> Verdict:
        kept = KNOWN / f"{mutant.id}.json"
        known = json.loads(kept.read_text()) if kept.exists() else {"key": "", "killed_by": None}
        if known.pop("key") == now:
            return Verdict(**known)
        found = trees.judge(mutant, known["killed_by"])
        kept.write_text(json.dumps({"key": now, **asdict(found)}))
        print(f"  {found.id}: {found.killed_by or 'SURVIVED'}, {found.seconds:.0f} s", flush=True)
        return found

    planted = [m for m in mutants if not m.equivalent and not m.dropped and (not wanted or m.id in wanted)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        trees = Trees(Path(folder), AT_ONCE)
        try:
            verdicts = list(pool.map(verdict, planted))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            return 130
    FOUND.write_text(json.dumps([asdict(found) for found in verdicts], indent=1) + "\n")
    survived = [found.id for found in verdicts if found.killed_by is None]
    print(f"{len(verdicts)} mutants, {len(survived)} survived{': ' if survived else ''}{', '.join(survived)}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
