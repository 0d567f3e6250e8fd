"""
Stored content, on real sockets: what is stored, what is not, and what remains after erasure.

Every test ends with the auditor's verifier comparing the whole log with what is kept.
"""

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
import time

import pytest
from sqlalchemy import text as sql
from typer.testing import CliRunner

from appliance.audit import verify
from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import SqlPayloadStore, export_payloads
from appliance.audit.content.sealing import Part, commit, open_sealed, place, unwrap
from appliance.audit.export import export_receipt
from appliance.audit.signing_keys import load_signing_key
from appliance.cli import cli
from appliance.errors import AuditVerificationError, ConfigurationError
from appliance.infra.settings import AuditSettings
from tests.fakes import FakeWorker, chat, until

ORIGIN = AuditSettings().origin
LIBEL = {"role": "user", "content": "an unmistakable secret"}


def keys_of(directory):
    """The key directory of a gateway under test."""
    clock = time.time  # noqa: TID251 - a test is a root
    folder = directory / "payload-keys"
    return PayloadKeys(folder, master_key=None, key_days=7, clock=clock, random_bytes=os.urandom)


class Archive:
    """The kept content, as an auditor with the keys reads it."""

    def __init__(self, directory, database="audit.db"):
        self.store = SqlPayloadStore(f"sqlite:///{directory / database}")
        self.keys = keys_of(directory)

    def open(self, entry, part):
        """Open one part that an entry names."""
        payload = self.store.get(entry["request_id"], part)
        name = self.keys.find(payload.key_id, Purpose.WRAPPING)
        return open_sealed(
            payload.sealed.blob,
            place(ORIGIN, entry["request_id"], part),
            unwrap(payload.sealed.wrapped_key, self.keys.read(name).key),
            digest=entry["payload_digest"],
            commitment=entry["payload_commitment"],
        )

    def count(self):
        """How many parts are kept."""
        return sum(1 for _ in self.store.all())


@pytest.fixture
def archive(running):
    """The archive of the gateway under test."""
    archive = Archive(running.directory)
    yield archive
    archive.store.close()


async def kept(running, body, count=1):
    """Send one request for the archive; return reply, intent and outcome."""
    reply = await running.post(body, key=running.archive_key)
    outcome = await running.outcome(count)
    return reply, running.entries("request.intent")[count - 1], outcome


async def admin(running, path, body):
    """Ask the admin API."""
    return await running.post(body, path=f"/admin/v1/{path}", key=running.admin_key)


# Keeping.


@pytest.mark.parametrize("stream", [False, True])
async def test_request_and_answer_are_kept_byte_for_byte(running, archive, stream):
    """Body as received, answer as sent, each opened and checked against its leaf."""
    body = json.dumps(chat(stream=stream, messages=[LIBEL]), indent=1).encode()
    reply, intent, outcome = await kept(running, body)
    assert intent["content_mode"] == "encrypted"
    assert archive.open(intent, Part.REQUEST) == body
    assert archive.open(outcome, Part.RESPONSE) == reply.body
    assert outcome["payload_bytes"] == len(reply.body)
    assert "payload_truncated" not in outcome


async def test_content_is_nowhere_in_the_clear(running):
    """Neither in the database nor in its write-ahead log."""
    await kept(running, chat(messages=[LIBEL]))
    files = [path for path in running.directory.glob("audit.db*") if path.is_file()]
    assert len(files) >= 2
    assert not any(LIBEL["content"].encode() in path.read_bytes() for path in files)


