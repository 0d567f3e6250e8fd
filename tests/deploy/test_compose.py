"""
`deploy/compose.yaml` as a text: both generations of compose read it, and every service is locked up.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from appliance.app.worker_process import PLUGIN
from appliance.infra.schema import upgrade_database
from appliance.infra.settings import load_settings
from appliance.serving.supervise import free_port
from appliance.sovereignty.environment import worker_variables
from tests.deploy.container_engine import ROOT
from tests.postgres import OWNER, private_postgres

AT = ROOT / "deploy"
TEXT = (AT / "compose.yaml").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
PROFILES = ("demo", "gpu", "gpu-2", "postgres", "monitoring", "notify", "dashboards")
DOORS = dict.fromkeys(("ingress", "admin", "dashboards"), "127.0.0.1")
"""Published services, and the addresses they are published at."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def default_of(value: str) -> str:
    """What a value is where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


@pytest.fixture(params=sorted(SERVICES))
def service(request) -> dict:
    return SERVICES[request.param]


def test_the_compose_specification_allows_it():
    """So does Compose v2, which reads files by that schema."""
    schema = files("check_jsonschema").joinpath("builtin_schemas", "vendor", "compose-spec.json")
    jsonschema.Draft7Validator(json.loads(schema.read_text(encoding="utf-8"))).validate(COMPOSE)
    assert "version" not in COMPOSE, "Compose v2 warns of it"


@pytest.mark.skipif(
    shutil.which("docker-compose") is None,
    reason="DOCKER-COMPOSE 1.29 DOES NOT READ compose.yaml HERE: install the Debian package docker-compose",
)
@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_reads_it(profile):
    """The generation before, which Debian 12 has, reads the same file without a warning."""
    done = subprocess.run(
        ["docker-compose", "--file", AT / "compose.yaml", "--profile", profile, "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{VERSION}" in done.stdout


def test_only_forwarders_are_on_a_network_with_egress():
    """Nothing else is on a network that is not internal, or published; and those are on loopback."""
    internal = {name for name, network in COMPOSE["networks"].items() if network.get("internal")}
    assert set(COMPOSE["networks"]) - internal == {"front", "notices"}
    for name in internal:
        options = COMPOSE["networks"][name]["driver_opts"]
        assert options == {"com.docker.network.bridge.inhibit_ipv4": "true"}, name
    outward = {name for name, service in SERVICES.items() if set(service["networks"]) - internal}
    assert outward == {*DOORS, "notify"}
    assert [name for name, service in SERVICES.items() if "notices" in service["networks"]] == ["notify"]
    assert SERVICES["notify"]["profiles"] == ["notify"]
    assert {name for name, service in SERVICES.items() if "ports" in service} == set(DOORS)
    for name, address in DOORS.items():
        (port,) = SERVICES[name]["ports"]
        assert default_of(port).startswith(f"{address}:"), name
    for name in outward:
        assert SERVICES[name]["entrypoint"][-1] == "/etc/appliance/ingress.py"
        # They hold nothing: no secret, no volume but their own program.
        assert "secrets" not in SERVICES[name]
        assert [volume.partition(":")[0] for volume in SERVICES[name]["volumes"]] == ["./compose/ingress.py"]


def test_a_service_is_locked_up(service):
    """Read-only, without capabilities or new privileges, with bounds on what it takes, asking no resolver."""
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["dns"] == ["127.0.0.1"]
    assert service["mem_limit"]
    assert service["cpus"]
    assert service["pids_limit"] > 0
    assert service["logging"]["options"]["max-size"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service)


def test_an_image_is_named_whole_and_never_fetched(service):
    """A version or digest, replaceable by a variable; and an engine never pulls it."""
    name = default_of(service["image"])
    assert service["image"] != name
    assert service["pull_policy"] == "never"
    tag = name.rpartition(":")[2]
    assert tag not in {name, "latest"}
    assert not name.startswith("sovereign-appliance/") or tag == VERSION


def test_no_secret_is_in_the_environment(service):
    """Secrets are files: `docker inspect` shows variables."""
    for name in service.get("environment", {}):
        secret = re.search(r"PASSWORD|TOKEN|KEY|SECRET", name)
        assert not secret or name.endswith("_FILE"), name


@pytest.mark.skipif(os.geteuid() != 0, reason="ONLY ROOT CAN MAKE THE SECRETS OF COMPOSE: not tried here")
def test_secrets_are_made_once_and_for_group_0(tmp_path):
    """The script creates every secret of the file, and never replaces one."""
    script = ["sh", AT / "compose" / "secrets.sh", tmp_path / "secrets"]
    subprocess.run(script, check=True, capture_output=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "secrets").iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert len(set(made.values())) == len(made)
    assert all(len(text) == 64 for text in made.values())
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o640}
    assert {path.stat().st_gid for path in (tmp_path / "secrets").iterdir()} == {0}
    subprocess.run(script, check=True, capture_output=True)
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "secrets").iterdir()} == made


def test_workers_get_the_offline_environment():
    """The file that compose reads says what the table says."""
    lines = (AT / "offline.env").read_text(encoding="utf-8").splitlines()
    read = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert read == {row.name: row.value for row in worker_variables((PLUGIN,))}
    for name in ("worker-cpu", "worker-gpu", "worker-gpu-2"):
        assert SERVICES[name]["env_file"] == "offline.env"
        assert "environment" not in SERVICES[name]
    assert SERVICES["grafana"]["env_file"] == "offline-grafana.env"


@pytest.mark.parametrize("name", ["gateway", "worker-demo", "worker-gpu", "worker-gpu-2"])
def test_the_settings_next_to_it_are_settings(name):
    """They are accepted, and agree with the ports, volumes and secrets of the file."""
    settings = load_settings(AT / "compose" / f"{name}.yaml")
    assert str(settings.data.directory) == "/var/lib/appliance"
    assert str(settings.data.control_token_file) == "/run/secrets/control-token"
    if name == "gateway":
        assert (settings.api.host, settings.api.port) == ("0.0.0.0", 8080)
        assert (settings.api.admin_host, settings.api.admin_port) == ("0.0.0.0", 8081)
        for door, port in (("ingress", 8080), ("admin", 8081)):
            assert SERVICES[door]["command"] == [str(port), f"gateway:{port}"]
        scraped = yaml.safe_load((AT / "compose" / "prometheus.yaml").read_text(encoding="utf-8"))
        assert scraped["scrape_configs"][0]["dns_sd_configs"][0]["port"] == 8081
        assert settings.pool.discover == "http://worker:8000"
        assert settings.egress.mode == "strict"
        # Not in the volume of the log.
        assert f"gateway-files:{settings.batch.directory}" in SERVICES["gateway"]["volumes"]
    else:
        assert (settings.worker.host, settings.worker.port) == ("0.0.0.0", 8000)
        assert str(settings.worker.model).startswith("/models/")
        assert str(settings.worker.scrape_token_file) == "/run/secrets/scrape-token"


def test_dashboards_and_rules_come_from_one_place():
    """Prometheus and Grafana read the files that the chart packages, too."""
    assert "./monitoring/rules:/etc/prometheus/rules:ro" in SERVICES["prometheus"]["volumes"]
    assert "./monitoring/dashboards:/etc/grafana/dashboards:ro" in SERVICES["grafana"]["volumes"]
    assert list((AT / "monitoring" / "rules").glob("*.yaml"))
    assert list((AT / "monitoring" / "dashboards").glob("*.json"))
    read = yaml.safe_load((AT / "compose" / "prometheus.yaml").read_text(encoding="utf-8"))
    assert read["rule_files"] == ["/etc/prometheus/rules/*.yaml"]
    assert not {"remote_write", "remote_read"} & set(read)


def test_prometheus_has_the_scrape_token_and_not_the_control_token():
    """Which would let it use models and restart workers; the file is readable by group 0."""
    read = yaml.safe_load((AT / "compose" / "prometheus.yaml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in read["scrape_configs"]}
    assert jobs["worker"]["authorization"] == {"credentials_file": "/run/secrets/scrape-token"}
    assert SERVICES["prometheus"]["secrets"] == ["scrape-token"]
    assert SERVICES["prometheus"]["user"].partition(":")[2] == "0"
    assert all(
        "scrape-token" in SERVICES[name]["secrets"] for name in ("worker-cpu", "worker-gpu", "worker-gpu-2")
    )


def test_the_database_comes_with_the_role_of_the_gateway(tmp_path):
    """The script of the postgres profile creates it without further rights."""
    source = (AT / "compose" / "postgres-role.sh").read_text(encoding="utf-8")
    (tmp_path / "database-gateway-password").write_text("se'cret", encoding="utf-8")
    script = tmp_path / "role.sh"
    script.write_text(source.replace("/run/secrets", str(tmp_path)), encoding="utf-8")
    assert script.read_text(encoding="utf-8") != source
    with private_postgres() as postgres:
        url = postgres.new_database()
        database = url.rpartition("/")[2]
        given = {"PGHOST": "127.0.0.1", "PGPORT": str(postgres.port), "PATH": os.environ["PATH"]}
        given |= {"POSTGRES_USER": OWNER, "POSTGRES_DB": database}
        subprocess.run(["bash", "-e", script], env=given, check=True, capture_output=True)
        upgrade_database(url, grant_to="gateway")
        stored = postgres.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'gateway'")
        assert "SCRAM-SHA-256" in stored
        assert "0" in postgres.execute("SELECT count(*) FROM audit_leaves", database=database, role="gateway")
        with pytest.raises(Exception, match="permission denied"):
            postgres.execute("CREATE TABLE other (id int)", database=database, role="gateway")


@asynccontextmanager
async def an_ingress(target_port: int, unused_port: int):
    """The ingress process, in front of a port of this machine."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", AT / "compose" / "ingress.py", str(unused_port), f"127.0.0.1:{target_port}")
    )
    try:
        for _ in range(200):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", unused_port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.fixture
