#!/bin/sh
# Make the environments the clients run in, each apart from ours: install.sh PYTHON PIP DIRECTORY
#
# An environment that is there already is kept until its pins change.  One that cannot be made is said
# to be missing, loudly, and its tests skip: a client of others must not keep ours from being tested.
set -eu
who=clients
# shellcheck source=tests/environments.sh
. "$(dirname "$0")/../environments.sh"

make_node() {
    make_python node || return 1
    at=$directory/node
    if ! cmp -s "$here/node/package-lock.json" "$at/package-lock.json" || [ ! -d "$at/node_modules" ]; then
        say "installing the packages for Node"
        rm -rf "$at/node_modules" "$at/package-lock.json"
        cp "$here/node/package.json" "$at/"
        cp "$here/node/package-lock.json" "$at/package-lock.json.new"
        (
            cd "$at" && mv package-lock.json.new package-lock.json &&
                PATH=$at/bin:$PATH npm ci --ignore-scripts --no-audit --no-fund --loglevel=error \
                --fetch-retries=2 --fetch-timeout=30000
        ) || {
            rm -f "$at/package-lock.json"
            return 1
        }
    fi
    # Node looks for packages beside the file that asks for them.
    ln -sfn "$at/node_modules" "$here/node/node_modules"
}

attempt() {
    log=$directory/$2.log
    "$1" "$2" >"$log" 2>&1 && return 0
    tail -n 5 "$log" >&2
    say "THE ENVIRONMENT $2 COULD NOT BE MADE (the lines above say why).  Its tests then skip:"
    sed -n 's/^# Tests: /clients:     /p' "$here/requirements/$2.txt" >&2
    rm -f "$directory/$2/installed.txt"
}

# Side by side: most of the time is waiting for the index.
attempt make_python current &
attempt make_python aider &
attempt make_node node &
wait
