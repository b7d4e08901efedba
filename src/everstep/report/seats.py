"""Seats of workers, by an event. Pure."""

from __future__ import annotations

from everstep.report.words import Event, as_dict


def seats_of(event: Event) -> dict[int, list[tuple[int, str, list[int]]]]:
    """Seats by worker_id, as (stage, role, lanes), from a `generation_started`; older jobs know one stage.

    Raises: TypeError, ValueError for a malformed event.
    """
    found: dict[int, list[tuple[int, str, list[int]]]] = {}
    seats = event.get("seats")
    if isinstance(seats, list):
        for worker_id, stage, role, lanes in seats:
            found.setdefault(_id(worker_id), []).append((_id(stage), str(role), [_id(lane) for lane in lanes]))
        return found
    for text, taken in as_dict(event.get("lanes")).items():
        found.setdefault(_id(int(text)), []).append((0, "", [_id(lane) for lane in taken]))
    return found


def _id(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r:.40}")
    return value
