#!/usr/bin/env bash
# Healthy: the server answers; on another node of a cluster, the head does.
set -euo pipefail

if [ "${ROLE:-server}" = worker ]; then
    exec ray health-check --address "${RAY_ADDRESS:?host:port of the head}" --skip-version-check
fi
host=127.0.0.1
if [ "${RANK:-0}" != 0 ]; then
    host=${HEAD:?the address of node 0}
fi
exec python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
    "http://$host:${PORT:-8000}/health"
