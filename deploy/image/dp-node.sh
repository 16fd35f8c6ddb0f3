#!/usr/bin/env bash
# One node of a data parallel server without Ray, inside the image: each node is one rank with its own
# GPUs, and node 0 serves.
#
#   dp-node.sh MODEL [flags of vllm serve]     the same on every node
#
# NODES is how many there are, RANK this one's number from 0, NODE its own address, HEAD the address or
# name of node 0. RPC_PORT is node 0's port for the others (13345).
set -euo pipefail

: "${NODES:?how many nodes there are}" "${RANK:?the number of this node, from 0}"
export VLLM_HOST_IP=${NODE:?the address of this node, as the others reach it}
address=$NODE
more=()
if [ "$RANK" != 0 ]; then
    # vLLM wants an address. A name is unknown until the head's pod has started.
    address=
    for _ in {1..60}; do
        read -r address _ < <(getent ahostsv4 "${HEAD:?the address of node 0}") && break
        sleep "${PAUSE_S:-5}"
    done
    if [ -z "$address" ]; then
        echo "error: the head has no address: HEAD is $HEAD" >&2
        exit 1
    fi
    more=(--headless --data-parallel-start-rank="$RANK")
fi
exec vllm serve "$@" --data-parallel-size="$NODES" --data-parallel-size-local=1 \
    --data-parallel-address="$address" --data-parallel-rpc-port="${RPC_PORT:-13345}" "${more[@]}"
