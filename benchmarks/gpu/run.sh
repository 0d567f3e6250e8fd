#!/bin/sh
# Benchmark the appliance on this machine's GPU, without a network: run.sh WHEELS [options of benchmarks.gpu]
#
# WHEELS is a folder with the wheels of vLLM, of the appliance's dependencies, and of hatchling and editables.
# What it lacks comes from the Python that PYTHON names: its PyTorch, if vLLM's wheel was built for that version.
set -eu
wheels=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
venv=.bench/gpu-venv
if [ ! -e "$venv/.installed" ]; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv --system-site-packages "$venv"
    pip="$venv/bin/python -m pip --disable-pip-version-check --quiet install --no-index --no-deps"
    $pip "$wheels"/*.whl
    $pip --no-build-isolation --editable .
    touch "$venv/.installed"
fi
exec "$venv/bin/python" -m benchmarks.gpu "$@"
