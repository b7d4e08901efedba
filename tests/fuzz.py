"""Changes inputs of parsers for as long as one likes: `python tests/fuzz.py [--seconds N] [NAME ...]`.

Goes on where it was: the rounds that each parser has passed are counted in build/fuzz, and inputs that were wrong are
kept beside, and tried first. Exit code 1 if a parser did what it must not; what it was given is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from fuzz_targets import FuzzTarget, changed, targets, try_one

FOLDER = Path("build") / "fuzz"
ROUND = 500
MEMORY_BYTES = 8 << 30


def one_round(target: FuzzTarget, number: int) -> None:
    """Raises what the parser must not."""

    @seed(number)
    @settings(
        max_examples=ROUND,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=DirectoryBasedExampleDatabase(FOLDER / "examples"),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    @given(changed(target.samples), st.booleans())
    def check(text: bytes, mended: bool) -> None:
        given_text = target.mend(text) if mended else text
        try:
            try_one(target, given_text)
        except Exception as error:
            error.add_note(f"{target.name} was given {given_text!r}"[:4000])
            raise

    check.hypothesis.inner_test.__qualname__ = f"fuzz {target.name}"  # type: ignore[attr-defined]
    check()


def main() -> int:
    """Fuzz the parsers that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each parser")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    for target in targets():
        if asked.names and target.name not in asked.names:
            continue
        state = FOLDER / f"{target.name.replace(' ', '-')}.json"
        rounds = json.loads(state.read_text())["rounds"] if state.exists() else 0
        before, end_s = rounds, time.monotonic() + asked.seconds
        try:
            while rounds == before or time.monotonic() < end_s:
                one_round(target, rounds)
                rounds += 1
                state.write_text(json.dumps({"rounds": rounds}))
        except Exception:
            traceback.print_exc()
            failed.append(target.name)
        word = "FAILED" if target.name in failed else "ok"
        print(f"{target.name:10} {word:6} {(rounds - before) * ROUND} inputs, {rounds * ROUND} in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
