"""What a worker of any host finds around it before its task is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.base.config import load_config, to_dict
from everstep.cli import worker
from everstep.runtime.link import listening
from everstep.runtime.link.context import WorkerContext
from everstep.train import worker as train_worker

NAMES = ("NCCL_IB_DISABLE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None = None, **settings: object
) -> list[str | None]:
    seen: list[list[str | None]] = []

    def run_worker(*given: object) -> int:
        seen.append([os.environ.get(name) for name in NAMES])
        with listening.listen("127.0.0.1", 1) as sock:
            assert "network.ports" not in settings or 29700 <= sock.getsockname()[1] <= 29799
        return 0

    monkeypatch.setattr(train_worker, "run_worker", run_worker)
    for name in NAMES:
        monkeypatch.setenv(name, own or "")  # and is put back in the end
        if own is None:
            monkeypatch.delenv(name)
    config = to_dict(load_config([("test", settings)]))
    context = WorkerContext(str(tmp_path), 0, 0, "b", "00", "", -1, config, "train.py", address="127.0.0.1")
    try:
        assert worker.main(context) == 0
    finally:
        listening.keep_within(None)
    return seen[0]


def test_the_variables_of_the_config_and_the_interface_of_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environment(tmp_path, monkeypatch, **{"env.NCCL_IB_DISABLE": "1", "network.ports": "29700-29799"})
    assert found == ["1", "lo", "=lo"]


def test_what_the_host_and_the_config_say_of_interfaces_counts_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environment(tmp_path, monkeypatch, "own", **{"env.NCCL_SOCKET_IFNAME": "ib0"})
    assert found == ["own", "own", "ib0"]
