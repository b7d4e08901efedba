#!/bin/sh
# run_failure_tests.sh [NAME]... [--OPTION=VALUE]...: the named scenarios (all six by default); each is compared with an
# undisturbed run. Options are those of `everstep chaos suite`, such as --max-seconds=600 for a slow machine.
set -eu
known="single_failure multi_failure cascading_failures leader_recovery all_backup_failure network_partition"
names=
for word; do
    case $word in
    -*) continue ;;
    esac
    case " $known " in
    *" $word "*) names=given ;;
    *)
        echo "run_failure_tests.sh: expected of $known, got $word" >&2
        exit 2
        ;;
    esac
done
[ "$names" ] || set -- $known "$@"
exec "${PYTHON:-python3}" -m everstep chaos suite "$@"
