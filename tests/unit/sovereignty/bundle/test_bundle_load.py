"""The version in service is unchanged until a complete new version replaces it."""

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from appliance.errors import (
    AuditUnavailableError,
    BundleRefusedError,
    BundleRollbackError,
    BundleStorageError,
    ConfigurationError,
)
from appliance.sovereignty.bundle.build import build_bundle, make_difference
from appliance.sovereignty.bundle.bundle_verifier import verify_bundle
from appliance.sovereignty.bundle.copying import PARTIAL
from appliance.sovereignty.bundle.engine import Engine, saved_form
from appliance.sovereignty.bundle.installed import InstalledBundles, ItemChange, make_plan, read_installed
from appliance.sovereignty.bundle.load import Home, Targets, copy_model, load_bundle
from appliance.sovereignty.bundle.manifest import BundleManifest, ItemKind
from appliance.sovereignty.bundle.oci import Platform
from appliance.sovereignty.bundle.oci_push import Registry
from appliance.sovereignty.bundle.parts import split
from appliance.sovereignty.bundle.placing import check_room
from appliance.sovereignty.bundle.recipe import load_recipe
from tests.bundles import GATEWAY, Workshop, all_files, tar_of, write_saved_image

ROOT = Path(__file__).parents[4]
WEIGHTS = "model.safetensors"
SAID = {"licence": "Apache-2.0", "origin": "https://example.com/source"}


class Site:
    """An installation for bundles, and the entries of its audit log."""

    def __init__(self, place: Path, workshop: Workshop) -> None:
        self.place = place
        self.workshop = workshop
        self.home = Home(directory=place / "data")
        self.targets = Targets(models=place / "models", files=place / "files")
        self.recorded: list[tuple[str, str, str]] = []
        self.said: list[str] = []

    def load(self, path: Path, *, base: Path | None = None) -> bool:
        bundle = self.workshop.open_bundle(path, base=base)
        return load_bundle(bundle, self.targets, self.home, self.record, self.said.append)

    def record(self, manifest: BundleManifest, signer: str) -> None:
        self.recorded.append((manifest.version, manifest.digest, signer))

    @property
    def serving(self) -> Path:
        """The model in service."""
        return self.place / "models" / "demo" / "target" / "current"

    def refused(self, kind: type[Exception], path: Path, **how: object) -> str:
        with pytest.raises(kind) as caught:
            self.load(path, **how)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def site(tmp_path, workshop) -> Site:
    return Site(tmp_path / "site", workshop)


@pytest.fixture
def newer(workshop) -> Path:
    return workshop.build("1.1.0", weights=b"weights, second edition" * 100)


def test_models_and_files_are_placed_in_their_directories(site, bundle):
    """Weights under their name, charts, compose files, wheels and bills of materials next to each other."""
    assert site.load(bundle)
    inputs = site.workshop.place / "inputs-1.0.0"
    assert {
        name: content for name, content in all_files(inputs / "model").items() if name[0] != "."
    } == all_files(site.serving)
    assert sorted(all_files(site.place / "files" / "sovereign-appliance" / "current")) == [
        "charts/sovereign-appliance-1.0.0.tgz",
        "files/compose/compose.yaml",
        "sbom/image/sovereign-appliance/gateway/1.0.0/sbom.cdx.json",
        "wheels/verifier/verifier-1.0-py3-none-any.whl",
    ]


