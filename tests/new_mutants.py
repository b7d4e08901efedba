"""`make mutants-new SEED=n COUNT=200 [PATHS=protocol/driver,report]`: plants bugs that nobody wrote, drawn from a seed.

The mistakes are those of `mutant_operators`, as many of each kind as of the others. Each is planted by itself in a
private copy of the tree. First run the fast tests that execute its line, by a record that is made once per tree; then,
for a bug in `SIMULATED` code that is left over, the simulator's seeds that execute it, up to `SEEDS` of each kind. A
seed notices it if a promise is broken, or else if it runs otherwise than recorded: both are told apart.
What is known of a bug is kept in build/mutants-new until src or tests change, so a run goes on where it was ended.
Results are in build/mutants-new/SEED.json. Bugs that change nothing are listed in equivalent-mutants.json, each with
its reason; they are counted apart.

TESTS=seeds leaves the tests out: what does the simulator notice by itself?
TESTS=tests/unit/runtime,tests/property runs these alone, which is much faster for one room: a survivor of few tests may
yet be noticed by others.

mutmut and cosmic-ray do one half of this well: neither draws bugs from a seed, or judges them by a simulator.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import coverage

from extended import key
from mutant_operators import Generated, changes, mistakes
from mutants import AT_ONCE, ROOT, SIMULATED, WARM, NoEnd, Trees

FOLDER = ROOT / "build" / "mutants-new"
DIGESTS = ROOT / "tests" / "sim" / "seed-digests.json"
NO_END, OTHERWISE = "tests without an end", "runs otherwise:"
ENDS = {NO_END: "no end", OTHERWISE: "otherwise", "seed": "seeds"}
EQUIVALENT = Path(__file__).with_name("equivalent-mutants.json")
FAST = ("tests/unit", "tests/property", "tests/traces")
TABLE = "tests/unit/base/test_base_times_and_sizes.py"
"""Holds constants of modules, which it reads rather than executes."""
SEEDS, KINDS = 300, ("", "split", "leased", "operated", "sharded")
MOST_TESTS, SEEDS_LIMIT_S = 1500, 300.0


@dataclass(frozen=True)
class Judged:
    """What became of one bug. killer: a test, a seed with its kind, "" if it survived."""

    id: str
    kind: str
    where: str
    old: str
    new: str
    killer: str
    seconds: float


class Executed:
    """Which tests, and which seeds, execute each line of src/everstep."""

    def __init__(self, folder: Path, among: Sequence[str] = FAST) -> None:
        self._tests, self._seeds, self._among = folder / "tests.coverage", folder / "seeds.coverage", among

    def record(self, simulated: bool) -> None:
        """Run the tests once, and seeds if simulated code is meant, unless that was done for this tree."""
        if self._among and not self._tests.exists():
            print("recording which tests execute which lines", flush=True)
            data = {"COVERAGE_FILE": f"{self._tests}.part", "COVERAGE_CORE": "ctrace"}
            options = [
                "--cov=src/everstep",
                "--cov-context=test",
                "--cov-report=",
                "-n",
                str(AT_ONCE),
                "--dist",
                "loadfile",
            ]
            command = [sys.executable, "-m", "pytest", "-q", *options, *self._among]
            ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **data}, stdout=subprocess.DEVNULL)
            if ended.returncode not in (0, 1):  # one that fails here counts for no bug
                raise RuntimeError(f"pytest ended with {ended.returncode}: {' '.join(command)}")
            os.replace(f"{self._tests}.part", self._tests)
        if simulated and not self._seeds.exists():
            print("recording which seeds execute which lines", flush=True)
            parts = [(f"{self._seeds}.{kind or 'plain'}", kind) for kind in KINDS]
            with multiprocessing.get_context("spawn").Pool(AT_ONCE) as pool:
                pool.starmap(_record_seeds, parts)
            whole = coverage.Coverage(data_file=f"{self._seeds}.part")
            whole.combine([part for part, _ in parts])
            whole.save()
            os.replace(f"{self._seeds}.part", self._seeds)

    def tests(self, bug: Generated) -> list[str]:
        """Tests that execute the line, by file; all that execute its file if it is executed by imports alone."""
        if not self._among:
            return []
        by_line = _contexts(self._tests, bug.file)
        found = by_line.get(bug.line, set()) - {""} or {name for names in by_line.values() for name in names} - {""}
        chosen = {name.partition("|")[0].partition("[")[0] for name in found}
        room = f"tests/unit/{bug.file.split('/')[0]}"
        if not chosen and (ROOT / room).is_dir():  # no test runs a line of the file: it is executed by imports alone
            chosen = {room}
        table = [TABLE] if not bug.where and any(TABLE.startswith(one) for one in self._among) else []
        return [*table, *sorted(chosen)[:MOST_TESTS]]

    def seeds(self, bug: Generated) -> list[tuple[int, str]]:
        """Seeds that execute the line, with their kinds."""
        found = _contexts(self._seeds, bug.file).get(bug.line, set()) - {""}
        return sorted((int(number), kind) for number, _, kind in (name.partition(" ") for name in found))


def _contexts(path: Path, file: str) -> dict[int, set[str]]:
    data = coverage.CoverageData(str(path))
    data.read()
    source = str(ROOT / "src" / "everstep" / file)
    return {line: set(names) for line, names in data.contexts_by_lineno(source).items()}


def _record_seeds(path: str, kind: str) -> None:
    from everstep.sim.scenario import simulate

    watched = [str(ROOT / "src" / "everstep" / room / "*") for room in SIMULATED]
    record = coverage.Coverage(data_file=path, include=watched)
    record.start()
    for seed in range(SEEDS):
        record.switch_context(f"{seed} {kind}")
        simulate(seed, **({kind: True} if kind else {}))
    record.stop()
    record.save()


def drawn(seed: int, count: int, paths: Sequence[str]) -> list[Generated]:
    """So many bugs in these files and folders, below src/everstep: of each kind as many as of the others."""
    source = ROOT / "src" / "everstep"
    files = sorted(
        {f for path in paths for f in ([source / path] if path.endswith(".py") else (source / path).rglob("*.py"))}
    )
    kinds: defaultdict[str, list[Generated]] = defaultdict(list)
    for file in files:
        for bug in mistakes(str(file.relative_to(source)), file.read_text()):
            kinds[bug.kind].append(bug)
    chance, found = random.Random(seed), []
    for bugs in kinds.values():
        chance.shuffle(bugs)
    while len(found) < count and kinds:
        name = chance.choice(sorted(kinds))
        one = kinds[name].pop()
        if changes(one, (source / one.file).read_text()):
            found.append(one)
        if not kinds[name]:
            del kinds[name]
    return found


class Judge:
    """Plants bugs, and sees which test or seed notices each."""

    def __init__(self, trees: Trees, executed: Executed, known: Path) -> None:
        self._trees, self._executed, self._known = trees, executed, known

    def __call__(self, bug: Generated) -> Judged:
        kept = self._known / f"{bug.id.replace('/', '+').replace(' ', '_')}.json"
        if kept.exists():
            return Judged(**json.loads(kept.read_text()))
        began_s = time.monotonic()
        with self._trees.planted(Path("src/everstep") / bug.file, bug.planted) as (tree, sound):
            try:
                killer = self._trees.noticing(tree, self._rungs(bug)) or ""
            except NoEnd as error:
                killer = f"{NO_END}: {error}"
            if not killer and bug.file.split("/")[0] in SIMULATED:
                killer = _seed_that_notices(tree, self._executed.seeds(bug))
        took_s = round(time.monotonic() - began_s, 1)
        found = Judged(bug.id, bug.kind, bug.where, sound[bug.begin : bug.end], bug.new, killer, took_s)
        kept.write_text(json.dumps(asdict(found)))
        print(f"  {found.id}: {found.killer or 'SURVIVED'}, {found.seconds:.0f} s", flush=True)
        return found

    def _rungs(self, bug: Generated) -> Iterable[list[str]]:
        """First the tests of the bug's own room, since they are likely to notice it soon."""
        tests, room = self._executed.tests(bug), bug.file.split("/")[0]
        own = [name for name in tests if f"/{room}/" in name or f"test_{room}_" in name]
        return [group for group in (own, [name for name in tests if name not in own]) if group]


