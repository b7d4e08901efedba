"""`make torment SEEDS=0:500`: random harm from outside to real jobs; each has to end as if nothing had been done to it.

One JSON line per seed: `seed`, `ok`, `reason`, `schedule` (the job, its lives, and what was done to whom), `seconds`.
What has passed leaves its line in build/torment, in a folder named for what src and tests hold, and is not run again;
of what has failed the run directory and an account of it stay there. Instead of A:B a printed line, or the schedule in
it, may be given (`-`: such lines on standard input): that is done again as it is written there. `--with KEY`
or `--with KEY=VALUE` keeps those alone that set the key, or set it so; it is an error if none does.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import everstep
import torment_plan as plans
from everstep.runtime.process import OUTLIVES_WORKERS
from extended import key
from job_harness import HERE, Event, Job, Jobs, same
from process_resources import children
from torment_plan import Harm, Life, Plan, Sent

FOLDER = HERE.parent / "build" / "torment"
MARK = "EVERSTEP_TORMENT"
OURS = str(Path(everstep.__file__).parent)
STALL_S = float(os.environ.get("EVERSTEP_TORMENT_STALL_S", "90"))
"""A job that says nothing for so long has come to a halt; all its own limits are shorter."""
LIFE_S = 600.0
EXTRA = 3
"""So many commands more, where the last one ran out of workers."""
GONE_S = 30.0
"""So long the processes of a command may take to be gone after it."""
COMMAND_S = 90.0
STEP_S = 0.2
"""So long a step takes while there is harm to be done."""
MODULES = ("coordinator_main", "host_agent", "fork_server", "warm_server", "everstep run")
DUMPS = "import faulthandler, signal\nfaulthandler.register(signal.SIGQUIT, all_threads=True)\n"


class Wrong(Exception):
    """The job did not do what it has to."""


class Cold(Job):
    """A job whose command imports everything itself, as a user's does."""

    def __init__(self, run_dir: Path, argv: list[str], environment: Mapping[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with open(run_dir.with_suffix(".out"), "ab") as out, open(run_dir.with_suffix(".err"), "ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "everstep", *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**clean, **environment},
                start_new_session=True,
            )
        super().__init__(run_dir, " ".join(argv), self.process.pid)


class Family:
    """The processes of a job: all that bear its mark, or belong to the session of one of its commands."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self.sessions: set[int] = set()

    def has(self, pid: int) -> bool:
        """Whether this process lives and is one of them."""
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
            ours = os.getsid(pid) in self.sessions
            return ours or self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def living(self) -> list[int]:
        """All of them."""
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self.has(pid)]

    def roles(self, launcher: int) -> dict[str, list[int]]:
        """Who is what below this command."""
        found: dict[str, list[int]] = {"launcher": [launcher]}
        for pid in self._children(launcher):
            line = command_line(pid)
            modules = {"coordinator_main": "coordinator", "host_agent": "agent"}
            found.setdefault(next((r for m, r in modules.items() if m in line), "fork_server"), []).append(pid)
        for agent in found.get("agent", []):
            found.setdefault("fork_server", []).extend(self._children(agent))
        for server in found.get("fork_server", []):
            found.setdefault("worker", []).extend(self._children(server))
        for worker in found.get("worker", []):
            found.setdefault("loader", []).extend(self._children(worker))
        return found

    def _children(self, pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(child for child in children(pid) if self.has(child))
        return []

    def send(self, pid: int, number: int) -> bool:
        """A signal to one of them, and to nobody who has its number by now. Returns whether it lived."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if self.has(pid):
                    signal.pidfd_send_signal(pidfd, number)
                    return True
            finally:
                os.close(pidfd)
        return False

    def gone(self, timeout_s: float) -> list[int]:
        """Those that are left once all are gone, or after so long."""
        end = time.monotonic() + timeout_s
        while (left := self.living()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def describe(self, pids: list[int]) -> str:
        """For people: state (T: stopped), number, and what each runs."""
        lines = []
        for pid in pids:
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                line = command_line(pid)
                what = next((word for word in MODULES if word in line), line[:40].strip())
                lines.append(f"{state} {pid} {what}")
        return ", ".join(sorted(lines))


def command_line(pid: int) -> str:
    """Words of a process's command; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


class Told:
    """The events of a job, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""
        self.events: list[Event] = []
        self.steps = 0
        self.changed_s = time.monotonic()

    def look(self) -> None:
        """Take in what has come."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._position)
            self._rest += file.read()
            self._position = file.tell()
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self.events.append(json.loads(line))
            kind, step = self.events[-1]["kind"], self.events[-1]["step"]
            if kind == "step_committed" or (kind == "job_started" and not step):
                self.steps = step
        if lines:
            self.changed_s = time.monotonic()


@dataclass
class Ran:
    """A command that was run, and the signals that it got."""

    job: Job
    sent: list[Sent] = field(default_factory=list)


class Torment:
    """One seed. folder: its own; `done` says what was done to whom."""

    def __init__(self, jobs: Jobs, plan: Plan, mark: str, folder: Path, last_step: int) -> None:
        self._jobs = jobs
        self._plan = plan
        self._family = Family(mark)
        self._mark = mark
        self.run_dir = folder / "job"
        self._scratch = folder / "tmp"
        self._dumps = folder / "dumps"
        self._last_step = last_step
        self._told = Told(self.run_dir / "events.jsonl")
        self._later: list[tuple[float, int, str, int]] = []
        self._commands: list[tuple[str, Job]] = []
        self._started: list[Job] = []
        self._shm = set(os.listdir("/dev/shm"))
        self.done: list[str] = []
        self.job: Job | None = None
        for path in (self._scratch, self._dumps):
            path.mkdir(parents=True, exist_ok=True)
        (self._dumps / "sitecustomize.py").write_text(DUMPS)

    def run(self, reference: Path | None) -> None:
        """All lives of the job, then the verdict. Raises: Wrong."""
        lives, code = list(self._plan.lives), None
        for number, life in enumerate(lives):
            done = len(self.done)
            ran = self._live(number, life)
            code = self._judge_life(ran, self.done[done:])
            last = number + 1 == len(lives)
            if last and code == 1 and number < len(self._plan.lives) + EXTRA:  # for want of workers: run again
                lives.append(replace(life, at_once=False, harms=()))
            if last or not lives[number + 1].at_once:
                self._judge_processes()
        if code != 0:
            raise Wrong(f"the last command ended with {code}, though nothing was done to it")
        if self.job is not None:
            self._judge_end(self.job, reference)

    # ---- a command's life

    def _start(self, number: int, life: Life) -> Job:
        pace = self.run_dir.with_name(f"pace-{number}.jsonl")
        pace.touch()
        lane_s = STEP_S / 8 * max(1, life.workers * life.fsdp // life.stages)
        environment = {
            MARK: self._mark,
            "TMPDIR": str(self._scratch),
            "TORCHINDUCTOR_CACHE_DIR": str(self._dumps),  # of torch, to stay
            "PYTHONPATH": str(self._dumps),
            "EVERSTEP_TEST_PACE": json.dumps({"events": str(pace), "until": [{"kind": "over"}], "lane_s": lane_s}),
        }
        argv = ["run", f"{HERE / 'job_tasks.py'}:{self._plan.task}", "--run-dir", str(self.run_dir), "--json"]
        argv += ["--workers", str(life.workers), "--stages", str(life.stages), "--spares", str(life.spares)]
        cell = {"cell.fsdp": life.fsdp, "cell.tp": life.tp}
        for name, value in {**self._plan.numerics, **self._plan.settings, **cell}.items():
            argv += ["--set", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
        for end in (".code", ".out", ".err"):
            with contextlib.suppress(FileNotFoundError):
                path = self.run_dir.with_suffix(end)
                path.rename(path.with_name(f"job-{number - 1}{end}"))
        if life.cold:
            return self._of_ours(Cold(self.run_dir, argv, environment))
        return self._warm(argv, self.run_dir, environment)

    def _warm(self, argv: list[str], base: Path, environment: Mapping[str, str]) -> Job:
        return self._of_ours(self._jobs.command(argv, base, environment))

    def _of_ours(self, job: Job) -> Job:
        self._started.append(job)
        self._family.sessions.add(job.launcher_pid())
        return job

    def _live(self, number: int, life: Life) -> Ran:
        job = self.job = self._start(number, life)
        ran = Ran(job)
        launcher = job.launcher_pid()
        begin_s = time.monotonic()
        self._told.look()
        seen, after = len(self._told.events), begin_s
        for harm in life.harms:
            if not self._wait(ran, lambda harm=harm, seen=seen: self._due(harm, seen)):  # type: ignore[misc]
                self.done.append(f"life {number}: over before {harm.do} {' '.join(harm.whom)}".rstrip())
                break
            after = (begin_s if harm.when == "begin" and not ran.sent else time.monotonic()) + harm.delay_s
            self._wait(ran, lambda after=after: time.monotonic() >= after)  # type: ignore[misc]
            seen = len(self._told.events)
            self._do(number, harm, launcher, ran)
        if not any(harm.ends for harm in life.harms):
            self.run_dir.with_name(f"pace-{number}.jsonl").write_text('{"kind":"over"}\n')
        self._wait(ran, lambda: False)
        return ran

    def _due(self, harm: Harm, seen: int) -> bool:
        if harm.when == "begin":  # before that, Python's own start answers signals
            return self.job is not None and catches(self.job.launcher_pid(), signal.SIGTERM)
        if harm.when == "last_step":
            return self._told.steps >= self._last_step
        kinds = [event["kind"] for event in self._told.events[seen:]]
        steps = kinds.count("step_committed")
        if harm.when == "steps":
            return steps >= harm.count
        return kinds.count(harm.when) >= harm.count or (harm.when != "job_completed" and steps >= plans.AT_LATEST)

    def _wait(self, ran: Ran, until: Callable[[], bool]) -> bool:
        """Until then; False if the command is over before. Raises: Wrong if it has come to a halt."""
        begin_s = self._told.changed_s = time.monotonic()
        while not until():
            if ran.job.over():
                self._told.look()
                return False
            self._do_what_is_due()
            self._told.look()
            now_s = time.monotonic()
            if now_s - max(self._told.changed_s, begin_s) > STALL_S or now_s - begin_s > LIFE_S:
                last = self._told.events[-1] if self._told.events else {"kind": "nothing", "step": 0}
                raise Wrong(
                    f"hang: nothing for {now_s - self._told.changed_s:.0f} s after {last['kind']} "
                    f"(step {self._told.steps}): {self._family.describe(self._family.living())}"
                )
            select.select([], [], [], 0.002)
        return True

    def _do_what_is_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            _, pid, who, number = heapq.heappop(self._later)
            if self._family.send(pid, number):
                self.done.append(f"{signal.Signals(number).name} to {who}")

    # ---- harm

    def _do(self, number: int, harm: Harm, launcher: int, ran: Ran) -> None:
        steps = self._told.steps
        where = f"life {number}, step {steps}"
        if harm.do.startswith("SIG"):
            if self._family.send(launcher, signal.Signals[harm.do]):
                ran.sent.append(Sent(harm.do, steps))
                self.done.append(f"{where}: {harm.do} to launcher")
            return
        if harm.do in ("kill", "stop"):
            roles = self._family.roles(launcher)
            for pid, who in self._targets(harm, roles):
                if self._family.send(pid, signal.SIGKILL if harm.do == "kill" else signal.SIGSTOP):
                    self.done.append(f"{where}: {harm.do} {who}" + (f" for {harm.for_s} s" if harm.for_s else ""))
                    if harm.do == "kill" and pid == launcher:
                        ran.sent.append(Sent("SIGKILL", steps))
                    if harm.for_s is not None:
                        heapq.heappush(self._later, (time.monotonic() + harm.for_s, pid, who, signal.SIGCONT))
            return
        argv = [harm.do, str(self.run_dir)]
        argv += {"scale": ["--workers", str(harm.number)], "drain": [str(harm.number)]}.get(
            harm.do, ["--timeout", "30"]
        )
        base = self.run_dir.with_name(f"command-{len(self._commands)}")
        self._commands.append((" ".join([harm.do, *argv[2:]]), self._warm(argv, base, {MARK: self._mark})))
        self.done.append(f"{where}: {self._commands[-1][0]}")

    def _targets(self, harm: Harm, roles: Mapping[str, list[int]]) -> Iterator[tuple[int, str]]:
        """Process and name of each; none where there is nobody of that role."""
        joined = [event for event in self._told.events if event["kind"] == "worker_joined"]
        ids = {
            pid: (event["worker_id"], rank)
            for event in joined
            for rank, pid in enumerate(event.get("pids", [event["pid"]]))
        }
        for name in harm.whom:
            role, _, index = name.partition(":")
            pids = roles.get(role, [])
            if role == "worker":
                pids = sorted(pids, key=lambda pid: (ids.get(pid, (len(ids), 0)), pid))
            if pids:
                pid = pids[int(index or 0) % len(pids)]
                worker = "{} rank {}".format(*ids[pid]) if pid in ids else "not joined"
                yield pid, f"worker {worker} (pid {pid})" if role == "worker" else role

    # ---- the verdict

    def _judge_life(self, ran: Ran, done: list[str]) -> int | None:
        if isinstance(ran.job, Cold):
            code: int | None = ran.job.process.wait()
        else:
            path = self.run_dir.with_suffix(".code")
            code = int(path.read_text()) if path.exists() else None
        self.done.append(f"exit code {code} after step {self._told.steps}")
        text = self.run_dir.with_suffix(".err").read_text(errors="replace")
        may_fail = plans.may_fail(self._plan, done)
        found = plans.wrong_code(code, ran.sent, self._told.steps, may_fail=may_fail)
        found = found or plans.wrong_output(text, code)
        if found and not (isinstance(ran.job, Cold) and ran.sent and plans.before_us(text, OURS)):
            raise Wrong(f"{found}{self._last_word(text)}")
        self._judge_commands()
        return code

    def _judge_commands(self) -> None:
        for words, command in self._commands:
            if not command.over(COMMAND_S):
                raise Wrong(f"hang: everstep {words} was not over within {COMMAND_S:g} s")
            said = command.run_dir.with_suffix(".err").read_text(errors="replace")
            path = command.run_dir.with_suffix(".code")
            code = int(path.read_text()) if path.exists() else None
            self.done.append(f"everstep {words}: exit code {code}{self._last_word(said)}")
            if found := plans.wrong_output(said, code):
                raise Wrong(f"everstep {words}: {found}")
            if code not in (0, 1, 2):
                raise Wrong(f"everstep {words}: exit code {code}")
        self._commands.clear()

    @staticmethod
    def _last_word(text: str) -> str:
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        return f" ({errors[-1][7:150]})" if errors else ""

    def _judge_processes(self) -> None:
        left = [pid for pid in self._family.gone(GONE_S) if not command_line(pid).startswith(OUTLIVES_WORKERS)]
        if left:
            raise Wrong(f"processes are left behind: {self._family.describe(left)}")

    def _judge_end(self, job: Job, reference: Path | None) -> None:
        for path in (self.run_dir / "logs").glob("*.log"):
            text = path.read_text(errors="replace")
            if "\nTraceback (" in f"\n{text}":
                raise Wrong(f"a traceback in {path.name}: {text.strip().splitlines()[-1]}")
        if reference is not None:
            self._compare(job, reference)
        if found := plans.lost_without_need(self._plan, self.done, self._redone()):
            raise Wrong(found)
        if left := self._left_behind():
            raise Wrong(f"files are left behind: {', '.join(left)}")

    def _compare(self, job: Job, reference: Path) -> None:
        try:
            same(reference, job)
        except AssertionError as error:
            raise Wrong(str(error).partition("\n")[0]) from None
        audited = self._warm(["ledger", str(self.run_dir), "--json"], self.run_dir.with_name("ledger"), {})
        if audited.end() != 0 or not json.loads(audited.run_dir.with_suffix(".out").read_text())["complete"]:
            raise Wrong("everstep ledger --json: not complete")
        expected = {e["step"]: e["metrics"] for e in Job(reference, "", 0).of_kind("evaluated")}
        found = [(event["step"], event["metrics"]) for event in job.of_kind("evaluated")]
        wrong = [step for step, metrics in found if metrics != expected.get(step)]
        if wrong or expected.keys() - dict(found).keys():
            raise Wrong(f"evaluations {found}, undisturbed {expected}")

    def _redone(self) -> int:
        return sum(int(e.get("steps_redone") or 0) for e in self._told.events if e["kind"] == "fallback")

    def _left_behind(self) -> list[str]:
        names = [str(path.relative_to(self.run_dir)) for path in self.run_dir.rglob("*") if path.is_file()]
        found = plans.leftovers(names)
        for path in [*self.run_dir.rglob("*"), *self._scratch.rglob("*")]:
            if path.is_relative_to(self._scratch) or stat.S_ISSOCK(path.lstat().st_mode):
                found.append(str(path.relative_to(self.run_dir.parent)))
        new = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shm if not name.startswith("etcd")}
        left = new - in_use() if new else new  # of which others may have been using some for a moment
        return found + sorted(path for path in left if os.path.exists(path))

    # ---- the end

    def account(self) -> str:
        """What is needed to understand what went wrong; stacks of all that still runs among it."""
        for pid in self._family.living():
            self._family.send(pid, signal.SIGQUIT)
        time.sleep(0.5)  # for the dumps of stacks: nobody says when they are written
        return self.job.account() if self.job is not None else ""

    def close(self) -> None:
        """End whatever is left."""
        for _ in range(20):
            for pid in self._family.living():
                self._family.send(pid, signal.SIGKILL)
            if not self._family.gone(1.0):
                break
        for job in self._started:
            if isinstance(job, Cold):
                job.process.wait()
            job.close()


def in_use() -> set[str]:
    """Files in shared memory that some process has mapped or open."""
    found: set[str] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.update(word for word in Path(f"/proc/{pid}/maps").read_text().split() if word.startswith("/dev/shm/"))
            found.update(os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return found


def kept_reference(jobs: Jobs, folder: Path, plan: Plan) -> Path:
    """The undisturbed run on one worker, kept from call to call."""
    words = "-".join(f"{name}-{value}" for name, value in sorted(plan.numerics.items()))
    path = folder / "references" / f"{plan.task}-{words}"
    if not (path / "final" / "digest.json").exists():
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        job = jobs.start(plan.task, workers=1, numerics=plan.numerics, run_dir=path)
        if code := job.end():
            raise Wrong(f"the undisturbed run ended with {code}\n{job.account()}")
    return path


def torment(jobs: Jobs, seed: int, plan: Plan, folder: Path, find_reference: Callable[[Plan], Path]) -> dict[str, Any]:
    """Run one plan. Returns its line; the account of one that went wrong is in its folder."""
    begin_s = time.monotonic()
    place = folder / f"seed-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    reason, done = "", []
    try:
        exact = plan.settings.get("batch") != "per_worker"
        reference = find_reference(plan)
        last_step = json.loads((reference / "final" / "digest.json").read_text())["step"]
        tormented = Torment(jobs, plan, f"{seed}-{os.getpid()}", place, last_step)
        begin_s, done = time.monotonic(), tormented.done
        try:
            tormented.run(reference if exact else None)
        except Exception as error:  # a torn file or the like: the job's doing, too
            reason = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            (place / "account.txt").write_text(f"{traceback.format_exc()}\n{tormented.account()}")
        finally:
            tormented.close()
    except Wrong as wrong:
        reason = str(wrong)
    if not reason:
        shutil.rmtree(place)
    seconds = round(time.monotonic() - begin_s, 1)
    return {
        "seed": seed,
        "ok": not reason,
        "reason": reason,
        "schedule": {**asdict(plan), "done": done},
        "seconds": seconds,
    }


def work(argument: str) -> dict[int, Plan]:
    """What is to be done: the seeds of A:B, or what a line says that was printed. Raises: ValueError."""
    if argument != "-" and not argument.startswith("{"):
        first, colon, last = argument.partition(":")
        if not colon or not 0 <= int(first) < int(last):
            raise ValueError
        return {seed: plans.draw(seed) for seed in range(int(first), int(last))}
    lines = [json.loads(text) for text in (sys.stdin if argument == "-" else [argument])]
    return {int(line.get("seed", n)): plans.from_json(line.get("schedule", line)) for n, line in enumerate(lines)}


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; True if there is no such process any more."""
    with contextlib.suppress(OSError):
        rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(rows.get("SigCgt", "0"), 16) >> (number - 1) & 1)
    return True


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    try:
        argument, *rest = arguments
        if len(rest) % 2 or any(word != "--with" for word in rest[::2]):
            raise ValueError
        drawn = work(argument)
    except (ValueError, KeyError, TypeError, AttributeError):
        print(
            f"expected seeds as A:B with A < B, perhaps --with KEY or KEY=VALUE, or a line that was printed, got "
            f"{' '.join(arguments)!r}",
            file=sys.stderr,
        )
        return 2
    todo = {seed: plan for seed, plan in drawn.items() if all(plans.sets(plan, word) for word in rest[1::2])}
    if not todo:
        known = sorted({name for plan in drawn.values() for name in (*plan.numerics, *plan.settings)})
        print(
            f"no plan of {argument:.20} sets {' and '.join(rest[1::2])}; they set {', '.join(known)}", file=sys.stderr
        )
        return 2
    folder = FOLDER / key()
    again = argument[:1] in "-{"
    for old in FOLDER.glob("*"):
        if old != folder and not again:
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job: what is started here must hear SIGINT
        signal.signal(number, signal.default_int_handler)
    jobs: Jobs | None = None
    with contextlib.ExitStack() as at_the_end:
        for seed, plan in todo.items():
            stamp = folder / f"seed-{seed}.json"
            if stamp.exists() and not again:
                line = json.loads(stamp.read_text())
            else:
                jobs = jobs or at_the_end.enter_context(contextlib.closing(Jobs(folder)))
                line = torment(jobs, seed, plan, folder, partial(kept_reference, jobs, folder))
                if line["ok"] and not again:
                    stamp.write_text(json.dumps(line))
            failed += not line["ok"]
            print(json.dumps(line), flush=True)
            if not line["ok"]:
                print(f"seed {seed}: {line['reason']} (account in {folder / f'seed-{seed}'})", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # what is done has its stamp
        sys.exit(130)
