#!/usr/bin/env bash
# Grafana's own types of a dashboard, and a compiler that checks against them, into FOLDER, where npm can get them; else
# the test of the Grafana file is skipped.
set -u
folder=$1
[ -x "$folder/node_modules/.bin/tsc" ] && exit 0
if command -v npm >/dev/null && command -v node >/dev/null; then
  mkdir -p "$folder" && cd "$folder" || exit 1
  echo '{"private": true}' > package.json
  timeout 300 npm install --no-audit --no-fund --ignore-scripts @grafana/schema@13.2.3 typescript >/dev/null 2>&1 && exit 0
fi
echo "Grafana's schema cannot be had here: the test of the Grafana dashboard against it is skipped"
