"""What the user's code reads of its surroundings is noted by line, and can be told otherwise; nobody else's is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import datetime, glob, json, os, socket, sys, time, uuid
from everstep.script.ambient import ALL, Ambient, Setting, site
moved = tuple(sys.argv[1:])
real = {"pid": os.getpid(), "host": socket.gethostname(), "hash": hash("a"), "files": sorted(os.listdir("f"))}
ambient = Ambient(Setting(moved=moved, pinned=True))
ambient.install()
__file__ = os.path.abspath("reads.py")
exec(compile(open("reads.py").read(), os.path.abspath("reads.py"), "exec"))
print(json.dumps({"read": read, "real": real, "sites": list(ambient.sites)}))
"""
_READS = """import datetime
read = {"pid": os.getpid()}
read["host"] = socket.gethostname()
read["hash"] = hash("a")
read["number"] = hash(7)
read["files"] = glob.glob("f/*")
read["clock"] = time.time()
read["RANK"] = os.environ.get("RANK")
read["day"] = str(datetime.datetime.now())
read["same"] = isinstance(datetime.datetime.now(), datetime.date)
read["inner"] = Ambient.__name__
import datetime as whole, importlib
read["others"] = importlib.import_module("datetime") is sys.modules["datetime"] is not whole
import random, secrets
read["dice"] = [random.SystemRandom().random(), secrets.randbelow(100)]
read["oldest"] = min(("f/a", "f/b"), key=os.path.getmtime)
read["able"] = os.stat in os.supports_follow_symlinks
"""


def told(folder: Path, *moved: str) -> dict[str, dict[str, object]]:
    (folder / "f").mkdir(exist_ok=True)
    for at, name in enumerate("abc"):
        (folder / "f" / name).touch()
        os.utime(folder / "f" / name, (at, at))
    (folder / "reads.py").write_text(_READS)
    command = [sys.executable, "-c", _SCRIPT, *moved]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("RANK", None)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a script that reads its surroundings."""
    return tmp_path_factory.mktemp("reads")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, dict[str, object]]:
    """Values that the script reads if nothing is told otherwise."""
    return told(folder)


def test_one_line_is_told_another_value_and_the_rest_stays(folder: Path, plain: dict[str, dict[str, object]]) -> None:
    assert plain["read"]["pid"] != plain["real"]["pid"]  # pinned, so that it is the same in every life
    assert plain["read"]["host"] == plain["real"]["host"]
    assert plain == told(folder) | {"real": plain["real"]}
    sites = [name.split("\n") for name in plain["sites"]]
    assert ["socket.gethostname", str(folder / "reads.py"), "3"] in sites
    assert ["os.environ['RANK']", str(folder / "reads.py"), "8"] in sites
    assert any(source.startswith("glob.") and line == "6" for source, _, line in sites), sites
    assert "5" not in [line for _, _, line in sites]  # the hash of a number is the same anywhere
    assert {source for source, _, line in sites if line == "15"} == {"random.random", "secrets.randbelow"}
    other = told(folder, "\n".join(("socket.gethostname", str(folder / "reads.py"), "3")))
    changed = {name for name in plain["read"] if plain["read"][name] != other["read"][name]}
    assert changed == {"host"}


def test_everything_is_told_otherwise(folder: Path, plain: dict[str, dict[str, object]]) -> None:
    other = told(folder, "all")
    same = {name for name in plain["read"] if plain["read"][name] == other["read"][name]}
    assert same == {"number", "same", "inner", "others", "able"}
    assert plain["read"]["others"] is True  # C extensions crash with other classes than the module's own
    assert sorted(map(str, other["read"]["files"])) == sorted(map(str, plain["read"]["files"]))  # type: ignore[call-overload]
    assert plain["read"]["same"] is True
