"""Aborts that come before a transport between machines is made hold for it, too, in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from everstep.base.plan import Member, Plan, Seat
from everstep.parallel.either import EitherChannel, EitherTransport

MEMBERS = tuple(Member(i, 0, f"host{i}", segment=f"machine{i}/segment") for i in (0, 1))
APART = Plan(7, "because", MEMBERS, tuple(Seat(i, 0, "active", (i,)) for i in (0, 1)), 2)


@pytest.mark.parametrize("aborts", [(5, 3), (3, 5), (5,)])
@pytest.mark.parametrize("make", [EitherTransport, EitherChannel])
def test_the_newest_abort_holds_for_what_is_made_later(make: Callable[..., Any], aborts: tuple[int, ...]) -> None:
    near, far = Mock(), Mock()
    transport = make("machine0", near, lambda *given: far)
    for generation in aborts:
        transport.abort(generation)
    transport.open(APART)
    far.open.assert_called_once_with(APART)
    far.abort.assert_called_once_with(5)
    assert [call.args for call in near.abort.call_args_list] == [(generation,) for generation in aborts]
    transport.abort(6)
    far.abort.assert_called_with(6)
