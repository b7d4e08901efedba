"""Transfers that failed between two workers that both live. Pure.

A dead worker makes its neighbours accuse it too, usually before its agent has said that it is dead. So accusations of
one generation are collected for a moment: if a death explains them, they are void; if not, the links themselves are at
fault. A first fault of a link regroups with the same members; a repeated one costs a smallest set of workers that
covers the faulty links.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from everstep.base.cause import Cause, Why
from everstep.protocol.coordinator import recovery, switching
from everstep.protocol.coordinator.alarms import LinksDue
from everstep.protocol.coordinator.health import evict
from everstep.protocol.coordinator.state import MILLISECOND_NS, SECOND_NS, State, Worker, listed
from everstep.protocol.messages import PeerFault

WINDOW_NS = 100 * MILLISECOND_NS
REPEAT_GENERATIONS = 10
REPEAT_NS = 60 * SECOND_NS
_EXACT_COVER_WORKERS = 14

Link = tuple[int, int]


def peer_fault(state: State, worker: Worker, message: PeerFault) -> None:
    """A member of the current plan could not transfer. An older generation's complaint is void."""
    switching.follow(state, message.generation)
    plan = state.plan
    if plan is None or not plan.has(worker.key) or state.broken:
        return
    if message.generation != plan.generation:
        if plan.prepared and worker.key.worker_id not in state.entered:
            left_behind(state, [worker.key.worker_id], message.reason)
        return
    if not state.accusations:
        state.alarms.set(LinksDue(), state.now + WINDOW_NS)
    state.accusations.setdefault(worker.key.worker_id, set()).update(message.accused)
    if message.reason not in state.accusation_reasons:
        state.accusation_reasons.append(message.reason)


def left_behind(state: State, worker_ids: list[int], reason: str) -> None:
    """Members lost their peers just when these switched to a prepared plan: nobody will bring them there."""
    why = Why(Cause.LINK, f"worker {listed(worker_ids)} could not follow to the switch: {reason}")
    state.broken.append(why)
    state.dirty = True
    recovery.begin(state, why)


def close_window(state: State, alarm: LinksDue) -> None:
    """Nothing has explained the accusations so far: decide about the links."""
    accusations, reasons = state.accusations, state.accusation_reasons
    state.accusations, state.accusation_reasons = {}, []
    plan = state.plan
    if not accusations or plan is None or state.broken or state.ended is not None:
        return
    links: dict[Link, int] = {}
    votes: dict[int, int] = {}
    for accuser, accused in sorted(accusations.items()):
        for other in sorted(accused or {accuser}):
            if other in plan.worker_ids and accuser in plan.worker_ids:
                link = (min(accuser, other), max(accuser, other))
                links[link] = links.get(link, 0) + 1
                votes[other] = votes.get(other, 0) + 1
    if not links:
        return
    said = "; ".join(reasons)
    repeated = [link for link in sorted(links) if _seen_lately(state, link)]
    for link in links:
        state.link_faults.setdefault(link, []).append((plan.generation, state.now))
    state.dirty = True
    if repeated:
        # An end that the coordinator does not reach either is the one to blame.
        away = {w for link in repeated for w in link if state.workers[w].connection is None}
        others = [link for link in repeated if not away.intersection(link)]
        chosen = tuple(sorted({*away, *smallest_cover(others, votes)}))
        if set(chosen) >= {w.key.worker_id for w in state.survivors()}:
            chosen = smallest_cover(repeated, votes)
        for worker_id in chosen:
            worker = state.workers[worker_id]
            text = f"its links failed again ({_named(repeated)}) though both ends live: {said}"
            evict(state, worker, Why(Cause.LINK, text), kill=True)
        return
    fault = Why(Cause.LINK, f"transfers failed between live workers ({_named(links)}): {said}")
    state.broken.append(fault)
    recovery.begin(state, fault)


def _named(links: Mapping[Link, int] | list[Link]) -> str:
    return listed_links(sorted(links))


def listed_links(links: list[Link]) -> str:
    """Links in plain words."""
    return ", ".join(f"{a} to {b}" if a != b else listed({a}) for a, b in links)


def _seen_lately(state: State, link: Link) -> bool:
    generation = state.plan.generation if state.plan is not None else 0
    return any(
        generation - g <= REPEAT_GENERATIONS and state.now - at <= REPEAT_NS
        for g, at in state.link_faults.get(link, [])
    )


def forget_old(state: State) -> None:
    """Drop link faults that no longer count, so that memory stays bounded."""
    generation = state.plan.generation if state.plan is not None else 0
    kept = {}
    for link, faults in state.link_faults.items():
        recent = [f for f in faults if generation - f[0] <= REPEAT_GENERATIONS and state.now - f[1] <= REPEAT_NS]
        if recent:
            kept[link] = recent
    state.link_faults = kept


def smallest_cover(links: list[Link], votes: Mapping[int, int]) -> tuple[int, ...]:
    """A smallest set of workers that touches every link; among equals the most accused, then the highest ids.

    Exact for up to 14 workers, greedy beyond. Ascending.
    """
    workers = sorted({w for link in links for w in link})
    if len(workers) > _EXACT_COVER_WORKERS:
        return _greedy_cover(links, votes)
    for size in range(1, len(workers) + 1):
        covers = [c for c in combinations(workers, size) if all(a in c or b in c for a, b in links)]
        if covers:
            return max(covers, key=lambda c: (sum(votes.get(w, 0) for w in c), c))
    return ()


def _greedy_cover(links: list[Link], votes: Mapping[int, int]) -> tuple[int, ...]:
    open_links, chosen = list(links), []
    while open_links:
        degree: dict[int, int] = {}
        for a, b in open_links:
            for worker in {a, b}:
                degree[worker] = degree.get(worker, 0) + 1
        best = max(degree, key=lambda w: (degree[w], votes.get(w, 0), w))
        chosen.append(best)
        open_links = [link for link in open_links if best not in link]
    return tuple(sorted(chosen))
