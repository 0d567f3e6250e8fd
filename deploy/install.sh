#!/bin/sh
# Make a virtual environment and install the appliance into it: install.sh PYTHON VENV EXTRAS
#
# It runs in the root of the checkout.  Packages come from the index that pip is configured with, with the versions and
# hashes of deploy/locks; torch.sh chooses the source of torch for the extra `cpu`.
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
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps "$@" >>"$log" 2>&1; }

# uv takes a tenth of pip's time.  It reads none of pip's settings, so it gets the usual ones here; if it fails for want
# of another, pip tries.
setting() { printf '%s\n' "$settings" | sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" | head -n 1 | sed "s/\\\\n/ /g; s/^ *//"; }
export_setting() {
    value=$(setting "$1" | tr -s ' ' "${3:- }")
    [ -z "$value" ] || export "$2=$value"
}
fast_install() {
    (
        settings=$("$venv/bin/python" -m pip config list)
        export_setting index-url UV_DEFAULT_INDEX
        export_setting extra-index-url UV_INDEX
        export_setting no-index UV_NO_INDEX
        export_setting find-links UV_FIND_LINKS ,
        export_setting trusted-host UV_INSECURE_HOST
        export_setting proxy ALL_PROXY
        export_setting cert SSL_CERT_FILE
        export_setting client-cert SSL_CLIENT_CERT
        export UV_INDEX_STRATEGY=unsafe-best-match
        "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --compile-bytecode "$@" >>"$log" 2>&1
    ) || pip_install "$@"
}
must() {
    "$@" || {
        tail -n 5 "$log" >&2
        say "failed: the lines above say why, $log has the rest"
        exit 1
    }
}

set -- --requirement "$locks/gateway.txt"
for extra in $(printf %s "$extras" | tr , ' '); do set -- "$@" --requirement "$locks/$extra.txt"; done
case ,$extras, in *,cpu,*)
    say "installing torch $torch"
    must get_torch pip_install --no-compile
    # On every core, unlike pip: a worker may not write there.  Templates in it are no Python.
    "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/*/site-packages/torch >>"$log" 2>&1 || true
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
must pip_install --require-hashes --requirement "$locks/build.txt"
must fast_install --require-hashes "$@"
must pip_install --no-build-isolation --editable .
must "$venv/bin/appliance" version >/dev/null
