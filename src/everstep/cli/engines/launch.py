"""The launch of a job, for any engine: the words of the job's own command and of each other host's agent. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from everstep.base.config_keys import HostsConfig
from everstep.base.exit_codes import HANDED_OVER, JOB_FAILED, NO_HEAD, WORKERS_MISSING


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
    def wait_s(self) -> float:
        """hosts.wait_s."""
        named = [text.partition("=")[2] for text in self.settings if text.startswith("hosts.wait_s=")]
        return float(named[-1]) if named else HostsConfig().wait_s

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


NOT_REACHED = 255
FINAL = (JOB_FAILED, 2, 126, 127)
"""Exit codes after which no other try helps: failed, refused; the interpreter cannot be run, or is not there."""
ENDS_JOB = (0, *FINAL, WORKERS_MISSING)
"""Exit codes with which the host that leads ends the job."""
_IN_VAIN = (*FINAL, WORKERS_MISSING, NO_HEAD)
"""Ends of a host that does not lead, and says nothing of one that does."""
NOBODY_LEADS = "nobody leads the job, and its first host cannot begin it: no host is tried any more"
LED = 64
"""Is added to such a code by a host that led the job when it ended, where any host may lead."""
_AGAIN_S = 1.0
_AGAIN_MOST_S = 60.0
_JOB_ENDS_S = 10.0
_HEALTHY_S = 60.0


def job_code(number: int, code: int, *, alike: bool) -> int | None:
    """Exit code of the job, if its end is what host `number` tells by this code; None if it goes on.

    Without etcd that is the end of the first host, whatever it is. With etcd any host may lead (alike), and the one
    that does tells the job's end; it waits for those that know of the job. Every other end is that of one host alone.
    """
    if not alike:
        return code if number == 0 else None
    return code - LED if code - LED in ENDS_JOB else None


@dataclass
class LaunchedHost:
    """A host of a launch, by one rule: what has ended begins again, later and later while that fails; but a host that
    has left in order, or says by 0 that the job is complete, is left out for good. Pure.

    due_s: when its process is to begin, inf while it runs; -inf before its first life. began_s, ended_s: its last life.
    code: with which that has ended. left: with which it was left out. vain_since_s: when it was refused, or failed, for
    the first time since it was well or could not be reached; inf if it was not. well_s: when it was well last.
    """

    name: str
    alike: bool = False
    due_s: float = -inf
    began_s: float = 0.0
    ended_s: float = -inf
    code: int | None = None
    left: int | None = None
    vain_since_s: float = inf
    well_s: float = -inf
    _tries: int = 0

    @property
    def runs(self) -> bool:
        return self.due_s == inf and self.left is None

    def begun(self, now_s: float) -> None:
        self.due_s, self.began_s = inf, now_s

    def ended(self, code: int, now_s: float) -> str:
        """Take in that its process has ended with this code. Returns words for the user, "" if there are none.

        An agent whose job failed says so before the job's own host has ended. Without etcd an agent ends with 0 when
        the job is over, too.
        """
        well = now_s - self.began_s >= _HEALTHY_S
        if well:
            self._tries = 0
        if well and code != NO_HEAD:
            self.well_s, self.vain_since_s = now_s, inf
        if code in _IN_VAIN:
            self.vain_since_s = min(self.vain_since_s, now_s)
        else:
            self.vain_since_s = now_s if code == HANDED_OVER else inf
        self.code, self.ended_s = code, now_s
        if code == 0 or (self.alike and code == HANDED_OVER):
            self.left, self.due_s = code, inf
            return f"{self.name} has left in order: it is left out" if code else ""
        failed = code in (JOB_FAILED, 2, WORKERS_MISSING)
        delay_s = min(_AGAIN_MOST_S, (_JOB_ENDS_S if failed else _AGAIN_S) * 2**self._tries)
        self._tries += 1
        self.due_s = now_s + delay_s
        if failed and self._tries == 1:
            return ""
        how = "cannot be reached" if code == NOT_REACHED else f"ended with {code}"
        return f"{self.name} {how}: again in {delay_s:g} s"

    def leads_not(self, since_s: float, now_s: float, patience_s: float) -> bool:
        """Whether it neither leads the job nor follows a host that does: its life before this one has waited in vain
        for one since then, and this one is no longer than such a life; or it does not run, and was not well lately."""
        if self.runs:
            return self.code == NO_HEAD and self.ended_s >= since_s and now_s - self.began_s <= patience_s
        return self.left is not None or now_s - self.well_s >= patience_s


def completed(hosts: Iterable[LaunchedHost]) -> bool:
    """Whether some host says so, where any may lead: then none begins again."""
    return any(host.alike and host.left == 0 for host in hosts)


def given_up(hosts: Sequence[LaunchedHost], patience_s: float, now_s: float) -> int | None:
    """Exit code of a job that is complete and runs nowhere; or that nobody begins or leads: the first host, which alone
    can begin it, has been refused or has failed for so long (if it cannot be reached, it may lead), and no other one
    has met a host that leads since. Else None."""
    first = hosts[0]
    if completed(hosts):
        return None if any(host.runs for host in hosts) else 0
    if first.runs or now_s - first.vain_since_s < patience_s:
        return None
    vain = all(host.leads_not(first.vain_since_s, now_s, patience_s) for host in hosts[1:])
    return min(host.code for host in hosts if host.code is not None) if vain else None


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
    known: str = '[ -e "$dir/job.json" ]',
) -> str:
    """The shell script of one host: host 0 is the job's own.

    index: number of this host, in a shell's words. job, agent: arguments. again: command that has the engine start this
    host again. alone: the engine's SIGTERM comes to the shell alone, not to its children. in_vain: commands for a host
    that has waited in vain for the others; killed: for one whose process was killed; leaving=1 has it start again.
    final: for one that led the job when it ended for good; refused: for another one that ended for good. known: whether
    the job may have begun, so that another host may lead it by etcd.

    SIGUSR1 means that the host has to go soon: an agent hands its workers over, the job takes a checkpoint.
    """
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in launch.variables)
    known = f"{known} || " if launch.etcd else ""
    end = '[ -z "$here" ] || kill -TERM "$here"' if alone else ":"  # a second one would end the job at once
    return f"""\
dir={shlex.quote(launch.run_dir)}
leaving= here=
EVERSTEP_HEAD_MARK=$(mktemp -u) # is there while this host leads the job
export EVERSTEP_HEAD_MARK
{variables}trap 'leaving=1; [ -z "$here" ] || kill -USR1 "$here"' USR1
trap '{end}' TERM
if [ "{index}" = 0 ]; then
  {known}touch "$EVERSTEP_HEAD_MARK"
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
  {HANDED_OVER}) code=0 ;;          # a standby host has handed over
  3) ;;                   # too few workers: those that came have left with the job's end
  {" | ".join(map(str, FINAL))}) # failed, refused, no such interpreter: no use to try again
    leaving=
    if [ -n "$led" ]; then {final}; else {refused}; fi
    ;;
  4) {in_vain} ;; # waited in vain for the job
  5) leaving=1 ;;         # deposed
  *) {killed} ;; # killed
esac
if [ -e "$dir/final/digest.json" ]; then
  [ "$code" != 4 ] || code=0 # the job is complete
elif [ -n "$leaving" ]; then
  {again}
fi
exit "$code"
"""
