"""`appliance bundle`, from the creation of a key to the entry in the audit log; each refusal is one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from appliance.audit.signing_keys import create_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.cli import cli
from appliance.errors import (
    BundleIncompleteError,
    BundleRefusedError,
    BundleRollbackError,
    ConfigurationError,
)
from appliance.sovereignty.bundle.load import LoadJournal
from tests.bundles import CREATED, Workshop, all_files

BUILD = ("--key-name", "example.com/releases", "--key-not-after", "2099-12-31", "--created", CREATED)


def invoke(*words: object):
    return CliRunner().invoke(cli, ["bundle", *map(str, words)], env={"SOURCE_DATE_EPOCH": None})


def run(*words: object) -> str:
    result = invoke(*words)
    assert result.exception is None, result.exception
    return result.stdout


def refused(kind: type[Exception], *words: object) -> str:
    result = invoke(*words)
    assert isinstance(result.exception, kind), (result.exception, result.output)
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A builder with recipes of two versions and a key, and an enclave that trusts it."""
    workshop = Workshop.open(tmp_path / "builder")
    (tmp_path / "builder" / "release.key").unlink()
    for version in ("1.0.0", "1.1.0"):
        workshop.recipe(version, weights=version.encode() * 1000)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    key = run("new-key", tmp_path / "builder" / "release.key", "--key-name", "example.com/releases")
    (data / "bundle-keys.txt").write_text(f"# the release key\n{key}")
    create_signing_key(data / "audit.key")
    SqlAuditStore(f"sqlite:///{data}/audit.db").close()
    for version in ("1.0.0", "1.1.0"):
        run(
            "build",
            recipe(tmp_path, version),
            tmp_path / version,
            "--key",
            tmp_path / "builder" / "release.key",
            *BUILD,
        )
    return tmp_path


def recipe(place: Path, version: str) -> Path:
    return place / "builder" / f"inputs-{version}" / "bundle.yaml"


def entries(place: Path) -> list[dict]:
    store = SqlAuditStore(f"sqlite:///{place}/data/audit.db")
    try:
        return [json.loads(leaf.leaf) for leaf in store.leaves(0, store.head().size)]
    finally:
        store.close()


def test_bundle_is_built_split_verified_and_loaded(place):
    """Build, difference, split, verify, plan, join, load and record."""
    data = ("--data", place / "data")
    targets = ("--models", place / "models", "--files", place / "files")
    assert "is complete and signed by example.com/releases" in run("verify", place / "1.0.0", *data)
    assert "1.0.0 is loaded" in run("load", place / "1.0.0", *targets, *data)
    assert "nothing changed" in run("load", place / "1.0.0", *targets, *data)

    assert "bytes saved" in run("diff", place / "1.0.0", place / "1.1.0", place / "difference")
    assert "parts" in run("split", place / "difference", place / "carrier", "--part-bytes", 8000)
    carried = ("--base", place / "1.0.0", *data)
    run("verify", place / "carrier", *carried)
    plan = run("plan", place / "carrier", *targets, *carried)
    assert plan.startswith("sovereign-appliance 1.0.0 -> 1.1.0\n")
    assert "changed model   demo/target r1\n" in plan
    assert "same    wheels  verifier 1.0\n" in plan
    assert "bytes needed" in plan
    run("join", place / "carrier", place / "joined", *carried)
    assert all_files(place / "joined") == all_files(place / "1.1.0")
    run("load", place / "carrier", *targets, *carried)

    digest = run("verify", place / "1.1.0", *data).splitlines()[1]
    kinds = [(entry["type"], entry["version"], entry["signer"]) for entry in entries(place)]
    assert kinds == [("bundle.installed", version, "example.com/releases") for version in ("1.0.0", "1.1.0")]
    assert (entries(place)[1]["digest"], entries(place)[1]["bundle"]) == (digest, "sovereign-appliance")
    assert "is not newer" in refused(BundleRollbackError, "load", place / "1.0.0", *targets, *data)
    assert "is not newer" in refused(BundleRollbackError, "plan", place / "1.0.0", *data)


def test_two_builds_by_the_command_are_the_same(place):
    """The time comes from the command line or from SOURCE_DATE_EPOCH."""
    words = [
        "bundle",
        "build",
        recipe(place, "1.0.0"),
        place / "again",
        "--key",
        place / "builder" / "release.key",
    ]
    result = CliRunner().invoke(
        cli, [*map(str, (*words, *BUILD[:-2]))], env={"SOURCE_DATE_EPOCH": str(CREATED)}
    )
    assert result.exception is None, result.output
    assert all_files(place / "again") == all_files(place / "1.0.0")