async def test_keys_lie_apart_and_only_their_owner_reads_them(running):
    """A directory of mode 0700 with files of mode 0600, none of it in the database."""
    await kept(running, chat())
    directory = running.directory / "payload-keys"
    (file,) = directory.iterdir()
    assert (directory.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


async def test_a_tenant_that_keeps_nothing_leaves_nothing(running, archive):
    """No rows, no keys, no commitment; the mode says `none`."""
    await running.post(chat())
    outcome = await running.outcome()
    (intent,) = running.entries("request.intent")
    assert intent["content_mode"] == "none"
    assert not {name for name in (*intent, *outcome) if name.startswith("payload")}
    assert archive.count() == 0
    assert not list((running.directory / "payload-keys").iterdir())


async def test_digest_is_provable_only_with_key_and_text(running, archive):
    """Nothing is stored; the commitment is keyed, and bound to its request."""
    body = json.dumps(chat(messages=[LIBEL])).encode()
    replies = [await running.post(body, key=running.notary_key) for _ in range(2)]
    await running.outcome(2)
    intents, outcomes = running.entries("request.intent"), running.entries("request.outcome")
    assert archive.count() == 0
    (name,) = archive.keys.names("notary", Purpose.COMMITMENT)
    key = archive.keys.read(name).key
    for intent, outcome, reply in zip(intents, outcomes, replies, strict=True):
        where = place(ORIGIN, intent["request_id"], Part.REQUEST)
        assert (intent["content_mode"], intent["payload_key"]) == ("digest", name.key_id)
        assert intent["payload_commitment"] == commit(key, where, body)
        assert intent["payload_commitment"] != hashlib.sha256(body).hexdigest()
        where = place(ORIGIN, outcome["request_id"], Part.RESPONSE)
        assert outcome["payload_commitment"] == commit(key, where, reply.body)
        assert "payload_digest" not in intent
    assert intents[0]["payload_commitment"] != intents[1]["payload_commitment"]


async def test_comments_that_fill_silence_are_kept_too(serve):
    """The answer as sent is kept, not the worker's."""
    running = await serve(FakeWorker(pause_seconds=0.07), keep_alive_seconds=0.03)
    reply, _, outcome = await kept(running, chat(stream=True))
    assert b": keep-alive" in reply.body
    assert Archive(running.directory).open(outcome, Part.RESPONSE) == reply.body


async def test_of_a_stream_that_broke_what_was_sent_is_kept_with_its_error(running, archive):
    """A worker's death does not take the evidence with it."""
    running.worker.breaks_after = 2
    reply, _, outcome = await kept(running, chat(stream=True))
    assert outcome["outcome"] == "worker_failed"
    assert b"worker_failed" in reply.body
    assert archive.open(outcome, Part.RESPONSE) == reply.body


async def test_of_a_client_that_left_what_was_sent_so_far_is_kept(running, archive):
    """The end is written without the client, and with what it got."""
    running.worker.pieces, running.worker.pause_seconds = ["x"] * 1000, 0.02
    async with running.asking(chat(stream=True), key=running.archive_key) as response:
        got = await response.content.readuntil(b"\n\n")
        response.close()
    outcome = await running.outcome()
    assert outcome["outcome"] == "client_gone"
    sent = archive.open(outcome, Part.RESPONSE)
    assert sent.startswith(got)
    assert b"".join(running.worker.frames("/v1/chat/completions", {})).startswith(sent)


async def test_a_gateway_that_stops_keeps_what_was_sent_so_far(running, archive):
    """`request.aborted` names the part of the answer that the client has."""
    running.worker.pieces, running.worker.pause_seconds = ["x"] * 1000, 0.02
    async with running.asking(chat(stream=True), key=running.archive_key) as response:
        got = await response.content.readuntil(b"\n\n")
        running.server.should_exit = True
        outcome = await running.outcome()
    assert (outcome["type"], outcome["reason"]) == ("request.aborted", "gateway_stopped")
    assert archive.open(outcome, Part.RESPONSE).startswith(got)


async def test_of_an_answer_that_is_too_long_the_beginning_is_kept_and_the_log_says_so(serve):
    """Memory is bounded, and the entry marks the answer as truncated."""
    running = await serve(FakeWorker(pieces=["x" * 100] * 50), audit={"payload_max_bytes": 1024})
    reply, _, outcome = await kept(running, chat(stream=True))
    assert len(reply.body) > 1024
    assert (outcome["payload_truncated"], outcome["payload_bytes"]) == (True, 1024)
    assert Archive(running.directory).open(outcome, Part.RESPONSE) == reply.body[:1024]


async def test_request_is_refused_if_its_content_cannot_be_kept(running, archive):
    """Fails closed for those whose content must be kept; others are served."""
    with archive.store._engine.begin() as connection:
        connection.execute(sql("ALTER TABLE audit_payloads RENAME TO elsewhere"))
    reply = await running.post(chat(), key=running.archive_key)
    assert (reply.status, reply.error["code"]) == (503, "audit_unavailable")
    assert running.worker.bodies == []
    assert (await running.post(chat())).status == 200
    with archive.store._engine.begin() as connection:
        connection.execute(sql("ALTER TABLE elsewhere RENAME TO audit_payloads"))
    assert (await running.post(chat(), key=running.archive_key)).status == 200


async def test_an_answer_that_cannot_be_kept_is_never_finished(running, archive):
    """The last frame waits for the answer to be kept, as it waits for the outcome."""
    running.worker.pause_seconds = 0.1
    async with running.asking(chat(stream=True), key=running.archive_key) as response:
        await response.content.readuntil(b"\n\n")
        with archive.store._engine.begin() as connection:
            connection.execute(sql("ALTER TABLE audit_payloads RENAME TO elsewhere"))
        rest = await response.read()
    assert b"audit_unavailable" in rest
    assert b"[DONE]" not in rest
    with archive.store._engine.begin() as connection:
        connection.execute(sql("ALTER TABLE elsewhere RENAME TO audit_payloads"))
    outcome = await running.outcome()
    assert (outcome["type"], outcome["payload_lost"]) == ("request.aborted", True)


async def test_many_requests_at_once_are_each_kept_under_their_own_name(running, archive):
    """Sealed in groups, never mixed up."""
    bodies = [json.dumps(chat(stream=True, n=number)).encode() for number in range(20)]
    await asyncio.gather(*(running.post(body, key=running.archive_key) for body in bodies))
    await running.outcome(20)
    intents = running.entries("request.intent")
    assert {archive.open(intent, Part.REQUEST) for intent in intents} == set(bodies)


# Ending it.


async def test_an_erased_request_is_gone_and_all_else_stays(running, archive):
    """Erasing one leaves its neighbours, every receipt issued before, and an entry that says why."""
    running.verdict = verify.ExitCode.ERASED
    _, intent, outcome = await kept(running, chat(messages=[LIBEL]))
    reply, _, other = await kept(running, chat(n=2), 2)
    await until(lambda: running.audit.state().checkpoint_size > other["index"])
    issued = [export_receipt(running.store, entry["index"]) for entry in (intent, outcome, other)]
    body = {"tenant": "archive", "requests": [intent["request_id"]], "basis": "GDPR Art. 17, ticket 12"}
    answer = await admin(running, "audit/erasures", body)
    assert answer.status == 200
    assert json.loads(answer.body)["payloads"] == 2
    (erasure,) = running.entries("erasure")
    assert (erasure["payloads"], erasure["requests"]) == (2, (intent["request_id"],))
    assert (erasure["tenant"], erasure["legal_basis"]) == ("archive", body["basis"])
    assert erasure["actor"]
    assert archive.store.get(intent["request_id"], Part.REQUEST) is None
    assert running.audit.state().checkpoint_size > erasure["index"]
    assert archive.open(other, Part.RESPONSE) == reply.body
    key = verify.parse_key(load_signing_key(running.directory / "audit.key", ORIGIN).vkey)
    for leaf, proof in issued:
        report = verify.verify_receipt(proof.encode(), leaf, key, None)
        assert report.exit_code == verify.ExitCode.VALID


async def test_a_backup_of_the_database_does_not_bring_back_what_was_erased(running, archive):
    """No key that is left opens the rows of a copy made before."""
    running.verdict = verify.ExitCode.ERASED
    _, intent, _ = await kept(running, chat(messages=[LIBEL]))
    _, other, _ = await kept(running, chat(n=2), 2)
    with sqlite3.connect(running.directory / "audit.db") as live:
        live.execute("VACUUM INTO ?", (str(running.directory / "backup.db"),))
    live.close()
    backup = Archive(running.directory, "backup.db")
    assert LIBEL["content"].encode() in backup.open(intent, Part.REQUEST)
    body = {"tenant": "archive", "requests": [intent["request_id"]], "basis": "a request"}
    assert (await admin(running, "audit/erasures", body)).status == 200
    payload = backup.store.get(intent["request_id"], Part.REQUEST)
    left = archive.keys.names()
    assert left
    for name in left:
        with pytest.raises(AuditVerificationError):
            unwrap(payload.sealed.wrapped_key, archive.keys.read(name).key)
    assert archive.open(other, Part.REQUEST)
    backup.store.close()


async def test_erasing_a_tenant_destroys_only_its_keys(running, archive):
    """Commitments of that tenant say nothing any more either."""
    running.verdict = verify.ExitCode.ERASED
    await kept(running, chat())
    await running.post(chat(), key=running.notary_key)
    await running.outcome(2)
    (key,) = archive.keys.names("notary")
    body = {"tenant": "archive", "basis": "the contract ended"}
    answer = json.loads((await admin(running, "audit/erasures", body)).body)
    assert (answer["payloads"], len(answer["keys"])) == (2, 1)
    assert archive.keys.names() == [key]
    assert archive.count() == 0
    await admin(running, "audit/erasures", {**body, "tenant": "notary"})
    assert archive.keys.names() == []
    _, _, outcome = await kept(running, chat(), 3)
    assert archive.open(outcome, Part.RESPONSE)


async def test_under_a_hold_nothing_is_erased_or_pruned(running, archive):
    """The hold takes precedence and is an entry; after its release the content can be erased."""
    running.verdict = verify.ExitCode.ERASED
    _, intent, _ = await kept(running, chat())
    hold = {"tenant": "archive", "reason": "case 7"}
    assert (await admin(running, "audit/holds", hold)).status == 201
    assert json.loads((await running.get("/admin/v1/audit/holds", key=running.admin_key)).body) == {
        "holds": {"archive": "case 7"}
    }
    body = {"tenant": "archive", "requests": [intent["request_id"]], "basis": "a request"}
    refused = await admin(running, "audit/erasures", body)
    assert (refused.status, refused.error["code"]) == (409, "control_refused")
    pruned = await admin(running, "audit/prunes", {"before": "2999-01-01"})
    assert json.loads(pruned.body) == {"erased": []}
    assert archive.count() == 2
    assert running.entries("erasure") == []
    assert (await admin(running, "audit/holds/releases", hold)).status == 201
    assert (await admin(running, "audit/holds/releases", hold)).status == 409
    pruned = json.loads((await admin(running, "audit/prunes", {"before": "2999-01-01"})).body)
    assert [(each["tenant"], each["payloads"]) for each in pruned["erased"]] == [("archive", 2)]
    assert archive.count() == 0


async def test_pruning_by_time_takes_what_is_older_and_leaves_the_rest(running, archive):
    """The request's own id says when it came."""
    running.verdict = verify.ExitCode.ERASED
    await kept(running, chat())
    await asyncio.sleep(0.01)
    before = time.time_ns() / 10**9
    await asyncio.sleep(0.01)
    reply, _, outcome = await kept(running, chat(n=2), 2)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before)) + f".{int(before * 1000) % 1000:03d}Z"
    await admin(running, "audit/prunes", {"before": stamp})
    assert archive.count() == 2
    assert archive.open(outcome, Part.RESPONSE) == reply.body


