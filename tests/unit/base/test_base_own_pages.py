"""Whether memory was touched is told page by page."""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char

import pytest

from everstep.base.own_pages import is_untouched, own_pages

PAGE, PAGES = mmap.PAGESIZE, 4


@pytest.mark.parametrize("page", range(PAGES))
def test_a_range_is_untouched_unless_one_of_its_pages_is(page: int) -> None:
    memory = own_pages(PAGES * PAGE)
    memory.obj.madvise(mmap.MADV_NOHUGEPAGE)
    start = addressof(c_char.from_buffer(memory.obj))
    assert is_untouched(start, PAGES * PAGE)
    memory[page * PAGE + 7] = 1
    edges = [at for k in range(PAGES + 1) for at in (k * PAGE - 1, k * PAGE, k * PAGE + 1) if 0 <= at <= PAGES * PAGE]
    for first in edges:
        for stop in (edge for edge in edges if edge > first):
            touched = first // PAGE <= page <= (stop - 1) // PAGE
            assert is_untouched(start + first, stop - first) != touched, (first, stop)


def test_memory_that_is_none_is_not_known_to_be_untouched() -> None:
    assert not is_untouched(0, 1)
