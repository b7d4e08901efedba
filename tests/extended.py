"""`make extended`: what takes longer than `make test` allows, in parts; one that has passed is not run again.

A part that passes leaves a stamp in build/extended, in a folder named for what src and tests hold. With arguments, only
these tiers are run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMPS = ROOT / "build" / "extended"
SEEDS, CHUNK = 10_000, 1_000
KINDS = ("", "--split", "--leased", "--operated", "--sharded")
LONGER = re.compile(r"\bmark\.longer|\bmostly_longer\b")
PYTEST = ("-m", "pytest", "-n", "0", "-o", "timeout=3000")


@dataclass(frozen=True)
class Part:
    """What is run by itself: arguments of python."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def seeds(kind: str) -> Iterator[Part]:
    """The simulator, so many seeds at a time. kind: an option of it, or nothing."""
    for first in range(0, SEEDS, CHUNK):
        command = ("-P", "-m", "everstep", "sim", "--seeds", f"{first}:{first + CHUNK}", "--json")
        yield Part(f"seeds{kind.removeprefix('-')}-{first}", (*command, *filter(None, [kind])))


def longer(folder: str) -> list[Part]:
    """What `make test` leaves out of a folder of tests, file by file."""
    files = [path for path in sorted((ROOT / "tests" / folder).glob("test_*.py")) if LONGER.search(path.read_text())]
    return [Part(path.stem, (*PYTEST, "-m", "longer", str(path.relative_to(ROOT)))) for path in files]


def halved(folder: str) -> list[str]:
    """Files of which `make test` takes half the seeds."""
    files = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    return [path.name for path in files if re.search(r"\bimport .*\bseeds\b", path.read_text())]


def random_ones(folder: str) -> list[Part]:
    """Files whose examples are drawn anew each time, with twice as many as in `make test`."""
    return [
        more(f"{folder}/{path.name}", EVERSTEP_TEST_ALL_SEEDS="1")
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    ]


def more(file: str, **environment: str) -> Part:
    """One file of tests, with more of the same than in `make test`."""
    return Part(f"{Path(file).stem}-more", (*PYTEST, "-m", "", f"tests/{file}"), environment)


TIERS = {
    "sim": [part for kind in KINDS for part in seeds(kind)],
    "schedules": [more(f"sim/test_sim_{name}cells.py", EVERSTEP_TEST_SCHEDULES="20000") for name in ("", "staged_")],
    "generations": [more("chaos/test_chaos_leaks.py", EVERSTEP_TEST_GENERATIONS="200")],
    "kills": [
        more("chaos/test_chaos_checkpoints.py", EVERSTEP_TEST_KILLS="200"),
        more("integration/test_object_kills.py", EVERSTEP_TEST_KILLS="200"),
    ],
    "busy": [more("chaos/test_chaos_busy.py", EVERSTEP_TEST_BUSY_S="600")],
    "release": [more("release/test_release_dist.py"), Part("site", ("docs/site/make_site.py",))],
    **{folder: longer(folder) for folder in ("integration", "chaos", "e2e", "hosts", "engines", "split")},
    "sim-tests": [*longer("sim"), *(more(f"sim/{name}", EVERSTEP_TEST_ALL_SEEDS="1") for name in halved("sim"))],
    "property": random_ones("property"),
    "unit": [part for folder in sorted((ROOT / "tests" / "unit").iterdir()) for part in longer(f"unit/{folder.name}")],
}
AT_ONCE = {"sim": os.cpu_count() or 1, "integration": 2, "chaos": 2, "e2e": 2}  # jobs have several processes each


def key(names: Sequence[str] = ("src", "tests", "pyproject.toml"), besides: str = "") -> str:
    """Of all that a result depends on: what these folders and files hold, and anything besides."""
    found = hashlib.sha256(besides.encode())
    paths = [path for name in names for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    for path in sorted(path for path in paths if path.is_file()):
        if "__pycache__" not in path.parts and ".egg-info" not in str(path):
            found.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def run(part: Part, folder: Path) -> str:
    """Returns "done", "done before" or "FAILED". What it prints is kept."""
    log, stamp = folder / f"{part.name}.log", folder / f"{part.name}.done"
    if stamp.exists():
        return "done before"
    begin_s = time.monotonic()
    with open(log, "wb") as out:
        command = [sys.executable, *part.command]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **part.environment}, stdout=out, stderr=out)
    took_s = time.monotonic() - begin_s
    if ended.returncode == 0:
        stamp.touch()
    verdict = "done" if ended.returncode == 0 else "FAILED"
    print(f"  {part.name}: {verdict}, {took_s:.0f} s", flush=True)
    return verdict


def never_seen(folder: Path) -> str:
    """What no seed has met, of all that a driver may say and that may strike."""
    total: Counter[str] = Counter()
    for part in TIERS["sim"]:
        for group, counts in json.loads((folder / f"{part.name}.log").read_text())["coverage"].items():
            total.update({f"{group}: {name}": n for name, n in counts.items()})
    return ", ".join(name for name, n in sorted(total.items()) if not n) or "nothing"


def main(names: list[str]) -> int:
    """Returns the exit code."""
    if unknown := set(names) - set(TIERS):
        print(f"expected tiers of {', '.join(TIERS)}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    folder = STAMPS / key()
    for old in STAMPS.glob("*"):
        if old != folder:
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for tier in names or TIERS:
        begin_s, parts = time.monotonic(), TIERS[tier]
        with ThreadPoolExecutor(AT_ONCE.get(tier, 1)) as pool:
            try:
                verdicts = list(pool.map(lambda part: run(part, folder), parts))
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                return 130
        failed += [p.name for p, verdict in zip(parts, verdicts, strict=True) if verdict == "FAILED"]
        counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(Counter(verdicts).items()))
        print(f"{tier}: {counts}, {time.monotonic() - begin_s:.0f} s", flush=True)
        if tier == "sim" and "FAILED" not in verdicts:
            print(f"  never seen in {len(KINDS) * SEEDS} seeds: {never_seen(folder)}")
    for name in failed:
        print(f"FAILED: {folder / name}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
