"""
The wall on this machine's kernel: processes that raise it, then try to bypass it in all known ways.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from appliance.audit.entry import decode
from appliance.audit.entry_types import EntryType
from appliance.audit.store import SqlAuditStore
from appliance.serving.launch import LaunchPlan
from appliance.serving.supervise import Supervisor
from appliance.sovereignty.file_wall import plan_file_wall
from appliance.sovereignty.landlock import NETWORK_ABI, abi_version
from appliance.sovereignty.ports import spell
from demo.process import ApplianceProcess
from tests.fakes import FakeWorker, chat
from tests.postgres import private_postgres


def kernel_version() -> int:
    try:
        return abi_version()
    except OSError:
        return 0


pytestmark = pytest.mark.skipif(
    kernel_version() < NETWORK_ABI, reason="SKIPPED THE WALL: this kernel's Landlock does not know ports"
)

WAYS = """
import asyncio, ctypes, errno, json, socket, struct, subprocess, sys
import uvloop

def by_socket(port):
    socket.create_connection(("127.0.0.1", port), 5).close()

def by_mapped_ipv6(port):
    socket.create_connection(("::ffff:127.0.0.1", port), 5).close()

def by_uvloop(port):
    async def connect():
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
        transport.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(connect())

def by_ctypes(port):
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
    address = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), bytes([127, 0, 0, 1]))
    if libc.connect(number, address, len(address)):
        raise OSError(ctypes.get_errno(), "connect")

def by_a_thread(port):
    async def connect():
        await asyncio.to_thread(by_socket, port)
    asyncio.run(connect())

def by_a_child(port):
    program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if ended.returncode:
        raise OSError(errno.EACCES if "PermissionError" in ended.stderr else 0, ended.stderr)

def by_a_childs_child(port):
    program = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    ended = subprocess.run([sys.executable, "-c", program, connect], capture_output=True, text=True)
    if ended.returncode:
        raise OSError(errno.EACCES if "PermissionError" in ended.stderr else 0, ended.stderr)

"""
"""Functions that connect to a port of this machine, or raise `OSError`."""
TRY_EVERYTHING = """
from appliance.sovereignty.wall import raise_wall

inside, outside = int(sys.argv[1]), int(sys.argv[2])
before = socket.create_connection(("127.0.0.1", outside), 5)
raise_wall("required", frozenset({inside}))

def attempt(way, port):
    try:
        way(port)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return "connected"

WAYS = [by_socket, by_mapped_ipv6, by_uvloop, by_ctypes, by_a_thread, by_a_child, by_a_childs_child]
answer = {way.__name__: [attempt(way, port) for port in (inside, outside)] for way in WAYS}
before.sendall(b"x")
listener = socket.create_server(("127.0.0.1", 0))
answer["bound"] = listener.getsockname()[1] > 0
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.connect(("127.0.0.1", outside))
answer["datagrams"] = datagrams.send(b"x") == 1
print(json.dumps(answer))
"""
PAST_A_HOOK = """
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event == "socket.connect" else None)
port = int(sys.argv[1])
by_socket(port)
noticed = len(seen)
for way in (by_uvloop, by_ctypes, by_a_child):
    way(port)
print(json.dumps([noticed, len(seen)]))
"""
WITH_A_THREAD = """
import threading
from appliance.sovereignty.wall import raise_wall
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(raise_wall("on", frozenset({1})).detail)
"""

WORKER = """
import json, os, pathlib, signal, subprocess, sys, tempfile, time
data, shown, mark = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
secret = data / "audit.key"

