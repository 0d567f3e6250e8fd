# What installs the tools of tests, each kind apart from ours; read by an install.sh PYTHON PIP DIRECTORY, which names
# itself in `who` first.
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
