"""The scale of the loss: when it changes, how far, and that a copy of its state goes on like it."""

from __future__ import annotations

from everstep.train.precision import LossScaler


def test_it_is_halved_where_a_gradient_overflows_and_that_update_is_left_out() -> None:
    scaler = LossScaler(enabled=True)
    assert [scaler.advance(finite) for finite in (True, False, True, False)] == [True, False, True, False]
    assert scaler.scale == 65536.0 / 4
    for _ in range(60):
        scaler.advance(finite=False)
    assert scaler.scale == 2.0**-24


def test_it_is_doubled_after_enough_updates_in_a_row() -> None:
    scaler, seen = LossScaler(enabled=True), list[float]()
    scaler.growth_interval = 3
    for finite in (True, True, False, *[True] * 7):
        scaler.advance(finite)
        seen.append(scaler.scale / 65536.0)
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 2] and LossScaler.growth_interval == 2000
    for _ in range(100):
        scaler.advance(finite=True)
    assert scaler.scale == 2.0**32


def test_a_copy_goes_on_like_it() -> None:
    one, other = LossScaler(enabled=True), LossScaler(enabled=True)
    one.growth_interval = other.growth_interval = 3
    for finite in (False, True, True):
        one.advance(finite)
    other.load_state_dict(one.state_dict())
    for scaler in (one, other):
        scaler.advance(finite=True)
    assert one.state_dict() == other.state_dict() == {"scale": 65536.0, "good_steps": 0}


def test_without_one_all_updates_are_made() -> None:
    scaler = LossScaler(enabled=False)
    assert scaler.advance(finite=False) and scaler.scale == 1.0
