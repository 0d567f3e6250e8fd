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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
OUTSIDE_LOG = "outside.log"
DRIVERS = ("overlay2", "vfs")
CONTAINERS = ("172.16.0.0/12", "192.168.0.0/16")
KINDS = {"engine", "outside", "clusternode", "clusteroutside"}
"""How the names of networks and directories begin; the id of the process that created them follows."""


class NoEngineError(Exception):
    """There can be no engine here; says why."""


class CommandError(Exception):
    """A program failed; carries what it printed."""


class Networks:
    """A network of the tests' own, and the machine outside of it; `make_networks` starts both."""

    def __init__(self, directory: Path, names: tuple[str, str], environment: Mapping[str, str]) -> None:
        self.directory = directory
        """For files of those inside; removed with them."""
        self.names = names
        """Network namespaces: inside, outside."""
        self.environment = {**os.environ, **environment}
        self._marks: set[str] = set()

    def run(
        self,
        *words: str | Path,
        seconds: float = 600,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the network inside."""
        given = {**self.environment, **(environment or {})}
        return run_command(self.command(*words), seconds, given, check=check, stdin=stdin)

    def command(self, *words: str | Path) -> list[str]:
        """The command that runs a program in the network inside."""
        return ["nsenter", f"--net=/run/netns/{self.names[0]}", *map(str, words)]

    def outside(self, source: str, *words: str, seconds: float = 300) -> str:
        """What Python prints on the machine outside."""
        return self._outside(sys.executable, "-c", source, *words, seconds=seconds)

    def outside_shell(self, source: str) -> str:
        """What commands of a shell print there."""
        return self._outside("sh", "-c", source)

    def _outside(self, *words: str, seconds: float = 300) -> str:
        command = ["nsenter", f"--net=/run/netns/{self.names[1]}", *words]
        return run_command(command, seconds, self.environment).stdout

    def knocks(self) -> list[dict[str, str]]:
        """
        What has reached the machine outside so far: `kind` (tcp, udp, dns) and `said`.

        Each listener writes down in order: once it has a mark sent now, it has all that was sent before.
        """
        marks = set(json.loads(self.run(sys.executable, "-c", SEND_MARKS).stdout))
        self._marks |= marks
        wait_until(lambda: marks <= {knock["said"] for knock in self._read()}, "marks arrive outside")
        return [knock for knock in self._read() if knock["said"] not in self._marks]

    def _read(self) -> list[dict[str, str]]:
        return [
            json.loads(line)
            for line in (self.directory / OUTSIDE_LOG).read_text(encoding="utf-8").splitlines()
        ]


class ContainerEngine(Networks):
    """One engine; `container_engine` starts and removes it."""

    def docker(self, *words: str | Path, **options) -> str:
        """What a command of the engine's client prints."""
        return self.run("docker", *words, **options).stdout.strip()

    def python(self, container: str, source: str, **options) -> subprocess.CompletedProcess[str]:
        """Run Python in a container that runs."""
        return self.run(
            "docker", "exec", "-i", container, "/opt/appliance/bin/python", "-I", "-", stdin=source, **options
        )


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
    data.mkdir(exist_ok=True)
    (directory / "data").symlink_to(data.resolve())
    # Debian's own client and server of one version, before others that may be installed.
    environment = {
        "PATH": f"/usr/bin:/usr/sbin:{os.environ['PATH']}",
        "DOCKER_HOST": f"unix://{directory / 'socket'}",
        "COMPOSE_HTTP_TIMEOUT": "600",
    }
    with ExitStack() as stack:
        stack.callback(remove_tree, directory)
        try:
            remove_what_killed_runs_left()
            names = (f"engine-{os.getpid()}", f"outside-{os.getpid()}")
            engine = ContainerEngine(directory, names, environment)
            make_networks(engine, CONTAINERS, stack)
            _start_engine(engine, stack)
        except (OSError, CommandError, subprocess.TimeoutExpired) as error:
            raise NoEngineError(str(error).strip()) from error
        yield engine


def remove_tree(directory: Path) -> None:
    """Remove a directory with what an engine left mounted below it."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for path in reversed([path for path in mounted if Path(path).is_relative_to(directory)]):
        subprocess.run(["umount", "--lazy", path], check=False)
    shutil.rmtree(directory, ignore_errors=True)


def remove_what_killed_runs_left() -> None:
    """Processes, networks and directories of `KINDS` whose creator is gone."""
    for path in (*Path("/run/netns").glob("*-*"), *Path(tempfile.gettempdir()).glob("*-*-*")):
        kind, number, *_ = path.name.split("-")
        if kind not in KINDS or not number.isdigit() or Path("/proc", number).exists():
            continue
        if path.is_dir():
            remove_tree(path)
            continue
        # Another run may do the same now.
        with suppress(CommandError, ProcessLookupError):
            for left in ip("netns", "pids", path.name).split():
                os.kill(int(left), signal.SIGKILL)
            ip("netns", "delete", path.name)


def make_networks(networks: Networks, behind: Sequence[str], stack: ExitStack) -> None:
    """
    Make them, and start the machine outside.

    Args:
        networks: their names begin with one of `KINDS` and the id of this process.
        behind: addresses that the machine outside reaches through the network inside, so that only filters
            keep it from them.
        stack: removes all of it.
    """
    names = networks.names
    inner, outer = f"in{os.getpid()}", f"out{os.getpid()}"
    for name in names:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "delete", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("link", "add", inner, "netns", names[0], "type", "veth", "peer", "name", outer, "netns", names[1])
    for name, link, address in ((names[0], inner, INSIDE), (names[1], outer, OUTSIDE)):
        ip("-n", name, "address", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
    ip("-n", names[0], "route", "add", "default", "via", OUTSIDE)
    for network in behind:
        ip("-n", names[1], "route", "add", network, "via", INSIDE)
    log = networks.directory / OUTSIDE_LOG
    outside = [f"--net=/run/netns/{names[1]}", sys.executable, __file__, str(log)]
    start(outside, log.with_suffix(".err"), stack)
    wait_until(log.exists, "the machine outside listens")


def _start_engine(engine: ContainerEngine, stack: ExitStack) -> None:
    at = engine.directory
    for driver in DRIVERS:
        log = at / f"dockerd-{driver}.log"
        words = ["dockerd", "--data-root", at / "data", "--exec-root", at / "exec", "--pidfile", at / "pid"]
        words += ["--host", f"unix://{at / 'socket'}", "--dns", OUTSIDE, "--storage-driver", driver]
        process = start(
            [f"--net=/run/netns/{engine.names[0]}", *map(str, words)], log, stack, engine.environment
        )
        until = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if engine.run("docker", "version", check=False).returncode == 0:
                return
            time.sleep(0.2)
    lines = log.read_text(encoding="utf-8").strip().splitlines() or ["dockerd said nothing"]
    raise OSError(f"dockerd did not start: {lines[-1][:300]}")


def wait_until(
    seen: Callable[[], bool], what: str, *, seconds: float = START_SECONDS, every: float = 0.02
) -> None:
    until = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > until:
            raise TimeoutError(f"not in {seconds} s: {what}")
        time.sleep(every)


def start(
    words: list[str],
    log: Path,
    stack: ExitStack,
    environment: Mapping[str, str] | None = None,
    *,
    end: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a program; `words` begin with arguments of `nsenter`.  `stack` ends it with the signal `end`."""
    with log.open("wb") as output:
        # Its parent may be killed: then it ends as well.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", end.name.removeprefix("SIG"), "nsenter", *words],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )

    def stop() -> None:
        process.send_signal(end)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    return process


def ip(*words: str) -> str:
    return run_command(["ip", *words], 30, os.environ).stdout


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"/usr/bin:/usr/sbin:{os.environ['PATH']}")


def run_command(
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
