"""What `make torment` does to a job, seed by seed, and what it makes of the end. Pure: a seed in, a plan out; what was
seen in, a verdict out."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = 40
LOST_AFTER = 12
"""So many steps are not committed any more once a signal has ended the job in order."""
AT_LATEST = 5
"""After so many steps nobody waits any longer for something that happens on the way."""
ENDING = {"SIGINT": 130, "SIGTERM": 143}

UNSPLIT = (
    "Pictures", "PicturesOneCycle", "PicturesEpochs", "PicturesAdafactor", "Text", "Sparse", "Layers", "MuonText",
)  # fmt: skip
SPLIT = {"Pictures": 3, "PicturesOneCycle": 3, "Text": 3, "Layers": 6, "SparseStages": 3, "MuonText": 2}
"""Tasks that can be cut, and into how many units."""
CELLS = ("Sharded", "Sharded", "Layers", "Sparse", "Text", "Pictures", "PicturesEpochs")
"""Tasks whose workers may be of several processes; the first can be cut into shards, too."""
STAGED_CELLS = ("Sharded", "Layers", "Text", "Pictures")
"""Those of them that are cut into stages as well."""
PRECISIONS = {
    "MuonText": ("fp32", "bf16"), "Text": ("fp32", "fp32", "fp16"), "Layers": ("fp32", "fp32", "bf16"),
    "Sharded": ("fp32", "bf16", "fp16"),
}  # fmt: skip

PLACED: tuple[dict[str, Any], ...] = (
    {"zero.stage": 1}, {"zero.stage": 2}, {"zero.stage": 1, "zero.copies": 1}, {"zero.stage": 2, "zero.copies": 1},
    {"zero.stage": 2, "zero.copies": 2}, {"zero.stage": 1, "zero.copies": 3},
    {"zero.offload": f"{tempfile.gettempdir()}/everstep-torment-offload"},
    {"zero.offload": f"{tempfile.gettempdir()}/everstep-torment-offload", "zero.offload_params": "true"},
)  # fmt: skip
"""Where the optimizer's state lies, and with stage 2 the gradients; the last three are of jobs that are not split, the
first four also of workers of several processes."""


@dataclass(frozen=True)
class Harm:
    """One thing that is done to a job from outside.

    when: `steps` (so many, `count`, were committed since the harm before), `begin` (of the command), `last_step` (is
    committed), or the kind of an event of which `count` have come since then, `AT_LATEST` steps later at the latest;
    `delay_s` later it is done. do: `kill`, `stop` (`for_s`: until it goes on, None: never), `scale`, `drain`,
    `checkpoint`, or the name of a signal to the command. whom: `worker:K` (the K-th process of all the workers that
    run, heads before their limbs, counted around), `loader:K`, `coordinator`, `agent`, `fork_server`, `launcher`; all
    at once. number: of `scale` and `drain`.
    """

    when: str
    do: str
    whom: tuple[str, ...] = ()
    count: int = 1
    delay_s: float = 0.0
    for_s: float | None = None
    number: int = 0

    @property
    def ends(self) -> bool:
        """Whether the command is to be over after this."""
        return self.do in ENDING or (self.do == "kill" and "launcher" in self.whom)


@dataclass(frozen=True)
class Life:
    """One command, and what is done while it runs. cold: a process that imports everything itself. at_once: it is
    started as soon as the command before it is over, whatever of that still runs. fsdp, tp: of each worker's cell."""

    workers: int
    stages: int = 1
    spares: int = 0
    cold: bool = False
    at_once: bool = False
    harms: tuple[Harm, ...] = ()
    fsdp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class Plan:
    """A job, and the lives that it needs to get to its end: each but the last is ended from outside."""

    task: str
    numerics: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    lives: tuple[Life, ...] = ()


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"torment {seed}")
    split, cells = rng.random() < 0.4, rng.random() < 0.3
    split = split and not cells
    task = rng.choice(CELLS if cells else sorted(SPLIT) if split else UNSPLIT)
    settings = _settings(rng, task, split, cells)
    lives: list[Life] = []
    harms = rng.choice((1, 2, 2, 3, 3, 4, 5))
    while harms > 0:
        life = _life(rng, task, split, settings, first=not lives, most=harms)
        harms -= len(life.harms)
        lives.append(life)
    if rng.random() < 0.25:
        lives = _with_harm_at_the_end(rng, lives)
    if lives[-1].harms and lives[-1].harms[-1].ends:
        lives.append(_command(rng, task, split, settings, first=False))
    numerics = _numerics(rng, task, settings)
    if cells:
        lives = [_as_cells(rng, task, life) for life in lives]
        if task == "Sharded":
            numerics |= {"cell.shards": rng.choice((2, 4)), "cell.sp": rng.random() < 0.5}
        if rng.random() < 0.3:
            numerics["clip_value"] = 0.01
    return Plan(task, numerics, settings, tuple(lives))


