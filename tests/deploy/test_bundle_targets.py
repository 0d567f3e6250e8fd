"""Loading bundles to real targets: a registry, a container engine, a full disk."""

import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from appliance.cli import cli
from appliance.errors import BundleStorageError
from appliance.sovereignty.bundle.build import build_bundle
from appliance.sovereignty.bundle.engine import Engine
from appliance.sovereignty.bundle.load import Home, Targets, load_bundle
from appliance.sovereignty.bundle.oci_push import Registry
from appliance.sovereignty.bundle.recipe import load_recipe
from appliance.sovereignty.bundle.source import ByteCount, ignore_bytes
from tests.bundles import DATABASE, GATEWAY, Workshop
from tests.certificates import Authority

START_SECONDS = 30.0
REGISTRY = "docker-registry"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop.open(tmp_path / "workshop")


@pytest.fixture
def bundle(workshop: Workshop) -> Path:
    return workshop.build()


def load(workshop: Workshop, path: Path, targets: Targets, count: ByteCount = ignore_bytes) -> bool:
    home = Home(directory=workshop.place / "data")
    return load_bundle(workshop.open_bundle(path), targets, home, lambda *_: None, lambda _: None, count)


def items(workshop: Workshop, path: Path) -> dict:
    return {item.label: item for item in workshop.open_bundle(path).manifest.items}


