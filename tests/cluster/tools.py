"""
Programs of a Kubernetes node and Helm, built from pinned Go modules: `python -m tests.cluster.tools`.

Each folder in `tools/` is a Go module; its `go.sum` holds the checksums of everything it is built from.  The
programs stay in a cache outside the checkout, by the hash of these files.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.deploy.build_cache import BuildCache

MODULES = Path(__file__).with_name("tools")
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubeadm",
    "kubectl",
    "kubelet",
)
"""Links to the program `kubernetes`, which is all of them: most of their code is the same."""
TAGS = {
    "containerd": "no_btrfs,no_devmapper,no_zfs,urfave_cli_no_docs",
    "coredns": "grpcnotrace",
    "kubernetes": "grpcnotrace",
}
"""Build tags that leave out what a node of the tests does not use."""
HOW = "run `make cluster-tools`"


class NoToolsError(Exception):
    """The programs cannot be built here; says why."""


def kubernetes_version() -> str:
    """The version that `go.mod` pins, such as `v1.36.4`."""
    required = re.search(
        r"k8s\.io/kubernetes (v\S+)", (MODULES / "kubernetes/go.mod").read_text(encoding="utf-8")
    )
    assert required, "go.mod requires k8s.io/kubernetes"
    return required.group(1)


def built() -> Path | None:
    """The directory with the programs, if they are built."""
    return _cache().existing("tools", _recipe())


def build() -> Path:
    """The same, built first where needed; takes long and both cores."""

    def make(directory: Path) -> None:
        go = shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin:/usr/lib/go/bin")
        if go is None:
            raise NoToolsError("there is no Go on this machine")
        for module in _modules():
            began = time.monotonic()
            _build(go, module, directory)
            sys.stderr.write(f"cluster-tools: {module.name}: {(time.monotonic() - began) / 60:.1f} minutes\n")
        for component in COMPONENTS:
            (directory / component).symlink_to("kubernetes")

    return _cache().entry("tools", _recipe(), make)


def _build(go: str, module: Path, directory: Path) -> None:
    """A module with a main.go is one program of its name; others name programs of others as tools."""
    words = [go, "build", "-trimpath", "-buildvcs=false"]
    words += ["-tags", ",".join(("osusergo", "netgo", TAGS.get(module.name, ""))).rstrip(",")]
    words += ["-ldflags", f"-s -w {_version_flags()}" if module.name == "kubernetes" else "-s -w"]
    own = (module / "main.go").exists()
    folder = directory / f"{module.name}.d"
    words += ["-o", str(directory / module.name) if own else f"{folder}/", "." if own else "tool"]
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": f"-mod=readonly {os.environ.get('GOFLAGS', '')}".strip(),
        "GOTOOLCHAIN": "local",
    }
    done = subprocess.run(words, cwd=module, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoToolsError(f"{module.name}: {done.stderr[-2000:].strip()}")
    if not own:
        for program in folder.iterdir():
            # There are two versions of Helm.
            program.rename(directory / (module.name if program.name == "helm" else program.name))
        folder.rmdir()


def _version_flags() -> str:
    """What the components say of themselves; without it they are v0.0.0, and Helm refuses charts."""
    version = kubernetes_version()
    minor = version.split(".")[1]
    return " ".join(
        f"-X {package}.gitVersion={version} -X {package}.gitMajor=1 -X {package}.gitMinor={minor}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    )


def _modules() -> list[Path]:
    return sorted(path.parent for path in MODULES.glob("*/go.mod"))


def _recipe() -> list[str | Path]:
    return [Path(__file__), *_modules()]


def _cache() -> BuildCache:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return BuildCache(caches / "appliance-cluster")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--built", action="store_true", help="build nothing; fail if they are not built")
    if parser.parse_args().built:
        return int(built() is None)
    try:
        sys.stdout.write(f"cluster-tools: {build()}\n")
    except NoToolsError as error:
        sys.stderr.write(f"cluster-tools: NO KUBERNETES HERE, tests/cluster skips: {error}\n")
        # In CI no test may skip.
        return int(os.environ.get("CI") == "true")
    return 0


if __name__ == "__main__":
    sys.exit(main())
