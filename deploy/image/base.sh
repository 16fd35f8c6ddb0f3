#!/usr/bin/env bash
# Check that the base image can carry the wheel: named by digest, glibc and CUDA new enough. Say what
# can be compiled while it serves.
#
#   base.sh IMAGE@sha256:... cuda|cpu
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
"$here/../pinned-image.sh" "${1:-}"
variant=${2:-}
"$here/python.sh" "$variant" >/dev/null

refuse() {
    printf 'error: this base image cannot be used: %s\n  expected: %s\n  found:    %s\n' "$1" "$2" "$3" >&2
    exit 1
}

case $variant-$(uname -m) in
cuda-x86_64 | cuda-aarch64 | cpu-x86_64) ;;
cuda-*) refuse "there is no CUDA base wheel for its machine" "x86_64 or aarch64" "$(uname -m)" ;;
*) refuse "there is no CPU base wheel for its machine" "x86_64" "$(uname -m)" ;;
esac
# The packages of the locks are manylinux_2_35 or older.
oldest=2.35
glibc=$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)
if ! printf '%s\n%s\n' "$oldest" "$glibc" | sort --version-sort --check=quiet; then
    refuse "glibc is too old" "$oldest or newer" "$glibc"
fi
if [ "$variant" = cpu ]; then
    echo "compiler: gcc of the distribution, for torch.compile"
    exit
fi

# torch of the lock is for CUDA 13. NVIDIA's images and vLLM's say their version in CUDA_VERSION.
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
compiler=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p') || true
cuda=${compiler:-${CUDA_VERSION:-}}
if [ "${cuda%%.*}" != 13 ]; then
    refuse "it is not for CUDA 13" "a runtime or devel image of CUDA 13" "${cuda:-no CUDA}"
fi
if [ -n "$compiler" ]; then
    echo "compiler: nvcc $compiler, for kernels that FlashInfer and DeepGEMM compile while they serve"
else
    echo "compiler: no nvcc: FlashInfer and DeepGEMM cannot compile kernels while they serve;" \
        "for models that need those take the devel flavour"
fi