def test_other_accounts_can_read_what_is_carried_whatever_the_umask(place):
    """Another account loads it at the site."""
    before = os.umask(0o077)
    try:
        run("split", place / "1.0.0", place / "carrier", "--part-bytes", 8000)
        run("diff", place / "1.0.0", place / "1.1.0", place / "difference")
    finally:
        os.umask(before)
    made = [*(place / "carrier").rglob("*"), *(place / "difference").rglob("*")]
    assert made
    assert [path for path in made if not path.stat().st_mode & 0o004] == []


def test_interrupted_load_reports_that_it_resumes(place):
    """From its journal."""
    manifest = run("verify", place / "1.0.0", "--data", place / "data").splitlines()[1]
    LoadJournal(place / "data" / "bundle.journal", manifest).note("recorded")
    result = invoke("load", place / "1.0.0", "--models", place / "models", "--data", place / "data")
    assert "resuming an interrupted load" in result.stderr
    assert entries(place) == []


def test_an_installation_that_was_never_started_has_no_log_yet(place):
    """The load continues, and reports where it is recorded."""
    (place / "data" / "audit.db").unlink()
    result = invoke("load", place / "1.0.0", "--models", place / "models", "--data", place / "data")
    assert result.exception is None
    assert "in bundle.json only" in result.stderr


def test_every_refusal_is_one_line(place):
    """The problem, and what to do."""
    data = ("--data", place / "data")
    assert "pass a destination" in refused(ConfigurationError, "load", place / "1.0.0", *data)
    assert "no bundle at" in refused(ConfigurationError, "verify", place / "none", *data)
    assert "cannot read the trusted keys" in refused(
        ConfigurationError, "verify", place / "1.0.0", "--data", place / "elsewhere"
    )
    run("diff", place / "1.0.0", place / "1.1.0", place / "difference")
    assert "--base" in refused(BundleIncompleteError, "verify", place / "difference", *data)
    key = ("--key", place / "builder" / "release.key", "--key-name", "example.com/releases", "--created", 1)
    assert "2027-12-31" in refused(
        ConfigurationError, "build", recipe(place, "1.0.0"), place / "x", *key, "--key-not-after", "soon"
    )
    load = ("load", place / "1.0.0", *data)
    assert "must be a URL" in refused(ConfigurationError, *load, "--registry", "registry.example")
    wrong = place / "credentials"
    wrong.write_text("me")
    assert "name:password" in refused(
        ConfigurationError, *load, "--registry", "http://127.0.0.1:1", "--registry-credentials", wrong
    )
    assert "cannot read" in refused(
        ConfigurationError, *load, "--registry", "https://127.0.0.1:1", "--registry-ca", place / "none"
    )
    shutil.rmtree(place / "1.0.0" / "blobs")
    assert "is missing" in refused(BundleRefusedError, "verify", place / "1.0.0", *data)


def test_emit_describes_the_bundle_for_other_tools(place):
    """Without a key: the list is also for the machine that builds."""
    assert run("emit", place / "1.0.0").count("@sha256:") == 2
    assert run("emit", place / "1.0.0", "--as", "zarf").startswith("kind: ZarfPackageConfig\n")


def test_charts_are_rendered_if_helm_is_installed(place, monkeypatch):
    """With the values of the recipe; helm's errors are reported in one line."""
    helm = place / "bin" / "helm"
    helm.parent.mkdir()
    known = "--kube-version 1.34.0 --api-versions cert-manager.io/v1"
    wanted = f"template bundle $3 {known} --values $9 --values -"
    helm.write_text(f'#!/bin/sh\ntest "$*" = "{wanted}" && cat && echo image: x:1\n')
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helm.parent}:/usr/bin:/bin")
    path = recipe(place, "1.0.0")
    document = yaml.safe_load(path.read_text())
    document["charts"][0]["values"] = ["everything.yaml"]
    path.write_text(yaml.safe_dump(document))
    build = ("build", path, place / "x", "--key", place / "builder" / "release.key", *BUILD)
    assert "rendered, names x:1 without a digest" in refused(BundleIncompleteError, *build)
    helm.write_text("#!/bin/sh\necho 'Error: values' >&2\nexit 1\n")
    assert "helm cannot render" in refused(ConfigurationError, *build)