async def test_what_is_deleted_is_overwritten_in_the_file(running, archive):
    """The ciphertext is not left in free pages or in the write-ahead log."""
    running.verdict = verify.ExitCode.ERASED
    _, intent, _ = await kept(running, chat(messages=[{"role": "user", "content": "x" * 9000}]))
    sample = archive.store.get(intent["request_id"], Part.REQUEST).sealed.ciphertext[2000:2032]
    await admin(running, "audit/erasures", {"tenant": "archive", "basis": "a request"})
    for path in running.directory.glob("audit.db*"):
        assert sample not in path.read_bytes()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("erasures", {"basis": "b"}),
        ("erasures", {"tenant": "archive"}),
        ("erasures", {"tenant": "archive", "basis": "b", "requests": ["../../etc"]}),
        ("erasures", {"tenant": "archive", "basis": "b", "requests": "01J"}),
        ("erasures", {"tenant": "archive", "basis": "b", "before": "yesterday"}),
        ("erasures", {"tenant": "archive", "basis": "b", "before": "2026-01-01", "requests": ["0" * 26]}),
        ("erasures", {"tenant": "archive", "basis": "b", "all": True}),
        ("prunes", {}),
        ("holds", {"tenant": "archive", "reason": "two\nlines"}),
    ],
)
async def test_invalid_erasure_request_erases_nothing(running, archive, path, body):
    """Refused as a whole, with the member that is wrong."""
    await kept(running, chat())
    answer = await admin(running, f"audit/{path}", body)
    assert answer.status == 400
    assert archive.count() == 2


