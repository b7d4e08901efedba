"""The launch of a job, for any engine: the words of the job's own command and of each other host's agent. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, MutableMapping
from typing import NamedTuple

from everstep.base.exit_codes import JOB_FAILED, NO_HEAD, WORKERS_MISSING


class Launch(NamedTuple):
    """A job on `hosts` hosts with `slots` workers each.

    name: fit for engines (letters, digits, hyphens). task, options, argv: of `everstep run`. run_dir: as all hosts see
    it. python: the interpreter there. settings: "key=value" of the keys that each agent sets. folder: working directory
    on hosts that share the file system, so that relative names are the same there. etcd: control.etcd, "" for none:
    with it any host can take over. variables: of the environment of hosts that ask etcd before they know the config.
    """

    name: str
    task: str
    options: tuple[str, ...]
    argv: tuple[str, ...]
    hosts: int
    slots: int
    run_dir: str
    python: str
    settings: tuple[str, ...] = ()
    folder: str = ""
    etcd: str = ""
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def interface(self) -> str:
        """network.interface, "" if the user has named none."""
        named = [text.partition("=")[2] for text in self.settings if text.startswith("network.interface=")]
        return named[-1] if named else ""

    @property
    def everstep(self) -> list[str]:
        """Words that start the command line on a host."""
        return [self.python, "-P", "-m", "everstep"]

    def job_words(self, listen: str, *more: str) -> str:
        """Arguments of the job's own process, for a shell. listen: "ADDR:PORT", in a shell's words. more: options."""
        own = ["--run-dir", self.run_dir, "--workers", str(self.hosts * self.slots), "--slots", str(self.slots)]
        own += ["--or-standby"] if self.etcd else []
        own += ["--set", "checkpoint.grace_s=20", *more, *self.options, *(["--", *self.argv] if self.argv else [])]
        return f"run {shlex.quote(self.task)} --listen {listen} {shlex.join(own)}"

    def agent_words(self, join: str, name: str) -> str:
        """Arguments of an agent, for a shell. join, name: of the job and the host, in a shell's words. With etcd
        the host finds the job there, and stands by."""
        workers = self.hosts * self.slots
        own = "".join(f" --set {shlex.quote(text)}" for text in self.settings)
        where = f"{shlex.quote(self.etcd)} --standby" if self.etcd else join
        return f"agent --join {where} --stay --refill {workers} --slots {self.slots} --host-name {name}{own}"


def in_brackets(name: str) -> str:
    """Line of a shell script that puts an IPv6 address in a variable into brackets, as it stands before a port."""
    return f'case "${name}" in [[]*) ;; *:*) {name}="[${name}]" ;; esac\n'


JOB_ENDS_S = 10.0
"""Time that the job's own host takes to end after an agent has ended with the job's exit code."""
NOT_REACHED = 255
_END_TOGETHER_S = 60.0
FINAL = (1, 2, 126, 127)
"""Exit codes after which no other try helps: failed, refused; the interpreter cannot be run, or is not there."""


def note_end(ends: MutableMapping[int, tuple[float, int]], number: int, code: int, now_s: float) -> None:
    """Note how a host ended. One that was lost and cannot be reached since has ended once."""
    if code != NOT_REACHED or ends.get(number, (0.0, 0))[1] != code:
        ends[number] = now_s, code


def job_code(ends: Collection[tuple[float, int]], *, final: bool) -> int | None:
    """Exit code of a job of which nothing runs, by when and how its hosts ended; None if it goes on. final: no host
    is to begin again; else one that left in order before the last one ended does not count."""
    last_s, last = max(ends, default=(0.0, NO_HEAD))
    together = [code for at_s, code in ends if last_s - at_s < _END_TOGETHER_S]
    failed = next((code for code in (JOB_FAILED, WORKERS_MISSING) if code in together), None)
    codes = [code for _, code in ends]
    if failed is not None or not codes:
        return failed
    if final:
        return 0 if 0 in codes else max(codes)
    return 0 if last == 0 else None


def host_script(
    launch: Launch,
    index: str,
    job: str,
    agent: str,
    again: str,
    *,
    alone: bool,
    in_vain: str = "leaving=",
    killed: str = "leaving=1",
    final: str = ":",
    refused: str = ":",
) -> str:
    """The shell script of one host: host 0 is the job's own.

    index: number of this host, in a shell's words. job, agent: arguments. again: command that has the engine start this
    host again. alone: the engine's SIGTERM comes to the shell alone, not to its children. in_vain: commands for a host
    that has waited in vain for the others; killed: for one whose process was killed; leaving=1 has it start again.
    final: for one that led the job when it ended for good; refused: for another one that ended for good.

    SIGUSR1 means that the host has to go soon: an agent hands its workers over, the job takes a checkpoint.
    """
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.variables)
    end = '[ -z "$here" ] || kill -TERM "$here"' if alone else ":"  # a second one would end the job at once
    return f"""\
dir={shlex.quote(launch.run_dir)}
leaving= here=
EVERSTEP_HEAD_MARK=$(mktemp -u) # is there while this host leads the job
export EVERSTEP_HEAD_MARK
{variables}trap 'leaving=1; [ -z "$here" ] || kill -USR1 "$here"' USR1
trap '{end}' TERM
if [ "{index}" = 0 ]; then
  touch "$EVERSTEP_HEAD_MARK"
  {shlex.join(launch.everstep)} {job} &
else
  {shlex.join(launch.everstep)} {agent} &
fi
here=$!
code=0
while :; do
  wait "$here" && code=0 || code=$?
  kill -0 "$here" 2>/dev/null || break # a signal ends the wait, not what is waited for
done
led=
if [ -e "$EVERSTEP_HEAD_MARK" ]; then led=1; rm -f "$EVERSTEP_HEAD_MARK"; fi
case $code in
  0 | 130 | 143) ;;       # over, handed over, told to stop
  3) ;;                   # too few workers: those that came have left with the job's end
  {" | ".join(map(str, FINAL))}) # failed, refused, no such interpreter: no use to try again
    leaving=
    if [ -n "$led" ]; then {final}; else {refused}; fi
    ;;
  4) {in_vain} ;; # waited in vain for the job
  5) leaving=1 ;;         # deposed
  *) {killed} ;; # killed
esac
if [ -n "$leaving" ] && [ ! -e "$dir/final/digest.json" ]; then
  {again}
fi
exit "$code"
"""
