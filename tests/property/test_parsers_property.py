"""Whatever bytes a parser is given, it gives a value or raises what it says it does; `make fuzz` goes on for longer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz_targets import FuzzTarget, changed, targets, try_one

TARGETS = targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_it_takes_what_is_right(target: FuzzTarget) -> None:
    taken = [try_one(target, sample) for sample in target.samples]
    assert any(taken) or target.name in ("handshake",)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_takes_or_refuses_what_is_changed(target: FuzzTarget, data: st.DataObject) -> None:
    text = data.draw(changed(target.samples))
    try_one(target, target.mend(text) if data.draw(st.booleans()) else text)
