#!/bin/sh
# check.sh [RUN_DIR]: does the task keep the promise here? With RUN_DIR: is that job's state sound, its ledger clean?
set -eu
python=${PYTHON:-python3}
if [ $# -gt 1 ]; then
    echo "usage: check.sh [RUN_DIR]" >&2
    exit 2
fi
if [ $# -eq 0 ]; then
    exec "$python" -m everstep check resnet18-digits
fi
"$python" -m everstep status "$1"
"$python" -m everstep checkpoints verify "$1"
exec "$python" -m everstep ledger "$1"
