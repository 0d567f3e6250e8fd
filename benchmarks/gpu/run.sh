#!/bin/sh
# Benchmark the appliance on this machine's GPU, without a network: run.sh WHEELS [options of benchmarks.gpu]
#
# WHEELS is a folder with the wheels of vLLM, of the appliance's dependencies, and of hatchling and editables.
# What it lacks comes from the Python that PYTHON names: its PyTorch, if vLLM's wheel was built for that version.
set -eu
wheels=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
venv=.bench/gpu-venv
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
install() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-index --no-deps "$@"; }
if [ ! -e "$venv/.installed" ]; then
    rm -rf "$venv"
    "$python" -m venv --system-site-packages "$venv"
    # If that Python is of a virtual environment itself, a new one would not see its packages.
    packages "$python" >"$(packages "$venv/bin/python")/machine.pth"
    install "$wheels"/*.whl
    install --no-build-isolation --editable .
    touch "$venv/.installed"
fi
exec "$venv/bin/python" -m benchmarks.gpu "$@"
