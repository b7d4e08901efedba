"""What processes say beside what a quiet job makes them say: messages that nobody may send, or that come twice, keys of
a generation's store, profiles, faults of the script, a host that fails; and workers that get stuck.

Acts are macros: what has to come together for a rare way comes together here, whenever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec

from everstep.base.cause import Cause, Why
from everstep.base.plan import Divides
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.identity import Code
from everstep.protocol.roles import JOB, OPERATE
from everstep.protocol.step_types import Holds, LaneDone, Takes
from everstep.sim.control import FOUL, forget
from everstep.sim.faults import SimFault, SimInjector, draw_one
from everstep.sim.life import nothing
from everstep.sim.mesh import SimControlClient
from everstep.sim.sim_worker import SimWorker
from everstep.sim.world import MS

HOST_FAILED = "its host has no room for logs"
NO_SPACE = "no space left for"
UNLIKE = ("can be divided by", "it runs other code than the job", "its kernels give other bits")
"""Words for what all workers of a job must share, and one does not."""
_SAID = "what its sender may not say"
_WEIGHTS = {
    "foul": 4,
    "again": 4,
    "keys": 4,
    "profiles": 2,
    "scripted": 3,
    "by_job": 2,
    "stuck": 2,
    "fails": 0.6,
    "first_words": 3,
    "compiles": 2,
    "stray": 1,
    "looked_at": 3,
    "other_entries": 2,
    "end_alone": 1.5,
    "divides": 2,
    "other_code": 1,
    "echoes": 3,
    "strange": 4,
    "unshown": 2,
}
WITHOUT_LEASE = frozenset({"other_entries", "end_alone", "unshown"})
"""Acts on a journal on one host's disk, or by a job's only process."""


def draw_odd(rng: Random, horizon_ms: int) -> tuple[SimFault, ...]:
    """Draw acts of these kinds, in every second schedule."""
    faults: list[SimFault] = []
    for _ in range(rng.choice((1, 1, 2, 3)) if rng.random() < 0.5 else 0):
        one = draw_one(rng, rng.randint(20, horizon_ms))
        kind = rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        if kind == "stuck":  # in the middle of a step; the next time perhaps at the same point, or it is over by itself
            one = replace(
                one, phase=rng.choice(("computing", "computing", "reducing", "")), count=1, delay_us=0, same=True
            )
            again = replace(one, kind=kind, at_ms=one.at_ms + rng.randint(700, 1100))
            faults += [again] if rng.random() < 0.6 else []
        faults.append(replace(one, kind=kind))
    return tuple(faults)


def _foul(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A process says what only others may say: the coordinator, an agent, another life, the agent of another host."""
    live, control = injector.control.live_workers(), injector.control
    if not live:
        return
    one, other = live[fault.pick % len(live)], live[(fault.pick + 1) % len(live)]
    agent = control.agents[one.host]
    elsewhere = [w for w in live if w.host != agent.host]
    match fault.pick % 4:
        case 0:
            one.ties.client.send(wire.JobEnded(state="failed", cause=FOUL, reason=_SAID, exit_code=1))
        case 1:
            one.ties.client.send(wire.HostFailed(agent_id=agent.host, cause=FOUL, reason=_SAID))
        case 2 if one is not other:
            one.ties.client.send(other.last_words(FOUL, _SAID))
        case 3 if elsewhere:
            life = elsewhere[fault.pick % len(elsewhere)].me
            agent.client.send(
                wire.WorkerExited(
                    agent_id=agent.host,
                    worker_id=life.worker_id,
                    incarnation=life.incarnation,
                    cause=FOUL,
                    reason=_SAID,
                    died_unix_ns=injector.world.now_ns,
                )
            )


