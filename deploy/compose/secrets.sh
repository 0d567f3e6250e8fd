#!/bin/sh
# Create the missing secrets of deploy/compose.yaml: secrets.sh [DIRECTORY]
#
# Run it as root.  Containers run as other users in group 0, which can read the files.
set -eu
directory=${1:-$(cd "$(dirname "$0")/.." && pwd)/secrets}
umask 077
mkdir -p "$directory"
for name in control-token scrape-token grafana-admin-password database-owner-password database-gateway-password; do
    [ -e "$directory/$name" ] && continue
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$directory/.$name.new"
    chgrp 0 "$directory/.$name.new"
    chmod 0640 "$directory/.$name.new"
    mv "$directory/.$name.new" "$directory/$name"
    printf '%s\n' "made $directory/$name"
done