def _as_cells(rng: random.Random, task: str, life: Life) -> Life:
    """The same command with workers of several processes, at most 8 in all."""
    tp = rng.choice((1, 2, 2)) if task == "Sharded" else 1
    fsdp = rng.randint(1 if tp > 1 else 2, 3) if rng.random() < 0.9 else 1
    lanes = 4 if task == "Sharded" else 8
    stages = 2 if task in STAGED_CELLS and rng.random() < 0.4 else 1
    workers = max(1, min(life.workers, lanes, 8 // (fsdp * tp)))
    return replace(life, fsdp=fsdp, tp=tp, stages=stages, workers=workers)


def _numerics(rng: random.Random, task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the undisturbed run has too."""
    found: dict[str, Any] = {} if task == "PicturesEpochs" else {"steps": STEPS}
    if settings.get("batch") != "per_worker":
        found["precision"] = rng.choice(PRECISIONS.get(task, ("fp32",)))
    if rng.random() < 0.25 and task.startswith(("Pictures", "Sharded")):
        found["eval_every"] = 7
    return found


def _settings(rng: random.Random, task: str, split: bool, cells: bool) -> dict[str, Any]:
    """What changes no bit, except for one kind of batch, of which there is no undisturbed run."""
    found: dict[str, Any] = {"hang_limit_s": 5, "heartbeat.interval_s": 0.2, "backoff.initial_s": 0.05}
    found["on_failure"] = rng.choice(("replace", "replace", "shrink", "wait"))
    if rng.random() < 0.6:
        found["checkpoint.disk.every_steps"] = rng.choice((1, 3, 5, 10))
        found["checkpoint.disk.full_every"] = rng.choice((1, 3, 10))
    elif rng.random() < 0.2:
        found["checkpoint.enabled"] = False
    if rng.random() < (0.7 if split else 0.3):
        found["checkpoint.memory.every_steps"] = rng.choice((2, 4))
    if rng.random() < 0.3:
        found["loader.workers"] = rng.choice((1, 2))
    if rng.random() < 0.2:
        found["transport"] = "sockets"
    if rng.random() < 0.3:
        found["verify_every"] = rng.choice((1, 5))
    if split:
        found["schedule"] = rng.choice(("1f1b", "gpipe"))
        found["recompute"] = rng.random() < 0.2
        if rng.random() < 0.2:
            found["redundancy"] = 1
        elif task == "Layers" and rng.random() < 0.3:
            found |= {"schedule": "interleaved", "chunks": 2}
    elif cells:
        found |= {"cell.wrap": 300} if rng.random() < 0.4 else {}
    elif rng.random() < 0.05:
        found["batch"] = "per_worker"
    if rng.random() < 0.5 and "batch" not in found:
        found |= rng.choice(PLACED[:4] if cells else PLACED if not split else PLACED[:-3])
    if rng.random() < 0.15:
        found["checkpoint.staging_mb"] = rng.choice((0, 1))
    return found


def _command(rng: random.Random, task: str, split: bool, settings: Mapping[str, Any], *, first: bool) -> Life:
    """A command as somebody may type it, the first or a later one."""
    stages = rng.randint(2, min(3, SPLIT[task])) if split else 1
    if split and not first and rng.random() < 0.3 and "chunks" not in settings:
        stages = 1
    if {"redundancy", "chunks"} & {*settings} or settings.get("zero.copies", 1) > 1:  # which not all numbers go with
        stages = min(stages, 2)
    workers = rng.randint(max(1, stages - 1), 5)
    if "redundancy" in settings:
        workers = 2 * stages
    elif settings.get("batch") == "per_worker":
        workers = 4
    elif first:  # a new job is refused that has fewer members than it is told to keep copies
        workers = max(workers, stages * settings.get("zero.copies", 1))
    spares = int(rng.random() < 0.25)
    return Life(workers, stages, spares, cold=rng.random() < 0.15, at_once=not first and rng.random() < 0.4)


def _life(rng: random.Random, task: str, split: bool, settings: Mapping[str, Any], *, first: bool, most: int) -> Life:
    life = _command(rng, task, split, settings, first=first)
    if first and rng.random() < 0.1:
        when_s = round(rng.choice((rng.uniform(0.0, 0.4), rng.uniform(0.0, 4.0))), 3)
        early = Harm("begin", rng.choice(("SIGINT", "SIGTERM", "SIGUSR1")), delay_s=when_s)
        return Life(life.workers, life.stages, life.spares, cold=True, harms=(early,))
    harms: list[Harm] = []
    while len(harms) < most and not (harms and harms[-1].ends):
        harm = _harm(rng, life.workers, settings)
        harms.append(harm)
        if harm.ends and harm.do != "kill" and rng.random() < 0.3:  # once more ends at once
            harms.append(Harm("begin", rng.choice(tuple(ENDING)), delay_s=rng.choice((0.0, 0.01, 0.1, 0.5))))
    return replace(life, harms=tuple(harms))


def _when(rng: random.Random) -> dict[str, Any]:
    """Steps most often; else something that happens on the way, such as the recovery from the harm before."""
    delay_s = rng.choice((0.0, 0.0, 0.005, 0.02, 0.1))
    if rng.random() < 0.65:
        return {"when": "steps", "count": rng.randint(1, 6), "delay_s": delay_s}
    kinds = ("job_started", "worker_joined", "generation_started", "worker_evicted", "checkpoint_completed")
    kind = rng.choice((*kinds, "worker_healed", "recovery_completed"))
    return {"when": kind, "delay_s": delay_s}


KINDS = {
    "kill worker": 5, "kill several": 3, "kill coordinator": 2, "kill agent": 1, "kill fork_server": 1,
    "kill launcher": 2, "kill loader": 0.5, "stop worker": 4, "stop coordinator": 1.5, "stop agent": 1,
    "stop fork_server": 0.7, "stop launcher": 0.7, "scale": 2, "drain": 1, "checkpoint": 2, "SIGUSR1": 2,
    "SIGINT": 1.5, "SIGTERM": 1.5,
}  # fmt: skip
"""What is done, and how often beside each other."""


def _harm(rng: random.Random, workers: int, settings: Mapping[str, Any]) -> Harm:
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    when = _when(rng)
    what, _, role = kind.partition(" ")
    if what == "kill":
        return Harm(**when, do="kill", whom=_whom(rng, role))
    if what == "stop":
        long = role in ("worker", "coordinator") and rng.random() < 0.5  # somebody has to notice those
        for_s = None if long or (role == "fork_server" and rng.random() < 0.3) else rng.choice((0.3, 1.0, 3.0, 8.0))
        return Harm(**when, do="stop", whom=_whom(rng, role), for_s=for_s)
    if kind == "scale":
        return Harm(**when, do=kind, number=rng.randint(1, 6))
    if kind == "drain":
        return Harm(**when, do=kind, number=rng.randint(0, workers))
    return Harm(**when, do=kind)


def _whom(rng: random.Random, role: str) -> tuple[str, ...]:
    if role in ("worker", "loader"):
        return (f"{role}:{rng.randint(0, 4)}",)
    if role == "several":
        several = [f"worker:{k}" for k in range(5)] + ["coordinator", "coordinator", "fork_server", "agent"]
        return tuple(sorted(set(rng.sample(several, rng.choice((2, 2, 3, 5))))))
    return (role,)


def _with_harm_at_the_end(rng: random.Random, lives: list[Life]) -> list[Life]:
    """One more, when the last step is committed, or the end is told."""
    last = lives[-1]
    if last.harms and last.harms[-1].ends:
        return lives
    when = {"when": rng.choice(("last_step", "job_completed")), "delay_s": rng.choice((0.0, 0.0, 0.01, 0.05, 0.2))}
    do = rng.choice(
        ("kill worker", "kill coordinator", "kill launcher", "kill agent", "stop worker", *ENDING, "SIGUSR1")
    )
    what, _, role = do.partition(" ")
    harm = Harm(**when, do=what, whom=_whom(rng, role) if role else ())
    return [*lives[:-1], replace(last, harms=(*last.harms, harm))]


def from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that a printed schedule describes."""
    lives = [
        Life(**{**life, "harms": tuple(Harm(**{**harm, "whom": tuple(harm["whom"])}) for harm in life["harms"])})
        for life in data["lives"]
    ]
    return Plan(data["task"], data["numerics"], data["settings"], tuple(lives))


def sets(plan: Plan, words: str) -> bool:
    """Whether a plan sets KEY, or sets it as KEY=VALUE says."""
    key, equals, value = words.partition("=")
    found = {**plan.numerics, **plan.settings}
    return key in found and (not equals or str(found[key]).lower() == value.lower())


@dataclass(frozen=True)
class Sent:
    """A signal that the command has got. steps: committed before it."""

    name: str
    steps: int


def may_fail(plan: Plan, done: Sequence[str]) -> bool:
    """Whether the job may end for want of workers: none is started again, and some were taken from it."""
    taken = any(word in text for text in done for word in ("worker", "agent", "fork_server", "loader"))
    return taken and plan.settings.get("on_failure") == "shrink"


def wrong_code(code: int | None, sent: Sequence[Sent], steps: int, *, may_fail: bool = False) -> str:
    """What is wrong with an exit code; "" if it is what was done to the command.

    code: negative, or None where nobody knows which, if a signal ended it. sent: before it was over. steps: committed
    in the end. may_fail: it may have run out of workers.
    """
    names = [signal.name for signal in sent]
    if "SIGKILL" in names:
        return ""
    ending = [signal for signal in sent if signal.name in ENDING]
    codes = {ENDING[signal.name] for signal in ending}
    if code is None or (code < 0 and 128 - code not in codes):
        return f"the command was ended by a signal ({code}), it had got {', '.join(names) or 'none'}"
    if code < 0 or code in codes or (code == 1 and may_fail):
        return ""
    if code == 0 and (not ending or steps - ending[0].steps <= LOST_AFTER):
        return ""
    if code == 0:
        return f"{ending[0].name} was lost: {steps - ending[0].steps} steps were committed after it"
    return f"exit code {code}, expected {sorted(codes) or 0}"


def wrong_output(text: str, code: int | None) -> str:
    """What is wrong with what a command has told its user; "" if nothing is."""
    lines = text.splitlines()
    if any(line.startswith("Traceback") for line in lines):
        return f"a traceback was printed: {[line for line in lines if line.strip()][-1]}"
    begins = ("error: ", "stopped after step ") if code in ENDING.values() else ("error: ",)
    errors = [line for line in lines if line.startswith(begins)]
    if code is not None and code > 0 and len(errors) != 1:
        return f"expected one line of error with exit code {code}, got {len(errors)}"
    return ""


def before_us(text: str, folder: str) -> bool:
    """Whether this is the traceback of an interpreter that had not come to the first file of our folder yet."""
    files = [line for line in text.splitlines() if line.strip().startswith("File ")]
    return "KeyboardInterrupt" in text and bool(files) and not any(folder in line for line in files)


def lost_without_need(plan: Plan, done: Sequence[str], steps_redone: int) -> str:
    """Steps that were done again though no worker was touched, nor what they are known to die with; "" if none."""
    touched = any(word in text for text in done for word in ("worker", "agent", "loader", "launcher", "drain", "scale"))
    if steps_redone and not touched and all(life.stages == 1 for life in plan.lives):
        return f"{steps_redone} steps were lost though no worker was touched: {'; '.join(done)}"
    return ""


def leftovers(names: Collection[str]) -> list[str]:
    """Of the files of a directory, those that are nobody's any more when all is over."""
    return sorted(name for name in names if name.rpartition("/")[2].startswith(".") or ".tmp" in name)
