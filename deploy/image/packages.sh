#!/usr/bin/env bash
# Install what the distribution gives: Python and a C compiler, or git for the build stage.
# What came, at which version, is noted in the image: a distribution's packages have no lock.
#
#   packages.sh cuda|cpu|build
set -euo pipefail

role=${1:-}
case $role in
# Triton and torch.compile compile while they serve: gcc, Python's headers. InfiniBand for NCCL and UCX;
# NUMA for fastsafetensors.
cuda) packages=(gcc g++ libibverbs1 ibverbs-providers librdmacm1 libnuma1) ;;
cpu) packages=(gcc g++ libnuma1) ;;
build) packages=(git) ;;
*)
    echo "usage: packages.sh cuda|cpu|build" >&2
    exit 2
    ;;
esac

# A base that has the Python keeps it: its digest pins it.
if [ "$role" != build ]; then
    python=$("$(dirname "${BASH_SOURCE[0]}")/python.sh" "$role")
    if ! "$python" -c 'import ensurepip, pathlib, sysconfig, venv
pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()' 2>/dev/null; then
        packages+=("$python" "$python-venv" "$python-dev")
    fi
fi

export DEBIAN_FRONTEND=noninteractive
lists=${LISTS:-/var/lib/apt/lists}
notes=${NOTES:-/usr/share/vllm-routed-experts}
apt-get update --quiet
if ! apt-get install --quiet --yes --no-install-recommends "${packages[@]}"; then
    echo "error: this base image cannot be used: its distribution lacks one of ${packages[*]}" >&2
    echo "  expected: Ubuntu 24.04 (cuda), Debian 12 (cpu), or an image that has the Python itself" >&2
    exit 1
fi
rm -rf "${lists:?}"/*
mkdir -p "$notes"
dpkg-query --show --showformat '${Package} ${Version}\n' >"$notes/system-packages.txt"
