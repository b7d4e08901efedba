"""The SHA-256 of a part, made beside its writing: of the bytes that went out, whatever their memory holds next."""

from __future__ import annotations

import hashlib
import threading

import pytest
import torch

from everstep.checkpoint.part_digest import PartDigest, digest_of
from everstep.exact.digest import bytes_of


def memory() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8)


def test_it_is_of_all_blocks_in_order_and_of_the_head() -> None:
    with PartDigest(memory, wanted=True) as sums:
        for number in range(50):
            room = sums.room()
            room.fill_(number)
            sums.add(bytes_of(room))
        blocks = b"".join(bytes([number] * 8) for number in range(50))
        assert sums.of(b"head") == digest_of(hashlib.sha256(b"head").digest(), hashlib.sha256(blocks).digest())


def test_where_none_is_wanted_there_is_none() -> None:
    with PartDigest(memory, wanted=False) as sums:
        sums.add(bytes_of(sums.room()))
        assert sums.of(b"head") == "" and sums.room() is sums.room()


class Held:
    """A digest that is not made before somebody lets it be."""

    def __init__(self) -> None:
        self.may, self.seen = threading.Event(), list[bytes]()

    def update(self, block: memoryview) -> None:
        self.may.wait(60)
        self.seen.append(bytes(block))


def test_a_room_is_used_again_when_what_was_in_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with PartDigest(memory, wanted=True) as sums:
        monkeypatch.setattr(sums, "_blocks", held)

        def write() -> None:
            for number in range(6):
                room = sums.room()
                room.fill_(number)
                sums.add(bytes_of(room))

        writing = threading.Thread(target=write)
        writing.start()
        writing.join(0.3)  # by then one that does not wait is through
        held.may.set()
        writing.join(60)
    assert held.seen[:2] == [bytes([number] * 8) for number in range(2)]
