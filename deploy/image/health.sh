#!/usr/bin/env bash
# Healthy: the server answers; on a worker of a Ray cluster, the head does.
set -euo pipefail

if [ "${ROLE:-server}" = worker ]; then
    exec ray health-check --address "${RAY_ADDRESS:?host:port of the head}" --skip-version-check
fi
exec python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
    "http://127.0.0.1:${PORT:-8000}/health"
