"""Memory that is planned for FSDP, beside the peak that torch's own tracker finds on a fake mesh of 32 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep.cost.models import ModelShape

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from plan_tables import TRACKED, tracked_gib

SCRIPT = Path(__file__).parents[1] / "fsdp_tracked.py"
SMALL = ModelShape(4, 1024, 16, 32_000, 2048, None, 4096, True)
LARGE = ModelShape(40, 5120, 40, 32_000, 2048, None, 13824, True)


def tracked(shape: ModelShape, recompute: str) -> float:
    sizes = map(str, (shape.layers, shape.hidden, shape.heads, shape.width))
    done = subprocess.run([sys.executable, SCRIPT, *sizes, recompute], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.longer
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.longer)])
def test_a_small_model(recompute: str) -> None:
    assert tracked_gib(recompute, SMALL) == pytest.approx(tracked(SMALL, recompute), rel=0.15)


@pytest.mark.longer
@pytest.mark.parametrize(("recompute", "gib"), TRACKED)
def test_the_13b_of_the_documentation(recompute: str, gib: float) -> None:
    found = tracked(LARGE, recompute)
    assert tracked_gib(recompute, LARGE) == pytest.approx(found, rel=0.15)
    assert found == pytest.approx(gib, rel=0.1)
