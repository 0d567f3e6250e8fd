#!/bin/sh
# Build the programs of others that check our logs: install.sh PYTHON PIP DIRECTORY
#
# Go keeps what it downloads and compiles in caches of its own, outside the checkout.  Versions and hashes are in go.mod
# and go.sum; nothing is resolved here.  Without Go it is said that our verifier checks alone; a failed build fails CI.
set -eu
who=interop
# shellcheck source=tests/environments.sh
. "$(dirname "$0")/../environments.sh"

if ! PATH=$PATH:/usr/local/go/bin command -v go >/dev/null; then
    say "THERE IS NO GO HERE: no program of others checks the logs of the tests, and tests/interop skips"
    exit 0
fi

make_go() {
    (
        cd "$here" && PATH=$PATH:/usr/local/go/bin && export CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS=-mod=readonly &&
            go build -trimpath -buildvcs=false -o "$directory/bin/" . tool
    ) && return 0
    rm -rf "$directory/bin"
    return 1
}

attempt_all make_go go