def unused_port() -> int:
    return free_port("127.0.0.1")


async def test_ingress_forwards_all_bytes(unused_port):
    """Bytes in both directions, the end of each, and both at once."""

    async def echo(reader, writer):
        while chunk := await reader.read(4096):
            writer.write(chunk)
            await writer.drain()
        writer.write(b"end")
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    sent = bytes(range(256)) * 20_000
    async with server, an_ingress(server.sockets[0].getsockname()[1], unused_port):
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_port)

        async def send():
            writer.write(sent)
            await writer.drain()
            writer.write_eof()

        _, received = await asyncio.wait_for(asyncio.gather(send(), reader.read(-1)), 60)
        writer.close()
    assert received == sent + b"end"


async def test_ingress_closes_connections_when_the_gateway_does(unused_port):
    """Without a listener behind it a client does not wait; open connections finish before it stops."""
    holding = asyncio.Event()

    async def hold(reader, writer):
        if await reader.read(1):  # not the attempt that found the door open
            holding.set()
            await reader.read(1)
            writer.write(b"late")
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with an_ingress(server.sockets[0].getsockname()[1], unused_port) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_port)
        writer.write(b"x")
        await asyncio.wait_for(holding.wait(), 60)
        server.close()
        lost, other = await asyncio.open_connection("127.0.0.1", unused_port)
        assert await asyncio.wait_for(lost.read(-1), 60) == b""
        other.close()
        process.terminate()
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(-1), 60) == b"late"
        writer.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_ingress_keeps_no_connection_the_gateway_has_closed(unused_port):
    """A client that never ends its side does not hold a connection for ever."""

    async def answer(reader, writer):
        if await reader.read(1):
            writer.write(b"answer")
        writer.close()

    def sockets(process) -> int:
        open_files = Path(f"/proc/{process.pid}/fd").iterdir()
        return sum(file.is_socket() for file in open_files)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, an_ingress(server.sockets[0].getsockname()[1], unused_port) as process:
        before = sockets(process)
        clients = [await asyncio.open_connection("127.0.0.1", unused_port) for _ in range(10)]
        for reader, writer in clients:
            writer.write(b"x")
            assert await asyncio.wait_for(reader.read(-1), 60) == b"answer"
        assert sockets(process) > before
        for _ in range(300):
            if sockets(process) <= before:
                break
            await asyncio.sleep(0.2)
        assert sockets(process) <= before
        for _, writer in clients:
            writer.close()
