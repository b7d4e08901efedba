"""`everstep plan goodput`: what failures cost, by recovery policy, from a simulation of failures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

import click

from everstep.base.errors import ConfigError, did_you_mean
from everstep.cli.plan_inputs import ASKED, MOST_HOURS, json_option, mtbf_hours, not_given, recovery_times, say, table
from everstep.cost import failures
from everstep.cost.goodput import Cluster, GoodputFound, Policy, closed_form, recovery_policies, simulate
from everstep.cost.quantities import parse_bytes, parse_rate, parse_seconds, time_words
from everstep.cost.wanted_goodput import WantedDevices, fewest_devices

SOURCE = "event simulation, exponential failures, 95 % confidence by Student's t over the runs"
MOST_DEVICES = 10**6
MOST_FAILURES = 2_000_000
"""Limit for all runs of a policy together: more would take minutes."""


@click.command("goodput")
@click.option("--devices", "--gpus", type=click.IntRange(1, MOST_DEVICES), help="Devices of the job.")
@click.option("--nodes", type=click.IntRange(1, MOST_DEVICES), help="Nodes of the job, instead of --devices.")
@click.option("--days", type=float, help="Days that the job takes (90).")
@click.option("--hours", type=float, help="Hours that the job takes, instead of --days.")
@click.option("--per-node", type=click.IntRange(1, 1024), help="Devices of a node (8).")
@click.option("--mtbf", default="100000h", show_default=True, help="Mean time between failures of a node.")
@click.option("--spares", type=click.IntRange(0, MOST_DEVICES), default=0, show_default=True, help="Spare devices.")
@click.option("--stages", type=click.IntRange(1, 1024), help="Stages of a pipeline, for the policy ours-stages (8).")
@click.option(
    "--backups", type=click.IntRange(0, 1024), default=0, show_default=True, help="Workers on standby for each stage."
)
@click.option("--repair", default="4h", show_default=True, help="Time until a broken device or host is back.")
@click.option("--step", default="10s", show_default=True, help="Length of a step.")
@click.option("--state", metavar="SIZE", help="State of one device, which a replacement copies: 40GiB (none).")
@click.option("--network", default="200Gb", show_default=True, help="Speed of a device's link: 200Gb.")
@click.option("--replica", type=click.IntRange(1, MOST_DEVICES), help="Devices of a replica of torchft (a node's).")
@click.option(
    "--checkpoint-cost", default="10s", show_default=True, help="Training time that a checkpoint on disk takes."
)
@click.option("--policy", "names", multiple=True, help="Policy to simulate; may be repeated (all).")
@click.option(
    "--time", "changed", multiple=True, metavar="NAME=TIME", help="Recovery time to use instead; may be repeated."
)
@click.option("--wanted", metavar="PERCENT", help="Show the fewest spares and backups that give this goodput: 99.9%.")
@click.option("--runs", type=click.IntRange(2, 1000), default=20, show_default=True, help="Simulated jobs per policy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the simulation.")
@json_option
def command(names: Sequence[str], runs: int, seed: int, as_json: bool, **asked: Any) -> int:
    """Show the goodput of a job by recovery policy. Goodput is the share of the work that counts."""
    days = _days(asked)
    times, about = recovery_times(asked["changed"])
    cluster = _cluster(asked)
    known = {policy.name: policy for policy in recovery_policies(times, cluster)}
    for name in names:
        if name not in known:
            near = did_you_mean(name, known, "{}")
            raise ConfigError(f"--policy: expected one of {', '.join(known)}, got {name[:40]!r}{near}")
    wanted = _wanted(asked["wanted"])
    tried = 1 if wanted is None else 1 + cluster.devices.bit_length()
    expected = cluster.rate * days * 86400 * runs * tried
    if expected > MOST_FAILURES:
        most = int(MOST_FAILURES / expected * runs)
        fewer = f"--runs {most}, " * (most >= 2)
        raise ConfigError(
            f"expected at most {MOST_FAILURES:,} failures in all runs of a policy, got about {expected:.3g}: "
            f"take {fewer}fewer --days or a longer --mtbf"
        )
    found = {
        name: (policy, simulate(policy, cluster, days * 86400, runs, random.Random(seed).random))
        for name, policy in known.items()
        if not names or name in names
    }

    def goodput(name: str, more: WantedDevices, runs: int) -> float:
        changed = replace(cluster, spares=more.spares, backups=more.backups)
        policy = next(one for one in recovery_policies(times, changed) if one.name == name)
        return simulate(policy, changed, days * 86400, runs, random.Random(seed).random).goodput

    enough: dict[str, WantedDevices | None] = {}
    if wanted is not None:
        for name, (policy, _) in found.items():
            enough[name] = fewest_devices(partial(goodput, name), wanted, cluster.devices, runs, policy.stages)
    result: dict[str, Any] = {
        "kind": "goodput",
        **asdict(cluster),
        "days": days,
        "seed": seed,
        "runs": runs,
        "mtbf_job_s": 1 / cluster.rate,
        "wanted": wanted,
        "policies": [_policy(cluster, *one) for one in found.values()],
        "spares_wanted": {name: one and one.spares for name, one in enough.items()},
        "backups_wanted": {name: one and one.backups for name, one in enough.items()},
        "times": about,
        "fits": None,
        "source": SOURCE,
        "sources": _sources(cluster),
        "assumed": [f"harms as in {failures.LLAMA3.source}", *_assumed(cluster, asked)],
    }
    say(result, as_json, _lines(result))
    return 0


def _sources(cluster: Cluster) -> dict[str, str]:
    """Sources of all figures, by key. Those of a policy name its recovery times beside this."""
    asked = (*(one.name for one in fields(Cluster)), "days", "seed", "runs", "wanted")
    found = dict.fromkeys(asked, ASKED) | {"shares": failures.LLAMA3.source}
    found |= dict.fromkeys(("policies", "spares_wanted", "backups_wanted"), SOURCE)
    return found | {"mtbf_job_s": f"{cluster.devices} devices that fail independently"}


def _assumed(cluster: Cluster, asked: Mapping[str, Any]) -> list[str]:
    return not_given(
        ({"days": "90 days"} if asked["hours"] is None else {})
        | {
            "per_node": f"{cluster.per_node} devices per node",
            "mtbf": f"a failure of each node per {asked['mtbf']}",
            "spares": "no spares",
            "stages": f"a pipeline has {cluster.stages} stages",
            "backups": "no backups of its stages",
            "repair": f"a device or host that broke is back after {time_words(cluster.repair_s)}",
            "step": f"a step takes {time_words(cluster.step_s)}",
            "state": "no state to copy to a replacement",
            "network": f"{cluster.link * 8 / 1e9:g} Gb/s into each device",
            "replica": f"replicas of torchft are {cluster.replica} devices",
            "checkpoint_cost": f"a checkpoint takes {time_words(cluster.checkpoint_s)} of training",
        }
    )


def _wanted(text: str | None) -> float | None:
    """A goodput in 0..1 from percent."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else 0.0
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(f"--wanted: expected more than 0% and less than 100%, such as 99.9%, got {text[:40]!r}")
    return share