async def test_a_tenants_key_erases_nothing(running, archive):
    """Only an admin may."""
    await kept(running, chat())
    body = {"tenant": "archive", "basis": "b"}
    answer = await running.post(body, path="/admin/v1/audit/erasures", key=running.archive_key)
    assert answer.status == 401
    assert archive.count() == 2


async def test_the_verifier_misses_content_that_no_erasure_accounts_for(running, archive):
    """Deletion without an entry is a finding; so is a change."""
    running.verdict = verify.ExitCode.INVALID
    _, intent, outcome = await kept(running, chat())
    with archive.store._engine.begin() as connection:
        connection.execute(sql("DELETE FROM audit_payloads WHERE part = 'request'"))
        connection.execute(sql("UPDATE audit_payloads SET nonce = zeroblob(12)"))
    folder = running.directory / "look"
    folder.mkdir()
    assert export_payloads(archive.store, folder) == 1
    report = verify.Report(subject="export", origin=ORIGIN)
    for entry in (intent, outcome):
        verify.see_payload(report, entry["index"], entry)
    verify.check_payloads(report, folder, {})
    assert [problem.split()[-1] for problem in report.problems] == ["missing", "altered"]
    shutil.rmtree(folder)


async def test_the_commands_do_all_of_it(running, archive, tmp_path):
    """Open, hold, erase and release on the command line, each with its entry in the log."""
    running.verdict = verify.ExitCode.ERASED
    (running.directory / "admin.key").write_text(running.admin_key)
    body = json.dumps(chat(messages=[LIBEL])).encode()
    _, intent, _ = await kept(running, body)
    where = ["--data", str(running.directory), "--url", running.admin_url]

    async def appliance(*words):
        return await asyncio.to_thread(CliRunner().invoke, cli, ["audit", *words, *where])

    request, keys = intent["request_id"], tmp_path / "keys.json"
    opened = await appliance("open", request, "--part", "request", "--keys", str(keys), "--purpose", "case 7")
    assert opened.exit_code == 0, opened.output
    assert opened.stdout_bytes == body
    (read,) = running.entries("audit.read")
    assert (read["operation"], read["start"], read["purpose"]) == ("open", intent["index"], "case 7")
    assert keys.stat().st_mode & 0o777 == 0o600
    assert list(verify.read_data_keys(keys)) == [f"{request}/request"]
    file = tmp_path / "body.json"
    for content, matches in ((body, True), (body + b" ", False)):
        file.write_bytes(content)
        checked = await appliance("check", request, str(file))
        assert isinstance(checked.exception, AuditVerificationError) is not matches
        assert ("is the request" in checked.output) is matches
    assert [read["operation"] for read in running.entries("audit.read")] == ["open", "check", "check"]
    assert (await appliance("hold", "--tenant", "archive", "--reason", "case 7")).exit_code == 0
    assert (await appliance("holds")).stdout == "archive\tcase 7\n"
    erase = ("erase", "--tenant", "archive", "--request", request, "--basis", "a request", "--yes")
    assert isinstance((await appliance(*erase)).exception, ConfigurationError)
    assert archive.count() == 2
    assert (await appliance("release", "--tenant", "archive", "--reason", "closed")).exit_code == 0
    erased = await appliance(*erase)
    assert "2 payloads erased" in erased.output
    assert archive.count() == 0
    opened = await appliance("open", request)
    assert (opened.stdout_bytes, "erased" in opened.stderr) == (b"", True)
    assert len(running.entries("audit.read")) == 3
    assert isinstance((await appliance("check", request, str(file))).exception, ConfigurationError)
    assert "may be erased" in (await appliance("prune", "--before", "2026-01-01")).output
    assert isinstance((await appliance("prune")).exception, ConfigurationError)


