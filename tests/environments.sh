# What installs the tools of tests, each kind apart from ours; read by an install.sh PYTHON PIP DIRECTORY, which names
# itself in `who` first and calls `attempt_all` last.
python=$1 directory=$3
pip=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$directory"
directory=$(cd "$directory" && pwd)

say() { printf '%s\n' "$who: $*" >&2; }

# Everything from files that say each version; `--no-deps`, so that nothing else comes along.
make_python() {
    name=$1 at=$directory/$1
    shift
    cmp -s "$here/requirements/$name.txt" "$at/installed.txt" && return 0
    say "installing the environment $name"
    rm -rf "$at"
    "$python" -m venv --without-pip "$at" &&
        "$pip" --python "$at/bin/python" --disable-pip-version-check install --quiet --no-compile \
            --retries 2 --timeout 30 --no-deps --only-binary :all: "$@" --requirement "$here/requirements/$name.txt" &&
        cp "$here/requirements/$name.txt" "$at/installed.txt"
}

attempt() {
    log=$directory/$2.log
    "$1" "$2" >"$log" 2>&1 && return 0
    tail -n 5 "$log" >&2
    say "$2 COULD NOT BE INSTALLED (the lines above say why).  Its tests then skip:"
    sed -n "s/^# Tests: /$who:     /p" "$here/requirements/$2.txt" >&2
    rm -f "$directory/$2/installed.txt"
    return 1
}

# Call functions, each with the name of what it installs: attempt_all FUNCTION NAME...  They run side by side: most of
# the time is waiting for the index.  It fails if one fails in CI, where no test may skip.
attempt_all() {
    jobs= failed=
    while [ $# -gt 0 ]; do
        attempt "$1" "$2" &
        jobs="$jobs $!"
        shift 2
    done
    for job in $jobs; do wait "$job" || failed=yes; done
    [ -z "$failed" ] || [ "${CI-}" != true ]
}
