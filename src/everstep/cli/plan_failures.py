"""`everstep plan failures`: how often a job will fail, for which causes, and how often to checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from everstep.cli.plan_inputs import (
    ASKED,
    MOST_NODES,
    hours_within,
    json_option,
    mtbf_hours,
    not_given,
    recovery_times,
    say,
    table,
)
from everstep.cost import failures, save_interval
from everstep.cost.goodput import Cluster, closed_form, recovery_policies
from everstep.cost.quantities import parse_seconds, time_words

_INTERVALS = "Young 1974; Daly 2006, equation 37; the interval that jobs use (checkpoint.interval=auto)"
_SOURCES = dict.fromkeys(("nodes", "hours", "mtbf_node_s", "devices"), ASKED)
_SOURCES |= dict.fromkeys(("probability", "expected", "mtbf_s"), failures.FORMULA)
_SOURCES |= {"lecture": f"the lecture's formula, {failures.LECTURE}"}


@click.command("failures")
@click.option("--nodes", type=click.IntRange(1, MOST_NODES), required=True, help="Number of nodes.")
@click.option("--hours", type=float, required=True, help="Hours that the job takes.")
@click.option(
    "--mtbf", default="100000h", show_default=True, help="Mean time between failures of a node: 100000h, 30d."
)
@click.option("--per-node", type=click.IntRange(1, 1024), default=8, show_default=True, help="Devices of a node.")
@click.option(
    "--checkpoint-cost", default="10s", show_default=True, help="Training time that a checkpoint takes: 30s, 250ms."
)
@json_option
def command(nodes: int, hours: float, mtbf: str, per_node: int, checkpoint_cost: str, as_json: bool) -> int:
    """Show how often a job fails, and how often it should checkpoint. The tables are by size and by cause."""
    mtbf_h = mtbf_hours(mtbf)
    cost_s = parse_seconds(checkpoint_cost, "--checkpoint-cost")
    asked = failures.forecast(nodes, hours_within(hours, "--hours"), mtbf_h)
    usual = [(case, failures.forecast(case.nodes, case.hours, mtbf_h)) for case in failures.SCENARIOS]
    devices = nodes * per_node
    observed = failures.LLAMA3
    per_cause = devices * hours / (observed.devices * observed.days * 24)
    chosen = save_interval.automatic_interval(cost_s, 0, 0.0, asked.mtbf_s)
    intervals = {
        "young_s": save_interval.young_s(cost_s, asked.mtbf_s),
        "daly_s": save_interval.daly_s(cost_s, asked.mtbf_s),
        "ours_s": chosen.seconds,
        "ours_reason": chosen.reason,
        "source": _INTERVALS,
    }
    result: dict[str, Any] = {
        "kind": "failures",
        **asdict(asked),
        "mtbf_node_s": mtbf_h * 3600,
        "devices": devices,
        "source": failures.FORMULA,
        "sources": _SOURCES,
        "lecture_formula": failures.LECTURE,
        "lecture_reason": failures.LECTURE_REASON,
        "scenarios": [{"name": case.name, **asdict(found), "source": failures.FORMULA} for case, found in usual],
        "by_cause": {
            "counts": dict(observed.counts),
            "total": observed.total,
            "expected": {cause: count * per_cause for cause, count in observed.counts.items()},
            "expected_total": observed.total * per_cause,
            "mttf_s": observed.mttf_s(devices),
            "source": observed.source,
        },
        "mttf_by_size": mttf_by_size(),
        "time_lost": llama3_time_lost(),
        "checkpoint_interval": intervals,
        "fits": None,
        "assumed": not_given(
            {
                "mtbf": f"a failure of each node per {mtbf}",
                "per_node": f"{per_node} devices per node",
                "checkpoint_cost": f"a checkpoint takes {time_words(cost_s)} of training",
            }
        ),
    }
    say(result, as_json, _lines(result))
    return 0


def llama3_time_lost() -> dict[str, Any]:
    """Share of the time that Llama 3's job lost, beside restarts from checkpoints by our closed form."""
    observed = failures.LLAMA3
    cluster = Cluster(observed.devices, 3600 / observed.per_device_hour, shares=observed.shares)
    restart = next(one for one in recovery_policies(recovery_times(())[0], cluster) if one.name == "restart")
    return {
        "published_at_most": failures.LLAMA3_LOST,
        "restarts": 1 - closed_form(restart, cluster),
        "source": "Llama 3 (arXiv 2407.21783; recalled): higher than 90 % effective training time; restarts as "
        "measured with small hosts, checkpoints of 10 s, repairs of 4 h (everstep plan goodput, policy restart)",
    }


def mttf_by_size() -> list[dict[str, Any]]:
    """Times to failure that were published, beside those by the rate of the same jobs, and by the other rates."""
    return [
        {
            "gpus": one.gpus,
            "published_s": one.hours * 3600,
            "published_is": one.rate.name,
            "by_rate_s": one.rate.mttf_s(one.gpus),
            "by_observed_rate_s": failures.OBSERVED.mttf_s(one.gpus),
            "by_projected_rate_s": failures.PROJECTED.mttf_s(one.gpus),
            "by_llama3_rate_s": failures.LLAMA3.mttf_s(one.gpus),
            "source": one.rate.source,
        }
        for one in failures.TIMES_TO_FAILURE
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    head = ["", "nodes", "hours", "at least one", "expected", failures.LECTURE]
    rows = [head] + [
        [
            one["name"],
            f"{one['nodes']:,}",
            f"{one['hours']:g}",
            f"{one['probability']:.2%}",
            f"{one['expected']:.3g}",
            f"{one['lecture']:.3g}",
        ]
        for one in [{"name": "this job", **result}, *result["scenarios"]]
    ]
    lost = result["time_lost"]
    causes, every, saved = result["by_cause"], result["mttf_by_size"], result["checkpoint_interval"]
    expected = sorted(causes["expected"].items(), key=lambda one: (-one[1], one[0]))
    rates = ("by_rate_s", "by_observed_rate_s", "by_projected_rate_s", "by_llama3_rate_s")
    sizes = [["GPUs", "published", "", "ours", "by the observed rate", "by the projected", "by Llama 3's"]] + [
        [
            f"{one['gpus']:,}",
            time_words(one["published_s"]),
            one["published_is"],
            *(time_words(one[rate]) for rate in rates),
        ]
        for one in every
    ]
    return [
        f"one failure per {time_words(result['mtbf_s'])} (a node: {time_words(result['mtbf_node_s'])})",
        *table(rows),
        f"{failures.LECTURE} is no expected number: {failures.LECTURE_REASON}.",
        "",
        f"By cause, at Llama 3's rates, {result['devices']:,} devices: {causes['expected_total']:.3g} in all, one per "
        f"{time_words(causes['mttf_s'])}",
        *table([[cause, f"{number:.3g}"] for cause, number in expected]),
        "Time to failure by size",
        *table(sizes),
        f"{failures.TWO_RATES}.",
        f"Time lost on 16,384 GPUs: published less than {lost['published_at_most']:.0%}, restarts by our model "
        f"{lost['restarts']:.1%}",
        f"Checkpoints: Young every {time_words(saved['young_s'])}, Daly every {time_words(saved['daly_s'])}, "
        f"jobs {saved['ours_reason']}",
        *(f"assumed: {one}" for one in result["assumed"]),
        *(f"source: {one}" for one in (result["source"], causes["source"], every[0]["source"], every[-1]["source"])),
        *(f"source: {one['source']}" for one in (lost, saved)),
    ]
