"""
A separate container engine for the tests, in its own network, next to a machine outside of it.

    outside (198.51.100.2) ──── engine (198.51.100.1): dockerd, its bridges, its containers

Both are network namespaces, so nothing the engine does to interfaces and packet filters touches this
machine, another engine here is not disturbed, and "outside" is a machine that an ordinary container reaches.
It writes down who knocks.  The engine asks it for names, too, so a name that leaks is seen.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""Programs, and the Debian packages they come in."""
INSIDE, OUTSIDE = "198.51.100.1", "198.51.100.2"
KNOCKED_PORT = 8000
"""Where the machine outside listens: the port of a worker, which the gateway's own wall lets pass."""
SEND_MARKS = f"""
import json, socket, uuid
marks = []
for port in ({KNOCKED_PORT}, 53):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        marks.append(uuid.uuid4().hex)
        datagrams.sendto(marks[-1].encode(), ({OUTSIDE!r}, port))
with socket.create_connection(({OUTSIDE!r}, {KNOCKED_PORT})) as connection:
    marks.append("%s:%d" % connection.getsockname())
print(json.dumps(marks))
"""
START_SECONDS = 180
DRIVERS = ("overlay2", "vfs")


class NoEngineError(Exception):
    """There can be no engine here; says why."""


class CommandError(Exception):
    """A program failed; carries what it printed."""


