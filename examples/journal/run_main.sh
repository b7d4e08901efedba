#!/bin/sh
# run_main.sh NODES RANK ADDR PORT [options of main.py]: this host's part of a job on NODES hosts.
# The hosts share --checkpoint-dir, or have the same secret in EVERSTEP_TOKEN (openssl rand -hex 32).
set -eu
if [ $# -lt 4 ]; then
    echo "usage: run_main.sh NODES RANK ADDR PORT [options of main.py]" >&2
    exit 2
fi
nodes=$1 rank=$2 addr=$3 port=$4
shift 4
exec "${PYTHON:-python3}" "$(dirname "$0")/main.py" --mode train --world-size "$nodes" --rank "$rank" \
    --master-addr "$addr" --master-port "$port" "$@"
