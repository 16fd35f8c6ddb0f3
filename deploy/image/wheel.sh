#!/usr/bin/env bash
# Build the patched wheel for this machine, or take the one in build/<line>/wheels-cuda or build/<line>/wheels;
# prove either way that it is the pinned base wheel plus the series; put it and its bill of materials into
# a directory.
#
#   wheel.sh LINE cuda|cpu OUT
#
# PIN, SERIES_FINGERPRINT, WHEEL_VERSION and PURPOSE are what the image's labels say; they must be true.
set -euo pipefail

line=${1:?the line of patches/}
image=${2:?cuda or cpu}
out=${3:?the directory to write to}
root=${ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
case $image-$(uname -m) in
cuda-x86_64) variant=cuda made=wheels-cuda ;;
cuda-aarch64) variant=cuda-aarch64 made=wheels-cuda ;;
cpu-x86_64) variant=cpu made=wheels ;;
*)
    echo "error: there is no base wheel of the variant $image for $(uname -m)" >&2
    exit 1
    ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    venv=$(mktemp -d)
    "$(deploy/image/python.sh "$image")" -m venv "$venv"
    python=$venv/bin/python
    "$python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --only-binary :all: \
        --require-hashes --requirement requirements/tools.txt
fi
tools() { "$python" -m tools --root "$root" --on "$line" "$@"; }

identity=$(tools wheel identity --variant "$variant")
said=$(printf '%s=%s\n' PIN "${PIN:-}" SERIES_FINGERPRINT "${SERIES_FINGERPRINT:-}" \
    WHEEL_VERSION "${WHEEL_VERSION:-}" PURPOSE "${PURPOSE:-}")
if [ "$said" != "$identity" ]; then
    echo "error: the labels would not be true of what is built" >&2
    printf '  expected:\n%s\n  found:\n%s\n' "$identity" "$said" >&2
    echo "  next:     make image passes them" >&2
    exit 1
fi

tools series apply
shopt -s nullglob
given=("$root"/build/"$line"/"$made"/vllm-*_"$(uname -m)".whl)
if [ ${#given[@]} -eq 0 ]; then
    built=$(mktemp -d)
    tools wheel build --variant "$variant" --out "$built"
    given=("$built"/vllm-*.whl)
fi
if [ ${#given[@]} -ne 1 ]; then
    echo "error: more than one wheel to take: ${given[*]}" >&2
    exit 1
fi
tools wheel verify "${given[0]}"

mkdir -p "$out"
cp "${given[0]}" "$out/"
"$python" - "${given[0]}" "$out/sbom.cdx.json" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith("/sboms/vllm-routed-experts.cdx.json"))
    open(sys.argv[2], "wb").write(wheel.read(name))
EOF
