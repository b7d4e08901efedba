"""A process that leads a job, or may have to: it runs the job to its end and tells the user about it."""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.base.cause import Cause
from everstep.base.errors import ConfigError, Deposed
from everstep.base.exit_codes import ANOTHER_LEADS
from everstep.chaos.spec import parse, strikes_of
from everstep.cli.beside import dashboard_beside, metrics_beside, sinks_beside
from everstep.cli.coming_back import become_standby, end_agent, mark_head
from everstep.cli.conclusion import end_of, say_the_end, tell_json
from everstep.cli.display import Display, Watcher, choose_display
from everstep.cli.job import JobFile, total_steps
from everstep.cli.main import complain
from everstep.observe.events import EventLog
from everstep.runtime.files.run_lock import run_lock
from everstep.runtime.host.fork_server_client import EarlyForkServer
from everstep.runtime.link.address import EVENTS_FILE
from everstep.runtime.start import Start
from everstep.runtime.targets import put_target

if TYPE_CHECKING:
    from everstep.runtime.job import Job


class UserView(NamedTuple):
    """The user's view of a job beside its progress. opening: lines to begin with. dashboard, public: as `run` has them.
    metrics: address at which they are served, None: nowhere."""

    opening: Sequence[str] = ()
    as_json: bool = False
    dashboard: bool = False
    metrics: str | None = None
    public: bool = False


class LeadersWork:
    """Work of the leading host beside deciding: it shows the job to the user, and feeds the sinks.

    It does both from the start, unless the coordinator of another host may decide by then. held: keeps things open
    until the command is over.
    """

    def __init__(self, begun: Start, display: Display, held: contextlib.ExitStack) -> None:
        self._begun = begun
        self._display = display
        self._held = held
        self._watching = contextlib.ExitStack()
        self._telling = contextlib.ExitStack()
        self.watcher = Watcher(begun.folder / EVENTS_FILE, time.time_ns(), display)
        self.led = False

    def begin(self) -> None:
        """Begin before the job's process runs."""
        if not self._begun.succession.guest:
            put_target(self._begun.folder, None)  # of the life before
            self._watch()
        if not self._begun.succession.owner:
            self._tell()

    def on_event(self, event: dict[str, Any]) -> None:
        """Take in an act of the job's process."""
        if event["kind"] in ("coordinator_leads", "coordinator_follows"):
            self._telling.close()
            mark_head(leads=event["kind"] == "coordinator_leads")
        if event["kind"] == "coordinator_leads":
            self._tell()
            if not self.led:
                self._take_over()
        if self.led:
            self.watcher.process_event(event)

    def close(self) -> None:
        """Feed the sinks the rest, and show all unread events."""
        self._telling.close()
        self._watching.close()

    def _take_over(self) -> None:
        begun = self._begun
        with contextlib.suppress(ConfigError):  # the command that began the job may still run
            self._held.enter_context(run_lock(begun.folder))
        logs = ", and no logs of its workers are here" if begun.succession.copying_host else ""
        put_target(begun.folder, None)  # of the host that did
        self._display.note(f"{begun.name} leads the job in {begun.folder} from now on: the host that did is lost{logs}")
        self._watch()

    def _watch(self) -> None:
        self.led = True
        self.watcher.start()
        self._watching.callback(self.watcher.stop)

    def _tell(self) -> None:
        self._telling.enter_context(sinks_beside(self._begun.folder, self._begun.config, self._display.note))


def see_through(begun: Start, job: JobFile, view: UserView = UserView()) -> int:  # noqa: B008
    """Run the job's process here until the job is over, or goes on elsewhere. begun: all facts but those in `job`.

    The directory must be locked by the caller if the job begins here. Returns the command's exit code.
    """
    from everstep.runtime.files.agent_files import bring_left
    from everstep.runtime.job import Job, hearing_signals

    config, strikes, begin_ns = job.config, strikes_of(parse(job.config.chaos)), time.time_ns()
    begun = replace(begun, config=config, task=job.task, argv=job.argv, strikes=tuple(strikes))
    run_dir, total = begun.folder, total_steps(config, job.dataset_size)
    with contextlib.ExitStack() as held:
        if begun.early is None:
            early = held.enter_context(contextlib.closing(EarlyForkServer(config.threads, begun.imports)))
            begun = replace(begun, early=early)
        process = Job(begun)
        held.enter_context(hearing_signals(process))
        events = EventLog(run_dir / EVENTS_FILE)
        held.callback(events.close, wait_s=1.0)
        display = choose_display(run_dir, as_json=view.as_json, log_every=config.log_every, total_steps=total)
        work = LeadersWork(begun, display, held)
        for line in view.opening:
            display.note(line)
        if begun.succession.begins:
            bring_left(run_dir)
            _say_the_start(events, job)
        with contextlib.closing(work), contextlib.ExitStack() as pages:
            work.begin()
            page = pages.enter_context(dashboard_beside(run_dir, view.dashboard, view.public))
            metrics = pages.enter_context(metrics_beside(run_dir, view.metrics, view.public))
            for name, address in (("dashboard", page), ("metrics", metrics)):
                if address:
                    display.note(f"{name} {address}")
            outcome = process.run(work.on_event)
            pages.close()
            if work.led and (outcome.state != "failed" or outcome.alone or outcome.exit_code == ANOTHER_LEADS):
                put_target(run_dir, None)
            if outcome.exit_code == ANOTHER_LEADS and config.control.etcd is not None:
                display.note(f"{outcome.why.reason}: {begun.name} stands by for the job from now on")
                left = replace(begun, agent=process.left_agent)
                if process.signalled:
                    return _stand_by(process, left)
                ways = functools.partial(_stand_by, process, left), functools.partial(end_agent, left)
                raise Deposed(outcome.why.reason, *ways)
            if begun.succession.guest and begun.stays and outcome.later:
                alone = replace(begun, agent=0)
                raise Deposed(outcome.why.reason, functools.partial(become_standby, alone, deposed=False))
            goes_on = begun.succession.guest or process.deposed
            leaves = outcome.elsewhere or outcome.exit_code > 128 or outcome.exit_code == ANOTHER_LEADS
            if outcome.alone or (goes_on and (not work.led or leaves)):
                if work.led and outcome.elsewhere:
                    display.note(
                        f"the job has ended on another host, in a directory of its own: {run_dir} lacks its end"
                    )
                if view.as_json:
                    work.close()  # the result comes after all events
                    tell_json(run_dir, work.watcher.facts, outcome)
                if outcome.exit_code:
                    complain(outcome.why.reason)
                return outcome.exit_code
            say_the_end(events, run_dir, begin_ns, outcome)
        exit_code = end_of(process, job, events, work.watcher.facts, outcome, as_json=view.as_json)
        if view.dashboard:
            display.note(f"to look again: everstep dashboard {shlex.quote(str(run_dir))}")
        return exit_code


def _stand_by(process: Job, left: Start) -> int:
    """Go on as a standby host, unless a signal has come meanwhile; then returns the exit code. left: with the agent
    that goes on. Raises: as `become_standby`."""
    if process.signalled:
        end_agent(left)
        return 128 + process.signalled
    become_standby(left)


def _say_the_start(events: EventLog, job: JobFile) -> None:
    words = shlex.join([job.task, *(["--", *job.argv] if job.argv else [])])
    step, workers = job.resumes_at, job.config.workers
    how = f"{words} with {workers} workers" + (f", from the checkpoint of step {step}" if step else "")
    events.write("job_started", step=step, cause=Cause.STARTED, reason=how, workers=workers)
