"""How the job's address gets to the other hosts through a launcher's store."""

from __future__ import annotations

import pytest

from everstep.base.errors import ConfigError
from everstep.train import launcher_store
from everstep.train.launcher_store import exchange


class Kept:
    """A store whose readers wait for what they ask for."""

    def __init__(self, **values: str) -> None:
        self.values = {name: value.encode() for name, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_the_job_takes_an_address_that_the_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"10.0.0.2": "10.0.0.1", "host1": "10.0.0.2"}
    monkeypatch.setattr(launcher_store, "address_towards", lambda host: ways.get(host, ""))
    store = Kept(job="10.0.0.1:4000")
    assert exchange(store, 0, "host1") == "10.0.0.1:4000"
    assert store.values["host"] == b"10.0.0.2"
    assert exchange(store, 5000, "host1") == "10.0.0.1:5000"
    assert store.values["job"] == b"10.0.0.1:5000"
    ways.update({"fd00::2": "fd00::1", "host1": "fd00::2"})
    store = Kept(job="[fd00::1]:4000", host="fd00::2")
    assert exchange(store, 5000, "host1") == "[fd00::1]:5000"
    assert exchange(store, 0, "host1") == "[fd00::1]:5000"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5",
        "10.0.0.1",
        "host:5",
        "10.0.0.1:5 --fresh",
        "10.0.0.1:70000",
        "10.0.0.1:0",
        "300.0.0.1:5",
        "x" * 99,
    ],
)
def test_what_is_no_address_is_not_taken(text: str) -> None:
    with pytest.raises(ConfigError):
        exchange(Kept(job=text), 0, "localhost")


@pytest.mark.parametrize("text", ["", "127.0.0.1", "host", "300.0.0.1", "x" * 99])
def test_what_no_other_host_can_be_at_is_not_taken(text: str) -> None:
    with pytest.raises(ConfigError, match="no address that the others reach"):
        exchange(Kept(host=text), 5, "localhost")
