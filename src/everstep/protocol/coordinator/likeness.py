"""The numerics and code that all workers of a job must share, and why a worker has to leave. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.base.cause import Cause, Why
from everstep.base.plan import Divides
from everstep.protocol.coordinator.environment import Environment
from everstep.protocol.identity import Code, Kernels, told


class Likeness:
    """The job's numerics and code: those of the first worker, and every import that no earlier worker had."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._kernels, self._code = env.config.hosts.alike.kernels, env.config.hosts.alike.code
        self._divides = dict(env.config.hosts.alike.divides)
        self._warned: set[str] = set()
        self._odd: dict[tuple[int, str], Why] = {}

    def differed(self, worker_id: int, host: str, why: Why) -> None:
        """A life of this slot, on this host, computed a lane differently from others."""
        self._odd[worker_id, host] = why

    def lane(self, worker_id: int, host: str) -> Why | None:
        """Why a later life of this slot may not take part; None if it may."""
        return self._odd.get((worker_id, host))

    def kernels(self, said: Kernels | None, host: str) -> Why | None:
        """A worker reports its numerics. Returns why it may not take part, None if it may."""
        words = "" if said is None or self._kernels is None else said.unlike(self._kernels)
        if said is None or (not words and self._kernels is not None):
            return None
        if not words:
            self._is_with(said)
        elif not self._env.config.hosts.alike.warns:
            remedy = "take hosts of one kind, or set numerics.changed=warn to go on inexactly"
            return Why(Cause.NONDETERMINISTIC, f"host {host}: its kernels give {words}: {remedy}")
        elif said.fingerprint not in self._warned:
            if not self._code.packages:  # it is the first of this run: the job goes on with its kernels
                self._is_with(said)
            self._warned.add(said.fingerprint)
            text = f"host {host}: its kernels give {words}: the result is no longer exact (numerics.changed=warn)"
            self._env.report("warning", Why(Cause.NONDETERMINISTIC, text))
        return None

    def _is_with(self, said: Kernels) -> None:
        self._kernels = said
        self._env.remember(numerics=told(said))

    def divides(self, said: Mapping[int, Divides], host: str) -> Why | None:
        """A worker has found that the optimizer's state of these stages can be divided so. Returns why it may not take
        part, None if it may."""
        known = self._divides
        for stage, how in said.items():
            if known.get(stage, how) != how:
                text = (
                    f"host {host}: the optimizer of stage {stage} can be divided by {how}, this job's by {known[stage]}"
                    " (zero.stage): use the same optimizer, or set zero.stage=0"
                )
                return Why(Cause.CONFIG, text)
        if said.keys() - known.keys():
            known |= said
            self._env.remember(divides={str(stage): how for stage, how in sorted(known.items())})
        return None

    def code(self, said: Code | None, host: str) -> Why | None:
        """A worker reports its imports. Returns why it may not take part, None if it may."""
        if said is None:
            return None
        data = said.samples.unlike(self._code, f"on host {host}", "in the job")
        if data:
            text = (
                f"host {host}: its data differ from the job's: {data}: bring the same files of the dataset to all "
                "hosts, and leave out of a sample what differs by host, such as a path"
            )
            return Why(Cause.CONFIG, text)
        words = said.unlike(self._code, f"on host {host}", "in the job")
        if words:
            remedy = (
                "bring the same files and packages to all hosts; to go on with code that was edited while the job ran, "
                "stop the job and run it again"
            )
            return Why(Cause.CONFIG, f"host {host}: it runs other code than the job: {words}: {remedy}")
        new = said.beyond(self._code)
        if new.files or new.packages:
            sources = new.beyond(new.samples)
            changed = sources.unlike(self._env.config.hosts.alike.before, "now", "when it ran last")
            if changed:
                text = f"the code has changed since this job last ran; it goes on with the code as it is now: {changed}"
                self._env.report("warning", Why(Cause.CONFIG, text))
            self._code = self._code.joined(new)
            self._env.remember(code=told(self._code))
        return None