def test_verifier_of_the_audit_log_is_a_signed_file_of_the_documented_bundle(site, tmp_path):
    """An auditor gets it from the release, not from who exports the log."""
    page = (ROOT / "docs/how-to/install-air-gapped.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load(re.search(r"```yaml\n(name: .*?)```", page, re.DOTALL)[1])
    (entry,) = (each for each in recipe["files"] if each["name"] == "audit-verifier")
    # A stand-in: prompts of tests are code, which nothing else may store.
    verifier = tmp_path / "verify.py"
    verifier.write_text("verifies")
    files = [str(verifier if path.endswith("/verify.py") else ROOT / path) for path in entry["files"]]
    bundle = site.workshop.build(files=[entry | {"files": files}])
    manifest = BundleManifest.decode((bundle / "MANIFEST.json").read_bytes(), "MANIFEST.json")
    stored = hashlib.sha256(b"verifies").hexdigest()
    assert stored in {file.sha256 for file in manifest.files}
    site.load(bundle)
    loaded = site.place / "files/sovereign-appliance/current/files/audit-verifier"
    assert sorted(all_files(loaded)) == ["verify.py", "verify.py.sha256"]
    assert (loaded / "verify.py").read_text() == "verifies"


def test_load_is_recorded_with_the_manifests_digest(site, bundle):
    """And the journal is gone."""
    site.load(bundle)
    manifest = BundleManifest.decode((bundle / "MANIFEST.json").read_bytes(), "MANIFEST.json")
    assert site.recorded == [("1.0.0", manifest.digest, "example.com/releases")]
    loaded = read_installed(site.home.installed).find("sovereign-appliance")
    assert (loaded.version, loaded.manifest, loaded.items) == ("1.0.0", manifest.digest, manifest.items)
    assert not site.home.journal.exists()


def test_loading_again_changes_nothing_and_records_nothing(site, bundle):
    """Not even a file's inode."""
    site.load(bundle)
    before = {path: path.stat().st_ino for path in site.place.rglob("*") if "models" in path.parts}
    assert not site.load(bundle)
    assert {path: path.stat().st_ino for path in site.place.rglob("*") if "models" in path.parts} == before
    assert len(site.recorded) == 1


def test_newer_version_replaces_the_link_and_keeps_the_previous(site, bundle, newer):
    """Files that did not change are the same file on the disk, not a second copy."""
    site.load(bundle)
    old = site.serving.resolve()
    site.load(newer)
    assert site.serving.resolve() != old
    assert (site.serving / WEIGHTS).read_bytes() == b"weights, second edition" * 100
    assert (old / WEIGHTS).read_bytes() == b"weights, first edition" * 100
    assert (site.serving / "config.json").stat().st_ino == (old / "config.json").stat().st_ino
    assert [version for version, *_ in site.recorded] == ["1.0.0", "1.1.0"]


@pytest.mark.parametrize("form", ["difference", "parts"])
def test_a_difference_and_parts_load_from_where_they_are(site, bundle, newer, form):
    """The base is read where the difference leaves something out; parts are not joined first."""
    site.load(bundle)
    opened = site.workshop.open_bundle(newer)
    if form == "difference":
        make_difference(site.workshop.open_bundle(bundle), opened, site.place / form)
    else:
        split(opened.head, opened.contents, site.place / form, 4096)
    site.load(site.place / form, base=bundle if form == "difference" else None)
    assert (site.serving / WEIGHTS).read_bytes() == b"weights, second edition" * 100


def test_workers_of_another_account_can_read_the_weights_whatever_the_umask(site, bundle):
    """Files are read-only for everyone, directories can be passed."""
    before = os.umask(0o077)
    try:
        site.load(bundle)
    finally:
        os.umask(before)
    for path in (site.place / "models").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o444), path
    assert site.home.directory.stat().st_mode & 0o777 == 0o700


def test_engine_failure_reports_its_message(site, workshop):
    """It closes the pipe while an image is still coming, and its last line is the reason."""
    recipe = workshop.recipe()
    write_saved_image(recipe.parent / "gateway.tar", GATEWAY, os.urandom(2**20))
    build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "large", workshop.stamp, None)
    engine = Engine(command=["sh", "-c", "echo first >&2; echo no room >&2; exit 3"], machine="x86_64")
    site.targets = Targets(engine=engine)
    message = site.refused(BundleStorageError, workshop.place / "large")
    assert "sh did not load" in message
    assert "no room; the previous version stays in service" in message


def test_an_image_for_another_machine_is_not_loaded(site, bundle):
    """An index that has no image for this one would run nothing."""
    site.targets = Targets(engine=Engine(command=["sh", "-c", "exit 1"], machine="riscv64"))
    trees = site.workshop.open_bundle(bundle).trees()
    tree = next(each for each in trees if each.item.label == GATEWAY)
    there = replace(tree.images[0], platform=Platform(architecture="amd64", os="linux"))
    with pytest.raises(BundleStorageError, match=r"not for this machine \(riscv64\)"):
        site.targets.engine.choose(replace(tree, images=(there,)))


ENGINE = """
import io, json, pathlib, sys, tarfile
state, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
images = json.loads(state.read_text()) if state.exists() else {}
if arguments == ["load"]:
    with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as tar:
        (listed,) = json.load(tar.extractfile("manifest.json"))
        images[listed["RepoTags"][0]] = json.load(tar.extractfile(listed["Config"]))
    state.write_text(json.dumps(images))
elif arguments[-1] in images:
    image, form = images[arguments[-1]], arguments[3]
    form = form.replace("{{json .RootFS.Layers}}", json.dumps(image["rootfs"]["diff_ids"]))
    print(form.replace("{{json .Config}}", json.dumps(image["config"])))
else:
    sys.exit(1)
"""


