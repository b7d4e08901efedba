"""Goodput of a job under failures: an event simulation of recovery policies, and closed forms to hold it to. Pure.

Goodput is the work that counts, as a share of what the devices of the job would do without failures and checkpoints;
spares do not count as devices of the job. Failures hit devices at a constant rate, independently, and harm a process
(its device goes on), a device or a whole host. A failure of what is down has no effect.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from everstep.base.errors import check
from everstep.cost.save_interval import automatic_interval

LOSSES = ("stalled", "redone", "missing", "checkpoints")


@dataclass(frozen=True)
class Cluster:
    """Devices of a job and how they fail.

    mtbf_s: between failures of one device, its share of its host's included. shares: of failures that harm a process, a
    device and a host. spares: further devices, ready. repair_s: until what broke is back. step_s: length of a step.
    state_bytes: of one device. link: bytes per second into one device. replica: devices of one replica (torchft).
    stages: of a pipeline, which divide the devices equally. backups: workers on standby for each of them, beside those
    devices.
    """

    devices: int
    mtbf_s: float
    per_node: int = 8
    spares: int = 0
    repair_s: float = 4 * 3600.0
    step_s: float = 10.0
    state_bytes: float = 0.0
    link: float = 25e9
    replica: int = 8
    checkpoint_s: float = 10.0
    shares: tuple[float, float, float] = (1.0, 0.0, 0.0)
    stages: int = 1
    backups: int = 0

    @property
    def rate(self) -> float:
        """Failures of the job per second."""
        return self.devices / self.mtbf_s


@dataclass(frozen=True)
class Policy:
    """What a job does at a failure.

    stall_s: all stand still, by harm. back_s: until a spare, or the process again, computes. provision_s: all wait
    until a replacement has come, so long where there is no spare; None: they go on, and what broke is repaired.
    rolls_back: work since the last checkpoint is lost. unit: devices that leave together. slowdown: throughput lost per
    share of devices lost. save_every_s, save_s: of training between checkpoints, and how long one stops it.
    copies: of each part of the state; 0: all workers have all of it. If the last copy is lost before there is another
    one, the job goes back to a checkpoint, which takes reload_s. head_s: if the head's host is lost. stages: each
    worker has one of them, and the stage with the fewest workers decides how fast the job is; 0: no pipeline.
    """

    name: str
    about: str
    source: str
    stall_s: tuple[float, ...]
    back_s: float
    save_every_s: float
    save_s: float = 0.0
    provision_s: float | None = None
    rolls_back: bool = False
    unit: int = 1
    slowdown: float = 1.0
    copies: int = 0
    reload_s: float = 0.0
    head_s: float = 0.0
    stages: int = 0

    def workers(self, cluster: Cluster) -> int:
        """Devices that can fail: those of the job, and its backups."""
        return cluster.devices + self.stages * cluster.backups


_MEASURED = "bench/README.md, scaled"
OOBLECK_SLOWDOWN = 3.8
"""Throughput that Oobleck loses per share of devices: with 10 % of them lost it is then 1/1.46 of ReCycle's, the most
that ReCycle's abstract (arXiv 2405.14009) states."""


def recovery_policies(times: Mapping[str, float], cluster: Cluster) -> tuple[Policy, ...]:
    """Policies, by recovery times (`recovery_times.json`) scaled as their parts scale.

    Ours: the measured time less its step, the lost lanes computed again (at most a step), and the plan's way to all
    workers, in proportion to their number; a joiner copies its state over its link. Others: the times as they are.
    """
    every_s = automatic_interval(cluster.checkpoint_s, 0, 0.0, 1 / cluster.rate).seconds
    copy_s = cluster.state_bytes / cluster.link
    return *_in_place(times, cluster, every_s, copy_s), *_of_others(times, cluster, every_s, copy_s)


def _in_place(times: Mapping[str, float], cluster: Cluster, every_s: float, copy_s: float) -> tuple[Policy, ...]:
    plan_s = times["ours_plan"] * cluster.devices / 8000
    in_place = max(0.0, times["ours_next_step"] - times["ours_step"]) + cluster.step_s + plan_s
    lost_host = times["ours_host"] + cluster.step_s + plan_s
    back_s = (times["ours_with_spare"] if cluster.spares else times["ours_restarted"]) + plan_s + copy_s
    head = 1 / math.ceil(cluster.devices / cluster.per_node)
    of_head = (times["ours_head"] + cluster.step_s) * head
    ours = Policy(
        "ours",
        "in place: survivors go on; the coordinator in etcd",
        _MEASURED,
        (in_place, in_place, lost_host),
        back_s,
        every_s,
        times["ours_snapshot"],
        head_s=of_head,
    )
    by_hand = replace(
        ours, name="ours-no-etcd", about="the same, a person moves a lost coordinator", head_s=times["operator"] * head
    )
    reload_s = times["ours_all"] + copy_s
    zero = replace(ours, name="ours-zero", about="the same with ZeRO, two copies", copies=2, reload_s=reload_s)
    about = f"in {cluster.stages} stages, each with {cluster.backups} backups"
    stages = replace(ours, name="ours-stages", about=about, reload_s=reload_s, stages=cluster.stages)
    return ours, by_hand, zero, stages


