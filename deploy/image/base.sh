#!/usr/bin/env bash
# Check that the base image can carry the wheel: named by digest, glibc and CUDA compiler new enough.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
"$here/../pinned-image.sh" "${1:-}"

refuse() {
    printf 'error: this base image cannot be used: %s\n  expected: %s\n  found:    %s\n' "$1" "$2" "$3" >&2
    exit 1
}

case $(uname -m) in
x86_64 | aarch64) ;;
*) refuse "there is no CUDA base wheel for its machine" "x86_64 or aarch64" "$(uname -m)" ;;
esac

# The base wheels are manylinux_2_35.
glibc=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
if ! printf '2.35\n%s\n' "$glibc" | sort --version-sort --check=quiet; then
    refuse "glibc is too old" "2.35 or newer" "$glibc"
fi

# FlashInfer and DeepGEMM compile kernels while vLLM runs; torch of the lock is for CUDA 13.
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
cuda=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p') || true
if [ "$cuda" != 13 ]; then
    refuse "there is no compiler of CUDA 13" "nvcc of CUDA 13: the devel flavour of an image" "${cuda:-none}"
fi
