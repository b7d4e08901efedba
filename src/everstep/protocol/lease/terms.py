"""Which coordinator counts: a message has effect only as long as no newer coordinator has been heard. Pure."""

from __future__ import annotations

from everstep.protocol.messages import AnyMessage, Heal, PlanNow, PlanPrepared, TermBegun


class Terms:
    """Terms heard by one process, an agent or a worker. term: the newest in which any coordinator has spoken."""

    def __init__(self) -> None:
        self.term = 0
        self._planned = 0
        self._said = True

    def connected(self) -> None:
        """Another connection begins, with a coordinator that has to say its term first."""
        self._said = False

    def refusal(self, message: AnyMessage) -> str:
        """Why a coordinator that sends this message is deposed; "" if it may go on, and then its message counts."""
        if isinstance(message, TermBegun):
            if message.term < self.term:
                return f"its term is {message.term}, and a coordinator of term {self.term} has spoken since"
            self.term, self._said = message.term, True
        elif self.term and not self._said:
            return f"it does not say its term, and a coordinator of term {self.term} has spoken"
        elif isinstance(message, PlanNow | PlanPrepared | Heal):
            term = message.plan.term
            if term < self._planned:
                return f"it sends a plan of term {term}, and one of term {self._planned} is known"
            self._planned = term
            self.term = max(self.term, term)
        return ""
