#!/usr/bin/env bash
# Run one node of a Ray cluster with Docker: the head serves, workers give it their GPUs.
#
#   IMAGE=name@sha256:... NODE=10.0.0.1 deploy/ray.sh head MODEL --tensor-parallel-size=8 ...
#   IMAGE=name@sha256:... NODE=10.0.0.2 HEAD=10.0.0.1 deploy/ray.sh worker
#
# Ray knows no passwords: NODE and HEAD must be addresses of a network that you trust.
set -euo pipefail

image=$("$(dirname "${BASH_SOURCE[0]}")/pinned-image.sh" "${IMAGE:-}")
role=${1:-}
case $role in
head) ;;
worker) : "${HEAD:?the address of the head}" ;;
*)
    echo "usage: IMAGE=name@sha256:... NODE=ADDRESS [HEAD=ADDRESS] ray.sh head MODEL [flags] | worker" >&2
    exit 2
    ;;
esac
options=(
    # Ray and NCCL open ports of their own, and InfiniBand needs locked memory and its devices.
    --network host --ulimit memlock=-1 --shm-size 16g --gpus all --init
    --read-only --tmpfs /tmp:exec --cap-drop ALL --security-opt no-new-privileges
    --volume vllm-cache:/home/vllm/.cache
    --env ROLE="$role" --env NODE="${NODE:?the address of this node}" --env HEAD="${HEAD:-$NODE}"
    --env RAY_ADDRESS="${HEAD:-$NODE}:${RAY_PORT:-6379}" --env RAY_PORT="${RAY_PORT:-6379}"
    # By name: the values do not appear in the list of processes.
    --env VLLM_API_KEY --env HF_TOKEN
    --env NCCL_DEBUG --env NCCL_SOCKET_IFNAME --env GLOO_SOCKET_IFNAME
)
if [ -d "${INFINIBAND:-/dev/infiniband}" ]; then
    options+=(--device "${INFINIBAND:-/dev/infiniband}")
fi
exec docker run --rm --name "vllm-$role" "${options[@]}" \
    --entrypoint /opt/deploy/image/ray-node.sh "$image" "$@"
