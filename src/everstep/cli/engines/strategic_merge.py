"""A user's changes to Kubernetes objects, merged as `kubectl patch --type=strategic` would. Pure.

Source: patchStrategy and patchMergeKey in k8s.io/api (core/v1, batch/v1); directives: Kubernetes' task page on kubectl
patch. Lists that are not in `_KEYS` are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from everstep.base.errors import ConfigError

_KEYS = {
    **dict.fromkeys(
        ("containers", "initContainers", "ephemeralContainers", "volumes", "env", "replicatedJobs"), "name"
    ),
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}
_DIRECTIVE = "$patch"
_POD = "Pod"


def patched(objects: Iterable[Mapping[str, Any]], patches: Iterable[Any]) -> list[dict[str, Any]]:
    """The objects with all patches. A patch names the kind that it changes, and may name the object; one of the kind
    Pod changes the pods' template, wherever it is.

    Raises: ConfigError, one line, for a patch that fits nothing.
    """
    found = [copy.deepcopy(dict(one)) for one in objects]
    for patch in patches:
        if not isinstance(patch, Mapping) or not isinstance(patch.get("kind"), str):
            raise ConfigError(f"--patch: expected objects with a kind, such as 'kind: Pod', got {str(patch)[:60]!r}")
        change = {name: value for name, value in patch.items() if name not in ("apiVersion", "kind")}
        targets = _pods(found) if patch["kind"] == _POD else [one for one in found if one["kind"] == patch["kind"]]
        name = (patch.get("metadata") or {}).get("name") if patch["kind"] != _POD else None
        targets = [one for one in targets if name in (None, one.get("metadata", {}).get("name"))]
        if not targets:
            kinds = ", ".join(sorted({_POD, *(str(one["kind"]) for one in found)}))
            called = f" with the name {name}" if name else ""
            raise ConfigError(f"--patch: there is no {patch['kind']}{called} to change: the kinds are {kinds}")
        for one in targets:
            merged = merge(one, change)
            one.clear()
            one.update(merged)
    return found


def merge(old: Any, change: Any, name: str = "") -> Any:
    """A value with a change. name: the field's, which says how lists are merged. null deletes a field."""
    if isinstance(change, Mapping):
        directive = change.get(_DIRECTIVE)
        strange = [key for key in change if str(key).startswith("$") and key != _DIRECTIVE]
        if strange or directive not in (None, "replace", "delete", "merge"):
            came = strange[0] if strange else f"{_DIRECTIVE}: {directive}"
            raise ConfigError(f"--patch: expected no directive but {_DIRECTIVE}: replace, delete or merge, got {came}")
        change = {key: value for key, value in change.items() if key != _DIRECTIVE}
        if directive in ("replace", "delete"):
            return change if directive == "replace" else {}
        old = old if isinstance(old, Mapping) else {}
        result = dict(old)
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge(result.get(key), value, key)
        return result
    if isinstance(change, list):
        before = old if isinstance(old, list) else []
        key = "port" if name == "ports" and any("port" in one for one in before) else _KEYS.get(name, "")  # a Service's
        return _merged_list(before, change, key)
    return change


def _merged_list(old: list[Any], change: list[Any], key: str) -> list[Any]:
    whole = [
        one for one in change if not (isinstance(one, Mapping) and one.get(_DIRECTIVE) == "replace" and len(one) == 1)
    ]
    if not key or len(whole) < len(change):
        return whole
    result = list(old)
    for one in whole:
        if not isinstance(one, Mapping) or key not in one:
            raise ConfigError(f"--patch: expected a field {key!r} in each element of this list, got {str(one)[:60]!r}")
        at = next((i for i, before in enumerate(result) if before.get(key) == one[key]), len(result))
        if one.get(_DIRECTIVE) == "delete":
            result[at : at + 1] = []
        else:
            result[at : at + 1] = [merge(result[at] if at < len(result) else {}, one)]
    return result


def _pods(objects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of pods in a Job and in a JobSet."""
    jobs = [one["spec"] for one in objects if one["kind"] == "Job"]
    for one in objects:
        if one["kind"] == "JobSet":
            jobs += [replicated["template"]["spec"] for replicated in one["spec"]["replicatedJobs"]]
    return [job["template"] for job in jobs]