def test_an_image_of_the_same_layers_that_is_run_in_another_way_is_loaded(site, workshop):
    """Under the same tag; equal layers may run another command."""
    script, state = site.place / "engine.py", site.place / "engine.json"
    site.place.mkdir()
    script.write_text(ENGINE)
    command = [sys.executable, str(script), str(state)]
    site.targets = Targets(engine=Engine(command=command, machine="x86_64"))
    first = workshop.recipe("1.0.0").parent / "gateway.tar"
    recipe = workshop.recipe("1.1.0")
    with tarfile.open(first) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    config = json.loads(files["config.json"])
    config["config"]["User"] = "65532"
    tarred = tar_of(files | {"config.json": json.dumps(config).encode()})
    (recipe.parent / "gateway.tar").write_bytes(tarred)
    build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "second", workshop.stamp, None)
    site.load(workshop.build("1.0.0"))
    assert site.load(workshop.place / "second")
    assert json.loads(state.read_text())[GATEWAY]["config"]["User"] == "65532"
    assert not site.load(workshop.place / "second")


def test_medium_that_changes_between_reads_changes_no_image(workshop, bundle):
    """The user of an image is read again for the engine, after all was verified."""
    opened = workshop.open_bundle(bundle)
    tree = next(each for each in verify_bundle(opened) if each.item.label == GATEWAY)
    (image,) = tree.images
    path = bundle / image.config.path
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"/hello", b"/other"))
    with pytest.raises(BundleRefusedError, match="does not have the hash"):
        list(saved_form(image, GATEWAY, opened))


def test_a_file_that_is_named_like_an_unfinished_one_is_loaded(site, workshop):
    """Files of a bundle are not leftovers of a crash."""
    recipe = workshop.recipe()
    (recipe.parent / "model" / f"vocab{PARTIAL}").write_bytes(b"a file")
    (recipe.parent / "model" / f"more{PARTIAL}").mkdir()
    (recipe.parent / "model" / f"more{PARTIAL}" / "inner").write_bytes(b"another")
    build_bundle(load_recipe(recipe), recipe.parent, workshop.place / "odd", workshop.stamp, None)
    site.load(workshop.place / "odd")
    assert (site.serving / f"vocab{PARTIAL}").read_bytes() == b"a file"
    assert (site.serving / f"more{PARTIAL}" / "inner").read_bytes() == b"another"


@pytest.mark.parametrize("location", [None, "", "http://["])
def test_registry_without_an_upload_url_is_refused(site, bundle, location):
    class Silent(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(404)

        def do_POST(self) -> None:
            self.answer(202)

        def answer(self, status: int) -> None:
            self.send_response(status)
            if status == 202 and location is not None:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        site.targets = Targets(registry=Registry(url=url, credentials=None, tls=None))
        try:
            assert "returned no upload URL" in site.refused(BundleStorageError, bundle)
        finally:
            server.shutdown()


def test_damaged_file_of_the_version_in_service_is_repaired(site, bundle):
    """Loading the same bundle again repairs what a disk lost, file by file."""
    site.load(bundle)
    weights = site.serving / WEIGHTS
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"X")
    assert site.load(bundle)
    assert weights.read_bytes() == b"weights, first edition" * 100


def test_foreign_file_among_the_weights_is_refused(site, bundle):
    """A second tokenizer would change the output of a model."""
    site.load(bundle)
    (site.serving / "tokenizer.json").write_text("{}")
    assert "is not in the bundle" in site.refused(BundleStorageError, bundle)


