"""
A site of version 0.1.0 (commit b8f7e63) starts, verifies and serves under this version.

`tests/data/site_0_1_0.py` made the archives: a data directory and, in one of them, a PostgreSQL database.
They lack the draft's weights, which are the demo draft's.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from appliance.audit import verify
from appliance.audit.export import export_log
from appliance.audit.signing_keys import create_signing_key, load_signing_key
from appliance.audit.store import SqlAuditStore
from appliance.infra.schema import upgrade_database
from appliance.infra.settings import DEMO_DRAFT
from tests.audit_log import ORIGIN
from tests.fakes import chat
from tests.integration.test_batches import Appliance, EchoWorker, begin, ended, lines, requests, said
from tests.postgres import private_postgres
from tests.writer_process import REPOSITORY, WriterProcess, assert_kept

FORMER = "b8f7e63"
ENTRIES = 400
DATA = Path(__file__).parents[1] / "data"
WITNESS = "auditor.example/witness"
KEPT = "the first question"


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request, tmp_path) -> Path:
    """The unpacked site; settings for this database are in its `settings`."""
    with tarfile.open(DATA / f"site-0.1.0-{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, members=[each for each in archive if each.name != "./keys.json"])
    (weights,) = tmp_path.glob("data/drafts/revisions/*/weights")
    shutil.copy(DEMO_DRAFT / "model.safetensors", weights)
    return tmp_path


@pytest.fixture
def keys(site, request) -> dict[str, str]:
    """API keys created by version 0.1.0; never written to a file here."""
    with tarfile.open(DATA / f"site-0.1.0-{request.node.callspec.params['site']}.tar.xz") as archive:
        return json.loads(archive.extractfile("./keys.json").read())


@pytest.fixture(scope="module")
def postgres():
    with private_postgres() as server:
        yield server


@pytest.fixture
def settings(site, keys, request) -> dict[str, str]:
    found = {"APPLIANCE_AUDIT__WITNESSES": json.dumps([{"name": WITNESS, "key": keys["witness"]}])}
    dump = site / "database.sql"
    if dump.exists():
        postgres = request.getfixturevalue("postgres")
        url = postgres.new_database()
        postgres.execute(dump.read_text(), database=url.rpartition("/")[2])
        found["APPLIANCE_AUDIT__DATABASE_URL"] = url
    return found


def command(settings: dict[str, str], *words: str | Path) -> str:
    """Run a command with the settings of the site."""
    done = subprocess.run(
        [sys.executable, "-m", "appliance", *map(str, words)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_a_site_of_the_former_version_is_upgraded_in_place(site, keys, settings):
    where = ("--data", site / "data")
    command(settings, "audit", "upgrade-database", *where)
    command(settings, "audit", "verify", *where)
    worker = EchoWorker()
    async with worker.serving():
        appliance = await Appliance(site / "data", worker, **settings).start()
        try:
            async with appliance.client(keys["demo"]) as demo, appliance.client(keys["clinic"]) as clinic:
                for client in (demo, clinic):
                    answer = await client.chat.completions.create(**{**chat(), "messages": said("after it")})
                    assert answer.choices[0].message.content == "after it"
                former = await clinic.batches.retrieve(keys["batch"])
                assert (former.status, former.request_counts.completed) == ("completed", 3)
                assert len(await lines(clinic, keys["output"])) == 3
                batch = await ended(clinic, (await begin(clinic, requests("four", "five"))).id)
                assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        finally:
            assert await appliance.stop() == 0, "".join(appliance.process.output)
    entries = [
        json.loads(line)
        for line in command(settings, "audit", "tail", "--json", "--count", "100000", *where).splitlines()
    ]
    kept = [
        each["request_id"]
        for each in entries
        if each["type"] == "request.intent" and each["tenant"] == "clinic"
    ]
    assert KEPT in command(settings, "audit", "open", kept[0], "--part", "request", *where)
    head = site / "head.json"
    command(settings, "audit", "witness", "export-head", head, *where)
    command(settings, "audit", "witness", "cosign", site / "witness", head)
    command(settings, "audit", "witness", "import", head, *where)
    command(settings, "audit", "verify", *where)
    (draft,) = json.loads(command(settings, "draft", "list", "--json", *where))["drafts"]
    assert draft["digest"].startswith("sha256:0e746747")


@pytest.fixture
def former(tmp_path):
    """The source of version 0.1.0."""
    writer = ("tests/writer_process.py", "tests/audit_log.py")
    archive = subprocess.run(
        ["git", "archive", FORMER, "appliance", *writer], cwd=REPOSITORY, capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"ROLLING UPGRADES ARE NOT TESTED: this checkout lacks the commit {FORMER}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "former", filter="data")
    return tmp_path / "former"


def test_gateways_of_the_former_version_write_beside_new_ones_during_an_upgrade(former, postgres, tmp_path):
    """One that keeps running after the tables were upgraded: neither refuses or loses an entry."""
    url = postgres.new_database()
    create_signing_key(tmp_path / "audit.key")
    subprocess.run(
        [sys.executable, "-m", "appliance", "audit", "upgrade-database", "--url", url],
        cwd=former,
        capture_output=True,
        check=True,
        timeout=120,
    )
    writers = [WriterProcess(tmp_path, url, "old", "old", source=former)]
    writers[0].wait_for(ENTRIES)
    upgrade_database(url)
    writers += [WriterProcess(tmp_path, url, name, name) for name in ("new", "newer")]
    before = [len(writer.acknowledged) for writer in writers]
    for writer, count in zip(writers, before, strict=True):
        writer.wait_for(count + ENTRIES)
    # The last gateway of the former version ends; then all are of this one.
    assert writers[0].close() == (0, "")
    for writer in writers[1:]:
        writer.wait_for(len(writer.acknowledged) + ENTRIES)
    assert [writer.close() for writer in writers[1:]] == [(0, "")] * 2
    assert [writer.refused for writer in writers] == [0, 0, 0]
    store = SqlAuditStore(url)
    leaves = store.leaves(0, 1_000_000)
    assert_kept([entry for writer in writers for entry in writer.acknowledged], leaves)
    assert store.accepted_leaves() == store.open_intents() == []
    signer = load_signing_key(tmp_path / "audit.key", ORIGIN)
    assert export_log(store, tmp_path / "export", vkey=signer.vkey) == len(leaves)
    store.close()
    report = verify.verify_export(tmp_path / "export", verify.parse_key(signer.vkey), None)
    assert (report.problems, report.exit_code) == ([], verify.ExitCode.VALID)
