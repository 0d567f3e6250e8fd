#!/bin/sh
# Run commands side by side: beside.sh NAME COMMAND NAME COMMAND ...
#
# Each line they print begins with the name.  The exit code is 0 if all of theirs are.
set -u
ended=$(mktemp -d) || exit 1
trap 'rm -rf "$ended"' EXIT
trap 'kill 0; exit 130' INT TERM
names=
while [ $# -ge 2 ]; do
    names="$names $1"
    {
        sh -c "$2" 2>&1
        echo $? >"$ended/$1"
    } | sed -u "s/^/$1: /" &
    shift 2
done
wait
code=0
for name in $names; do
    [ "$(cat "$ended/$name" 2>/dev/null)" = 0 ] || { echo "$name failed" >&2 && code=1; }
done
exit $code