async def test_a_text_can_be_shown_to_be_the_one_of_a_digest(running, tmp_path):
    """With the tenant's key and the text, and not with another text."""
    running.verdict = verify.ExitCode.ERASED
    (running.directory / "admin.key").write_text(running.admin_key)
    reply = await running.post(chat(stream=True), key=running.notary_key)
    outcome = await running.outcome()
    file = tmp_path / "answer.kept-by-the-client"
    words = ["audit", "check", outcome["request_id"], str(file), "--part", "response"]
    words += ["--data", str(running.directory), "--url", running.admin_url]
    file.write_bytes(reply.body)
    assert (await asyncio.to_thread(CliRunner().invoke, cli, words)).exit_code == 0
    file.write_bytes(reply.body[:-1])
    checked = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert isinstance(checked.exception, AuditVerificationError)
    await admin(running, "audit/erasures", {"tenant": "notary", "basis": "a request"})
    file.write_bytes(reply.body)
    checked = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert "destroyed" in str(checked.exception)


async def test_the_log_is_exported_and_verified_with_its_content_or_without(running, tmp_path):
    """Both verify; the report names omitted content, and its leaves remain."""
    (running.directory / "admin.key").write_text(running.admin_key)
    _, _, outcome = await kept(running, chat())
    await until(lambda: running.audit.state().checkpoint_size > outcome["index"])
    where = ["--data", str(running.directory)]

    async def appliance(*words):
        return await asyncio.to_thread(CliRunner().invoke, cli, ["audit", *words, *where])

    verified = await appliance("verify")
    assert (verified.exit_code, "2 intact" in verified.output) == (0, True)
    verified = await appliance("verify", "--no-payloads")
    assert (verified.exit_code, "2 named by entries, not looked at" in verified.output) == (0, True)
    for words, files in (((), 2), (("--no-payloads",), 0)):
        folder = tmp_path / f"for-an-auditor-{files}"
        exported = await appliance("export", str(folder), *words, "--url", running.admin_url)
        assert exported.exit_code == 0, exported.output
        assert len(list(folder.glob("payloads/*"))) == files
