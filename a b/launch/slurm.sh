#!/bin/bash
#SBATCH --job-name=everstep-t
#SBATCH --array=0-2
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
#SBATCH --output=/work/wt/engines/a b/launch/host-%a.log
#SBATCH --partition=gpu
# One element of the array per host; element 0 runs the job itself. More: sbatch --array=4-5 of this.
address=${EVERSTEP_ADDRESS:-$(hostname -I | cut -d' ' -f1)} # of this host, for the others
dir='/work/wt/engines/a b'
leaving= here=
trap 'leaving=1; [ -z "$here" ] || kill -USR1 "$here"' USR1
trap ':' TERM
if [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then
  /work/wt/engines/.venv/bin/python -P -m everstep run /tmp/pytest-of-root/pytest-1001/test_a_script_for_sbatch0/t.py --listen "$address:0" --run-dir '/work/wt/engines/a b' --workers 6 --slots 2 --set checkpoint.grace_s=20 --set 'security.token_file=/work/wt/engines/a b/token' --set lr=1 --steps=5 -- --lr 'it'"'"'s' --print &
else
  /work/wt/engines/.venv/bin/python -P -m everstep agent --join "file://$dir" --stay --refill 6 --slots 2 --host-name "host-$SLURM_ARRAY_TASK_ID" --address "$address" &
fi
here=$!
code=0
while :; do
  wait "$here" && code=0 || code=$?
  kill -0 "$here" 2>/dev/null || break # a signal ends the wait, not what is waited for
done
case $code in
  0 | 130 | 143) ;;       # over, handed over, told to stop
  1 | 2 | 3) leaving= ;;  # failed, refused, waited in vain: no use to try again
  *) leaving=1 ;;         # killed
esac
if [ -n "$leaving" ] && [ ! -e "$dir/final/digest.json" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
