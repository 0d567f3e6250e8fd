#!/bin/sh
# Make the environments the clients run in, each apart from ours: install.sh PYTHON PIP DIRECTORY
#
# An environment that is there already is kept until its pins change.  One that cannot be made is reported
# to be missing, loudly, and its tests skip: a client of others must not keep ours from being tested.  In CI this fails.
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
    # Node looks for packages next to the file that asks for them.
    ln -sfn "$at/node_modules" "$here/node/node_modules"
}

attempt_all make_python current make_python aider make_node node
