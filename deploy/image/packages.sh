#!/usr/bin/env bash
# Install what the distribution gives: Python 3.12 and a C compiler, or git for the build stage.
# What came, at which version, is noted in the image: a distribution's packages have no lock.
set -euo pipefail

case ${1:-} in
# The wheel's kernels are for CPython 3.12. Triton compiles its launchers: gcc, Python's headers.
# InfiniBand for NCCL; NUMA for fastsafetensors.
run) packages=(python3.12 python3.12-venv python3.12-dev gcc g++ libibverbs1 ibverbs-providers libnuma1) ;;
build) packages=(git) ;;
*)
    echo "usage: packages.sh run|build" >&2
    exit 2
    ;;
esac

export DEBIAN_FRONTEND=noninteractive
lists=${LISTS:-/var/lib/apt/lists}
notes=${NOTES:-/usr/share/vllm-routed-experts}
apt-get update --quiet
if ! apt-get install --quiet --yes --no-install-recommends "${packages[@]}"; then
    echo "error: this base image cannot be used: its distribution lacks one of ${packages[*]}" >&2
    echo "  expected: Ubuntu 24.04" >&2
    exit 1
fi
rm -rf "${lists:?}"/*
mkdir -p "$notes"
dpkg-query --show --showformat '${Package} ${Version}\n' >"$notes/system-packages.txt"