class RunningRegistry:
    """Debian's registry, storing below a directory."""

    def __init__(
        self, place: Path, *, asks_for_a_name: bool = False, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.place = place
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        settings = {
            "version": "0.1",
            "log": {"accesslog": {"disabled": False}},
            "storage": {"filesystem": {"rootdirectory": str(place / "storage")}},
            "http": {"addr": f"127.0.0.1:{self.port}", "secret": "x"},
        }
        if tls is not None:
            settings["http"]["tls"] = {"certificate": str(tls[0]), "key": str(tls[1])}
        if asks_for_a_name:
            settings["auth"] = {"silly": {"realm": "registry", "service": "registry"}}
        place.mkdir(parents=True)
        (place / "config.yml").write_text(yaml.safe_dump(settings))

    @contextmanager
    def running(self) -> Iterator[None]:
        with (self.place / "log").open("ab") as log:
            process = subprocess.Popen(
                [shutil.which(REGISTRY), "serve", self.place / "config.yml"], stdout=log, stderr=log
            )
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", self.port)).close()
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < until, (self.place / "log").read_text()[-2000:]
                    assert process.poll() is None, (self.place / "log").read_text()[-2000:]
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(30)

    def uploads(self) -> int:
        """How many blobs were sent to it so far."""
        return (self.place / "log").read_text().count('"PUT /v2/') - self.manifests()

    def manifests(self) -> int:
        return sum(
            '"PUT /v2/' in line and "/manifests/" in line
            for line in (self.place / "log").read_text().splitlines()
        )

    def target(
        self,
        prefix: str = "",
        credentials: tuple[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Targets:
        return Targets(registry=Registry(url=f"{self.url}{prefix}", credentials=credentials, tls=tls))


@pytest.fixture
def registry(tmp_path: Path) -> RunningRegistry:
    if shutil.which(REGISTRY) is None:
        pytest.skip(f"THE DEBIAN PACKAGE {REGISTRY} IS MISSING: no bundle is pushed to a registry here")
    return RunningRegistry(tmp_path / "registry")


def pulled(registry: RunningRegistry, repository: str, tag: str) -> tuple[str, list[bytes]]:
    """What another client gets: the digest, and configuration and layers as bytes."""
    accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
    answer = httpx.get(f"{registry.url}/v2/{repository}/manifests/{tag}", headers=accept)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    digests = [document["config"]["digest"], *(layer["digest"] for layer in document["layers"])]
    blobs = [httpx.get(f"{registry.url}/v2/{repository}/blobs/{digest}").content for digest in digests]
    return answer.headers["Docker-Content-Digest"], blobs


def test_images_and_charts_are_in_the_registry_under_their_digests(registry, workshop, bundle):
    """By tag and by digest; the host of another registry is left off the name."""
    with registry.running():
        assert load(workshop, bundle, registry.target("/site"))
        for label, repository, tag in (
            (GATEWAY, "site/sovereign-appliance/gateway", "1.0.0"),
            (DATABASE, "site/library/postgres", "15"),
            ("chart/sovereign-appliance:1.0.0", "site/charts/sovereign-appliance", "1.0.0"),
        ):
            digest = items(workshop, bundle)[label].digest
            assert pulled(registry, repository, tag) == pulled(registry, repository, digest)
            assert pulled(registry, repository, tag)[0] == digest
        chart = pulled(registry, "site/charts/sovereign-appliance", "1.0.0")[1]
        assert chart[1] == (workshop.place / "inputs-1.0.0" / "chart.tgz").read_bytes()


def test_what_is_sent_to_the_registry_is_counted(registry, workshop, bundle):
    """After what was read to be verified; to the last byte, unless the registry has some of it."""
    counts: list[list[tuple[int, int]]] = []
    with registry.running():
        for path in (bundle, workshop.build("1.1.0")):
            counts.append([])
            load(workshop, path, registry.target(), lambda *count: counts[-1].append(count))
    for number, found in enumerate(counts):
        at = next(at for at in range(1, len(found)) if found[at][0] < found[at - 1][0])
        sent = found[at:]
        assert sent == sorted(sent)
        assert (sent[-1][0] == sent[-1][1]) is (number == 0)


def test_what_the_registry_has_is_not_sent_again(registry, workshop, bundle):
    """Not in a second load, and of a newer version only new blobs."""
    with registry.running():
        load(workshop, bundle, registry.target())
        before = registry.uploads()
        assert before > 5
        assert not load(workshop, bundle, registry.target())
        assert registry.uploads() == before
        newer = workshop.build("1.1.0")
        load(workshop, newer, registry.target())
        # The gateway's configuration and one layer; the chart and its configuration.
        assert registry.uploads() == before + 4


def test_a_moved_tag_is_corrected(registry, workshop, bundle):
    """The tag then names the bundle's image again."""
    with registry.running():
        load(workshop, bundle, registry.target())
        accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        repository = f"{registry.url}/v2/sovereign-appliance/gateway/manifests"
        manifest = httpx.get(f"{repository}/1.0.0", headers=accept).json()
        manifest["layers"] = manifest["layers"][:1]
        moved = httpx.put(
            f"{repository}/1.0.0",
            content=json.dumps(manifest),
            headers={"Content-Type": "application/vnd.oci.image.manifest.v1+json"},
        )
        assert moved.status_code == 201
        assert load(workshop, bundle, registry.target())
        digest = items(workshop, bundle)[GATEWAY].digest
        assert pulled(registry, "sovereign-appliance/gateway", "1.0.0")[0] == digest


def test_lost_registry_is_one_error_line_and_the_next_run_resumes(registry, workshop, bundle):
    """Nothing is remembered as loaded until all of it is there."""
    with pytest.raises(BundleStorageError, match="cannot push"):
        load(workshop, bundle, registry.target())
    assert not (workshop.place / "data" / "bundle.json").exists()
    with registry.running():
        assert load(workshop, bundle, registry.target())


def test_a_registry_that_asks_for_a_name_gets_one(tmp_path, registry, workshop, bundle):
    """Without credentials the error names them."""
    closed = RunningRegistry(tmp_path / "closed", asks_for_a_name=True)
    with closed.running():
        with pytest.raises(BundleStorageError, match="requires a user name and password"):
            load(workshop, bundle, closed.target())
        assert load(workshop, bundle, closed.target(credentials=("site", "secret")))
    assert "secret" not in (closed.place / "log").read_text()


def test_registry_certificate_is_verified_with_the_sites_authority(tmp_path, registry, workshop, bundle):
    """And refused without it."""
    authority = Authority("site")
    files = authority.issue(tmp_path, "registry", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    (tmp_path / "ca.pem").write_text(authority.pem)
    secret = RunningRegistry(tmp_path / "secret", tls=(files.certificate, files.key))
    believing = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with secret.running():
        with pytest.raises(BundleStorageError, match="certificate"):
            load(workshop, bundle, secret.target(tls=ssl.create_default_context()))
        assert load(workshop, bundle, secret.target(tls=believing))


def test_a_registry_that_sends_uploads_elsewhere_is_refused(workshop, bundle):
    """Name and password of one registry are not for another machine."""

    class Elsewhere(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def do_POST(self) -> None:
            self.send_response(202)
            self.send_header("Location", "http://192.0.2.1/upload")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever).start()
        target = Registry(url=f"http://127.0.0.1:{server.server_port}", credentials=("a", "b"), tls=None)
        try:
            with pytest.raises(BundleStorageError, match=r"redirects uploads to http://192\.0\.2\.1"):
                load(workshop, bundle, Targets(registry=target))
        finally:
            server.shutdown()


class TestEngine:
    """Images in a container engine, without a registry."""

    @pytest.fixture
    def docker(self, engine) -> Engine:
        host = engine.environment["DOCKER_HOST"]
        return Engine(command=["/usr/bin/docker", "--host", host], machine=os.uname().machine)

    def test_images_are_in_the_engine_under_the_ids_of_the_manifest(self, engine, docker, workshop, bundle):
        """Saved or OCI, compressed or not; a second load has nothing to do."""
        assert load(workshop, bundle, Targets(engine=docker))
        for label, reference in ((GATEWAY, GATEWAY), (DATABASE, "postgres:15")):
            found = engine.docker("image", "inspect", "--format", "{{.Id}}", reference)
            assert found == items(workshop, bundle)[label].image_id
        assert not load(workshop, bundle, Targets(engine=docker))
        engine.docker("image", "rm", "--force", GATEWAY)
        assert load(workshop, bundle, Targets(engine=docker))

    def test_engine_image_round_trips_through_a_bundle(self, engine, docker, workshop):
        """The real `docker save`, not our idea of it."""
        first = workshop.build()
        load(workshop, first, Targets(engine=docker))
        recipe = workshop.recipe("1.1.0")
        for reference, name in ((GATEWAY, "gateway.tar"), ("postgres:15", "postgres.tar")):
            engine.docker("save", "--output", recipe.parent / name, reference)
        (recipe.parent / "compose.yaml").write_text("services: {}\n")
        document = yaml.safe_load(recipe.read_text()) | {"charts": []}
        document["images"][1]["reference"] = "postgres:15"
        recipe.write_text(yaml.safe_dump(document))
        second = workshop.place / "second"
        build_bundle(load_recipe(recipe), recipe.parent, second, workshop.stamp, None)
        workshop.verify(second)
        old, new = items(workshop, first), items(workshop, second)
        assert new[GATEWAY].image_id == old[GATEWAY].image_id
        assert new["postgres:15"].image_id == old[DATABASE].image_id

    def test_an_engine_that_refuses_or_is_not_there_is_one_line(self, docker, workshop, bundle):
        """The engine's own last line, or that it cannot be run."""
        with pytest.raises(BundleStorageError, match="cannot list the images of no-such-engine") as caught:
            load(workshop, bundle, Targets(engine=Engine(command=["no-such-engine"], machine="x86_64")))
        assert "\n" not in str(caught.value)
        unreachable = Engine(command=["/usr/bin/docker", "--host", "unix:///nonexistent"], machine="x86_64")
        with pytest.raises(BundleStorageError, match="did not load"):
            load(workshop, bundle, Targets(engine=unreachable))


@pytest.mark.parametrize("form", ["oci-archive", "docker-archive", "oci"])
def test_third_party_tool_reads_and_writes_the_oci_layout(workshop, bundle, form):
    """Skopeo takes images out as any OCI layout; digests stay, or the id, where it writes the older form."""
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("THE DEBIAN PACKAGE skopeo IS MISSING: no other tool reads a bundle here")
    recipe = workshop.recipe("1.1.0")
    for reference, name in ((GATEWAY, "gateway.tar"), (DATABASE, "postgres.tar")):
        (recipe.parent / name).unlink()
        target = f"{form}:{recipe.parent / name}:{reference}"
        # Left to itself it would compress layers, and call the image by another digest.
        keep = [] if form == "docker-archive" else ["--preserve-digests"]
        words = [skopeo, "--insecure-policy", "copy", *keep, f"oci:{bundle}:{reference}", target]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    if form == "docker-archive":
        (recipe.parent / "compose.yaml").write_text("services: {}\n")
        document = yaml.safe_load(recipe.read_text()) | {"charts": []}
        recipe.write_text(yaml.safe_dump(document))
    again = workshop.place / "again"
    build_bundle(load_recipe(recipe), recipe.parent, again, workshop.stamp, None)
    workshop.verify(again)
    for reference in (GATEWAY, DATABASE):
        old, new = items(workshop, bundle)[reference], items(workshop, again)[reference]
        assert new.image_id == old.image_id
        assert form == "docker-archive" or new.digest == old.digest


def test_one_command_brings_a_bundle_everywhere(tmp_path, engine, registry, workshop, bundle):
    """Models, files, engine and registry, as an installer would say it."""
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "bundle-keys.txt").write_text(workshop.signer.vkey)
    (tmp_path / "credentials").write_text("site:secret\n")
    closed = RunningRegistry(tmp_path / "closed", asks_for_a_name=True)
    words = [
        "bundle",
        "load",
        bundle,
        "--data",
        data,
        "--models",
        tmp_path / "models",
        "--files",
        tmp_path / "files",
    ]
    words += ["--engine", f"/usr/bin/docker --host {engine.environment['DOCKER_HOST']}"]
    words += ["--registry", f"{closed.url}/site", "--registry-credentials", tmp_path / "credentials"]
    with closed.running():
        first = CliRunner().invoke(cli, [str(word) for word in words])
        assert first.exception is None, first.exception
        assert "1.0.0 is loaded" in first.stdout
        again = CliRunner().invoke(cli, [str(word) for word in words])
        assert "nothing changed" in again.stdout
    assert engine.docker("image", "inspect", "--format", "{{.Id}}", GATEWAY)
    assert (tmp_path / "models" / "demo" / "target" / "current" / "config.json").exists()
    assert (
        tmp_path / "files" / "sovereign-appliance" / "current" / "files" / "compose" / "compose.yaml"
    ).exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(
            f"NO SMALL DISK CAN BE MOUNTED, SO A FULL ONE IS NOT TRIED HERE: {mounted.stderr.strip()}"
        )
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(small_disk, workshop):
    """With the missing space; the previous version stays active."""
    targets = Targets(models=small_disk / "models")
    load(workshop, workshop.build(), targets)
    current = small_disk / "models" / "demo" / "target" / "current"
    before = current.resolve()
    large = workshop.build("1.1.0", weights=os.urandom(3 * 2**20))
    with pytest.raises(BundleStorageError, match=r"free \d+ more"):
        load(workshop, large, targets)
    assert current.resolve() == before


def test_disk_full_during_load_is_one_error_line_and_load_resumes(small_disk, workshop, monkeypatch):
    """Another process used the free space after it was counted."""
    targets = Targets(models=small_disk / "models")
    load(workshop, workshop.build(), targets)
    current = small_disk / "models" / "demo" / "target" / "current"
    before = current.resolve()
    large = workshop.build("1.1.0", weights=os.urandom(2**20))
    (small_disk / "others").write_bytes(bytes(2**20 + 2**19))
    with monkeypatch.context() as patch:
        patch.setattr("appliance.sovereignty.bundle.load.check_room", lambda _: None)
        with pytest.raises(BundleStorageError, match=r"the disk is full .*the previous version stays"):
            load(workshop, large, targets)
    assert current.resolve() == before
    (small_disk / "others").unlink()
    load(workshop, large, targets)
    assert current.resolve() != before