def _days(asked: Mapping[str, Any]) -> float:
    days, hours = asked["days"], asked["hours"]
    if days is not None and hours is not None:
        raise ConfigError("expected --days or --hours, got both")
    found = 2160.0 if days is None else days * 24
    found = found if hours is None else hours
    if not 0 < found <= MOST_HOURS:
        key, most, got = ("days", MOST_HOURS // 24, days) if hours is None else ("hours", MOST_HOURS, hours)
        raise ConfigError(f"--{key}: expected more than 0 and at most {most} {key}, got {got:g}")
    return float(found / 24)


def _devices(asked: Mapping[str, Any]) -> int:
    devices, nodes = asked["devices"], asked["nodes"]
    if (devices is None) == (nodes is None):
        got = "neither" if nodes is None else "both"
        raise ConfigError(f"expected --devices or --nodes, such as --devices 512, got {got}")
    devices = nodes * (asked["per_node"] or 8) if devices is None else devices
    if devices > MOST_DEVICES:
        raise ConfigError(f"--nodes: expected at most {MOST_DEVICES:,} devices in all, got {devices:,}")
    return int(devices)


def _cluster(asked: Mapping[str, Any]) -> Cluster:
    devices = _devices(asked)
    per_node = min(asked["per_node"] or 8, devices)
    if asked["per_node"] is not None and asked["per_node"] > devices:
        raise ConfigError(f"--per-node: expected at most --devices ({devices}), got {asked['per_node']}")
    if devices % per_node:
        raise ConfigError(f"--devices: expected whole nodes of {per_node} (--per-node), got {devices}")
    if asked["replica"] is not None and asked["replica"] > devices:
        raise ConfigError(f"--replica: expected at most --devices ({devices}), got {asked['replica']}")
    stages = asked["stages"] or next(count for count in range(8, 0, -1) if devices % count == 0)
    if devices % stages:
        raise ConfigError(f"--stages: expected a number that divides --devices ({devices}), got {stages}")
    return Cluster(
        devices,
        mtbf_hours(asked["mtbf"]) * 3600 * per_node,
        per_node=per_node,
        spares=asked["spares"],
        repair_s=parse_seconds(asked["repair"], "--repair"),
        step_s=parse_seconds(asked["step"], "--step"),
        state_bytes=parse_bytes(asked["state"], "--state") if asked["state"] else 0,
        link=parse_rate(asked["network"], "--network"),
        replica=asked["replica"] or min(per_node, devices),
        checkpoint_s=parse_seconds(asked["checkpoint_cost"], "--checkpoint-cost"),
        stages=stages,
        backups=asked["backups"],
        shares=failures.LLAMA3.shares,
    )


def _policy(cluster: Cluster, policy: Policy, found: GoodputFound) -> dict[str, Any]:
    paid = found.goodput * cluster.devices / (policy.workers(cluster) + cluster.spares)
    about = {key: getattr(policy, key) for key in ("name", "about", "source")}
    more = {"save_every_s": policy.save_every_s, "closed_form": closed_form(policy, cluster)}
    return {**about, **more, **asdict(found), "goodput_of_paid_devices": paid}


def _lines(result: dict[str, Any]) -> list[str]:
    head = [
        "policy",
        "goodput",
        "95 %",
        "failures",
        "stalled",
        "redone",
        "missing",
        "checkpoints",
        "closed form",
        "of paid devices",
    ]
    rows = [
        [
            one["name"],
            f"{one['goodput']:.3%}",
            f"{one['low']:.3%} to {one['high']:.3%}",
            f"{one['failures']:.0f}",
            *(f"{share:.3%}" for share in one["lost"].values()),
            f"{one['closed_form']:.3%}",
            f"{one['goodput_of_paid_devices']:.2%}",
        ]
        for one in result["policies"]
    ]
    return [
        f"{result['devices']:,} devices for {result['days']:g} days, one failure per "
        f"{time_words(result['mtbf_job_s'])}, {result['runs']} runs from seed {result['seed']}",
        *table([head, *rows]),
        *table([[one["name"], one["about"], one["source"]] for one in result["policies"]]),
        *_wanted_lines(result),
        *(f"assumed: {one}" for one in result["assumed"]),
    ]


def _wanted_lines(result: dict[str, Any]) -> list[str]:
    if result["wanted"] is None:
        return []
    head = ["policy", f"spares for {100 * result['wanted']:g}%", "backups of each stage"]
    backups, none = result["backups_wanted"], f"not with {result['devices']:,}"
    spares = result["spares_wanted"].items()
    return table([head, *([name, none if n is None else f"{n:,}", f"{backups[name] or ''}"] for name, n in spares)])
