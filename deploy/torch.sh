# Sourced by install.sh and images/wheels.sh, which set `root` and `say`.
locks=$root/deploy/locks
torch=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$locks/torch.txt")

# Run a pip command with torch, `get_torch COMMAND...`: a build for CPUs from the configured index, then from
# PyTorch's own, and last PyPI's build.  Only PyPI's has hashes here: each index has its own build for CPUs.
get_torch() {
    "$@" "torch==$torch+cpu" && return
    "$@" --index-url https://download.pytorch.org/whl/cpu --timeout 15 --retries 1 "torch==$torch+cpu" && return
    say "no index has torch $torch+cpu: taking PyPI's, which needs no GPU but 4.5 GB on disk instead of 0.8 GB"
    "$@" --require-hashes --requirement "$locks/torch.txt"
}
