"""From two surveys of one moment to findings: state that is lost on resume. Pure.

Apart from `reachable`, which makes the surveys, because this decides which state is refused, which is only listed,
and in which words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.script.reachable import Fact

TRAINING = "what is trained"
_DRAWS = (
    "draw from the global generators of torch, numpy and random, which are seeded for every step, or give join "
    "state=everstep.state({key}={name})"
)
_CARRIES = (
    "the loop carries it from step to step, and the training depends on it, but join does not carry it: it is lost on "
    "resume"
)
_REREAD = (
    "the script loads this file before its loop, and the loop saves it: a worker that starts later, or the next job, "
    "would begin with other weights"
)
_LEADS = (
    "the training depends on it, and it is true on one worker alone, so other numbers of workers give other weights"
)
_GIVEN_BEFORE = (
    "the loop lets this name stand for something else, but join has read what it stood for before: the training would "
    "go on with that"
)
_FORWARD = (
    "the forward pass counts on from batch to batch, and the training depends on it: a worker computes only some "
    "of the batches, and one that is resumed or healed would begin again"
)
_BY_TASK = (
    "the task's code changes it from batch to batch, and the training depends on it: a worker computes only some of "
    "the batches, and one that is resumed or healed would begin again"
)
_ANEW = "join does not carry this {}: it is lost on resume"
_SAYS = {"reread": _REREAD, "leader": _LEADS, "given": _GIVEN_BEFORE, "forward": _FORWARD}
_GIVE = "give it to join: state={{'{key}': {name}}}"
_STATE = (
    "write kept = everstep.state({key}={name}), give it to join as state=kept, and use kept.{key} in the loop instead"
)
_GIVEN = "and give that to join as state="
_REMEDIES = {
    "carried": _STATE,
    "cache": "let its result depend on its arguments alone",
    "count": "count from step.number",
    "forward": "set {name} from step.number in the loop, before the batches, or make it a buffer of the model",
    "file": "keep its content in everstep.state(...), and give that to join as state=",
    "reread": "do not load before the loop what the loop saves: a job goes on from its own checkpoints",
    "scheduler": "give it to join: scheduler={name}, which steps it once per update, or state={{'{key}': {name}}} to "
    "step it yourself",
    "optimizer": _GIVE,
    "module": _GIVE,
    "object": "give it to join: state={{'{key}': {name}}} (it needs state_dict and load_state_dict)",
    "generator": _DRAWS,
    "training": "give join everything else that the training depends on, as state={{...}}",
    "iterator": "let its items depend on step.number alone",
    "given": "change the object itself by step.number, or train in two scripts; if it is something else now, give that "
    "another name",
    "leader": "do the same on all workers, and only print, log and save under it",
}


@dataclass(frozen=True)
class Finding:
    """A value that would be lost. object: its name in the loop's code. refused: a job is not started with it.

    file, line: where it is made, "" and 0 if unknown. changed: the line of that file that first changes it, 0 if
    unknown or the same.
    """

    kind: str
    object: str
    type_name: str
    refused: bool
    remedy: str
    file: str = ""
    line: int = 0
    says: str = ""
    changed: int = 0

    def __str__(self) -> str:
        where = f" ({self.file}:{self.line})" if self.line else ""
        return f"{self.object}{where}: {self.says}; {self.remedy}"


def differing(one: Mapping[str, Fact], other: Mapping[str, Fact]) -> set[str]:
    """Names whose facts differ, or that only one of the two has."""
    return {
        name
        for name in one.keys() | other.keys()
        if (one[name].digest if name in one else None) != (other[name].digest if name in other else None)
    }


def findings(
    undisturbed: Mapping[str, Fact],
    resumed: Mapping[str, Fact],
    names: Iterable[str],
    shapes: Sequence[tuple[int, ...]],
    harmless: Sequence[str] = (),
) -> list[Finding]:
    """Findings, one per object, the refused ones first. names: of facts that differ. shapes: of the model's parameters.
    harmless: names without effect on training."""
    grown = {name.removesuffix("[...]") for name in names if name.endswith("[...]")}
    by_object: dict[tuple[str, str], list[Fact]] = {}
    for name in sorted(names, key=lambda n: (n.count(".") + n.count("["), n)):
        fact = undisturbed.get(name) or resumed[name]
        if fact.kind == "module" and name in harmless:  # for example a count of its calls
            fact = replace(fact, hard=False)
        parents = [g for g in grown if name.startswith(f"{g}[") and not name.endswith("[...]")]
        if parents:
            continue  # an element of a container that has grown differently
        if fact.kind in ("list", "tensor", "value") and not fact.hard:
            by_object.setdefault((fact.kind, re.split(r"\[", name)[0]), []).append(fact)
        else:
            by_object.setdefault((fact.kind, fact.owner), []).append(fact)
    found = [_finding(kind, name, facts, shapes) for (kind, name), facts in by_object.items()]
    suspects = [f.object for f in found if f.kind != "training"]
    if suspects and not any(f.refused and f.kind != "training" for f in found):
        found = [_accused(f, suspects) if f.kind == "training" else f for f in found]
    elif suspects:
        found = [f for f in found if f.kind != "training"]  # it follows from a finding that is refused by name
    return sorted(found, key=lambda f: not f.refused)


def _finding(kind: str, name: str, facts: Sequence[Fact], shapes: Sequence[tuple[int, ...]]) -> Finding:
    refused = any(fact.hard for fact in facts)
    found = [fact.shape for fact in facts if fact.shape is not None]
    if not refused and found and like_parameters(found, shapes):
        refused = True
    remedy = _remedy(kind, name)
    if kind != "training":
        remedy += f"; or join(ignore=['{name}']) if no later step depends on it"
    type_name = facts[0].type_name
    if kind == "training":
        says = "on resume it differs from an undisturbed run"
    else:
        says = _ANEW.format(type_name)
    return Finding(kind, name, type_name, refused, remedy, says=says)


def _remedy(kind: str, name: str) -> str:
    """Remedy for the user."""
    wanted = _REMEDIES.get(kind, _STATE)
    key = re.split(r"[.\[]", name)[-1].strip("]'\"") or name
    if wanted is _STATE and re.fullmatch(r"default\d+", key):
        return f"keep the content of {name.rpartition('.')[0]}'s default argument in everstep.state(...), {_GIVEN}"
    if wanted is _STATE and (name.split(".")[0] in sys.stdlib_module_names or not key.isidentifier()):
        return f"keep that in everstep.state(...) instead, {_GIVEN}"
    return wanted.format(name=name, key=key)


def unpassed(name: str, type_name: str) -> Finding:
    """Finding of a scheduler that drives the job's optimizer, whether it has been stepped by now or not."""
    remedy = _REMEDIES["scheduler"].format(name=name, key=name.split(".")[-1])
    remedy += f"; or join(ignore=['{name}']) if it is never stepped"
    return Finding("scheduler", name, type_name, True, remedy, says=_ANEW.format(type_name))


