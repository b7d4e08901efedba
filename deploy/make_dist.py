"""`make dist`: wheel and sdist of a commit, the same bytes wherever and whenever they are built.

    python deploy/make_dist.py [--out dist] [--source FOLDER]

The sources are those of the commit (`git archive`), or of a folder. Times of files are the commit's, or
SOURCE_DATE_EPOCH. A tag vX.Y.Z of the commit has to name the version of `everstep.__version__`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("build", "dist", "runs", ".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", "out")


def version_of(source: Path) -> str:
    """`everstep.__version__`, by its text."""
    text = (source / "src" / "everstep" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if found is None:
        raise SystemExit('src/everstep/__init__.py: expected __version__ = "X.Y.Z"')
    return found[1]


def check_tags(version: str) -> None:
    """Raises: SystemExit if the commit has a tag of another version."""
    said = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    tags = [tag for tag in said.stdout.split() if re.fullmatch(r"v\d+\.\d+\.\d+.*", tag)]
    if tags and f"v{version}" not in tags:
        raise SystemExit(f"expected the tag v{version}, as everstep.__version__ says, got {', '.join(tags)}")


def epoch() -> int:
    """Seconds since 1970 that all files get."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        return int(given)
    said = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(said.stdout)


def copied(source: Path | None, target: Path) -> Path:
    """The sources in a folder of their own: those of the commit, or of a folder."""
    if source is not None:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
        return target
    target.mkdir()
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(target, filter="data")
    return target


def repacked(path: Path, seconds: int) -> None:
    """Pack an sdist again, with sorted names and no owner, times or modes of this machine."""
    with tarfile.open(path) as tar:
        held = sorted(
            ((one, tar.extractfile(one).read() if one.isfile() else b"") for one in tar.getmembers()),  # type: ignore[union-attr]
            key=lambda pair: pair[0].name,
        )
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in held:
            fresh = tarfile.TarInfo(member.name)
            fresh.type, fresh.size, fresh.mtime = member.type, len(data), seconds
            fresh.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            tar.addfile(fresh, io.BytesIO(data))
    with open(path, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as packed:
        packed.write(raw.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheel and sdist.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--source", type=Path, help="folder to build in place of the commit")
    options = parser.parse_args()
    seconds = epoch()
    os.umask(0o022)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="everstep-dist-") as name:
        source = copied(options.source, Path(name) / "source")
        version = version_of(source)
        check_tags(version)
        for path in source.rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        command = [sys.executable, "-m", "build", "--outdir", str(options.out), str(source)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    repacked(options.out / f"everstep-{version}.tar.gz", seconds)
    for path in sorted(options.out.glob(f"everstep-{version}*")):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


if __name__ == "__main__":
    main()
