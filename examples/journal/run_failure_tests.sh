#!/bin/sh
# run_failure_tests.sh [NAME]...: the named scenarios (all six by default); each is compared with an undisturbed run.
set -eu
known="single_failure multi_failure cascading_failures leader_recovery all_backup_failure network_partition"
[ $# -gt 0 ] || set -- $known
for name; do
    case " $known " in
    *" $name "*) ;;
    *)
        echo "run_failure_tests.sh: expected of $known, got $name" >&2
        exit 2
        ;;
    esac
done
exec "${PYTHON:-python3}" -m everstep chaos suite "$@"
