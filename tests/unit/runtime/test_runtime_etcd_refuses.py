"""The journal in etcd, where etcd does not take what has to be written."""

from __future__ import annotations

import asyncio

from everstep.base.errors import ProtocolError
from everstep.protocol.lease.requests import Appended, JournalEntry, Loaded, StoreAnswer, StoreRequest, TooMuch
from everstep.runtime.lead.journal_and_lease import Asker, EtcdStore


class Small(Asker):
    """An etcd that takes but small entries."""

    def __init__(self) -> None:
        pass

    async def ask(self, request: StoreRequest) -> StoreAnswer:
        return TooMuch("request is too large") if len(str(request)) > 1000 else Appended()


def test_an_entry_that_etcd_does_not_take_ends_the_coordinator_with_words() -> None:
    said: list[str] = []
    written: list[int] = []
    small: JournalEntry = {"kind": "ticket", "ticket": 1}

    async def write() -> None:
        fenced: list[str] = []
        store = EtcdStore(Small(), 7, Loaded([], 1), fenced.append, said.append)
        store.on_written(written.append)
        store.append([small, {"kind": "plan", "text": "x" * 2000}])
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0)
        assert not fenced

    asyncio.run(write())
    assert written == [1] and len(said) == 1
    assert "does not take an entry (plan)" in said[0] and "--max-request-bytes" in said[0]


class Changed(Asker):
    """An etcd whose journal somebody has changed."""

    def __init__(self) -> None:
        pass

    async def ask(self, request: StoreRequest) -> StoreAnswer:
        raise ProtocolError("entry 6 is not as it was left")


def test_a_journal_that_somebody_changed_ends_the_coordinator_with_words() -> None:
    said: list[str] = []

    async def write() -> None:
        store = EtcdStore(Changed(), 7, Loaded([], 1), said.append, said.append)
        store.append([{"kind": "ticket", "ticket": 1}])
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0)

    asyncio.run(write())
    assert said == ["entry 6 is not as it was left"]
