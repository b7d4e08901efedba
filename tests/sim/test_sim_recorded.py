"""Every promise holds under the first seeds of each kind, and each runs as it was recorded: message by message.

A change that is meant to change no behaviour changes no digest. After one that is, run
`pytest tests/sim/test_sim_recorded.py -m '' -n 0 --rewrite`, and say in the commit message how many seeds of each kind
run differently, and why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from ordinary_seeds import ordinary

from everstep.sim.scenario import SeedKind
from sampling import mostly_longer

CHUNK, SEEDS, IN_SHORT = 20, 300, 60
RECORDED = Path(__file__).with_name("seed-digests.json")
"""By kind, the digests of the seeds from 0, a line for each chunk."""
CASES = [(kind, start) for kind in get_args(SeedKind) for start in range(0, SEEDS, CHUNK)]


@pytest.mark.parametrize(("kind", "start"), mostly_longer(CASES, lambda case: case[1] < IN_SHORT))
def test_every_promise_holds_as_recorded(kind, start, rewrite):
    outcomes = [ordinary(seed, kind) for seed in range(start, start + CHUNK)]
    replayed = f"replay: everstep sim --seed N {'--' * bool(kind)}{kind} --trace"
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not failed, "\n".join([*failed, replayed])
    recorded, line = json.loads(RECORDED.read_text()), start // CHUNK
    found = [outcome.digest for outcome in outcomes]
    if rewrite:
        recorded[kind or "plain"][line] = " ".join(found)
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
        return
    known = recorded[kind or "plain"][line].split()
    others = [seed for seed, was, now in zip(range(start, start + CHUNK), known, found, strict=True) if was != now]
    assert not others, f"seeds {others} run differently; if that is meant: --rewrite, as above; {replayed}"
