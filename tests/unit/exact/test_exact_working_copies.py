"""Narrow copies of a unit's parameters: made when it is called, for all calls of a lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everstep.exact.working_copies import WorkingCopies


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_takes_none_from_later_ones(first: type) -> None:
    unit = nn.Linear(4, 2)
    with WorkingCopies([unit], torch.bfloat16, torch.bfloat16):
        with first():
            unit(torch.ones(1, 4))
        loss = unit(torch.ones(1, 4)).sum()
    loss.backward()
    assert unit.weight.grad is not None and unit.weight.grad.dtype == torch.float32


def test_whether_a_unit_was_called_is_known() -> None:
    unit = nn.Linear(4, 2)
    copies = WorkingCopies([unit], torch.bfloat16, torch.float32)
    with copies:
        nn.functional.linear(torch.ones(1, 4), unit.weight)
    assert not copies.entered
    with copies:
        unit(torch.ones(1, 4))
    assert copies.entered
