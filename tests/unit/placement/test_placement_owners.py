from __future__ import annotations

import pytest

from everstep.base.errors import InvariantViolation
from everstep.placement.owners import owners


def test_ranges_are_contiguous_and_even():
    assert owners(10, [7, 2, 4]) == {2: (0, 4), 4: (4, 7), 7: (7, 10)}
    assert owners(0, [1]) == {1: (0, 0)}
    assert owners(2, [0, 1, 2]) == {0: (0, 1), 1: (1, 2), 2: (2, 2)}


def test_impossible_input_is_a_bug():
    for n_blocks, ids in ((3, []), (3, [1, 1]), (-1, [0])):
        with pytest.raises(InvariantViolation):
            owners(n_blocks, ids)
