"""The Grafana dashboard is what Grafana's own schema package says that one is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = Path(sys.prefix) / "grafana"
COMPILER = SCHEMA / "node_modules" / ".bin" / "tsc"
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext")
LIMIT_S = 120.0

pytestmark = pytest.mark.skipif(
    not COMPILER.exists(), reason="Grafana's schema is not there: see tests/install_grafana_schema.sh"
)


def complaints(folder: Path, dashboard: str) -> str:
    """What the compiler says of a dashboard's JSON."""
    (folder / "node_modules").symlink_to(SCHEMA / "node_modules")
    (folder / "package.json").write_text('{"type": "module"}')
    types = (ROOT / "tests" / "integration" / "grafana_types.ts").read_text()
    (folder / "check.ts").write_text(f"{types}\nexport const dashboard: Checked = {dashboard};\n")
    done = subprocess.run(
        [str(COMPILER), *OPTIONS, "--target", "es2022", "check.ts"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_dashboard_is_one(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "grafana" / "everstep.json").read_text()
    assert complaints(tmp_path, text) == ""


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ('"mode" : "absolut"', '"mode" : "absolute"'),
        ('"drawStyle" : "lines"', '"drawStyle" : "line"'),
        ('"grid" :', '"gridPos" :'),
        ('"sort" : "down"', '"sort" : "desc"'),
    ],
)
def test_what_is_none_is_noticed(tmp_path: Path, wrong: str, right: str) -> None:
    text = (ROOT / "deploy" / "grafana" / "everstep.json").read_text()
    assert text.count(right) > 0
    said = complaints(tmp_path, text.replace(right, wrong, 1))
    assert re.search(r"check.ts\(\d+,\d+\): error TS", said), said