class ContainerEngine:
    """One engine; `container_engine` starts and removes it."""

    def __init__(self, directory: Path, socket: Path, names: tuple[str, str], outside_log: Path) -> None:
        self.directory = directory
        """For files of this engine; removed with it."""
        self._names = names
        self._outside_log = outside_log
        self._marks: set[str] = set()
        # Debian's own client and server of one version, before others that may be installed.
        path = f"/usr/bin:/usr/sbin:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": path,
            "DOCKER_HOST": f"unix://{socket}",
            "COMPOSE_HTTP_TIMEOUT": "600",
        }

    def run(
        self,
        *words: str | Path,
        seconds: float = 600,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the engine's network."""
        command = ["nsenter", f"--net=/run/netns/{self._names[0]}", *map(str, words)]
        return _run(command, seconds, {**self.environment, **(environment or {})}, check=check, stdin=stdin)

    def docker(self, *words: str | Path, **options) -> str:
        """What a command of the engine's client prints."""
        return self.run("docker", *words, **options).stdout.strip()

    def python(self, container: str, source: str, **options) -> subprocess.CompletedProcess[str]:
        """Run Python in a container that runs."""
        return self.run(
            "docker", "exec", "-i", container, "/opt/appliance/bin/python", "-I", "-", stdin=source, **options
        )

    def outside(self, source: str, *words: str, seconds: float = 300) -> str:
        """What Python prints on the machine outside."""
        return self._outside(sys.executable, "-c", source, *words, seconds=seconds)

    def outside_shell(self, source: str) -> str:
        """What commands of a shell print there."""
        return self._outside("sh", "-c", source)

    def _outside(self, *words: str, seconds: float = 300) -> str:
        command = ["nsenter", f"--net=/run/netns/{self._names[1]}", *words]
        return _run(command, seconds, self.environment).stdout

    def knocks(self) -> list[dict[str, str]]:
        """
        What has reached the machine outside so far: `kind` (tcp, udp, dns) and `said`.

        Each listener writes down in order: once it has a mark sent now, it has all that was sent before.
        """
        marks = set(json.loads(self.run(sys.executable, "-c", SEND_MARKS).stdout))
        self._marks |= marks
        _wait_until(lambda: marks <= {knock["said"] for knock in self._read()}, "marks arrive outside")
        return [knock for knock in self._read() if knock["said"] not in self._marks]

    def _read(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self._outside_log.read_text(encoding="utf-8").splitlines()]


@contextmanager
def container_engine(data: Path) -> Iterator[ContainerEngine]:
    """
    Start an engine, and stop it with all it started.

    Args:
        data: what it keeps on disk, images among it; stays.

    Raises:
        NoEngineError: a program is missing, or this machine does not allow it.
    """
    missing = sorted({package for tool, package in TOOLS.items() if _which(tool) is None})
    if missing:
        raise NoEngineError(f"the Debian packages {', '.join(missing)} are missing")
    if os.geteuid() != 0:
        raise NoEngineError("an engine, and a base image by debootstrap, need root")
    # The path of a socket is short.
    directory = Path(tempfile.mkdtemp(prefix=f"engine-{os.getpid()}-"))
    names = (f"engine-{os.getpid()}", f"outside-{os.getpid()}")
    log = directory / "outside.log"
    data.mkdir(exist_ok=True)
    (directory / "data").symlink_to(data.resolve())
    with ExitStack() as stack:
        stack.callback(remove_tree, directory)
        try:
            _remove_what_killed_runs_left()
            _make_networks(names, stack)
            outside = [f"--net=/run/netns/{names[1]}", sys.executable, __file__, str(log)]
            _start(outside, directory / "outside.err", stack)
            _wait_until(log.exists, "the machine outside listens")
            engine = ContainerEngine(directory, directory / "socket", names, log)
            _start_engine(engine, names[0], stack)
        except (OSError, CommandError, subprocess.TimeoutExpired) as error:
            raise NoEngineError(str(error).strip()) from error
        yield engine


def remove_tree(directory: Path) -> None:
    """Remove a directory with what an engine left mounted below it."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for path in reversed([path for path in mounted if Path(path).is_relative_to(directory)]):
        subprocess.run(["umount", "--lazy", path], check=False)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_what_killed_runs_left() -> None:
    """Names of networks and directories contain the id of the process that created them."""
    for path in (*Path("/run/netns").glob("*-*"), *Path(tempfile.gettempdir()).glob("engine-*-*")):
        kind, number, *_ = path.name.split("-")
        if kind not in {"engine", "outside"} or not number.isdigit() or Path("/proc", number).exists():
            continue
        if path.is_dir():
            remove_tree(path)
            continue
        # Another run may do the same now.
        with suppress(CommandError, ProcessLookupError):
            for left in _ip("netns", "pids", path.name).split():
                os.kill(int(left), signal.SIGKILL)
            _ip("netns", "delete", path.name)


def _make_networks(names: tuple[str, str], stack: ExitStack) -> None:
    inner, outer = f"in{os.getpid()}", f"out{os.getpid()}"
    for name in names:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("link", "add", inner, "netns", names[0], "type", "veth", "peer", "name", outer, "netns", names[1])
    for name, link, address in ((names[0], inner, INSIDE), (names[1], outer, OUTSIDE)):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
        _ip("-n", name, "link", "set", link, "up")
    _ip("-n", names[0], "route", "add", "default", "via", OUTSIDE)
    # The machine outside knows where containers are, so that only filters keep it from them.
    _ip("-n", names[1], "route", "add", "172.16.0.0/12", "via", INSIDE)
    _ip("-n", names[1], "route", "add", "192.168.0.0/16", "via", INSIDE)


def _start_engine(engine: ContainerEngine, network: str, stack: ExitStack) -> None:
    at = engine.directory
    for driver in DRIVERS:
        log = at / f"dockerd-{driver}.log"
        words = ["dockerd", "--data-root", at / "data", "--exec-root", at / "exec", "--pidfile", at / "pid"]
        words += ["--host", f"unix://{at / 'socket'}", "--dns", OUTSIDE, "--storage-driver", driver]
        process = _start([f"--net=/run/netns/{network}", *map(str, words)], log, stack, engine.environment)
        until = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if engine.run("docker", "version", check=False).returncode == 0:
                return
            time.sleep(0.2)
    lines = log.read_text(encoding="utf-8").strip().splitlines() or ["dockerd said nothing"]
    raise OSError(f"dockerd did not start: {lines[-1][:300]}")


def _wait_until(seen: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_SECONDS
    while not seen():
        if time.monotonic() > until:
            raise TimeoutError(f"not in {START_SECONDS} s: {what}")
        time.sleep(0.02)


def _start(
    words: list[str], log: Path, stack: ExitStack, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        # Its parent may be killed: then it ends as well.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "nsenter", *words],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )

    def stop() -> None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    return process


def _ip(*words: str) -> str:
    return _run(["ip", *words], 30, os.environ).stdout


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"/usr/bin:/usr/sbin:{os.environ['PATH']}")


def _run(
    command: list[str],
    seconds: float,
    environment: Mapping[str, str],
    *,
    check: bool = True,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
    )
    if check and done.returncode:
        raise CommandError(f"{' '.join(command)}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done


def _write_down_who_knocks(log: Path) -> None:
    """Be the machine outside: take connections, datagrams and questions for names, and answer each."""
    import socket  # noqa: PLC0415 - what only the machine outside needs
    import threading  # noqa: PLC0415

    lock = threading.Lock()

    def note(kind: str, said: bytes) -> None:
        with lock, log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "said": said.decode("latin-1")}) + "\n")

    def take_datagrams(kind: str, listener: socket.socket) -> None:
        while True:
            said, peer = listener.recvfrom(4096)
            note(kind, said)
            # A question for a name comes back as an answer that there is none (RFC 1035: QR, RCODE 3).
            listener.sendto(said[:2] + b"\x81\x83" + said[4:] if kind == "dns" else said, peer)

    for kind, port in (("dns", 53), ("udp", KNOCKED_PORT)):
        listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listener.bind((OUTSIDE, port))
        threading.Thread(target=take_datagrams, args=(kind, listener), daemon=True).start()
    with socket.create_server((OUTSIDE, KNOCKED_PORT)) as server:
        log.touch()
        while True:
            connection, peer = server.accept()
            note("tcp", "{}:{}".format(*peer).encode())
            connection.close()


if __name__ == "__main__":
    _write_down_who_knocks(Path(sys.argv[1]))
