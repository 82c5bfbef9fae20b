#!/bin/sh
# Runs a supervisor as a container would: process 1, nobody without rights, every file system read-only, no
# /dev/shm, an empty environment. To be run by `unshare -pfm --mount-proc`.
#
#   container.sh PYTHON-PREFIX SITE-PACKAGES CODE APP-FOLDER VERSION REDIS-URL ARGUMENT...
set -eu
prefix=$1 site=$2 code=$3 app=$4 version=$5 url=$6
shift 6

# What nobody may read where it is, it reads below /mnt.
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /mnt
for folder in python site code app; do mkdir "/mnt/$folder"; done
mount --bind "$prefix" /mnt/python
mount --bind "$site" /mnt/site
mount --bind "$code" /mnt/code
mount --bind "$app" /mnt/app

while umount /dev/shm 2>/dev/null; do :; done
# Some cannot be: those that another one hides.
while read -r _ point _; do
    [ "$point" = /proc ] || mount -o remount,bind,ro "$point" 2>/dev/null || :
done </proc/self/mounts
for folder in / /tmp /dev/shm /var/tmp /mnt /mnt/app; do
    if touch "$folder/here" 2>/dev/null; then
        echo "$folder is not read-only" >&2
        exit 99
    fi
done

cd /mnt/app
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
    env -i PATH=/usr/bin:/bin LD_LIBRARY_PATH=/mnt/python/lib PYTHONPATH=/mnt/code:/mnt/site "DTQ_REDIS_URL=$url" \
    "/mnt/python/bin/python$version" -m dtq_supervisor "$@"
