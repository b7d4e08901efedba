"""Who sits where, as an event says. Pure."""

from __future__ import annotations

from everstep.report.words import Event, as_dict


def seats_of(event: Event) -> dict[int, list[tuple[int, str, list[int]]]]:
    """worker_id -> (stage, role, lanes) of its seats, as a `generation_started` gives them; older jobs know one stage.

    Raises: TypeError, ValueError for what is none.
    """
    found: dict[int, list[tuple[int, str, list[int]]]] = {}
    seats = event.get("seats")
    if isinstance(seats, list):
        for worker_id, stage, role, lanes in seats:
            found.setdefault(int(worker_id), []).append((int(stage), str(role), [int(x) for x in lanes]))
        return found
    for text, taken in as_dict(event.get("lanes")).items():
        found.setdefault(int(text), []).append((0, "", [int(x) for x in taken]))
    return found
