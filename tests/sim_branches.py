"""`make branches [SEEDS_OF_EACH=1000]`: which branches of the rules in protocol/ does no seed of the simulator take?

So many seeds of each kind are run, with every branch recorded. One that is never taken is either met by seeds that are
drawn otherwise, or listed in sim-branches-unmet.json with the reason why the simulator cannot or need not take it. The
command fails if one is not listed, and if a listed one is taken after all, or is no more.

What lies behind a branch that is never taken is not listed, but does not count as taken either.

A branch is named by its file, its function, its line and the line that would follow; a function that is never entered
counts as one.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).parents[1]
PROTOCOL = ROOT / "src" / "everstep" / "protocol"
UNMET = Path(__file__).with_name("sim-branches-unmet.json")
GUARDS = ("raise InvariantViolation(", "raise ProtocolError(", "check(job.version == ")
"""Where these would follow, no right program goes: such branches do not count."""
KINDS, FIRST, CHUNK = ("", "split", "leased", "operated", "sharded"), 1000, 100


@dataclass(frozen=True, order=True)
class Branch:
    """A way through a function that may be taken. line: "" for the function itself. to: "return" where it ends."""

    file: str
    function: str
    line: str
    to: str

    def __str__(self) -> str:
        way = f": {self.line} -> {self.to}" if self.line else ", never entered"
        return f"{self.file}, {self.function}{way}"


def _run(part: tuple[str, str, int]) -> None:
    """Run a chunk of seeds of one kind."""
    from everstep.sim.scenario import simulate

    path, kind, first = part
    record = coverage.Coverage(data_file=path, branch=True, include=[f"{PROTOCOL}/*"])
    record.start()
    try:
        for seed in range(first, first + CHUNK):
            outcome = simulate(seed, **({kind: True} if kind else {}))
            if not outcome.ok:
                raise RuntimeError(str(outcome))
    finally:
        record.stop()
        record.save()


def measure(seeds: int, folder: Path, processes: int) -> dict[str, Any]:
    """What coverage tells of each file: coverage.py's JSON report."""
    parts = [
        (str(folder / f"{kind or 'plain'}-{first}"), kind, first)
        for first in range(FIRST, FIRST + seeds, CHUNK)
        for kind in KINDS
    ]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        pool.map(_run, parts, chunksize=1)
    whole = coverage.Coverage(data_file=str(folder / "all"), branch=True, include=[f"{PROTOCOL}/*"])
    whole.combine([path for path, _, _ in parts])
    whole.save()
    whole.json_report(outfile=str(folder / "report.json"))
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["files"]
    return found


def unmet(report: dict[str, Any]) -> tuple[list[Branch], int, int]:
    """The branches that were never taken, as far as one comes to them; how many were never taken in all, and how many
    there are."""
    found, never_taken, count = [], 0, 0
    for name, told in sorted(report.items()):
        path = ROOT / name
        lines, file = [line.strip() for line in path.read_text().splitlines()], str(path.relative_to(PROTOCOL))
        functions = list(_functions(ast.parse(path.read_text())))
        missing = set(told["missing_lines"])
        never = {name for name, first, last in functions if first in missing}
        found += [Branch(file, name, "", "") for name in never]
        never_taken += len(never)
        count += told["summary"]["num_branches"] + sum(1 for _ in functions)
        for source, to in told["missing_branches"]:
            inside = [name for name, first, last in functions if first <= source <= last]
            target = "return" if to < 0 else lines[to - 1]
            if target.startswith(GUARDS):
                count -= 1
                continue
            never_taken += 1
            if source not in missing and not never & set(inside):
                found.append(Branch(file, inside[-1] if inside else "", lines[source - 1], target))
    return sorted(found), never_taken, count


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int, int]]:
    """Names of all functions, and the first and the last line of what each does."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body:
                    yield name, body[0].lineno, node.end_lineno or node.lineno
            yield from _functions(node, name)
        else:
            yield from _functions(node, within)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Number of seeds of each kind.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="How many run seeds at once.")
    parser.add_argument("--report", type=Path, help="A report of coverage.py that there is already.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-branches-") as folder:
        if options.report:
            report = json.loads(options.report.read_text())["files"]
        else:
            report = measure(options.seeds, Path(folder), options.processes)
    branches, never_taken, count = unmet(report)
    reasons = {Branch(*one["branch"]): one["why"] for one in json.loads(UNMET.read_text())}
    met = count - never_taken
    print(f"{met} of {count} branches are taken ({met / count:.1%}); {len(reasons)} are listed as never taken")
    print(", ".join(f"{file}: {n}" for file, n in Counter(b.file for b in branches).most_common()))
    unlisted = [branch for branch in branches if branch not in reasons]
    stale = [branch for branch in reasons if branch not in branches]
    for branch in unlisted:
        print(f"never taken: {branch}")
    for branch in stale:
        print(f"listed as never taken, but taken, or gone: {branch}")
    return 1 if unlisted or stale else 0


if __name__ == "__main__":
    sys.exit(main())
