#!/bin/sh
# Make the base image from Debian's own packages, without any registry: base.sh [PACKAGE...]
#
# Needs root, debootstrap, a Debian mirror (DEBIAN_MIRROR) and a container engine (CONTAINER_ENGINE).  The
# result is $BASE_IMAGE, by default the image that the Dockerfile builds on.  worker-gpu compiles small
# programs at run time: give its base the packages gcc libc6-dev libpython3.11-dev, and another name.
set -eu
suite=bookworm
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
image=${BASE_IMAGE:-sovereign-appliance/base:$suite}
engine=${CONTAINER_ENGINE:-docker}

include=ca-certificates,libnuma1,libpython3.11-stdlib,python3-minimal
for package in "$@"; do include=$include,$package; done

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
debootstrap --variant=minbase --include="$include" "$suite" "$tree" "$mirror" >"$tree.log" 2>&1 || {
    tail -n 5 "$tree.log" >&2
    exit 1
}
rm -f "$tree.log"
# Remove documentation except licences, and the package manager's downloads.
rm -rf "$tree"/var/cache/apt/* "$tree"/var/lib/apt/lists/* "$tree"/var/log/* "$tree"/usr/share/man/* \
    "$tree"/usr/share/info/* "$tree"/usr/share/locale/*
find "$tree/usr/share/doc" -type f ! -name copyright -delete
tar --create --directory "$tree" --numeric-owner . | "$engine" import - "$image"
