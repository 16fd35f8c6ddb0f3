#!/usr/bin/env bash
# Install the locked packages and the proved wheel into a virtual environment.
#
#   install.sh cuda|cpu WHEELS REQUIREMENTS VENV
set -euo pipefail

variant=${1:?cuda or cpu}
wheels=${2:?the directory of the wheel}
requirements=${3:?the directory of the locks}
venv=${4:?the virtual environment to make}

python=${PYTHON:-$("$(dirname "${BASH_SOURCE[0]}")/python.sh" "$variant")}
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    --only-binary :all: --require-hashes --requirement "$requirements/bootstrap.txt"
uv() { "$venv/bin/uv" --no-cache "$@" --python "$venv/bin/python"; }
# Compiled here: the server's user cannot write there, and each of its processes would compile anew.
uv pip sync --compile-bytecode --no-build --require-hashes "$requirements/$variant.txt"
uv pip install --compile-bytecode --no-deps --no-index "$wheels"/vllm-*.whl
# Nothing is missing but what the lock leaves out on purpose, nothing older but what it overrides on purpose.
if ! said=$(uv pip check 2>&1); then
    named() { sed -n 's/^\([a-z].*\)/requires `\1\\b.*'"$2"'/p' "$requirements/$1" 2>/dev/null || true; }
    accepted=$(named left-out.in 'not installed' && named overrides.in 'is installed')
    rest=$(grep '^The package' <<<"$said" | grep -v "${accepted:-^$}" || true)
    if [ -n "$rest" ] || [ -z "$accepted" ]; then
        echo "$said" >&2
        exit 1
    fi
fi
