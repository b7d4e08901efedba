"""A script, and what it ends with on one worker; hosts as network namespaces."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines_harness import reference, write_script

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
from net import Net, why_not


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script that joins."""
    return write_script(tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="session")
def alone(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its undisturbed run."""
    return reference(tmp_path_factory.mktemp("alone"), script)


@pytest.fixture
def net() -> Iterator[Net]:
    """Four hosts, which can resolve each other's names, and n0, n1, ... from the second on."""
    why = why_not()
    if why:
        pytest.skip(why)
    found = Net(4)
    names = [f"{host.address} {host.name} n{host.number - 2}" for host in found.hosts]
    folders = [Path("/etc/netns", host.namespace) for host in found.hosts]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    yield found
    found.close()
    for folder in folders:
        shutil.rmtree(folder)
