#!/usr/bin/env bash
# Print the manifest for an image and a model; an image without a digest is refused.
#
#   kubernetes.sh IMAGE@sha256:... MODEL [nodes] | kubectl apply --filename -
#
# With "nodes", the server over several nodes instead of the one pod.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
image=$("$here/pinned-image.sh" "${1:-}")
model=${2:?a model, by name or directory}
if [[ ! $model =~ ^[A-Za-z0-9._/-]+$ ]]; then
    echo "error: this does not look like a model's name or directory: $model" >&2
    exit 1
fi
case ${3:-} in
"") file=kubernetes.yaml ;;
nodes) file=kubernetes-nodes.yaml ;;
*)
    echo "error: which manifest? nothing or \"nodes\", found: $3" >&2
    exit 2
    ;;
esac
sed -e "s|image: IMAGE\$|image: $image|" -e "s|- MODEL\$|- $model|" "$here/$file"
