"""What ends a cell: its processes by rank, as they die one after the other. Pure.

Apart from the fork server because who is to blame does not follow from who is found dead first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class ForkedCell:
    """One life of a worker. ranks: by pid, of the processes that have not been waited for.

    cell_rank, status, unix_ns: of the death that ended the cell; status None before. A limb that ends in order ends
    nothing: it does so when its head lets go of it.
    """

    worker_id: int
    incarnation: int
    ranks: dict[int, int]
    cell_rank: int = 0
    status: int | None = None
    unix_ns: int = 0

    def died(self, statuses: Mapping[int, int], unix_ns: int) -> list[int]:
        """These, by pid, were found dead at once, with these wait statuses. Returns who is to be killed by that."""
        found = {self.ranks.pop(pid): status for pid, status in statuses.items()}
        if self.status is None:
            cell_rank = first_to_go(found)
            if cell_rank is None:
                return []
            self.cell_rank, self.status, self.unix_ns = cell_rank, found[cell_rank], unix_ns
        return list(self.ranks)


def first_to_go(statuses: Mapping[int, int]) -> int | None:
    """Of ranks that were found dead at once, by wait status, the one that drew the others along; None if none did.

    A head that leaves in order needs its limbs no more. Otherwise a signal is nobody's reaction to another's death; and
    a head may raise because a limb has gone, while limbs leave quietly.
    """
    if statuses.get(0) == 0:
        return 0
    failed = sorted(cell_rank for cell_rank, status in statuses.items() if status != 0)
    struck = [cell_rank for cell_rank in failed if os.WIFSIGNALED(statuses[cell_rank])]
    limbs = [cell_rank for cell_rank in failed if cell_rank > 0]
    return next(iter(struck or limbs or failed), None)
