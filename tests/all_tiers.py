"""`make test`: the tiers that compute, one after the other, beside those that mostly wait for processes.

A tier is a target of the Makefile. One that passes leaves a stamp in build/test, in a folder named for what the tree
holds and what is installed, and is not run again; with CI=true all are run. What a tier prints is kept there, too, and
shown as a whole if it failed. A failure of one tier ends no other one. With arguments, only these tiers are run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extended import ROOT, key

STAMPS = ROOT / "build" / "test"
MADE = {"build", "dist", "runs"}
TIERS = {
    # They leave the processors to what waits: a process that is woken late looks like one that hangs.
    "computing": (("lint",), ("types",), ("computed",)),
    "waiting": (("processes", "KILLS=20"), ("hosts",), ("seeds",)),
}


class Tiers:
    """Runs tiers, and can end all that it runs."""

    def __init__(self, folder: Path, *, again: bool) -> None:
        self._folder = folder
        self._again = again
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._over = False
        self.failed: list[Path] = []

    def run(self, kind: str, wanted: set[str]) -> None:
        """Those of this kind, one after the other."""
        for target in TIERS[kind]:
            if target[0] in wanted and not self._over:
                self._tier(target, ["nice"] if kind == "computing" else [])

    def _tier(self, target: tuple[str, ...], before: list[str]) -> None:
        log, stamp = self._folder / f"{target[0]}.log", self._folder / f"{target[0]}.passed"
        if stamp.exists() and not self._again:
            print(f"{target[0]}: has passed before, in {stamp.read_text()} s: not run again", flush=True)
            return
        command = [*before, os.environ.get("MAKE", "make"), "--no-print-directory", *target]
        print(f"{target[0]}: begins, into {log.relative_to(ROOT)}", flush=True)
        began_s = time.monotonic()
        with open(log, "wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
            with self._lock:
                self._running[process.pid] = process
            code = process.wait()
            with self._lock:
                del self._running[process.pid]
        took_s = f"{time.monotonic() - began_s:.0f}"
        if code == 0:
            stamp.write_text(took_s)
        else:
            self.failed.append(log)
        shown = log.read_text(errors="replace").rstrip().splitlines()[-1:] if code == 0 else []
        print(f"{target[0]}: {'passed' if code == 0 else 'FAILED'}, {took_s} s {' '.join(shown)}".rstrip(), flush=True)

    def end(self) -> None:
        """Ctrl-C to all that is run, the end for what that does not end, and nothing more is begun."""
        self._over = True
        with self._lock:
            running = list(self._running.values())
        for number, patience_s in ((signal.SIGINT, 60.0), (signal.SIGKILL, None)):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)


def tree() -> str:
    """Of all that a result depends on."""
    installed = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    names = sorted(path.name for path in ROOT.iterdir() if path.name not in MADE and not path.name.startswith("."))
    return key(names, "\n".join([sys.version, *installed]))


def main(names: list[str]) -> int:
    """Returns the exit code."""
    known = {target[0] for targets in TIERS.values() for target in targets}
    if unknown := set(names) - known:
        print(f"expected tiers of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    folder = STAMPS / tree()
    for old in STAMPS.glob("*"):
        if old != folder:
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores the former, and so would tiers
        signal.signal(number, signal.default_int_handler)
    tiers, began_s = Tiers(folder, again=os.environ.get("CI") == "true"), time.monotonic()
    with ThreadPoolExecutor(len(TIERS)) as pool:
        try:
            for done in [pool.submit(tiers.run, kind, set(names) or known) for kind in TIERS]:
                done.result()
        except KeyboardInterrupt:
            tiers.end()
            return 130
    for log in tiers.failed:
        print(f"\n{'=' * 40} FAILED: {log.stem} ({log.relative_to(ROOT)})\n{log.read_text(errors='replace')}")
    said = f"FAILED: {', '.join(log.stem for log in tiers.failed)}" if tiers.failed else "all passed"
    print(f"{said}, {time.monotonic() - began_s:.0f} s")
    return 1 if tiers.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