def left_early(name: str) -> Finding:
    """Finding of a loop that ends earlier in a worker that is resumed than in an undisturbed run. name: its script."""
    says = "its loop ends earlier in a worker that is resumed than in an undisturbed run"
    return Finding("loop", name, "", True, "give join what the loop's end depends on, as state=...", says=says)


def read_in_code(name: str, kind: str, file: str, line: int) -> Finding:
    """Finding of a name that the loop carries from round to round, and that training depends on."""
    remedy = _remedy(kind, name)
    remedy += f"; or join(ignore=['{name}']) if no later step depends on it"
    return Finding(kind, name, "", True, remedy, file, line, _SAYS.get(kind, _CARRIES))


def of_task(read: Iterable[tuple[str, str, str, int]]) -> list[str]:
    """Why a task is not trained that changes these names for each batch, a line for each."""
    remedy = "keep it in a buffer of the model, or let it follow from the batch"
    return [str(Finding(kind, name, "", True, remedy, file, line, _BY_TASK)) for name, kind, file, line in read]


def with_code(found: Sequence[Finding], read: Sequence[Finding], harmless: Sequence[str]) -> list[Finding]:
    """Findings of two lives, joined with findings of the code. harmless: names without effect on training."""
    named = {_last(f.object) for f in found if f.refused}
    told = [f for f in read if _last(f.object) not in named]
    own = {_last(f.object) for f in told}
    rest = [f for f in found if _last(f.object) not in own and not (told and f.kind == "training")]
    rest = [f if f.refused or is_one_of(f.object, harmless) else replace(f, refused=True) for f in rest]
    return sorted([*told, *rest], key=lambda f: not f.refused)


def _last(name: str) -> str:
    return name.split(".")[-1]


def is_one_of(name: str, names: Iterable[str]) -> bool:
    """Whether it is one of these, a part of one, or has one as a part."""
    return any(
        name == n or name.startswith((f"{n}.", f"{n}[")) or n.startswith((f"{name}.", f"{name}[")) for n in names
    )


def _accused(finding: Finding, suspects: Sequence[str]) -> Finding:
    named = ", ".join(suspects[:5])
    return Finding(
        finding.kind,
        finding.object,
        finding.type_name,
        finding.refused,
        f"it depends on state that join does not carry and that is lost on resume: {named}; keep it in objects with "
        "state_dict and load_state_dict that join is given as state={...}, or let it depend on step.number alone",
        says=finding.says,
    )


def like_parameters(found: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether tensors look like an average, or another copy, of the parameters: a matrix of the same shape, all of
    them, or all in one vector."""
    if any(len(shape) > 1 and shape in shapes for shape in found):
        return True
    total = sum(_count(shape) for shape in shapes)
    left = list(found)
    for shape in shapes:
        if shape in left:
            left.remove(shape)
    return (total,) in found or len(found) - len(left) == len(shapes)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
