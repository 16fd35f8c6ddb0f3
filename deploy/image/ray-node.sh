#!/usr/bin/env bash
# One node of a Ray cluster, inside the image.
#
#   ray-node.sh head [flags of vllm serve]     Ray's head, and the server
#   ray-node.sh worker                         gives its GPUs to the head at HEAD
#
# NODE is this node's own address, HEAD the head's; RAY_PORT is the head's port (6379).
set -euo pipefail

role=${1:-}
node=${NODE:?the address of this node, as the others reach it}
port=${RAY_PORT:-6379}
export VLLM_HOST_IP=$node
case $role in
head)
    shift
    ray start --head --node-ip-address "$node" --port "$port" --include-dashboard=false --disable-usage-stats
    export RAY_ADDRESS=$node:$port
    # vLLM waits half an hour for the workers' GPUs.
    exec vllm serve --distributed-executor-backend ray "$@"
    ;;
worker)
    export RAY_ADDRESS=${HEAD:?the address of the head}:$port
    exec ray start --address "$RAY_ADDRESS" --node-ip-address "$node" --disable-usage-stats --block
    ;;
*)
    echo "usage: ray-node.sh head [flags of vllm serve] | worker" >&2
    exit 2
    ;;
esac
