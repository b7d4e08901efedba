#!/usr/bin/env bash
# The packages of a real S3 server for the tests, where that is possible (Debian, root); else the tests use moto.
command -v radosgw >/dev/null && command -v ceph-mon >/dev/null && command -v ceph-osd >/dev/null && exit 0
packages="radosgw ceph-mon ceph-osd ceph-common"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  install() { timeout 600 apt-get install -y -q --no-install-recommends $packages >/dev/null 2>&1; }
  install || { timeout 300 apt-get update -q >/dev/null 2>&1 && install; } && exit 0
fi
echo "Ceph RGW is not installed ($packages): the object store tests use moto instead"
