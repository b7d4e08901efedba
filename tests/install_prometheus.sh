#!/usr/bin/env bash
# Prometheus and promtool for the tests of the metrics, unpacked into FOLDER from Debian's package, where that is
# possible; else they are skipped. Not installed: the package would start a server.
set -u
folder=$1
[ -x "$folder/prometheus" ] && [ -x "$folder/promtool" ] && exit 0
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cd "$scratch" || exit 1
  download() { timeout 600 apt-get download -q prometheus >/dev/null 2>&1; }
  download || { timeout 300 apt-get update -q >/dev/null 2>&1 && download; }
  if dpkg-deb -x prometheus_*.deb . 2>/dev/null; then
    mkdir -p "$folder"
    cp usr/bin/prometheus usr/bin/promtool "$folder"/ && exit 0
  fi
fi
echo "Prometheus cannot be had here: the tests of the alert rules and of scraping are skipped"
