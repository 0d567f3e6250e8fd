#!/bin/sh
# Make a virtual environment and install the appliance into it: install.sh PYTHON VENV EXTRAS
#
# It runs in the root of the checkout.  Packages come from the configured index with the versions and hashes of
# deploy/locks; torch.sh chooses the source of torch for the extra `cpu`.
set -eu
python=$1 venv=$2 extras=$3
root=.

say() { printf '%s\n' "appliance setup: $*" >&2; }

# shellcheck source=deploy/torch.sh
. deploy/torch.sh

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
    say "$python is not Python 3.11, 3.12 or 3.13: name one with PYTHON=..."
    exit 1
}
if [ ! -x "$venv/bin/pip" ]; then
    say "making $venv"
    rm -rf "$venv"
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
            say "$python cannot make virtual environments: install the python3-venv package"
            exit 1
        fi
        say "installing the python3-venv package"
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
        "$python" -m venv "$venv"
    fi
fi
log=$venv/install.log
# The many files of torch and vLLM are compiled on every core, at the end; pip uses one.
compile=
case ,$extras, in *,cpu,* | *,gpu,*) compile=--no-compile ;; esac
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps $compile "$@" >>"$log" 2>&1
}
must() {
    "$@" || {
        tail -n 5 "$log" >&2
        say "failed: the lines above say why, $log has the rest"
        exit 1
    }
}

set -- --requirement "$locks/build.txt" --requirement "$locks/gateway.txt"
for extra in $(printf %s "$extras" | tr , ' '); do set -- "$@" --requirement "$locks/$extra.txt"; done
case ,$extras, in *,cpu,*)
    say "installing torch $torch"
    must get_torch pip_install
    ;;
esac
case ,$extras, in *,dev,*)
    missing=$(while read -r package _; do
        case $package in '#'* | '') continue ;; esac
        dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            printf ' %s' "$package"
    done <deploy/debian-packages.txt)
    if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing the Debian packages$missing"
        # shellcheck disable=SC2086  # a list
        if { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing; } \
            >>"$log" 2>&1; then
            missing=
        fi
    fi
    for package in $missing; do
        say "THE DEBIAN PACKAGE $package IS MISSING AND COULD NOT BE INSTALLED.  The tests then skip:"
        say "    $(sed -n "s/^$package  *//p" deploy/debian-packages.txt)"
    done
    ;;
esac
say "installing the appliance with extras $extras (the first time takes a few minutes)"
must pip_install --require-hashes "$@"
must pip_install --no-build-isolation --editable .
must "$venv/bin/appliance" version >/dev/null
if [ -n "$compile" ]; then
    # A worker may not write there.  Templates among the packages are no Python.
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >>"$log" 2>&1 || true
fi
