#!/usr/bin/env bash
# A Ceph object gateway (a real S3 server) with its own tiny cluster, on loopback. Needs root and Debian's radosgw,
# ceph-mon, ceph-osd and ceph-common. Ready when it returns, after about 15 s.
#   start_rgw.sh DIR PORT MON_PORT      stop with: kill $(cat DIR/run/*.pid)
# Users: test / testsecret, and small / smallsecret, whose quota is 1 MB.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd) port=$2 mon_port=$3
mkdir -p "$dir"/{mon,osd,rgw,run,log}
cd "$dir"
fsid=$(cat /proc/sys/kernel/random/uuid)
cat > ceph.conf <<C
[global]
fsid=$fsid
mon_host=v1:127.0.0.1:$mon_port
auth_cluster_required=none
auth_service_required=none
auth_client_required=none
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=4
osd_pool_default_pgp_num=4
osd_pool_default_pg_autoscale_mode=off
mon_allow_pool_size_one=true
osd_crush_chooseleaf_type=0
mon_data=$dir/mon
osd_data=$dir/osd
osd_objectstore=bluestore
bluestore_block_size=10737418240
osd_memory_target=1073741824
run_dir=$dir/run
log_file=$dir/log/\$name.log
admin_socket=$dir/run/\$name.asok
pid_file=$dir/run/\$name.pid
rgw_data=$dir/rgw
rgw_frontends=beast endpoint=127.0.0.1:$port
rgw_run_sync_thread=false
rgw_enable_usage_log=false
rgw_gc_obj_min_wait=1
rgw_gc_processor_period=1
ms_bind_ipv6=false
public_network=127.0.0.0/8
ms_bind_msgr2=false
C
export CEPH_CONF=$dir/ceph.conf
monmaptool --create --addv a "[v1:127.0.0.1:$mon_port]" --fsid "$fsid" monmap >/dev/null
ceph-mon --mkfs -i a --monmap monmap
ceph-mon -i a
osd=$(cat /proc/sys/kernel/random/uuid)
ceph osd new "$osd" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$osd" >/dev/null 2>&1
for _ in 1 2 3 4 5; do
  ceph osd crush add osd.0 1.0 host=one root=default >/dev/null 2>&1 && break
  sleep 0.3
done
# On a busy machine it may ask before it knows the cluster ("wrong fsid"), and ends.
for again in 1 2 3 4 5; do
  ceph-osd -i 0 >>log/start.log 2>&1 && break
  [ "$again" = 5 ] && { tail -n 5 log/start.log >&2; exit 1; }
  sleep 1
done
radosgw -n client.rgw.a >/dev/null 2>&1
user() { radosgw-admin user create --uid="$1" --display-name="$1" --access-key="$1" --secret-key="$2" >/dev/null; }
user test testsecret
user small smallsecret
radosgw-admin quota set --uid=small --quota-scope=user --max-size=1M >/dev/null
radosgw-admin quota enable --uid=small --quota-scope=user >/dev/null
for _ in $(seq 300); do
  (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && exit 0
  sleep 0.1
done
echo "the gateway did not answer on port $port; see $dir/log" >&2
exit 1