def _of_others(times: Mapping[str, float], cluster: Cluster, every_s: float, copy_s: float) -> tuple[Policy, ...]:
    restart = Policy(
        "restart",
        "torchrun: all start again from the last checkpoint, without the lost host",
        _MEASURED,
        tuple(times[name] + copy_s for name in ("torchrun_process", "torchrun_host", "torchrun_host")),
        copy_s,
        every_s,
        cluster.checkpoint_s,
        rolls_back=True,
        unit=cluster.per_node,
    )
    lost_step = times["torchft_next_step"] + cluster.step_s / 2
    torchft = Policy(
        "torchft",
        "a replica leaves, and the step is lost",
        _MEASURED,
        (lost_step, lost_step, lost_step),
        times["torchft_replacement"] + copy_s,
        every_s,
        unit=cluster.replica,
    )
    gemini_s = times["gemini_detect"] + times["gemini_serialize"] + times["gemini_restart"]
    gemini = Policy(
        "gemini",
        "all start again from peers' memory, with the step before",
        "GEMINI, SOSP 2023, recalled",
        (gemini_s, gemini_s, gemini_s),
        copy_s,
        cluster.step_s,
        provision_s=times["gemini_replace"],
        rolls_back=True,
    )
    pause = times["reroute"]
    recycle = Policy(
        "recycle",
        "micro-batches go to data parallel peers",
        "arXiv 2405.14009: as fast as the devices that are left",
        (pause, pause, pause),
        pause + copy_s,
        every_s,
    )
    pipelines = "pipelines of fewer nodes"
    source = "arXiv 2309.08125, by ReCycle's comparison with it"
    oobleck = replace(recycle, name="oobleck", about=pipelines, source=source, slowdown=OOBLECK_SLOWDOWN)
    return restart, torchft, gemini, recycle, oobleck


