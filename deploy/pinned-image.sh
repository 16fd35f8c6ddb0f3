#!/usr/bin/env bash
# Print an image reference that carries a digest; refuse one that does not. A tag alone can mean
# another image tomorrow.
set -euo pipefail

reference=${1:-}
if [[ ! $reference =~ ^[a-z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}$ ]]; then
    echo "error: an image reference without a digest" >&2
    echo "  expected: name@sha256:<64 hexadecimal digits>" >&2
    echo "  found:    ${reference:-nothing}" >&2
    echo "  next:     docker buildx imagetools inspect NAME:TAG prints the digest" >&2
    exit 1
fi
printf '%s\n' "$reference"