class TestRollback:
    """An older bundle is never loaded after a newer one."""

    def test_an_older_bundle_is_refused_though_properly_signed(self, site, bundle, newer):
        """Nothing is touched."""
        site.load(newer)
        before = all_files(site.place)
        assert "is not newer than installed 1.1.0" in site.refused(BundleRollbackError, bundle)
        assert all_files(site.place) == before

    def test_the_same_version_made_earlier_or_at_the_same_time_is_older(self, site, workshop, bundle):
        """A version can be built twice; only a later build may follow."""
        site.load(bundle)
        for seconds, follows in ((-1, False), (0, False), (1, True)):
            other = workshop.build(name=f"other{seconds}")
            manifest = BundleManifest.decode((other / "MANIFEST.json").read_bytes(), "MANIFEST.json")
            changed = manifest.model_copy(
                update={"created": manifest.created + seconds, "key_not_after": manifest.key_not_after + 1}
            )
            workshop.resign(other, changed)
            if follows:
                assert site.load(other)
            else:
                assert "is not newer" in site.refused(BundleRollbackError, other)

    def test_required_intermediate_version_is_named(self, site, workshop, bundle):
        """The bundle says from which version on it can follow."""
        site.load(bundle)
        later = workshop.build("2.0.0", upgrade_from="1.5.0")
        assert "load 1.5.0 first" in site.refused(BundleRollbackError, later)

    def test_versions_are_compared_as_numbers(self, site, workshop):
        """1.10 follows 1.9."""
        site.load(workshop.build("1.9.0"))
        assert site.load(workshop.build("1.10.0"))

    def test_damaged_installed_state_is_refused(self, site, bundle, newer):
        """Otherwise damage to it would allow a rollback."""
        site.load(newer)
        site.home.installed.write_bytes(site.home.installed.read_bytes()[:-2])
        assert "restore it from a backup" in site.refused(BundleStorageError, bundle)

    def test_bundles_of_different_names_are_independent(self, site, workshop, newer):
        """A bundle of weights has its own versions."""
        site.load(newer)
        other = workshop.build("0.1.0", name="other", images=[], charts=[], rendered=[])
        manifest = BundleManifest.decode((other / "MANIFEST.json").read_bytes(), "MANIFEST.json")
        workshop.resign(other, manifest.model_copy(update={"name": "weights"}))
        site.load(other)
        names = [(each.name, each.version) for each in read_installed(site.home.installed).bundles]
        assert names == [("sovereign-appliance", "1.1.0"), ("weights", "0.1.0")]


