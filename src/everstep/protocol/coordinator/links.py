"""Transfers that failed between two workers that both live. Pure.

The neighbours of a dead worker accuse it, usually before its agent has reported its death. So accusations of one
generation are collected for a moment, and until the agents have seen both ends of each link alive after it: a death
voids those that it explains; otherwise the links are at fault, and the agents of both ends look whether the hosts
answer each other. After a first fault of a link whose hosts do, the same members regroup; one whose hosts do not, or a
repeated one, costs a smallest set of workers that covers the faulty links. Between two hosts every link counts as the
same, since not all of them carry data at the moment. If several links between two hosts fail, the hosts do not reach
each other: one of them leaves as a whole, and stays outside for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from everstep.base.cause import Cause, Why
from everstep.base.plan import Plan, WorkerKey
from everstep.protocol.coordinator.agreement import Agreement, Recovery
from everstep.protocol.coordinator.environment import MILLISECOND_NS, SECOND_NS, Alarm, Environment, listed
from everstep.protocol.coordinator.membership import Membership, Worker
from everstep.protocol.messages import HostsProbed, PeerFault

WINDOW_NS = 100 * MILLISECOND_NS
REPEAT_GENERATIONS = 10
REPEAT_NS = 60 * SECOND_NS
PROBE_NS = 1500 * MILLISECOND_NS
"""Time for agents to look whether other hosts answer."""
APART_NS = 20 * SECOND_NS
"""After this time a worker that wants to heal checks by itself whether it reaches all others."""
_EXACT_COVER_WORKERS = 14

Link = tuple[int, int]
Between = tuple[str, str] | Link
"""Two hosts, or two workers of one host."""


@dataclass
class Probes:
    """Probes of one window. asked: agents that have yet to answer, by request; silent: pairs of hosts of which one does
    not hear the other. begun: they were asked for; until_ns: time for answers."""

    begun: bool = False
    until_ns: int = 0
    asked: dict[int, str] = field(default_factory=dict)
    silent: set[Between] = field(default_factory=set)

    def begin(self) -> bool:
        """Note that probes are asked for; returns False if they were before."""
        begun, self.begun = self.begun, True
        return not begun

    def ask(self, number: int, agent_id: str, until_ns: int) -> None:
        self.asked[number], self.until_ns = agent_id, until_ns

    def pardon(self, gap_ns: int) -> None:
        self.until_ns += gap_ns

    def heard(self, agent_id: str, host: str, message: HostsProbed) -> bool:
        """Take in an answer; returns whether it was asked for."""
        if self.asked.get(message.number) != agent_id:
            return False
        del self.asked[message.number]
        self.silent |= {(min(host, other), max(host, other)) for other in message.silent}
        return True


class Links:
    """Accusations of the moment, and links that have failed recently."""

    def __init__(self, env: Environment, membership: Membership, agreement: Agreement, recovery: Recovery) -> None:
        self._env, self._membership, self._agreement, self._recovery = env, membership, agreement, recovery
        self._accusations: dict[WorkerKey, set[int]] = {}
        self._reasons: list[str] = []
        self._closes_ns = 0
        self._faults: dict[Link, tuple[int, int, Between]] = {}  # generation and time of the newest, and its two ends
        self._probes = Probes()
        self._apart: dict[tuple[str, str], int] = {}  # hosts that did not reach each other, until when that counts

    def peer_fault(self, worker: Worker, message: PeerFault) -> None:
        """A member of the current plan could not transfer. Accusations of an older generation are void."""
        plan = self._agreement.plan
        if not plan.has(worker.key) or self._agreement.broken:
            return
        if message.generation != plan.generation:
            if plan.prepared and worker.key.worker_id not in self._agreement.entered:
                self._break_off(_behind([worker.key.worker_id], message.reason))
            return
        if not self._accusations:
            self._closes_ns = self._env.now + WINDOW_NS
            self._env.alarms.set(Alarm.LINKS, self._closes_ns)
        self._accusations.setdefault(worker.key, set()).update(message.accused)
        if message.reason not in self._reasons:
            self._reasons.append(message.reason)

    def left_behind(self, plan: Plan) -> Why | None:
        """Members of the prepared plan, to which the others are switching now, that lost a peer before they had
        decided so. In the new generation the others would wait for them in vain."""
        behind = [i for i in sorted(self._accusers()) if i in plan.worker_ids]
        return Why(Cause.LINK, _behind(behind, self._reasons[0])) if behind else None

    def forget_accusations(self) -> None:
        self._accusations, self._reasons = {}, []
        self._probes = Probes()

    def pardon(self, gap_ns: int) -> None:
        """The coordinator was away for this long: what explains the accusations may be yet to be read."""
        self._closes_ns += gap_ns
        self._probes.pardon(gap_ns)

    # ---- probes

    def to_probe(self) -> list[tuple[Worker, Worker]]:
        """One accused link between each two hosts that were not probed in this window, as its ends."""
        if self._agreement.broken or not self._probes.begin():
            return []
        workers, links = self._membership.workers, self._accused()[0]
        found = {known: link for link, known in sorted(self._between(links).items()) if isinstance(known[0], str)}
        return [(workers[a], workers[b]) for a, b in found.values()]

    def asks(self, agent_id: str) -> int:
        """An agent is asked to probe. Returns the number of the request."""
        number, until_ns = self._env.number(), self._env.now + PROBE_NS
        self._probes.ask(number, agent_id, until_ns)
        self._env.alarms.set(Alarm.LINKS, until_ns)
        return number

    def probed(self, agent_id: str, host: str, message: HostsProbed) -> None:
        """Take in an agent's answer."""
        if self._probes.heard(agent_id, host, message) and not self._probes.asked:
            self._env.alarms.set(Alarm.LINKS, self._env.now)

    def waits_for_probes(self) -> bool:
        """Whether answers are still to come."""
        if not self._probes.asked or self._env.now >= self._probes.until_ns:
            return False
        self._env.alarms.set(Alarm.LINKS, self._probes.until_ns)
        return True

    def _accused(self) -> tuple[set[Link], Counter[int]]:
        """Accused links between members, and how often each end was accused."""
        links, votes, plan = set[Link](), Counter[int](), self._agreement.plan
        for accuser, accused in sorted(self._accusers().items()):
            for other in sorted(accused or {accuser}):
                if other in plan.worker_ids and accuser in plan.worker_ids:
                    links.add((min(accuser, other), max(accuser, other)))
                    votes[other] += 1
        return links, votes

    def _accusers(self) -> dict[int, set[int]]:
        """Accused workers by living accuser; deaths explain the accusations of dead workers."""
        alive = self._membership.alive
        return {key.worker_id: accused for key, accused in self._accusations.items() if alive(key) is not None}

    def may_be_dead(self, worker: Worker) -> bool:
        """Whether this end of an accused link was not seen alive since the window, and its agent, which starves with
        its host, may still say so."""
        accusers = self._accusers()
        accused = worker.key.worker_id in accusers.keys() | set[int]().union(*accusers.values())
        patient = self._env.now < self._closes_ns + self._env.config.heartbeat_ceiling_ns
        return accused and patient and worker.seen_ns < self._closes_ns

    def close_window(self) -> list[tuple[Worker, Why]]:
        """Nothing has explained the accusations so far: decide about the links. Returns the workers that have to
        leave, and why."""
        (links, votes), reasons, plan = self._accused(), self._reasons, self._agreement.plan
        silent = self._probes.silent
        self.forget_accusations()
        if self._agreement.broken:
            return []
        if not links:
            return []
        said = "; ".join(reasons)
        self.forget_old()
        between = self._between(links)
        before = {known for _, _, known in self._faults.values()}
        repeated = sorted(link for link in links if between[link] in before or between[link] in silent)
        others = "" if self._faults.keys() >= {*repeated} else ", or others between the same hosts,"
        dead = any(between[link] in silent for link in repeated)
        self._faults |= {link: (plan.generation, self._env.now, between[link]) for link in links}
        if repeated:
            text = f"its links{others} failed again ({listed_links(repeated)}) though both ends live: {said}"
            if dead:
                text = f"its host and another do not reach each other ({listed_links(repeated)}): {said}"
            workers = self._membership.workers
            leaving = self._hosts_to_leave(repeated, votes, silent) or self._to_leave(repeated, votes)
            return [(workers[i], Why(Cause.LINK, text)) for i in leaving]
        self._break_off(f"transfers failed between live workers ({listed_links(sorted(links))}): {said}")
        return []

    def _break_off(self, reason: str) -> None:
        why = Why(Cause.LINK, reason)
        self._agreement.break_off(why)
        self._recovery.begin(why)

    def _between(self, links: Iterable[Link]) -> dict[Link, Between]:
        """The two ends of each link."""
        hosts = {w.key.worker_id: w.host for w in self._agreement.survivors()}
        pairs = {(a, b): sorted({hosts.get(a, ""), hosts.get(b, "")} - {""}) for a, b in links}
        return {link: (pair[0], pair[1]) if len(pair) == 2 else link for link, pair in pairs.items()}

    def _to_leave(self, repeated: list[Link], votes: Mapping[int, int]) -> tuple[int, ...]:
        """A smallest cover of the links; but an end that has lost the coordinator, too, is the one to blame."""
        workers = self._membership.workers
        away = {i for link in repeated for i in link if workers[i].connection is None}
        others = [link for link in repeated if not away.intersection(link)]
        chosen = tuple(sorted({*away, *smallest_cover(others, votes)}))
        if set(chosen) >= {w.key.worker_id for w in self._agreement.survivors()}:
            return smallest_cover(repeated, votes)
        return chosen

    def _hosts_to_leave(
        self, repeated: list[Link], votes: Mapping[int, int], silent: Collection[Between]
    ) -> tuple[int, ...]:
        """All members of a smallest set of hosts, if each fault is one of several between two hosts, or these do not
        answer each other; else none."""
        hosts = {w.key.worker_id: w.host for w in self._agreement.survivors()}
        again = {self._faults[link][2] for link in repeated}
        pairs = Counter(known for _, _, known in self._faults.values() if known in again)
        between = sorted((a, b) for a, b in pairs if isinstance(a, str) and isinstance(b, str))
        until_ns = self._env.now + APART_NS
        if between:
            self._apart |= dict.fromkeys(between, until_ns)
        if len(between) < len(pairs) or any(n < 2 and pair not in silent for pair, n in pairs.items()):
            return ()
        order = {host: n for n, host in enumerate(dict.fromkeys(hosts.values()))}  # that of the first member goes last
        accused = Counter[int]()
        for worker_id, n in votes.items():
            accused[order[hosts[worker_id]]] += n if order[hosts[worker_id]] else 0
        chosen = smallest_cover([(order[a], order[b]) for a, b in between], accused)
        leaving = tuple(i for i, host in sorted(hosts.items()) if order[host] in chosen)
        return leaving if len(leaving) < len(hosts) else ()

    def kept_out(self, host: str) -> bool:
        """Whether workers of this host recently failed to reach those of a member's host: with them no member could
        go on."""
        self._apart = {pair: until_ns for pair, until_ns in self._apart.items() if until_ns > self._env.now}
        if not self._apart:  # thousands that wait need not look at thousands of members each
            return False
        members = {w.host for w in self._agreement.survivors()}
        until_ns = [at for pair, at in self._apart.items() if host in pair and members & ({*pair} - {host})]
        if until_ns:
            self._env.alarms.set(Alarm.JOINS, min(until_ns))
        return bool(until_ns)

    def forget_old(self) -> None:
        """Drop faults that no longer count."""
        least = (self._agreement.plan.generation - REPEAT_GENERATIONS, self._env.now - REPEAT_NS)
        self._faults = {link: it for link, it in self._faults.items() if it[0] >= least[0] and it[1] >= least[1]}


def _behind(worker_ids: list[int], reason: str) -> str:
    return f"worker {listed(worker_ids)} could not follow to the switch: {reason}"


def listed_links(links: list[Link]) -> str:
    """Links in plain words."""
    return ", ".join(f"{a} to {b}" if a != b else listed({a}) for a, b in links)


def smallest_cover(links: list[Link], votes: Mapping[int, int]) -> tuple[int, ...]:
    """A smallest set of workers that touches every link; on a tie the most accused ones, then the highest ids. Exact
    for up to 14 workers, greedy beyond. Ascending."""
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
        degree = Counter(worker for link in open_links for worker in set(link))
        best = max(degree, key=lambda w: (degree[w], votes.get(w, 0), w))
        chosen.append(best)
        open_links = [link for link in open_links if best not in link]
    return tuple(sorted(chosen))