def _seed_that_notices(tree: Path, seeds: Sequence[tuple[int, str]]) -> str:
    """The first of these seeds that breaks a promise with this tree's code, or else that runs otherwise; "" if none
    does."""
    mine, its = WARM.Pipe(duplex=False)
    process = WARM.Process(target=_simulate, args=(its, str(tree), list(seeds)))
    process.start()
    its.close()
    try:
        found = str(mine.recv()) if mine.poll(SEEDS_LIMIT_S) else "seeds: no end"
    except EOFError:
        found = "seeds: died"
    process.kill()
    process.join()
    return found


def _simulate(told: Connection, tree: str, seeds: Sequence[tuple[int, str]]) -> None:
    sys.path[:] = [f"{tree}/src", *(p for p in sys.path if Path(p) not in (ROOT / "src", ROOT / "tests"))]
    from everstep.sim.scenario import simulate

    recorded = {kind: " ".join(lines).split() for kind, lines in json.loads(DIGESTS.read_text()).items()}
    differs = ""
    for seed, kind in seeds:
        outcome = simulate(seed, **({kind: True} if kind else {}))
        if not outcome.ok:
            told.send(f"seed {seed} {kind}: {outcome.problem[:150]}")
            return
        if not differs and outcome.digest != recorded[kind or "plain"][seed]:
            differs = f"{OTHERWISE} seed {seed} {kind}"
    told.send(differs)


