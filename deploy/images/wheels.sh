#!/bin/sh
# Collect the packages for the images: wheels.sh [--python PYTHON] DIRECTORY IMAGE...
#
# IMAGE is gateway, worker-cpu or worker-gpu.  Only this step needs a package index; the build
# that follows (build.sh) reads only DIRECTORY.  `own` has the appliance's wheel, one folder per image its other
# packages, with the versions and hashes of deploy/locks, `tools` the tools of the build, and `demo-wheel` the demo
# models as a package, for `appliance up` without a checkout; these two are in no image.
#
# The wheels are for the Python of the base image, 3.11 unless PYTHON_VERSION says otherwise.
# worker-cpu uses a build of torch for CPUs if it finds one: if yours is on another index, name it with
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
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

# Download packages into a folder: collect FOLDER ARGUMENT...
collect() {
    at=$1
    shift
    "$python" -m pip --disable-pip-version-check download --quiet --only-binary :all: --no-deps \
        --python-version "${PYTHON_VERSION:-3.11}" --dest "$directory/$at" "$@"
}

# The same with the packages of lock files: collect_locked FOLDER LOCK...
collect_locked() {
    at=$1
    shift
    for lock in "$@"; do collect "$at" --require-hashes --requirement "$locks/$lock.txt"; done
}

# Remove earlier downloads: they may have other versions, and everything in a folder is installed.
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
for part in build own demo-wheel tools "$@"; do rm -rf "${directory:?}/$part"; done

say "building the documentation, which the gateway serves"
make --no-print-directory -C "$root" docs PYTHON="$python" >&2
say "building the appliance's own wheel"
collect_locked build build
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-index --find-links "$directory/build" \
    --wheel-dir "$directory/own" "$root"
say "building the wheel of the demo models"
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-index --find-links "$directory/build" \
    --wheel-dir "$directory/demo-wheel" "$root/demo"

say "collecting the tools of the build"
collect_locked tools tools

for image in "$@"; do
    say "collecting what $image installs"
    case $image in
    gateway) collect_locked gateway gateway hsm picker ;;
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
