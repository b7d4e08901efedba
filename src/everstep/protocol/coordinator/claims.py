"""Plans that workers follow and this coordinator lacks; one worker is asked to send the plan. Pure.

The journal may lack plans that had been sent. One worker is asked; another one if that is lost, silent or sends
something else. Nothing waits for workers that are gone, and all waits end after `GIVE_UP_NS`.
"""

from __future__ import annotations

from everstep.base.plan import WorkerKey
from everstep.protocol.coordinator.environment import SECOND_NS, Alarm, Environment
from everstep.protocol.following import PlanName, PlanShown
from everstep.protocol.messages import AnyMessage, WorkerHello

ASK_AGAIN_NS = SECOND_NS
GIVE_UP_NS = 15 * SECOND_NS
MOST_SAID = 1000
"""Most messages kept until the plan is known; further ones are dropped."""


class Claims:
    """The newest claimed plan, and its claimants. wanted: name of the plan, None if none is wanted. While one is
    wanted nothing is decided, since the basis of every decision is out of date."""

    def __init__(self, env: Environment) -> None:
        self.wanted: PlanName | None = None
        self._env = env
        self._by: dict[WorkerKey, WorkerHello] = {}  # who waits to be told how to go on
        self._said: list[tuple[str, AnyMessage]] = []  # and their messages meanwhile, by connection
        self._to_ask: dict[
            WorkerKey, str
        ] = {}  # followers of the wanted plan, in the order of hellos, with their connections
        self._asked: tuple[WorkerKey, str] | None = None
        self._again_ns = self._until_ns = 0
        self._given_up: tuple[int, int] = (-1, -1)

    def opens(self, said: PlanName, known: tuple[int, int]) -> bool:
        """Whether to ask for the plan of this name: it is newer than the known plans. known: rank of the newest
        known plan."""
        return said.rank > max(known, self._given_up) and not self.beyond(said)

    def beyond(self, said: PlanName) -> bool:
        """Whether a later holder of the lease made that plan: that coordinator decides, and this one does not."""
        return 0 < self._env.config.hosts.term < said.term

    def claim(self, connection: str, said: PlanName, hello: WorkerHello) -> None:
        """This life's hello claims this plan, which `opens` accepted."""
        self._env.change()
        key = hello.member.key
        self._by[key] = hello
        if self.wanted is None or said.rank > self.wanted.rank:
            self.wanted, self._asked, self._to_ask = said, None, {}
            self._until_ns = self._env.now + GIVE_UP_NS
        if said.rank == self.wanted.rank:
            self._to_ask[key] = connection

    def by(self, key: WorkerKey) -> WorkerHello | None:
        """The hello in which this life has claimed the wanted plan, None if it has not."""
        return self._by.get(key)

    def waits_for(self, key: WorkerKey, connection: str | None) -> bool:
        """Whether this life was asked last, and still has time to answer."""
        return self._asked == (key, connection) and self._env.now < self._again_ns

    @property
    def asked(self) -> WorkerKey | None:
        return None if self._asked is None else self._asked[0]

    @property
    def over(self) -> bool:
        """Whether the plan was asked for long enough."""
        return self._env.now >= self._until_ns

    def next(self) -> tuple[WorkerKey, str] | None:
        key = next(iter(self._to_ask), None)
        return None if key is None else (key, self._to_ask.pop(key))

    def ask(self, key: WorkerKey, connection: str) -> None:
        self._asked, self._again_ns = (key, connection), self._env.now + ASK_AGAIN_NS
        self._env.alarms.set(Alarm.ASKED, min(self._again_ns, self._until_ns))

    def refused(self, key: WorkerKey) -> None:
        """This life has sent something other than the wanted plan."""
        if self.asked == key:
            self._asked = None

    def wait(self) -> None:
        """Nobody is left to ask: ring at the end of the wait."""
        self._asked = None
        self._env.alarms.set(Alarm.ASKED, self._until_ns)

    def defers(self, key: WorkerKey, connection: str, message: AnyMessage) -> bool:
        """Whether to keep this message of a waiting life until the plan is known. The plan itself is not kept."""
        waits = key in self._by and not isinstance(message, PlanShown)
        if waits and len(self._said) < MOST_SAID:
            self._said.append((connection, message))
        return waits

    def take_said(self) -> list[tuple[str, AnyMessage]]:
        """Take the kept messages with their connections, once the wait is over."""
        said = [] if self._by else self._said
        self._said = self._said if self._by else []
        return said

    def close(self, *, found: bool) -> list[WorkerHello]:
        """End the wait, with or without the plan. Returns the hellos that waited, in the order of lives."""
        self._env.change()
        if self.wanted is not None and not found:
            self._given_up = self.wanted.rank
        claimed = [hello for _, hello in sorted(self._by.items(), key=lambda claim: claim[0])]
        self.wanted, self._asked, self._by, self._to_ask = None, None, {}, {}
        return claimed

    def pardon(self, gap_ns: int) -> None:
        """This coordinator was away for `gap_ns`: nobody could answer."""
        self._again_ns, self._until_ns = self._again_ns + gap_ns, self._until_ns + gap_ns