def equivalent() -> dict[tuple[str, str, str, str], str]:
    """Bugs that change nothing: the reason, by file, function, old and new text."""
    listed = json.loads(EQUIVALENT.read_text())
    return {(one["file"], one["where"], one["old"], one["new"]): one["reason"] for one in listed}


def report(found: Sequence[Judged], path: Path) -> int:
    """Write the results, and say them. Returns how many survived that are not equivalent."""
    same = equivalent()
    reasons = {one.id: same.get((one.id.split(":")[0], one.where, one.old, one.new), "") for one in found}
    path.write_text(json.dumps([{**asdict(one), "equivalent": reasons[one.id]} for one in found], indent=1) + "\n")
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        noticed = next((end for begins, end in ENDS.items() if one.killer.startswith(begins)), "tests")
        end = "equivalent" if reasons[one.id] else noticed if one.killer else "survived"
        rooms[one.id.split("/")[0]][end] += 1
    for room, ends in sorted(rooms.items()):
        noticed = ends["tests"] + ends["no end"] + ends["seeds"] + ends["otherwise"]
        counts = noticed + ends["survived"]
        share = f"{noticed / counts:.0%}" if counts else "none"
        by = (
            f"{ends['tests']} by tests, {ends['no end']} as tests do not end, {ends['seeds']} by seeds that break a "
            f"promise, {ends['otherwise']} by seeds that run otherwise"
        )
        print(f"{room}: {share} of {counts} noticed ({by}); {ends['equivalent']} change nothing")
    survivors = [one for one in found if not one.killer and not reasons[one.id]]
    for one in survivors:
        print(
            f"  survived: {one.id} ({one.where}): {' '.join(one.old.split())[:80]} -> {' '.join(one.new.split())[:80]}"
        )
    return len(survivors)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 if all were noticed."""
    parser = argparse.ArgumentParser(description="Plant bugs that nobody wrote.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--paths", default="", help="files and folders below src/everstep, separated by commas")
    text = "test folders and files that are to notice them, separated by commas; all fast ones if left out"
    parser.add_argument("--tests", default="", help=text)
    chosen = parser.parse_args(arguments)
    source = ROOT / "src" / "everstep"
    rooms = sorted(p.name for p in source.iterdir() if p.is_dir() and p.name not in ("__pycache__", "sim"))
    paths = [path for path in chosen.paths.split(",") if path] or rooms
    if missing := [path for path in paths if not (source / path).exists()]:
        print(f"expected files or folders below src/everstep, got {', '.join(missing)}", file=sys.stderr)
        return 2
    WARM.set_forkserver_preload(["torch", "pytest", "hypothesis", "msgspec", "click", "rich"])
    among = [] if chosen.tests == "seeds" else [path for path in chosen.tests.split(",") if path] or list(FAST)
    known = FOLDER / key(besides=chosen.tests)
    known.mkdir(parents=True, exist_ok=True)
    executed = Executed(known, among)
    executed.record(any(path.split("/")[0] in SIMULATED for path in paths))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        judge = Judge(Trees(Path(folder), AT_ONCE), executed, known)
        try:
            found = list(pool.map(judge, drawn(chosen.seed, chosen.count, paths)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            return 130
    return 1 if report(found, FOLDER / f"{chosen.seed}.json") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
