"""Events as lines for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from everstep.base.cause import Cause

Event = Mapping[str, Any]

ERRORS = frozenset({"job_failed", "worker_evicted"})
WARNINGS = frozenset(
    {
        "warning",
        "worker_suspected",
        "nonfinite",
        "waiting",
        "fallback",
        "checkpoint_failed",
        "coordinator_restarted",
        "coordinator_killed",
        "fault_injected",
    }
)
_LIFE = re.compile(r"\b(worker \d{1,9}) \(incarnation (\d{1,9})\)")


def level(event: Event) -> str:
    """Level of an event: info, warning or error."""
    kind = event["kind"]
    if kind == "job_failed" and event.get("state") == "interrupted":
        return "warning"
    if kind == "checkpoint_failed" and checkpoint_result(event) == "skipped":
        return "info"
    return "error" if kind in ERRORS else "warning" if kind in WARNINGS else "info"


def one_line(value: Any, most: int = 600) -> str:
    """Text without line breaks and control characters, cut off if it is long."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value or "")).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def reason_text(value: Any, most: int = 600) -> str:
    """A reason as one line for people: a worker's first life is the worker, a later one is named."""
    return _LIFE.sub(
        lambda found: f"life {found[2]} of {found[1]}" if int(found[2]) else found[1], one_line(value, most)
    )


def shortened(text: str, most: int, between: str = " ") -> str:
    """As many whole words of a text as so many characters hold, with an ellipsis for the rest."""
    if len(text) <= most:
        return text
    end = f"{between.strip()}…"
    whole = text[: max(0, most - len(end) + 1)].rpartition(between)[0]
    return whole.rstrip(" ,;:") + end if whole else text[: max(0, most - 1)] + "…"


def number(value: Any, default: float = 0.0) -> float:
    """A finite number from a file's value, else the default."""
    if type(value) is float:
        return value if isfinite(value) else default
    try:
        return float(value) if type(value) is int else default
    except OverflowError:
        return default


def whole_number(value: Any) -> int:
    """An integer from a file's value, else 0; times in ns keep every digit."""
    return value if type(value) is int else int(number(value))


def known(value: Any) -> int | None:
    """An integer from a file's value, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_dict(value: Any) -> dict[str, Any]:
    """A dictionary from a file's value, else an empty one."""
    return value if isinstance(value, dict) else {}


def cause(event: Event) -> Cause:
    """Cause of an event, for programs; unknown in events of older versions."""
    return Cause.read(event.get("cause"))


def why_of(event: Event) -> tuple[Cause, str]:
    """Cause and reason of an event, for programs and for people."""
    return cause(event), reason_text(event.get("reason"))


def checkpoint_result(event: Event) -> str:
    """Result of a checkpoint: complete, skipped (the next one will do) or failed; older jobs told the last two
    alike."""
    if event["kind"] == "checkpoint_completed":
        return "complete"
    return "skipped" if event["kind"] == "checkpoint_skipped" or cause(event).skips_checkpoint else "failed"


def sentence(event: Event) -> str:
    """An event as a line for people; unknown kinds are named."""
    kind = str(event["kind"])
    who = f"worker {event['worker_id']}" if event.get("worker_id") is not None else "the coordinator"
    reason = reason_text(event.get("reason"))
    why = f": {reason}" if reason else ""
    special = _SPECIAL.get(kind)
    if special is not None:
        return special(event, why)
    words = {
        "job_started": f"started{why}",
        "worker_joined": f"{who} has joined{why}",
        "worker_suspected": f"{who} is suspected{why}",
        "worker_evicted": f"{who} was evicted{why}",
        "worker_left": f"{who} has left{why}",
        "worker_healed": f"{who} has healed{why}",
        "cell_shrunk": f"{who} goes on as a smaller cell{why}",
        "waiting": f"waiting{why}",
        "coordinator_restarted": f"the coordinator was restarted{why}",
        "coordinator_killed": reason or "the coordinator was killed",
        "commanded": reason or "a command was given",
        "fault_injected": reason or "a fault was injected",
        "fault_over": reason or "a fault is over",
        "warning": f"warning{why}",
        "fallback": f"fallback{why}",
        "job_completed": f"completed{why}",
        "job_failed": (reason or "interrupted") if event.get("state") == "interrupted" else f"failed{why}",
    }
    return words.get(kind, f"{kind.replace('_', ' ')}{why}")


def number_text(value: Any, form: str = "f") -> str:
    """A measured value with four digits, significant ones below 0.001; events have null for one that is not finite."""
    found = number(value, nan)
    form = "g" if 0 < abs(found) < 1e-3 else form
    return f"{found:.4{form}}" if isfinite(found) else "not finite"


