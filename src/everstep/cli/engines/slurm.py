"""A job as an array of Slurm, one element per host: a lost or preempted element is requeued by itself, the others go
on.

Source: measured on Slurm 22.05. When a node dies, one job over several nodes is killed and requeued as a whole; of an
array only the lost element is. An element that merely ends badly is not requeued, so the script asks for it. A SIGTERM
(preemption, time limit, scancel) goes to all processes of an element, --signal=B: to its shell alone. A requeued
element waits for cred_expire (AuthInfo in slurm.conf, 120 s by default) before it starts again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from everstep.cli.engines.launch import Launch, host_script, in_brackets

ADDRESS = "EVERSTEP_ADDRESS"
_AGAIN = 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
"""Requeues by this name: one element's SLURM_JOB_ID is that of the array, and all of it would be requeued."""
_IN_VAIN = 'leaving=$(squeue -h -j "${SLURM_ARRAY_JOB_ID}_0" 2>/dev/null)'
"""Have the element start again only while host 0 is still to come."""

_KILLED = """\
killed="$dir/launch/killed-$SLURM_ARRAY_TASK_ID" # a line for each end of this kind, one soon after another
    old=$(find "$killed" -mmin +1440 2>/dev/null)
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ "$SECONDS" -lt LONG ] && [ -z "$old" ] || rm -f "$killed"
    echo "$code" >>"$killed"
    if [ "$(wc -l <"$killed")" -ge MOST ]; then
      echo "this host ended with $code, and MOST times in a row within LONG s of its start: it is not requeued" >&2
    else
      leaving=1
    fi""".replace("LONG", "600").replace("MOST", "20")
"""What ends the same way each time would be requeued for ever; but one that ran for long, or was preempted often, comes
again. Without a file that can be written it does, too."""


def script(launch: Launch, extra: Sequence[str] = (), notice_s: int = 60) -> str:
    """The script for sbatch. extra: further options of sbatch, such as "partition=gpu". notice_s: seconds before its
    time limit at which an element is told to leave."""
    options = {
        "job-name": launch.name,
        "array": f"0-{launch.hosts - 1}",
        "nodes": "1",
        "ntasks": "1",
        "exclusive": "",
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:USR1@{notice_s}",
        "output": f"{launch.run_dir.replace('%', '%%')}/launch/host-%a.log",
    }
    for text in extra:
        name, _, value = text.partition("=")
        options[name] = value
    lines = [f"#SBATCH --{name}{'=' + shlex.quote(value) if value else ''}" for name, value in options.items()]
    listen, own = '"$address:0"', ' --address "$address"'
    found = f"${{{ADDRESS}:-$(hostname -I | cut -d' ' -f1)}}"
    if launch.interface:  # each host finds its own address there
        listen, own = f'"${{address:-{launch.interface}}}:0"', ' ${address:+--address "$address"}'
        found = f"${{{ADDRESS}:-}}"
    job = launch.job_words(listen, "--set", f"security.token_file={launch.run_dir}/token")
    agent = launch.agent_words('"file://$dir"', '"host-$SLURM_ARRAY_TASK_ID"') + own
    agent += ' --token-file "$dir/token"' if launch.etcd else ""
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "# One element of the array per host; element 0 runs the job itself. More: sbatch --array=4-5 of this.",
            f"# Before it is submitted there is the folder {launch.run_dir}/launch, and 64 hex digits are in",
            f"# {launch.run_dir}/token, for its owner alone: 'everstep launch' makes both where sbatch is.",
            f"address={found} # of this host, for the others",
            in_brackets("address").rstrip(),
            host_script(
                launch, "$SLURM_ARRAY_TASK_ID", job, agent, _AGAIN, alone=False, in_vain=_IN_VAIN, killed=_KILLED
            ),
        ]
    )
