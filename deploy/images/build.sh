#!/bin/sh
# Build images from a directory that wheels.sh filled, without a network: build.sh DIRECTORY IMAGE...
#
# IMAGE is gateway, worker-cpu or worker-gpu.  In the environment:
#   BASE_IMAGE        base image; default: the result of base.sh.  Name yours by digest.
#   TAG               default: the appliance's version
#   CONTAINER_ENGINE  default: docker
# Each image's bill of materials is written next to the wheels, as sbom/IMAGE.cdx.json.
set -eu
if [ $# -lt 2 ]; then
    sed -n '2,8p' "$0" >&2
    exit 64
fi
directory=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
engine=${CONTAINER_ENGINE:-docker}
base=${BASE_IMAGE:-sovereign-appliance/base:bookworm}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/../../pyproject.toml")
tag=${TAG:-$version}

cp "$here/sbom.py" "$here/healthcheck.py" "$here/refresh.py" "$directory/"
rm -rf "${directory:?}/demo"
cp -R "$here/../../demo/models" "$directory/demo"
mkdir -p "$directory/sbom"
for image in "$@"; do
    network=none
    # vLLM downloads its kernels during this build, and at no other time.
    if [ "$image" = worker-gpu ]; then network=default; fi
    DOCKER_BUILDKIT=1 "$engine" build --quiet --network="$network" --pull=false --target "$image" \
        --file "$here/Dockerfile" --tag "sovereign-appliance/$image:$tag" \
        --build-arg BASE_IMAGE="$base" --build-arg VERSION="$version" \
        --build-arg SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-0}" \
        --label org.opencontainers.image.base.name="$base" "$directory" >/dev/null
    "$engine" run --rm --network=none --entrypoint cat "sovereign-appliance/$image:$tag" \
        /opt/appliance/sbom.cdx.json >"$directory/sbom/$image.cdx.json"
    printf '%s\n' "sovereign-appliance/$image:$tag"
done