def rate_text(rate: float, digits: int = 1) -> str:
    """A speed with so many digits after the point; with two significant ones where that would be less than two."""
    return f"{rate:.{digits}f}" if rate >= 10.0 ** (1 - digits) else f"{rate:.2g}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def size_text(size_bytes: float) -> str:
    """Size in words: 12 B, 3.4 kB, 5.6 MB, 7.8 GB."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_text(seconds: float) -> str:
    """Time in words: 850 us, 12 ms, 3.4 s, 5m06s, 2h03m, 4d05h."""
    if not seconds:
        return "0 s"
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    hours = whole // 3600
    return f"{hours}h{whole % 3600 // 60:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def _step(event: Event, why: str) -> str:
    loss = event.get("loss")
    shown = f", loss {number_text(loss)}" if isinstance(loss, float) else ", loss nan" if event.get("nonfinite") else ""
    return f"step {event.get('step')}{shown}"


def _nonfinite(event: Event, why: str) -> str:
    samples = event.get("samples")
    found = [str(n) for n in samples if isinstance(n, int)] if isinstance(samples, list) else []
    named = f" (samples {', '.join(found[:8])}{' and more' if len(found) > 8 else ''})" if found else ""
    return f"step {event.get('step')} is not finite{why}{named}"


def _probed(event: Event, why: str) -> str:
    ids = event.get("workers")
    found = [str(i) for i in ids[:12]] if isinstance(ids, list) else []
    who = f" by worker{'s' * (len(found) != 1)} {', '.join(found)}" if found else ""
    what = f"lane {event.get('lane')} of step {event.get('step')} was computed twice{who}, for comparison"
    return f"{what}: {'the same bits' if event.get('equal') else f'other bits{why}'}"


def _recovered(event: Event, why: str) -> str:
    redo_s = number(as_dict(event.get("phases_s")).get("redo"))
    whole_s = number(event.get("duration_s"))
    step = f", next step after {time_text(whole_s)}" if redo_s else ""
    return f"recovered in {time_text(max(0.0, whole_s - redo_s))}{step}{why}"


def _evaluated(event: Event, why: str) -> str:
    return f"evaluated after step {event.get('step')}: {_values(event)}"


def _logged(event: Event, why: str) -> str:
    return f"logged after step {event.get('step')}: {_values(event)}"


def _values(event: Event) -> str:
    found = as_dict(event.get("metrics")).items()
    return ", ".join(f"{one_line(k)} {number_text(v)}" for k, v in found)


def _generation(event: Event, why: str) -> str:
    ids = event.get("workers")
    members = [str(i) for i in ids] if isinstance(ids, list) else []
    named = ", ".join(members) if len(members) <= 12 else f"{', '.join(members[:8])} and {len(members) - 8} more"
    return f"generation {event.get('generation')} with worker{'s' * (len(members) != 1)} {named}{why}"


def _leader(event: Event, why: str) -> str:
    stage = f" of stage {event['stage']}" if event.get("stage") else ""
    return f"the leader{stage} is now worker {event.get('worker_id')}{why}"


def _checkpoint(event: Event, why: str) -> str:
    size, stall_s = number(event.get("size_bytes") or event.get("bytes")), number(event.get("stall_s"))
    facts = [size_text(size)] if size else []
    facts += [time_text(number(event.get("duration_s")))] if event.get("duration_s") is not None else []
    facts += [f"training stood still for {time_text(stall_s)}"] if stall_s else []
    more = f" ({', '.join(facts)})" if facts else ""
    return f"checkpoint of step {event.get('step')}{_tier(event)}{more}{why}"


def _no_checkpoint(event: Event, why: str) -> str:
    of = f"checkpoint of step {event.get('step')}{_tier(event)}"
    return f"{of} skipped, the next one replaces it{why}" if checkpoint_result(event) == "skipped" else f"no {of}{why}"


def _tier(event: Event) -> str:
    tier = one_line(event.get("tier"), 20)
    known_as = {"memory": " in memory", "disk": " on disk", "object": " in the object store", "": ""}
    return known_as.get(tier, f" in {tier}")


_SPECIAL = {
    "step_committed": _step,
    "nonfinite": _nonfinite,
    "probe_done": _probed,
    "recovery_completed": _recovered,
    "evaluated": _evaluated,
    "logged": _logged,
    "generation_started": _generation,
    "leader_changed": _leader,
    "checkpoint_completed": _checkpoint,
    "checkpoint_failed": _no_checkpoint,
    "checkpoint_skipped": _no_checkpoint,
}
