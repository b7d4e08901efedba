#!/bin/sh
# A ResNet-18 in three stages on three hosts, each stage with a leader and a backup on another host. One host is lost in
# the middle; its backups are promoted, and the weights are those of one worker in which nothing happened, bit for bit.
#
#   sudo sh examples/three_hosts.sh [FOLDER] [STEPS]      # PYTHON=.venv/bin/python, where everstep is installed
#
# The hosts are network namespaces on one bridge of this machine, with addresses 10.78.0.1 to 3. On real machines only
# the lines with `everstep` are needed: `run` on one of them, `agent` on the others (docs/hosts.md).
set -eu
folder=${1:-runs/three_hosts} steps=${2:-12}
python=$(command -v "${PYTHON:-python3}") || { echo "error: PYTHON: there is no ${PYTHON:-python3}" >&2; exit 2; }
for tool in ip unshare; do
  command -v $tool >/dev/null || { echo "error: hosts as network namespaces need $tool: install it" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "error: hosts as network namespaces need root: use sudo" >&2; exit 2; }
[ ! -e "$folder" ] || { echo "error: expected a new folder, got $folder: give another one" >&2; exit 2; }
everstep() { "$python" -P -m everstep "$@"; }
net=es$$

clean_up() {
  trap - EXIT INT TERM
  for host in 1 2 3; do
    ip netns pids $net-$host 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del $net-$host 2>/dev/null || true
  done
  ip netns del $net-switch 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Three hosts on a bridge. It is in a namespace, too, so nothing here touches this machine's own network.
ip netns add $net-switch || { echo "error: no network namespace can be made here" >&2; exit 2; }
ip -n $net-switch link add bridge0 type bridge
ip -n $net-switch link set bridge0 up
for host in 1 2 3; do
  ip netns add $net-$host
  ip -n $net-switch link add port$host type veth peer name eth0 netns $net-$host
  ip -n $net-switch link set port$host master bridge0 up
  ip -n $net-$host link set lo up
  ip -n $net-$host addr add 10.78.0.$host/24 dev eth0
  ip -n $net-$host link set eth0 up
done
on() { # HOST COMMAND...: with a host name, processes and shared memory of its own
  host=$1; shift
  ip netns exec $net-$host unshare --uts --ipc --pid --fork --kill-child --mount-proc sh -c \
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"' "host$host" "$@"
}

mkdir -p "$folder"
cat >"$folder/map.yaml" <<'MAP'
stages: 3
map:
  - {units: [0, 2], hosts: [10.78.0.1, host2]}
  - {units: [3, 5], hosts: [host2, host3]}
  - {units: [6, 9], hosts: [host3, 10.78.0.1]}
MAP
EVERSTEP_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export EVERSTEP_TOKEN OMP_NUM_THREADS=1
task="resnet18-digits --steps $steps --batch-size 64"
fault="kill:target=host:host2,at=$((steps / 3))"
on 1 "$python" -P -m everstep run $task --config "$folder/map.yaml" --workers 6 --slots 2 --listen 10.78.0.1:29400 \
  --run-dir "$folder/job" --chaos "$fault" >"$folder/host1.log" 2>&1 &
job=$!
agent() { on "$1" "$python" -P -m everstep agent --join 10.78.0.1:29400 --slots 2 >>"$folder/host$1.log" 2>&1; }
{ agent 2 || agent 2; } & # lost with all its processes, and started again
agent 3 &
wait $job || { tail -n 5 "$folder/host1.log" >&2; exit 1; }
"$python" - "$folder/job/events.jsonl" <<'TOLD'
import json, sys

for event in map(json.loads, open(sys.argv[1])):
    if event["kind"] in ("fault_injected", "worker_evicted", "leader_changed", "worker_healed"):
        print(f"{event['kind']:15} step {event['step']:<3} {event['reason']}")
TOLD

echo "the same on one worker, on this machine:"
everstep run $task --workers 1 --run-dir "$folder/one" >"$folder/one.log" 2>&1
everstep verify "$folder/one" "$folder/job"
