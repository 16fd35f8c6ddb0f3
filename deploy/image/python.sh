#!/usr/bin/env bash
# Print the Python of a variant: python.sh cuda|cpu
set -euo pipefail

case ${1:-} in
# A part of the CUDA base wheel (vllm/third_party/deep_gemm) is compiled for CPython 3.12 alone.
cuda) echo python3.12 ;;
# The one that this project's tests run in.
cpu) echo python3.11 ;;
*)
    echo "error: which image: cuda or cpu? found: ${1:-nothing}" >&2
    exit 2
    ;;
esac
