"""What a page may ask of a running job: checkpoint, drain, scale, a fault. Everything is checked before it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.base.errors import ConfigError, EverstepError
from everstep.chaos.spec import parse_now
from everstep.runtime import commands

_PATIENCE_S = 10.0
_CHECKPOINT_S = 120.0
NAMES = ("checkpoint", "drain", "scale", "chaos")


def act(run_dir: Path, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Do it, or say in one line why not: {"ok": true, "text"} or {"ok": false, "error"}."""
    try:
        wanted = _checked(name, args)
        patience_s = _CHECKPOINT_S if name == "checkpoint" else _PATIENCE_S
        result = commands.ask(run_dir, name, wanted, timeout_s=patience_s)
    except EverstepError as error:
        return {"ok": False, "error": " ".join(str(error).split())}
    return {"ok": True, "text": _said(name, wanted, result), "result": result}


def _checked(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    if name == "checkpoint":
        return {}
    if name == "drain":
        return {"worker_id": _integer(args, "worker_id")}
    if name == "scale":
        return {"workers": _integer(args, "workers")}
    if name == "chaos":
        fault = args.get("fault")
        if not isinstance(fault, str) or not 0 < len(fault) <= 500:
            raise ConfigError("expected a fault such as kill:target=worker:2")
        return parse_now(fault).request()
    raise ConfigError(f"unknown action {name!r}: expected one of {', '.join(NAMES)}")


def _integer(args: Mapping[str, Any], name: str) -> int:
    value = args.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1_000_000:
        raise ConfigError(f"{name}: expected a whole number, got {str(value)[:40]!r}")
    return value


def _said(name: str, args: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    if name == "drain":
        return f"worker {args['worker_id']} is leaving, {result.get('workers', '?')} stay"
    if name == "scale":
        return f"from {result.get('before', '?')} to {args['workers']} workers"
    if name == "checkpoint":
        return f"checkpoint of step {result.get('step', '?')} in {result.get('path', '?')}"
    return f"{args['fault']} is on its way"
