#!/usr/bin/env bash
# A browser for the tests of the dashboard, where that is possible (Debian, root); else they are skipped.
command -v chromium >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  install() { timeout 600 apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1; }
  install || { timeout 300 apt-get update -q >/dev/null 2>&1 && install; } && exit 0
fi
echo "chromium is not installed: the tests of the dashboard in a browser are skipped"
