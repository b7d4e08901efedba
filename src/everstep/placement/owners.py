"""Which worker owns which blocks: it finishes the reduction of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.base.errors import check


def owners(n_blocks: int, worker_ids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Contiguous block ranges [first, last) by worker id, in id order; sizes differ by at most one, larger ones first.

    With fewer blocks than workers the last workers own the empty range (n_blocks, n_blocks).
    """
    given = list(worker_ids)
    ids = sorted(set(given))
    check(len(ids) == len(given), f"worker ids must be distinct, got {sorted(given)}")
    check(n_blocks >= 0 and len(ids) > 0, f"expected blocks and workers to own them, got {n_blocks} and {ids}")
    size, larger = divmod(n_blocks, len(ids))
    ranges: dict[int, tuple[int, int]] = {}
    first = 0
    for position, worker_id in enumerate(ids):
        last = first + size + (position < larger)
        ranges[worker_id] = (first, last)
        first = last
    return ranges
