#!/usr/bin/env bash
# etcd for the tests, where that is possible (Debian, root); else the tests that need it say so and are skipped.
command -v etcd >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  install() { timeout 600 apt-get install -y -q --no-install-recommends etcd-server >/dev/null 2>&1; }
  install || { timeout 300 apt-get update -q >/dev/null 2>&1 && install; } && exit 0
fi
echo "etcd is not installed (etcd-server): tests of jobs whose coordinator may be lost with its host are skipped"
