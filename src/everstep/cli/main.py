"""`everstep`: the command line. Commands are imported when they are used, so that `--help` answers at once.

Every operating fault ends as one line on stderr and an exit code: 0 done; 1 the job failed, runs differ, the ledger is
not clean; 2 usage, config, or something named that does not exist; 3 gave up waiting for workers; 4 no head of the job
was found; 5 another host leads the job, and this one could not stand by; 130 and 143 signals.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from typing import Any

import click

from everstep import __version__
from everstep.base.below import write_privately
from everstep.base.errors import (
    CheckpointCorrupt,
    ConfigError,
    Deposed,
    EverstepError,
    NoHead,
    StoreError,
    did_you_mean,
)
from everstep.base.exit_codes import ANOTHER_LEADS, NO_HEAD
from everstep.cli.terminal import guarded, paragraph, tell

COMMANDS = {
    "run": ("everstep.cli.run", "Train a task, and go on when workers fail, join or leave."),
    "agent": ("everstep.cli.agent", "Run workers on this host for a job that was started elsewhere."),
    "launch": ("everstep.cli.launch:launch", "Start a job on the hosts of Slurm, Kubernetes, Ray or ssh."),
    "takeover": (
        "everstep.cli.standby:takeover",
        "Continue a job on this host after the host that led it was lost.",
    ),
    "init": ("everstep.cli.starting_points:init", "Write a script to start from."),
    "check": ("everstep.cli.check", "Find out before a job what would make its results differ."),
    "demo": ("everstep.cli.demo", "Kill workers while they train, and compare with an undisturbed run."),
    "eval": ("everstep.cli.evaluate", "Evaluate trained weights on the task's test split."),
    "config": ("everstep.cli.config", "List the config keys, and the causes of events and metrics."),
    "status": ("everstep.cli.status", "Show what a job is doing, or how it ended."),
    "verify": ("everstep.cli.verify", "Compare the final weights of two runs, byte by byte."),
    "ledger": ("everstep.cli.ledger", "Check that every sample was used exactly once."),
    "checkpoint": ("everstep.cli.running:checkpoint", "Take a checkpoint of a running job, now."),
    "checkpoints": ("everstep.cli.checkpoints", "List, verify, compare, prune, export and import checkpoints."),
    "chaos": ("everstep.cli.chaos", "Break jobs on purpose: the failure suite, your own faults, reports."),
    "scale": ("everstep.cli.running:scale", "Change the number of workers of a running job."),
    "drain": ("everstep.cli.running:drain", "Let a worker, or a host, of a running job leave in order."),
    "hosts": ("everstep.cli.hosts:hosts", "List the hosts of a running job, with the state of each."),
    "ports": ("everstep.cli.hosts:ports", "Print free ports of this host, or check whether ports of others answer."),
    "doctor": ("everstep.cli.doctor", "Check whether this host could take part in a job elsewhere."),
    "dashboard": ("everstep.cli.serving:dashboard", "Show jobs, running or over, on a live page in the browser."),
    "metrics": ("everstep.cli.serving:metrics", "Serve or print the numbers of a job for Prometheus."),
    "top": ("everstep.cli.top", "Show a job and its workers in the terminal, live."),
    "logs": ("everstep.cli.logs", "Print all logs of a job as one stream, filtered."),
    "publish": (
        "everstep.cli.publish",
        "Send a job's metrics to TensorBoard, Weights & Biases, MLflow or OpenTelemetry.",
    ),
    "profile": ("everstep.cli.profile", "Record the next steps of a running job's workers as one trace."),
    "report": ("everstep.cli.report:report_command", "Write what happened in a job as one HTML file and pictures."),
    "compare": ("everstep.cli.report:compare_command", "Overlay several runs in one HTML file."),
    "sim": ("everstep.cli.simulate", "Train under simulated faults, seed by seed, and check the promises."),
    "plan": ("everstep.cli.plan", "Plan a job before it is started: splits, memory, time, failures, goodput."),
    "schedule": ("everstep.cli.schedule", "Show a pipeline schedule as a table of stages by time steps."),
    "completion": (
        "everstep.cli.starting_points:completion",
        "Print a script for command completion in bash, zsh or fish.",
    ),
}


class LazyGroup(click.Group):
    """Group that knows its commands by name; it imports one when it is run or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute or "command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            near = did_you_mean(name, COMMANDS)
            raise click.UsageError(f"no such command {name!r}; known: {', '.join(COMMANDS)}{near}")
        if name == "run":
            from everstep.cli.early_server import start_early

            start_early(ctx, args[1:])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="everstep")
def cli() -> None:
    """Fault-tolerant, elastic distributed training for PyTorch. The results are bit-identical to an undisturbed run."""


def exit_code_of(error: EverstepError) -> int:
    """Exit code for an operating fault."""
    if isinstance(error, ConfigError | CheckpointCorrupt | StoreError):
        return 2
    return NO_HEAD if isinstance(error, NoHead) else 1


def complain(text: str) -> None:
    """One line on stderr; on a terminal it is broken between words."""
    tell(paragraph(f"error: {' '.join(text.split())}", sys.stderr, "  "), sys.stderr)


def run_command(argv: list[str] | None = None, *, becomes: bool = True) -> int:
    """Run a command, and turn its exceptions into a line and an exit code. Its files are private to the user.

    becomes: the process may become another one, if its host was deposed.
    """
    write_privately()
    with guarded():
        return _run(argv, becomes)


def _stand_again(deposed: Deposed, *, becomes: bool) -> int:
    """Become a standby host; returns an exit code if that is impossible, or a signal has come."""
    try:
        if becomes:
            sys.stdout.flush()
            return deposed.become()
    except (EverstepError, OSError) as error:
        deposed.end()
        complain(f"{deposed}; this host could not stand by: {error}")
        return ANOTHER_LEADS
    deposed.end()
    complain(f"{deposed}; this host cannot stand by, as processes of its launcher wait for this one")
    return ANOTHER_LEADS


def _run(argv: list[str] | None, becomes: bool = True) -> int:
    try:
        result: Any = cli.main(args=argv, prog_name="everstep", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as help_wanted:
        print(help_wanted.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        complain(error.format_message())
        return 2
    except Deposed as deposed:
        return _stand_again(deposed, becomes=becomes)
    except EverstepError as error:
        complain(str(error))
        return exit_code_of(error)
    except click.Abort:
        complain("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not any(_reader_gone(stream.fileno()) for stream in (sys.stdout, sys.stderr)):
            raise  # a pipe within the command broke: that is an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        complain(f"{error.filename or 'the system'}: {error.strerror or error}")
        return 2
    except (MemoryError, RecursionError) as error:
        what = "more memory than this host has" if isinstance(error, MemoryError) else "fewer levels of nesting"
        complain(f"the command needs {what}: a file that it reads may be damaged or of the wrong kind")
        return 2


def _reader_gone(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, 0)  # poll always reports POLLERR and POLLHUP
    return bool(poller.poll(0))
