"""How long is waited, and what is made once however often its reason comes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_runtime_cells import Pair
from test_runtime_hearsay import LOCAL, OneHost

from everstep.protocol import messages as m
from everstep.runtime.host import cell
from everstep.runtime.link import control_client
from everstep.runtime.link.control_client import ControlClient

LOOKS = st.none() | st.integers(0, 40)


@given(st.floats(0, 0.5), LOOKS, LOOKS)
def test_a_pause_lasts_until_its_end_another_address_or_the_close(
    seconds: float, moved: int | None, over: int | None
) -> None:
    """With a clock that a wait alone moves on. moved, over: the look at which it is so."""
    waits = list[float]()
    client: Any = SimpleNamespace(_closing=over == 0, _waker=SimpleNamespace(fd=0, take=lambda: None))
    client._where = SimpleNamespace(changed=lambda: moved is not None and len(waits) > moved)

    def wait(fds: list[int], for_s: float) -> None:
        waits.append(for_s)
        client._closing = over is not None and len(waits) >= over

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_client, "readable", wait)
        patch.setattr(control_client, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
        ControlClient._pause(client, seconds)
    whole = -(-seconds // control_client.FIRST_BACKOFF_S)
    ends = [whole, *([] if moved is None else [moved + 1]), *([] if over is None else [over])]
    assert sum(waits) == pytest.approx(min(seconds, min(ends) * control_client.FIRST_BACKOFF_S), abs=1e-6)
    assert all(0 < one <= control_client.FIRST_BACKOFF_S for one in waits)


class _Limb:
    """A limb's connection that tells for how long its end is waited."""

    def __init__(self, sock: Any, waited: list[float]) -> None:
        self._sock, self._waited = sock, waited
        self.shutdown, self.recv, self.__enter__ = sock.shutdown, sock.recv, sock.__enter__

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self._sock.close()

    def settimeout(self, seconds: float) -> None:
        self._waited.append(seconds)
        self._sock.settimeout(seconds)


def test_a_head_waits_for_its_limbs_and_for_all_of_them_no_longer_than_for_one() -> None:
    pair, waited = Pair(3), list[float]()
    for k in range(3):
        pair.serve(k, {})
    pair.head.meet()
    pair.head._limbs = [_Limb(limb, waited) for limb in pair.head._limbs]  # type: ignore[misc]
    pair.head.close()
    assert pair.join() == [None] * 3
    pair.board.close()
    assert len(waited) == 3 and all(0 < seconds <= cell._END_S for seconds in waited)
    assert waited == sorted(waited, reverse=True)


def test_places_that_are_told_again_make_no_second_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = OneHost(tmp_path)
        stack.callback(one.close)
        held = list[int]()
        for count in (1, 1, 2, 3):
            places = {f"host {n}": one.place(f"host {n}", f"{LOCAL}:{n + 1}") for n in range(count)}
            one.files.hear(m.HostsThere(places={"here": one.place("here", f"{LOCAL}:9"), **places}))
            held.append(len([fd for fd in os.listdir("/proc/self/fd") if _listens(int(fd))]))
        assert held == held[:1] * 4


def _listens(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False