def _again(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The newest message of a process comes a second time."""
    workers = [w.ties.client for w in injector.control.live_workers() if w.frozen_ns is None]
    agents = [agent.client for _, agent in sorted(injector.control.agents.items()) if agent.alive]
    clients = [*workers, *agents]
    clients[fault.pick % len(clients)].again() if clients else None


def _keys(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Members meet by keys, now and once more."""
    for one in injector.control.live_workers():
        one.later(0, one.ties.meet)
        one.later(fault.for_ms * MS, one.ties.meet)


def _profiles(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A profile is asked for while another is made. A worker stands still meanwhile; or the coordinator is another one,
    which knows of none."""
    control, world, steps = injector.control, injector.world, 5 + fault.pick % 40
    control.command("profile", {"steps": steps, "folder": "first"}, OPERATE)
    world.later(10 * MS, control.command, "profile", {"steps": steps, "folder": "second"}, OPERATE)
    if fault.pick % 2:
        world.later(20 * MS, _new_coordinator, injector)
        world.later(100 * MS, control.command, "profile", {"steps": steps, "folder": "third"}, OPERATE)
    for one in control.live_workers()[:1]:
        world.later(30 * MS, one.freeze)
        world.later(830 * MS, one.thaw)


def _new_coordinator(injector: SimInjector) -> None:
    injector.control.coordinator.die("SIGKILL")
    injector.world.later(5 * MS, injector.control.start_coordinator)


def _scripted(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A fault of the script is due, or one that nobody knows; the next leader, and the same one, say so again."""
    for after_ms in (0, 1, fault.for_ms):
        for one in injector.control.live_workers():
            one.later(after_ms * MS, one.ties.strikes, fault.pick % 3)


def _by_job(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The process of the job asks for a checkpoint; a fault that strikes the coordinator goes through it."""
    injector.control.command("checkpoint", {}, JOB)
    if fault.pick % 2:
        due = {"text": "kill:target=coordinator", "kind": "kill", "target": "coordinator", "coordinator": True}
        injector.control.command("chaos", {"fault": "kill:target=coordinator", "due": due})


def _stuck(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A worker waits for a lock that nobody lets go: it is never back."""
    live = injector.control.live_workers()
    target = worker or (live[fault.pick % len(live)] if live else None)
    if target is not None:
        target.freeze(stuck=True)


def _fails(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """An agent can do nothing more for the job; perhaps the coordinator is dead at that time."""
    if fault.pick % 2:
        injector.control.coordinator.die("SIGKILL")
        injector.for_a_while(fault, injector.control.start_coordinator)
    injector.control.agents[injector.host(fault, worker)].fail(HOST_FAILED)


def _first_words(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A process says something before it has said who it is: a worker its last words, an agent that its host leaves."""
    control, live = injector.control, injector.control.live_workers()
    agent = control.agents[injector.host(fault, worker)]
    if fault.pick % 2 and live:
        one, words = live[fault.pick % len(live)], "it cannot even be built"
        said = [one.last_words(Cause.EXCEPTION, words)]
        SimControlClient(one, control.dial, f"worker {one.me}", lambda: said, nothing).begin()
        one.later(fault.for_ms * MS // 20, one.end, Cause.EXCEPTION, words)
    elif agent.alive:
        leaves = wire.HostLeaving(agent_id=agent.host)
        link = SimControlClient(agent, control.dial, f"agent {agent.host}", lambda: [leaves], nothing)
        link.begin()
        agent.later(400 * MS, link.close)


def _compiles(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A worker compiles: it stands still for longer than others may."""
    for one in injector.control.live_workers()[:1]:
        if one.frozen_ns is None:
            one.ties.compile(True)
            injector.world.later((600 + fault.for_ms) * MS, one.ties.compile, False)


def _stray(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The next lives of a slot run another script. Before the first step the job itself may be that script's."""
    live = injector.control.live_workers()
    if len(live) > 1 and all(worker.state.at for worker in live):
        target = live[fault.pick % len(live)]
        injector.control.site.another_script(target.me)
        target.die("SIGKILL")


def _divides(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Workers say how the optimizer's state can be divided; now and then one says otherwise."""
    odd = fault.pick % 6
    for n, one in enumerate(injector.control.live_workers()):
        how: Divides = "matrices" if n == odd else "elements"
        one.ties.client.send(wire.Divided(**_of(one), stages={0: how}))


def _other_code(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The code of a worker was edited before it imported that."""
    for one in injector.control.live_workers()[fault.pick % 3 :][:1]:
        files = {f"part{n}.py": "3" * 16 for n in range(fault.pick % 6)}
        one.ties.client.send(wire.Imported(**_of(one), code=Code(files)))
        one.ties.client.send(wire.Imported(**_of(one), code=Code(dict.fromkeys(files, "4" * 16))))


def _of(one: SimWorker) -> dict[str, Any]:
    return {"worker_id": one.me.worker_id, "incarnation": one.me.incarnation}


def _echoes(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """What threads of a worker note of a step comes a second time, after the step, or about one that was undone."""
    for one in injector.control.live_workers():
        one.later(0, _echo, one, fault.pick)


def _echo(one: SimWorker, pick: int) -> None:
    step, stages = one.driver.machine.step, one.driver.machine.stages
    notes = (
        *(LaneDone(step, 0, 0), Takes(step, {}), Holds(step - 1, {}), do.TimePassed()),
        *(do.OthersKept(step + 9, done=False), do.NotKept(step + 9, Why(Cause.DISK, "no room"))),
    )
    if stages:
        one.handle(notes[pick % len(notes)])


def _strange(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """Workers say what is out of date, or about nobody: that a link to a stranger failed, a plan that nobody wanted, a
    copy that nobody ordered, the last words of a life that is not known; and that the host's disk is full."""
    live = injector.control.live_workers()
    for one in live if fault.pick % 5 < 2 else live[:1]:
        machine, about = one.driver.machine, _of(one)
        match fault.pick % 5:
            case 0 if machine.plan is not None:
                about |= {"generation": machine.generation}
                failed = wire.PeerFault(**about, accused=[99], cause=Cause.LINK, reason="a transfer failed")
                one.ties.client.send(failed)
            case 1:
                one.ties.show_plan(machine.plan)
            case 2:
                one.ties.client.send(wire.HealFailed(**about, ticket=0, cause=Cause.LINK, reason="nobody gives it"))
            case 3:
                said = {"incarnation": one.me.incarnation + 9}
                words = msgspec.structs.replace(one.last_words(Cause.EXCEPTION, "it is over"), **said)
                role = f"worker {words.worker_id}.{words.incarnation}"
                link = SimControlClient(one, injector.control.dial, role, partial(list, [words]), nothing)
                link.begin()
                one.later(400 * MS, link.close)
            case 4:
                one.later(0, partial(one.ties.fail, f"{NO_SPACE} {one.me}", Cause.DISK, fatal=True))


def _unshown(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """The coordinator dies, the next one lacks a plan that workers follow, and those that it asks do not show it."""
    control = injector.control
    control.coordinator.die("SIGKILL")
    forget(control, 1 + fault.pick % 4)
    control.site.facts["unshown"] = list(([1, 1200], [800, 1], [1], [3000, 3000, 1])[fault.pick // 4 % 4])
    injector.for_a_while(fault, control.start_coordinator)


def _looked_at(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """People look again and again how hosts are, one of which goes."""
    agent, ask = injector.control.agents[injector.host(fault, worker)], injector.control.command
    agent.leave() if fault.pick % 2 else agent.freeze()
    injector.for_a_while(fault, agent.thaw)
    for n in range(1, 8):
        injector.world.later(n * 150 * MS, ask, "hosts", {})
    strike = {"text": "cut:target=host0,for_s=1", "kind": "cut", "target": "host0", "for_s": 1.0}
    ask("chaos", {"strike": strike})


def _other_entries(injector: SimInjector, fault: SimFault, worker: SimWorker | None) -> None:
    """A coordinator begins with a journal that has an entry of another version, and a plan of another job."""
    control = injector.control
    control.coordinator.die("SIGKILL")
    control.journal.append({"kind": "of another version"})
    plans = [entry["plan"] for entry in control.journal if entry["kind"] == "plan"]
    if plans and fault.pick % 2:
        control.journal.append({"kind": "plan", "plan": {**plans[-1], "lanes": 1 + control.checks.job.lanes}})
    injector.for_a_while(fault, control.start_coordinator)


ODD_FAULTS: dict[str, Callable[[SimInjector, SimFault, SimWorker | None], None]] = {
    "foul": _foul,
    "again": _again,
    "keys": _keys,
    "profiles": _profiles,
    "scripted": _scripted,
    "by_job": _by_job,
    "stuck": _stuck,
    "fails": _fails,
    "first_words": _first_words,
    "compiles": _compiles,
    "stray": _stray,
    "looked_at": _looked_at,
    "other_entries": _other_entries,
    "divides": _divides,
    "other_code": _other_code,
    "echoes": _echoes,
    "strange": _strange,
    "unshown": _unshown,
}
