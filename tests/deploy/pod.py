"""
What `test_helm_pod` runs: a gateway as Kubernetes would run the chart's pod, in namespaces of its own.

    unshare --net --mount python -m tests.deploy.pod DIRECTORY HOST

DIRECTORY holds the rendered `appliance.yaml`, and HOST is the workers' name in it.  The user is not root and
has the pod's group; Secrets are root's files that the group may read; the disk is root's directory that the
group may write; HOST resolves as a headless Service does; and nothing else can be reached.  Leaves
`report.json` in the directory, and searches the disk for leaks.
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests import leaks
from tests.fakes import MODEL, FakeWorker
from tests.integration.enclave import raise_loopback

ROOT = Path(__file__).parents[2]
USER = GROUP = 10001
APPLIANCE = Path(sys.executable).with_name("appliance")
SETTINGS, DATA = Path("/etc/appliance"), Path("/var/lib/appliance")
URL, ADMIN_URL = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
START_SECONDS = 100
SECRETS = {
    "control-token/token": ["openssl", "rand", "-hex", "32"],
    "signing-key/audit.key": ["openssl", "genpkey", "-algorithm", "ed25519"],
    "tenants-mac/tenants-mac.key": ["openssl", "rand", "-hex", "32"],
    "payload-master-key/master.key": ["openssl", "rand", "-base64", "32"],
}
AS_USER = [
    *("setpriv", "--reuid", str(USER), "--regid", str(GROUP), "--clear-groups"),
    *("--no-new-privs", "--bounding-set", "-all", "--inh-caps", "-all"),
]


def open_to_all(*needed: Path) -> None:
    """Have another user reach what lies below a directory that is root's alone, as a home may be."""
    closed = {
        parent for path in needed for parent in path.parents if not parent.stat().st_mode & stat.S_IXOTH
    }
    for number, parent in enumerate(each for each in closed if not closed & set(each.parents)):
        aside = SETTINGS / f"aside-{number}"
        aside.mkdir()
        subprocess.run(["mount", "--bind", parent, aside], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", parent], check=True)
        for path in needed:
            if path.is_relative_to(parent):
                path.mkdir(parents=True, exist_ok=True)
                subprocess.run(["mount", "--bind", aside / path.relative_to(parent), path], check=True)
        subprocess.run(["umount", aside], check=True)
        aside.rmdir()


def furnish(directory: Path, host: str) -> None:
    """Mount what the pod would have mounted; all of it is gone with the namespace."""
    layers = directory / "layers"
    layers.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", layers], check=True)
    for mount_point in (SETTINGS, DATA):
        # Its parent gets a layer of this namespace: no directory is made on the machine.
        upper, work = (layers / f"{kind}-{mount_point.parent.name}" for kind in ("upper", "work"))
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir={mount_point.parent},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "none", "-o", options, mount_point.parent], check=True)
        mount_point.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", mount_point], check=True)
    open_to_all(*(Path(each) for each in {sys.base_prefix, sys.prefix, str(ROOT)}))
    for name in ("appliance.yaml", "environment.json"):
        (SETTINGS / name).write_bytes((directory / name).read_bytes())
    for name, command in SECRETS.items():
        file = SETTINGS / name
        file.parent.mkdir()
        file.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        os.chown(file, 0, GROUP)
        file.chmod(0o440)
    os.chown(DATA, 0, GROUP)
    DATA.chmod(0o2770)
    hosts = directory / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {host}\n", encoding="utf-8")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


@asynccontextmanager
async def worker_on(port: int) -> Any:
    """A scripted worker at the ports that the chart's workers have."""
    async with FakeWorker().serving() as worker:
        target = int(worker.url.rpartition(":")[2])
        async with await _relayed(port, target), await _relayed(port + 1, target + 1):
            yield worker


def _relayed(port: int, target: int) -> Coroutine[Any, Any, asyncio.Server]:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_pump(reader, requests), _pump(answers, writer))

    return asyncio.start_server(relay, "127.0.0.1", port)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(65536):
        writer.write(block)
        await writer.drain()
    writer.close()


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command in the pod, as by `kubectl exec`."""
    ended = subprocess.run(
        [*AS_USER, APPLIANCE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
        cwd="/",
        env=environment(),
    )
    return ended.returncode, ended.stdout + ended.stderr


def environment() -> dict[str, str]:
    """What the image and the chart set."""
    chart = json.loads((SETTINGS / "environment.json").read_text(encoding="utf-8"))
    return {"PATH": os.environ["PATH"], "USER": "appliance", "PYTHONUNBUFFERED": "1", **chart}


@contextmanager
def gateway(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The container, from its start to the SIGTERM of Kubernetes."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*AS_USER, APPLIANCE, "gateway", "--config", SETTINGS / "appliance.yaml"],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(),
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_SECONDS)
        finally:
            process.kill()


def ask(path: str, key: str = "", body: dict[str, Any] | None = None, *, url: str = URL) -> tuple[int, str]:
    """Status and text of an answer; status 0 if nothing listens yet."""
    request = urllib.request.Request(
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


async def until_ready(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """What the readiness probe says at last."""
    seen = 0, "it was not asked"
    async with asyncio.timeout(START_SECONDS):
        while seen[0] != 200 and process.poll() is None:
            await asyncio.sleep(0.2)
            seen = await asyncio.to_thread(ask, "/readyz", url=ADMIN_URL)
    return seen


async def live(directory: Path) -> dict[str, Any]:
    """Start, serve, end, and start again on the same disk."""
    report: dict[str, Any] = {}
    async with worker_on(8000):
        for start in ("first", "second"):
            log = directory / f"{start}.log"
            with gateway(log) as process:
                report[start] = await until_ready(process)
                if start == "first":
                    command("tenant", "create", "demo")
                    key = command("key", "create", "demo")[1].split()[0]
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
                # Its output is discarded: a run stores no completion.
                report[f"{start} chat"], _ = await asyncio.to_thread(ask, "/v1/chat/completions", key, body)
                report["alive"] = await asyncio.to_thread(ask, "/healthz", url=ADMIN_URL)
            report[f"{start} exit"] = process.returncode
    report["verify"] = command("audit", "verify", "--no-payloads")
    return report


def main(directory: Path, host: str) -> None:
    """Run everything, and write down what happened."""
    raise_loopback()
    furnish(directory, host)
    report = asyncio.run(live(directory))
    leaks.look_in(DATA)
    report["owners"] = sorted({path.stat().st_uid for path in DATA.rglob("*")})
    (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
