#!/bin/sh
# Collect what the images are built from: wheels.sh [--python PYTHON] DIRECTORY IMAGE...
#
# IMAGE is gateway, worker-cpu or worker-gpu.  This is the one step that needs a package index; the build
# that follows (build.sh) reads nothing but DIRECTORY.  `own` there has the appliance's wheel, a folder for each image
# the packages it installs before, with the versions and hashes of deploy/locks, and `tools` what the build itself
# uses and no image keeps.
#
# The wheels are for the Python of the base image, 3.11 unless PYTHON_VERSION says otherwise.
# worker-cpu takes a build of torch for CPUs where it finds one: if yours is on an index of its own, name that
# with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
set -eu
python=python3
if [ "${1-}" = --python ]; then
    python=$2
    shift 2
fi
if [ $# -lt 2 ]; then
    sed -n '2,3p' "$0" >&2
    exit 64
fi
directory=$1
shift
root=$(cd "$(dirname "$0")/../.." && pwd)

say() { printf '%s\n' "wheels: $*" >&2; }

# shellcheck source=deploy/torch.sh
. "$root/deploy/torch.sh"

# Download what pip's arguments name into a folder: collect FOLDER ARGUMENT...
collect() {
    at=$1
    shift
    "$python" -m pip --disable-pip-version-check download --quiet --only-binary :all: --no-deps \
        --python-version "${PYTHON_VERSION:-3.11}" --dest "$directory/$at" "$@"
}

# The same with what lock files name: collect_locked FOLDER LOCK...
collect_locked() {
    at=$1
    shift
    for lock in "$@"; do collect "$at" --require-hashes --requirement "$locks/$lock.txt"; done
}

# What was collected before may be of other versions, and everything in a folder is installed.
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
for part in build own tools "$@"; do rm -rf "${directory:?}/$part"; done

say "building the appliance's own wheel"
collect_locked build build
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-index --find-links "$directory/build" \
    --wheel-dir "$directory/own" "$root"

say "collecting the tools of the build"
collect_locked tools tools

for image in "$@"; do
    say "collecting what $image installs"
    case $image in
    gateway) collect_locked gateway gateway ;;
    worker-cpu)
        collect_locked worker-cpu gateway cpu
        get_torch collect worker-cpu
        ;;
    worker-gpu) collect_locked worker-gpu gateway gpu ;;
    *)
        say "there is no image $image: name gateway, worker-cpu or worker-gpu"
        exit 64
        ;;
    esac
done
