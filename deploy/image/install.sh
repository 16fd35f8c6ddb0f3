#!/usr/bin/env bash
# Install the locked packages and the proved wheel into a virtual environment.
#
#   install.sh WHEELS REQUIREMENTS VENV
set -euo pipefail

wheels=${1:?the directory of the wheel}
requirements=${2:?the directory of the locks}
venv=${3:?the virtual environment to make}

${PYTHON:-python3.12} -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    --only-binary :all: --require-hashes --requirement "$requirements/bootstrap.txt"
uv() { "$venv/bin/uv" --no-cache "$@" --python "$venv/bin/python"; }
uv pip sync --no-build --require-hashes "$requirements/cuda.txt"
uv pip install --no-deps --no-index "$wheels"/vllm-*.whl
uv pip check