@dataclass
class _Run:
    """One simulated job. cycle_s: since the last checkpoint was complete. down: workers. held: by stage, its backups;
    below 0 the devices that it lacks. returns: when, devices, the first one's stage, spares."""

    policy: Policy
    cluster: Cluster
    uniform: Callable[[], float]
    spares: int
    held: list[int]
    speed: float = 1.0
    now_s: float = 0.0
    useful_s: float = 0.0
    since_s: float = 0.0
    cycle_s: float = 0.0
    stalled_until_s: float = 0.0
    down: int = 0
    failures: int = 0
    returns: list[tuple[float, int, int, int]] = field(default_factory=list)
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))

    def go_to(self, until_s: float) -> None:
        """Let time pass in which nothing fails and nothing comes back."""
        start_s, self.now_s = self.now_s, until_s
        if start_s < self.stalled_until_s:
            halt_s = min(until_s, self.stalled_until_s)
            self.lost_s["stalled"] += halt_s - start_s
            start_s = halt_s
        span_s = until_s - start_s
        every, cost = self.policy.save_every_s, self.policy.save_s
        whole, rest_s = divmod(self.cycle_s + span_s, every + cost)
        trained_s = whole * every + min(rest_s, every) - min(self.cycle_s, every)
        self.useful_s += self.speed * trained_s
        self.since_s = self.speed * min(rest_s, every) if whole else self.since_s + self.speed * trained_s
        self.lost_s["missing"] += (1 - self.speed) * trained_s
        self.lost_s["checkpoints"] += span_s - trained_s
        self.cycle_s = rest_s

    def come_back(self) -> None:
        """What returns next: devices to the job, or repaired ones to the spares."""
        _, devices, stage, spares = heapq.heappop(self.returns)
        self.spares += spares
        if devices:
            self._count(devices, stage)

    def _count(self, more: int, stage: int) -> None:
        """More workers, or fewer, from this stage on one in each."""
        self.down -= more
        if not self.held:
            self.speed = max(0.0, 1 - self.policy.slowdown * self.down / self.cluster.devices)
            return
        for number in range(abs(more)):
            self.held[(stage + number) % len(self.held)] += 1 if more > 0 else -1
        self.speed = 1 + min(0, *self.held) * len(self.held) / self.cluster.devices

    def fail(self) -> None:
        """One failure hits a worker, idle or busy."""
        policy, cluster = self.policy, self.cluster
        place, workers = self.uniform(), policy.workers(cluster)
        stage = int(place * policy.stages)
        missing = (cluster.backups - self.held[stage]) * policy.stages if self.held else self.down
        if (place * policy.stages % 1 if self.held else place) * workers < missing:
            return
        self.failures += 1
        draw, process = self.uniform(), cluster.shares[0]
        harm = 0 if draw < process else 1 if draw < process + cluster.shares[1] else 2
        hit = cluster.per_node if harm == 2 else 1
        lost = min(workers - self.down, -(-hit // policy.unit) * policy.unit)
        gone = policy.copies and self.uniform() * cluster.devices < self.down * (policy.copies - 1)
        until_back_s = self._replace(harm, lost, stage)
        if policy.provision_s is None:
            self._count(-lost, stage)
            gone = gone or self.speed <= 0 < len(self.held)
        stall_s = policy.stall_s[harm] + (policy.head_s if harm == 2 else 0.0) + (policy.reload_s if gone else 0.0)
        if policy.provision_s is not None:
            stall_s += until_back_s
        if policy.rolls_back or gone:
            self.lost_s["redone"] += self.since_s
            self.useful_s -= self.since_s
            self.since_s = self.cycle_s = 0.0
        self.stalled_until_s = max(self.stalled_until_s, self.now_s + stall_s)

    def _replace(self, harm: int, lost: int, stage: int) -> float:
        """Arrange the return of lost devices; seconds until the last of them is back."""
        policy, cluster = self.policy, self.cluster
        at_once = lost if harm == 0 else min(lost, self.spares)
        later_s = policy.back_s + (cluster.repair_s if policy.provision_s is None else policy.provision_s)
        if harm:
            self.spares -= at_once
            self._schedule(cluster.repair_s, 0, 0, at_once)
        if policy.provision_s is None:
            self._schedule(policy.back_s, at_once, stage, 0)
            self._schedule(later_s, lost - at_once, stage + at_once, 0)
        return later_s if at_once < lost else policy.back_s

    def _schedule(self, after_s: float, devices: int, stage: int, spares: int) -> None:
        if devices or spares:
            heapq.heappush(self.returns, (self.now_s + after_s, devices, stage, spares))


@dataclass(frozen=True)
class GoodputFound:
    """Means over the runs, with the 95 % confidence interval of the goodput. lost: shares of the time by LOSSES."""

    goodput: float
    low: float
    high: float
    failures: float
    lost: Mapping[str, float]
    runs: int


def simulate(policy: Policy, cluster: Cluster, seconds: float, runs: int, uniform: Callable[[], float]) -> GoodputFound:
    """Goodput of a job of so many seconds. uniform: draws from [0, 1), all the randomness there is."""
    check(runs >= 2, f"a confidence interval needs at least 2 runs, got {runs}")
    found = [_one_run(policy, cluster, seconds, uniform) for _ in range(runs)]
    shares = [run.useful_s / seconds for run in found]
    mean = statistics.fmean(shares)
    wide = _student_95(runs - 1) * statistics.stdev(shares) / math.sqrt(runs)
    return GoodputFound(
        mean,
        max(0.0, mean - wide),
        min(1.0, mean + wide),
        statistics.fmean(run.failures for run in found),
        {name: max(0.0, statistics.fmean(run.lost_s[name] for run in found) / seconds) for name in LOSSES},
        runs,
    )


def _one_run(policy: Policy, cluster: Cluster, seconds: float, uniform: Callable[[], float]) -> _Run:
    run = _Run(policy, cluster, uniform, cluster.spares, [cluster.backups] * policy.stages)
    rate = policy.workers(cluster) / cluster.mtbf_s
    fails_s = -math.log1p(-uniform()) / rate
    while True:
        back_s = run.returns[0][0] if run.returns else math.inf
        run.go_to(min(fails_s, back_s, seconds))
        if run.now_s >= seconds:
            return run
        if back_s <= fails_s:
            run.come_back()
        else:
            run.fail()
            fails_s -= math.log1p(-uniform()) / rate


def _student_95(freedom: int) -> float:
    """Quantile of Student's t for a two-sided interval of 95 %, by its expansion around the normal one; exact for 1, 2.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if freedom <= 2:
        return (12.7062, 4.3027)[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


MOST_EXPONENT = 700.0
"""exp() of more is no number."""


def restart_goodput(rate: float, every_s: float, save_s: float, restart_s: float) -> float:
    """Goodput with restarts from checkpoints, exponential failures at any time, also in checkpoints and restarts.

    Source: Daly 2006, section 4: a segment takes exp(rate x restart) (exp(rate x (every + save)) - 1) / rate.
    """
    segment = rate * (every_s + save_s)
    return rate * every_s * math.exp(-rate * restart_s) / math.expm1(segment) if segment < MOST_EXPONENT else 0.0


def in_place_goodput(rate: float, stall_s: float) -> float:
    """Goodput of a job that stands still for stall_s after each failure: no failure in the stall_s before, exp(-rate x
    stall). Source: Poisson process."""
    return math.exp(-rate * stall_s)


def closed_form(policy: Policy, cluster: Cluster) -> float:
    """Goodput of a policy by the closed forms together, as if stalls and missing devices did not meet."""
    stall_s = sum(share * stall for share, stall in zip(cluster.shares, policy.stall_s, strict=True))
    process, device, host = cluster.shares
    later_s = policy.back_s + (cluster.repair_s if policy.provision_s is None else policy.provision_s)
    broken = device * policy.unit + host * max(policy.unit, cluster.per_node)
    away_s = process * policy.unit * policy.back_s + broken * (policy.back_s if cluster.spares else later_s)
    if policy.provision_s is not None:
        at_once = 1.0 if cluster.spares else process
        stall_s += at_once * policy.back_s + (1 - at_once) * later_s
        present = 1.0
    elif policy.stages:
        with_host_s = host * (policy.back_s if cluster.spares else later_s) * (cluster.per_node > 1)
        present = present_stages(cluster, away_s - cluster.per_node * with_host_s, with_host_s)
    else:
        present = 1 - policy.slowdown * (1 - available_devices(cluster.mtbf_s, away_s))
    if policy.rolls_back:
        return restart_goodput(cluster.rate, policy.save_every_s, policy.save_s, stall_s) * present
    stall_s += host * policy.head_s
    saving = policy.save_every_s / (policy.save_every_s + policy.save_s)
    return in_place_goodput(policy.workers(cluster) / cluster.mtbf_s, stall_s) * present * saving


ROUNDING = 1e-12
"""Probabilities that are less than this are none."""


def present_stages(cluster: Cluster, away_s: float, host_away_s: float = 0.0) -> float:
    """Speed of a pipeline, in 0..1, whose stage with the fewest devices decides: each lacks a binomial number of them
    beyond its backups, and those of hosts that are away. A host is taken to lack in all stages alike, which is too much
    where it has fewer devices than there are stages. away_s, host_away_s: seconds per failure that devices are away,
    alone and with their host. Source: the expected maximum of so many is the sum of 1 - P(at most k)^stages over k."""
    pool, there = cluster.devices // cluster.stages, available_devices(cluster.mtbf_s, away_s)
    workers, within, more = pool + cluster.backups, 0.0, []
    if there == 0:
        return 0.0
    for missing in range(workers if there < 1 else 0):
        within += _binomial(workers, missing, 1 - there)
        more.append(1 - min(1.0, within) ** cluster.stages)
        if within >= 1 - ROUNDING:
            break
    hosts, taken = max(1, workers * cluster.stages // cluster.per_node), -(-cluster.per_node // cluster.stages)
    down = 1 - available_devices(cluster.mtbf_s / cluster.per_node, host_away_s)
    lacking = taken * hosts * down + sum(more) - cluster.backups
    for lost in range(min(hosts, -(-cluster.backups // taken))):
        left = cluster.backups - lost * taken
        lacking += _binomial(hosts, lost, down) * (left - sum(more[:left]))
    return min(1.0, max(0.0, 1 - lacking / pool))


def _binomial(count: int, chosen: int, share: float) -> float:
    """Probability that of so many, each with this probability, below 1, exactly `chosen` are it."""
    if share == 0:
        return float(chosen == 0)
    ways = math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
    return math.exp(ways + chosen * math.log(share) + (count - chosen) * math.log1p(-share))


def available_devices(mtbf_s: float, away_s: float) -> float:
    """Share of devices that are there, each away for away_s after a failure. Source: alternating renewal process."""
    return mtbf_s / (mtbf_s + away_s)