def test_abandoned_version_is_removed(site, workshop, bundle, newer):
    """A newer one came before its load was ever finished."""
    site.load(bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.sovereignty.bundle.placing.sync_directory", killed)
        with pytest.raises(KeyboardInterrupt):
            site.load(newer)
    model = site.place / "models" / "demo" / "target"
    (model / f".begun{PARTIAL}").mkdir()
    (model / f".begun{PARTIAL}" / "half").write_bytes(b"x" * 1000)
    site.load(workshop.build("1.2.0"))
    assert not list(model.glob(".*"))


def test_two_versions_of_one_model_are_refused_before_anything_is_written(site, workshop):
    """Properly signed as they may be: there is one link, and it would be turned twice at every load."""
    model = {"version": "r1", "directory": "model", **SAID}
    two = workshop.build("1.1.0", models=[{**model, "name": f"demo/{name}"} for name in ("target", "other")])
    manifest = BundleManifest.decode((two / "MANIFEST.json").read_bytes(), "MANIFEST.json")
    opened = workshop.open_bundle(two)
    trees = [
        replace(tree, item=tree.item.model_copy(update={"name": "demo/target"}))
        if tree.item.kind is ItemKind.MODEL
        else tree
        for tree in verify_bundle(opened)
    ]
    with pytest.raises(BundleRefusedError, match="two versions of the model demo/target"):
        site.targets.placements(manifest, trees)


def killed(*_: object) -> None:
    raise KeyboardInterrupt


class TestFailures:
    """One line, and the previous version stays in service."""

    def test_a_damaged_bundle_is_refused_before_anything_is_written(self, site, bundle, newer):
        """Though the damage is in its last file."""
        site.load(bundle)
        before = all_files(site.place)
        blob = max((newer / "blobs" / "sha256").iterdir())
        blob.write_bytes(blob.read_bytes()[:-1] + b"\x00")
        site.refused(BundleRefusedError, newer)
        assert all_files(site.place) == before

    def test_what_cannot_be_recorded_is_not_put_into_service(self, site, bundle, newer, monkeypatch):
        """The audit log comes before the link; the next run resumes from there."""
        site.load(bundle)
        old = site.serving.resolve()

        def unavailable(*_: object) -> None:
            raise AuditUnavailableError("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(site, "record", unavailable)
            site.refused(AuditUnavailableError, newer)
        assert site.serving.resolve() == old
        assert read_installed(site.home.installed).find("sovereign-appliance").version == "1.0.0"
        site.load(newer)
        assert site.serving.resolve() != old

    def test_second_concurrent_load_is_refused(self, site, bundle):
        """The second one ends with an error."""
        site.load(bundle)
        with site.home.lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "another load is running" in site.refused(BundleStorageError, bundle)

    def test_disk_space_is_checked_before_writing(self, site, workshop):
        """Weights that are larger than the disk according to the manifest."""
        big = workshop.build(weights=b"x" * 1000)
        bundle = workshop.open_bundle(big)
        (file,) = [each for each in bundle.manifest.files if each.size == 1000]
        placements = site.targets.placements(bundle.manifest, bundle.trees())
        huge = file.model_copy(update={"size": 2**50})
        model = next(each for each in placements if WEIGHTS in each.files)
        model.files[WEIGHTS] = huge
        with pytest.raises(BundleStorageError, match=r"free \d+ more"):
            check_room(placements)
        assert not site.place.exists()

    def test_full_disk_keeps_the_previous_version_and_load_resumes(self, site, bundle, workshop):
        """A real limit of the kernel on the size of a file, in a separate process."""
        large = workshop.build("1.1.0", weights=b"w" * 200_000)
        site.load(bundle)
        old = site.serving.resolve()

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            message = site.refused(BundleStorageError, large)
            assert "the disk is full" in message
            assert "the previous version stays in service" in message

        assert in_a_child(limited) == 0
        assert site.serving.resolve() == old
        assert not [path for path in site.place.rglob("*.partial") if path.is_file()]
        site.load(large)
        assert (site.serving / WEIGHTS).read_bytes() == b"w" * 200_000

    def test_disk_that_reads_back_other_bytes_is_detected(self, site, bundle, monkeypatch):
        """What was written is read again before it counts."""
        monkeypatch.setattr("hashlib.file_digest", lambda *_: hashlib.sha256(b"rot"))
        assert "the disk is faulty" in site.refused(BundleStorageError, bundle)

    def test_bundle_that_cannot_be_recorded_is_not_activated(self, site, bundle, newer):
        """Otherwise any bundle newer than the previous version could follow it; the next run resumes."""
        site.load(bundle)
        old = site.serving.resolve()
        # No user can write over a directory, the superuser included.
        (site.home.directory / f"bundle.json{PARTIAL}").mkdir()
        message = site.refused(BundleStorageError, newer)
        assert "the previous version stays in service" in message
        assert site.serving.resolve() == old
        (site.home.directory / f"bundle.json{PARTIAL}").rmdir()
        site.load(newer)
        assert site.serving.resolve() != old
        assert [version for version, *_ in site.recorded] == ["1.0.0", "1.1.0"]

    def test_directory_in_place_of_the_link_is_refused(self, site, bundle):
        """An operator's own weights are not removed."""
        site.serving.mkdir(parents=True)
        (site.serving / "mine").write_text("mine")
        assert "is not a link" in site.refused(BundleStorageError, bundle)
        assert (site.serving / "mine").read_text() == "mine"


EFFECTS = ("fsync", "replace", "rename", "link", "symlink", "unlink", "chmod")
"""Calls after which something may be on the disk; a kill comes right before each of them in turn."""


def in_a_child(act: Callable[[], None]) -> int:
    """Run a function in a separate process; returns its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(point: int, act: Callable[[], None]) -> int:
    """Run something in a child that kills itself, as `kill -9` does, right before its n-th effect."""
    left = point

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return called

    def run() -> None:
        for name in EFFECTS:
            setattr(os, name, dying(getattr(os, name)))
        act()

    return in_a_child(run)


def test_load_killed_at_any_point_leaves_a_complete_version(site, workshop, bundle, newer):
    """
    `kill -9` before every flush, rename and link in turn; each time the next run ends well.

    And what may serve by then is never followed by an older bundle, though it is newer than the one before.
    """
    between = workshop.build("1.0.5")
    site.load(bundle)
    old = site.serving.resolve()
    saved = site.place.with_name("saved")
    shutil.copytree(site.place, saved, symlinks=True)
    point, killed, resumed, guarded = 0, 0, 0, 0
    while True:
        status = killed_at(point, lambda: site.load(newer))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        weights = (site.serving / WEIGHTS).read_bytes()
        versions = {b"weights, first edition" * 100: "1.0.0", b"weights, second edition" * 100: "1.1.0"}
        assert weights in versions
        remembered = read_installed(site.home.installed).find("sovereign-appliance").version
        # Never in service before it is recorded, neither weights nor files.
        served = {str(link.readlink()).partition("-")[0] for link in site.place.rglob("current")}
        assert max(versions[weights], *(served - {"r1"})) <= remembered
        if remembered == "1.1.0":
            site.refused(BundleRollbackError, between)
            guarded += 1
        site.said.clear()
        site.load(newer)
        resumed += "resuming an interrupted load" in site.said
        assert (site.serving / WEIGHTS).read_bytes() == b"weights, second edition" * 100
        assert not list(site.place.rglob("*.partial*"))
        assert {path.stat().st_mode & 0o777 for path in site.serving.rglob("*") if path.is_file()} == {0o444}
        assert not site.home.journal.exists()
        shutil.rmtree(site.place)
        shutil.copytree(saved, site.place, symlinks=True)
        assert site.serving.resolve() == old
        point += 1
    assert killed > 20
    assert resumed > 2
    # At least before, between and after the two links.
    assert guarded > 3


def test_plan_lists_changed_and_removed_items(workshop, bundle, newer):
    """By kind and name, against the installed state."""
    old = BundleManifest.decode((bundle / "MANIFEST.json").read_bytes(), "MANIFEST.json")
    new = BundleManifest.decode((newer / "MANIFEST.json").read_bytes(), "MANIFEST.json")
    loaded = InstalledBundles().with_bundle(old, "x").find(old.name)
    assert {step.change for step in make_plan(old, None)} == {ItemChange.NEW}
    assert {step.change for step in make_plan(old, loaded)} == {ItemChange.SAME}
    changes = {f"{step.item.kind} {step.item.name}": step.change for step in make_plan(new, loaded)}
    assert changes["model demo/target"] == ItemChange.CHANGED
    assert changes["image docker.io/library/postgres"] == ItemChange.SAME
    smaller = new.model_copy(update={"items": tuple(item for item in new.items if item.kind != "wheels")})
    gone = [step.item.label for step in make_plan(smaller, loaded) if step.change is ItemChange.GONE]
    assert gone == ["wheels/verifier:1.0"]


def test_installed_state_is_one_canonical_file(site, bundle):
    """So that a byte changed in it shows."""
    site.load(bundle)
    content = site.home.installed.read_bytes()
    assert InstalledBundles.decode(content, "x").encode() == content
    assert json.loads(content)["bundles"][0]["version"] == "1.0.0"


def test_weights_without_a_bundle_are_placed_like_those_of_one(site, tmp_path):
    """A second run changes nothing; other weights get another directory, and the link moves last."""
    source = tmp_path / "weights"
    (source / "tokenizer").mkdir(parents=True)
    (source / "tokenizer" / "vocab.json").write_text("{}")
    (source / WEIGHTS).write_bytes(b"one")
    (source / ".cache").write_bytes(b"left by a download")

    def copy(name: str = "llama") -> bool:
        return copy_model(source, name, site.targets.models, site.home, site.said.append)

    assert copy()
    current = site.targets.models / "llama" / "current"
    first = current.resolve()
    assert all_files(current) == {"tokenizer/vocab.json": b"{}", WEIGHTS: b"one"}
    assert not copy()
    (source / WEIGHTS).write_bytes(b"two")
    assert copy()
    assert ((current / WEIGHTS).read_bytes(), (first / WEIGHTS).read_bytes()) == (b"two", b"one")
    with pytest.raises(ConfigurationError, match="not a name"):
        copy("../elsewhere")


def test_a_copy_that_was_interrupted_resumes(site, tmp_path):
    """As a crash leaves it: a complete file under the temporary name, half of another, no link."""
    source = tmp_path / "weights"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / WEIGHTS).write_bytes(b"weights" * 100)
    models = site.targets.models
    copy_model(source, "llama", models, site.home, site.said.append)
    current = models / "llama" / "current"
    final = current.resolve()
    current.unlink()
    (final / WEIGHTS).unlink()
    (final / f"{WEIGHTS}{PARTIAL}").write_bytes(b"wei")
    kept = (final / "config.json").stat().st_ino
    final.rename(final.with_name(f".{final.name}{PARTIAL}"))
    assert copy_model(source, "llama", models, site.home, site.said.append)
    assert "1 of 2 files written" in site.said[-1]
    assert (current / "config.json").stat().st_ino == kept
    assert (current / WEIGHTS).read_bytes() == b"weights" * 100
    assert not list(final.parent.rglob(f"*{PARTIAL}"))
