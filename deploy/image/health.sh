#!/usr/bin/env bash
# Ask the server, or on another node of a cluster the head, whether it answers.
#
#   health.sh          fails while the server loads, and when it no longer answers: send it no requests
#   health.sh alive    fails only when a server that has answered no longer does: restart it. A server
#                      may load for as long as it needs
set -euo pipefail

answers() {
    if [ "${ROLE:-server}" = worker ]; then
        ray health-check --address "${RAY_ADDRESS:?host:port of the head}" --skip-version-check
        return
    fi
    local host=127.0.0.1
    if [ "${RANK:-0}" != 0 ]; then
        host=${HEAD:?the address of node 0}
    fi
    python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \
        "http://$host:${PORT:-8000}/health"
}

# Of this start of the container: /tmp may be older.
read -r process </proc/1/stat
read -ra fields <<<"${process##*) }"
answered=${TMPDIR:-/tmp}/answered-${fields[19]}
if answers; then
    touch "$answered"
elif [ "${1:-}" != alive ] || [ -e "$answered" ]; then
    exit 1
fi
