#!/usr/bin/env bash
# Make the user that everything runs as, and the directories it may write to.
set -euo pipefail

home=${HOME_DIR:-/home/vllm}
groupadd --gid 10001 vllm
useradd --uid 10001 --gid 10001 --home-dir "$home" --no-create-home --shell /usr/sbin/nologin vllm
mkdir -p "$home/.cache"
chown -R 10001:10001 "$home"
