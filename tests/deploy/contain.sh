#!/usr/bin/env bash
# Run a command in the files of an image, as `docker run --read-only --tmpfs /tmp --user 10001 --cap-drop ALL
# --security-opt no-new-privileges` would: it is process 1, sees no process of the machine, and can write
# to /tmp, /dev/shm and the volumes alone. The network is the caller's. Needs root and Linux; no daemon.
#
#   contain.sh ROOT [FOLDER:PLACE[:ro]]... -- [NAME=VALUE]... COMMAND...
set -euo pipefail

if [ "${1:-}" != inside ]; then
    exec unshare --mount --pid --fork --kill-child "$0" inside "$@"
fi
root=${2:?the files of the image}
shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
for place in /dev/shm /tmp; do
    mount -t tmpfs -o mode=1777 tmpfs "$root$place"
done
touch "$root/etc/hosts"
mount --bind /etc/hosts "$root/etc/hosts"
while [ "$1" != -- ]; do
    IFS=: read -r from to mode <<<"$1"
    mkdir -p "$root$to"
    mount --bind "$from" "$root$to"
    if [ "$mode" = ro ]; then
        mount -o remount,bind,ro "$root$to"
    fi
    shift
done
shift
mount -o remount,bind,ro "$root"
exec chroot "$root" /usr/bin/setpriv --reuid=10001 --regid=10001 --clear-groups --bounding-set=-all --no-new-privs \
    /usr/bin/env --ignore-environment --chdir=/home/vllm "$@"