def by_a_child():
    command = [sys.executable, "-c", f"open({str(secret)!r}).read()"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise PermissionError(13, "child") if "PermissionError" in ended.stderr else OSError(0, ended.stderr)

def by_the_parents_memory():
    supervisor = next(p for p in pathlib.Path("/proc").iterdir() if p.name == mark)
    (supervisor / "mem").open("rb").close()

def move_and_return():
    data.rename(data.parent / "moved").rename(data)

WAYS = {
    "read": secret.read_text,
    "read a later file": lambda: (data / "later").read_text(),
    "write": lambda: secret.write_text("mine"),
    "truncate": lambda: os.truncate(secret, 0),
    "remove": secret.unlink,
    "make": lambda: (data / "tenants.yaml").write_text("mine"),
    "link": lambda: os.symlink("/tmp/mine.yaml", data / "tenants.yaml"),
    "hard link": lambda: os.link(secret, shown / "linked"),
    "move in": lambda: os.rename(shown / "own", data / "tenants.yaml"),
    "move out": lambda: os.rename(secret, shown / "stolen"),
    "move the directory": move_and_return,
    "through /proc": lambda: pathlib.Path(f"/proc/self/root{secret}").read_text(),
    "child": by_a_child,
    "memory": by_the_parents_memory,
}
(shown / "own").write_text("mine")
answer = {}
for name, way in WAYS.items():
    try:
        way()
        answer[name] = "done"
    except PermissionError:
        answer[name] = "refused"
    except OSError as error:
        answer[name] = "refused" if error.errno == 18 else repr(error)
with tempfile.NamedTemporaryFile() as own:
    own.write(b"x")
(shown / "own").write_text("mine")
answer["own"] = (shown / "own").read_text()
(shown / "answer.part").write_text(json.dumps(answer))
(shown / "answer.part").rename(shown / "answer")
time.sleep(60)
"""
"""A worker that tries to open the gateway's files, and says in a file of its own how each try ended."""


@pytest.fixture(scope="module")
def listeners() -> Iterator[tuple[int, int]]:
    """Ports of two listeners: one to be inside the wall, one outside."""
    with socket.create_server(("127.0.0.1", 0)) as inside, socket.create_server(("127.0.0.1", 0)) as outside:
        yield inside.getsockname()[1], outside.getsockname()[1]


def answer_of(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def answer(listeners) -> dict:
    """How each way ended, to the port inside and to the one outside."""
    return json.loads(answer_of(WAYS + TRY_EVERYTHING, *listeners))


def test_ports_outside_are_refused_in_every_way_and_those_inside_work(answer):
    """Also where Python's audit hooks see nothing: uvloop, ctypes, children and theirs."""
    ways = {name: ends for name, ends in answer.items() if name.startswith("by_")}
    assert ways == {name: ["connected", "EACCES"] for name in ways}
    assert len(ways) == 7


def test_listening_stays_possible(answer):
    """A gateway accepts as before."""
    assert answer["bound"]


def test_datagrams_are_not_held(answer):
    """As documented: the network must block UDP."""
    assert answer["datagrams"]


def test_is_not_raised_around_only_a_part_of_a_process():
    """An earlier thread would stay outside, so the wall is not raised, with a message."""
    assert answer_of(WITH_A_THREAD).strip() == "not up: threads are running already and would not be covered"


def test_audit_hook_is_not_a_boundary(listeners):
    """It observes Python's own socket, but not uvloop, ctypes or a child."""
    assert json.loads(answer_of(WAYS + PAST_A_HOOK, listeners[0])) == [1, 1]


async def test_a_gateway_inside_its_wall_reaches_its_peers_and_no_new_port(tmp_path):
    """Worker and PostgreSQL: a chat is served and recorded; a worker elsewhere is refused with the reason."""
    file, data = tmp_path / "settings.yaml", tmp_path / "data"
    with private_postgres() as postgres:
        database = postgres.new_database()

        def write(*urls: str) -> None:
            settings = {
                "sovereignty": {"wall": "required"},
                "audit": {"database_url": database},
                "pool": {"urls": urls},
            }
            file.write_text(json.dumps(settings), encoding="utf-8")

        async with FakeWorker().serving() as worker, aiohttp.ClientSession() as session:
            write(worker.url)
            upgrade = [sys.executable, "-m", "appliance", "audit", "upgrade-database"]
            await asyncio.to_thread(subprocess.run, [*upgrade, "--config", str(file)], check=True)
            process = ApplianceProcess("gateway", "--config", str(file), data=data)
            try:
                await asyncio.to_thread(process.wait_ready)
                port = int(worker.url.rpartition(":")[2])
                doors = spell([postgres.port, port, port + 1])
                assert f"wall: TCP connections only to ports {doors}\n" in process.output
                key = {"Authorization": f"Bearer {process.key}"}
                async with session.post(
                    f"{process.url}/v1/chat/completions", json=chat(), headers=key
                ) as reply:
                    assert reply.status == 200
                write(worker.url, "http://127.0.0.1:1")
                admin = (data / "admin.key").read_text(encoding="utf-8").strip()
                async with session.post(
                    f"{process.admin_url}/admin/v1/workers/reload",
                    headers={"Authorization": f"Bearer {admin}"},
                ) as reply:
                    error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (409, "control_refused")
                assert "port 1-2 is blocked by the wall" in error["message"]
            finally:
                assert await asyncio.to_thread(process.stop) == 0, "".join(process.output)
                process.process.stdout.close()
        with closing(SqlAuditStore(database)) as store:
            entries = [decode(leaf.leaf) for leaf in store.leaves(0, 100)]
        started = next(entry for entry in entries if entry.type is EntryType.AUDIT_STARTED)
        assert started.fields["wall"] == f"TCP connections only to ports {doors}"


@pytest.mark.parametrize("is_walled", [True, False])
async def test_a_worker_cannot_open_the_gateways_files(tmp_path, is_walled):
    """Without the wall it can, so that the test can fail."""
    data = tmp_path / "data"
    shown = data / "worker"
    shown.mkdir(parents=True)
    (data / "audit.key").write_text("secret")
    wall, detail = plan_file_wall("required", [data], [shown, Path(sys.prefix)], home=tmp_path)
    assert detail == f"the worker cannot open files in {data}"
    plan = LaunchPlan(
        argv=(sys.executable, "-c", WORKER, str(data), str(shown), str(os.getpid())),
        environment={"TMPDIR": str(wall.temporary)},
        url="http://127.0.0.1:1",
        host="127.0.0.1",
        port=1,
        control_port=2,
        model="none",
        drain_seconds=1,
        max_startup_seconds=60,
        answers=False,
    )
    supervisor = Supervisor(
        plan,
        worker="w1",
        log_directory=tmp_path,
        max_restarts=0,
        observe=lambda _: None,
        open_ruleset=wall.open_ruleset if is_walled else None,
    )
    with wall.prepared():
        running = asyncio.ensure_future(supervisor.run())
        (data / "later").write_text("secret")
        while not (shown / "answer").exists():
            assert not running.done(), supervisor.log.read_text()
            await asyncio.sleep(0.05)
        await supervisor.stop()
        await running
    answer = json.loads((shown / "answer").read_text())
    assert answer.pop("own") == "mine"
    if is_walled:
        assert answer == dict.fromkeys(answer, "refused")
        assert len(answer) == 14
        assert (data / "audit.key").read_text() == "secret"
    else:
        done = {name for name, end in answer.items() if end == "done"}
        assert {"read", "write", "remove", "make", "move in", "move the directory"} <= done
