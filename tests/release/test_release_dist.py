"""What is released: the same bytes twice, and a wheel that runs `everstep demo` in an environment with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import everstep

pytest.importorskip("build.env", reason="the extra [docs] is not installed")

ROOT = Path(__file__).parents[2]
LIMIT_S = 2400


def made(out: Path) -> dict[str, bytes]:
    """Wheel and sdist of the tree as it is."""
    command = [sys.executable, str(ROOT / "deploy" / "make_dist.py"), "--source", str(ROOT), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    made(out)
    return out


@pytest.mark.timeout(3 * LIMIT_S)
def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    again = made(tmp_path / "again")
    names = {f"everstep-{everstep.__version__}-py3-none-any.whl", f"everstep-{everstep.__version__}.tar.gz"}
    assert set(again) == names
    assert again == {path.name: path.read_bytes() for path in dist.iterdir()}


@pytest.mark.timeout(3 * LIMIT_S)
def test_the_wheel_has_all_that_a_job_reads_and_nothing_of_tests(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("everstep/")}
    source = ROOT / "src"
    wanted = [p for p in (source / "everstep").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert held == {str(path.relative_to(source)) for path in wanted}
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        assert {member.uid for member in tar.getmembers()} == {0}


@pytest.mark.timeout(3 * LIMIT_S)
def test_the_wheel_runs_the_demo_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=LIMIT_S)
    python = str(venv / "bin" / "python")
    for wanted in ("torch==2.13.0", str(wheel)):
        done = subprocess.run([python, "-m", "pip", "install", "-q", wanted], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "EVERSTEP"))}
    done = subprocess.run(
        [str(venv / "bin" / "everstep"), "demo"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
