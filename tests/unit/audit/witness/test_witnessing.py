"""The log has its head cosigned, over HTTP or by file, and shows auditors by whom."""

import asyncio
import json
from base64 import b64decode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint, encode_body, parse_body, parse_note, sign_note
from appliance.audit.cosignature import ED25519_COSIGNATURE
from appliance.audit.cosigned import Cosigned, CosignedCheckpoints, merge_notes, worth_keeping
from appliance.audit.export import export_log, export_receipt
from appliance.audit.signing_keys import MldsaSigner, Signer
from appliance.audit.store import SqlAuditStore, StoredCheckpoint
from appliance.audit.verify import ExitCode
from appliance.audit.witness.witness import OK, Answer, Witness, encode_request
from appliance.audit.witness.witness_state import WitnessState
from appliance.audit.witness.witnessing import (
    RAREST_ROUNDS,
    KnownWitness,
    Witnessing,
    cosign,
    import_cosigned,
    latest_checkpoint,
    level_of,
    load_witnesses,
    make_request,
)
from appliance.errors import AuditUnavailableError, AuditVerificationError, ConfigurationError
from appliance.infra.settings import AuditSettings, WitnessSettings
from tests.growing_log import TIME, Log
from tests.signers import joined


class Direct:
    """A courier that asks witnesses in this process, by URL."""

    def __init__(self, witnesses):
        self.witnesses, self.asked = witnesses, []

    async def add_checkpoint(self, url, text):
        self.asked.append((url, text))
        found = self.witnesses[url]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, Answer) else found.add_checkpoint(text)


@pytest.fixture
def log(sql_store, signer):
    return Log(sql_store, signer)


@pytest.fixture
def kept(sql_store):
    return CosignedCheckpoints(sql_store.database)


@pytest.fixture
def make_witness(tmp_path, signer, clock):
    """Make a witness of the log; returns it, and how the log knows it."""

    def make_(name, *, log_keys=signer.verifier_keys, post_quantum=False):
        seed = name.encode().ljust(32, b".")[:32]
        keys = Signer(name, Ed25519PrivateKey.from_private_bytes(seed), kind=ED25519_COSIGNATURE)
        if post_quantum:
            keys = joined(keys, MldsaSigner(name, MLDSA44PrivateKey.from_seed_bytes(seed)))
        state = WitnessState(tmp_path / f"{name.replace('/', '-')}.db")
        witness = Witness(state=state, signer=keys, log_keys=log_keys, clock=clock)
        return witness, KnownWitness(name=name, keys=keys.verifier_keys, url=f"http://{name}")

    return make_


@pytest.fixture
def witnessing(sql_store, kept):
    """Make the task that asks these witnesses."""

    def make_(pairs, reports=None, replace=None):
        courier = Direct({known.url: witness for witness, known in pairs} | (replace or {}))
        task = Witnessing(
            store=sql_store,
            kept=kept,
            witnesses=[known for _, known in pairs],
            courier=courier,
            seconds=60,
            report=lambda name, problem: reports.append((name, problem)) if reports is not None else None,
        )
        return task, courier

    return make_


@pytest.fixture
def audit(tmp_path, signer):
    """Export the log and verify it as an auditor who knows these witnesses."""
    count = 0

    def audit_(store, *known, needed=None, keys=signer.vkey):
        nonlocal count
        count += 1
        directory = tmp_path / f"export{count}"
        export_log(store, directory, vkey=keys)
        return verify.verify_export(directory, verify.parse_keys(keys), None, named(*known, needed=needed))

    return audit_


def named(*known, needed=None):
    """The witnesses an auditor named on the command line."""
    found = verify.Witnesses(keys=tuple(verify.parse_key(key.encode()) for one in known for key in one.keys))
    return verify.Witnesses(keys=found.keys, needed=len(found.names) if needed is None else needed)


async def test_a_growing_log_is_cosigned_round_after_round(log, kept, make_witness, witnessing):
    """Each round shows the newest head, with a proof from where the witness stands."""
    pair = make_witness("w.test/1")
    task, courier = witnessing([pair])
    assert task.level.name == "UNWITNESSED"
    for size in (5, 5, 12, 300):
        log.grow(size - log.tree.size) if size > log.tree.size else log.sign()
        await task.round()
        (statement,) = kept.all()
        assert (statement.witness, statement.size) == ("w.test/1", size)
    assert [text.partition("\n")[0] for _, text in courier.asked] == ["old 0", "old 5", "old 5", "old 12"]
    assert (task.level.name, task.level.known, task.level.cosigned, task.level.size) == (
        "WITNESSED",
        1,
        1,
        300,
    )
    assert task.level.time == statement.time


async def test_a_witness_is_shown_no_entry(log, make_witness, witnessing):
    """Only name, sizes and hashes, of 32 bytes each."""
    log.text = "unmistakable"
    task, courier = witnessing([make_witness("w.test/1")])
    for count in (5, 7):
        log.grow(count)
        await task.round()
    for (_, text), sizes in zip(courier.asked, ((0, 5), (5, 12)), strict=True):
        proof, _, note = text.partition("\n\n")
        old, *hashes = proof.splitlines()
        origin, size, root = note.partition("\n\n")[0].splitlines()
        assert (old, origin, size) == (f"old {sizes[0]}", log.signer.name, str(sizes[1]))
        assert {len(b64decode(each, validate=True)) for each in (*hashes, root)} == {32}
        assert log.text not in text


async def test_log_without_a_checkpoint_asks_no_witness(sql_store, make_witness, witnessing):
    """There is nothing to cosign yet; that is reported, not raised."""
    reports = []
    task, courier = witnessing([make_witness("w.test/1")], reports)
    await task.round()
    assert courier.asked == []
    assert "nothing was signed yet" in reports[0][1]


async def test_restarted_gateway_resumes_at_the_size_of_the_witness(log, make_witness, witnessing):
    """It believes what it kept, and the witness where that is wrong."""
    pair = make_witness("w.test/1")
    log.grow(7)
    await witnessing([pair])[0].round()
    log.grow(4)
    task, courier = witnessing([pair])
    await task.round()
    assert courier.asked[0][1].startswith("old 7\n")
    # A witness with another size answers with it.
    log.grow(4)
    pair[0].add_checkpoint(encode_request(make_request(log.store, 11)))
    log.grow(3)
    await task.round()
    assert [text.partition("\n")[0] for _, text in courier.asked[1:]] == ["old 11", "old 15"]
    assert task.level.size == 18


async def test_one_witness_in_trouble_does_not_disturb_the_others(log, make_witness, witnessing):
    """A problem is reported when it begins and when it ends."""
    good, bad = make_witness("w.test/1"), make_witness("w.test/2")
    reports = []
    log.grow(3)
    gone = AuditUnavailableError("gone")
    task, courier = witnessing([good, bad], reports, {bad[1].url: gone})
    await task.round()
    await task.round()
    assert reports == [("w.test/2", "gone")]
    assert (task.level.known, task.level.cosigned) == (2, 1)
    courier.witnesses[bad[1].url] = bad[0]
    for _ in range(4):
        await task.round()
    assert reports[1:] == [("w.test/2", None)]
    assert task.level.cosigned == 2


async def test_a_witness_that_is_gone_is_asked_less_and_less(log, make_witness, witnessing):
    """And still often enough to notice that it is back."""
    witness, known = make_witness("w.test/1")
    log.grow(3)
    task, courier = witnessing([(witness, known)], [], {known.url: AuditUnavailableError("gone")})
    for _ in range(5 * RAREST_ROUNDS):
        await task.round()
    assert 8 <= len(courier.asked) <= 14


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(status=422, text="no\n"), "answered 422: no"),
        (Answer(status=200, text=""), "not cosigned by"),
        (Answer(status=200, text="hello\n"), "signature line"),
        (Answer(status=409, text="many\n"), "did not name its size"),
        (Answer(status=409, text="99\n"), "rolled back"),
        (Answer(status=409, text="9" * 50), "did not name its size"),
        (Answer(status=500, text="sorry"), "answered 500"),
    ],
)
async def test_a_witness_that_answers_nonsense_is_not_counted(log, make_witness, witnessing, answer, words):
    """The log continues, nothing is kept, and the problem is reported."""
    witness, known = make_witness("w.test/1")
    log.grow(3)
    reports = []
    task, _ = witnessing([(witness, known)], reports, {known.url: answer})
    await task.round()
    assert words in reports[0][1]
    assert task.level.cosigned == 0


async def test_a_damaged_log_is_not_shown_to_witnesses(log, make_witness, witnessing, signer):
    """A checkpoint that the entries do not add up to is a finding here already."""
    log.grow(3)
    forged = sign_note(encode_body(Checkpoint(origin=signer.name, size=3, root=bytes(32))), [signer])
    log.store.save_checkpoint(StoredCheckpoint(size=3, note=forged, time=TIME))
    reports = []
    task, courier = witnessing([make_witness("w.test/1")], reports)
    await task.round()
    assert courier.asked == []
    assert "damaged" in reports[0][1]


async def test_the_task_asks_again_and_again(log, make_witness, witnessing):
    """It runs until it is cancelled."""
    log.grow(3)
    task, courier = witnessing([make_witness("w.test/1")])

    async def pause(seconds):
        assert seconds == 60
        if len(courier.asked) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await task.run(pause)


async def test_carried_by_file_is_as_good_as_by_network(log, kept, make_witness, signer):
    """Head out, cosignature back; a witness without URL is never asked."""
    witness, known = make_witness("w.test/1", post_quantum=True)
    log.grow(9)
    for size in (0, 9, 20):
        if size:
            log.grow(11) if size == 20 else log.sign()
        request = make_request(log.store, kept.all()[0].size if size else 0)
        answer = witness.add_checkpoint(encode_request(request))
        assert answer.status == OK
        (statement,) = import_cosigned(log.store, request.note + answer.text, [known], signer.verifier_keys)
        kept.save(statement)
    assert level_of([known], kept.all()).size == 20


async def test_imported_checkpoint_must_be_of_this_log_and_cosigned(log, make_witness, signer, tmp_path):
    """A file from a stranger, of another log, or of another history is refused."""
    witness, known = make_witness("w.test/1")
    log.grow(9)
    request = make_request(log.store, 0)
    answer = witness.add_checkpoint(encode_request(request))
    _, stranger = make_witness("w.test/2")
    with pytest.raises(AuditVerificationError, match="no witness in the settings"):
        import_cosigned(log.store, request.note, [known], signer.verifier_keys)
    with pytest.raises(AuditVerificationError, match="no witness in the settings"):
        import_cosigned(log.store, request.note + answer.text, [stranger], signer.verifier_keys)
    impostor = Signer(signer.name, Ed25519PrivateKey.generate())
    with pytest.raises(AuditVerificationError, match="no signature"):
        import_cosigned(log.store, request.note + answer.text, [known], impostor.verifier_keys)
    other = SqlAuditStore(f"sqlite:///{tmp_path}/other.db")
    Log(other, signer, "rewritten ").grow(12)
    with pytest.raises(AuditVerificationError, match="proves that the log was changed"):
        import_cosigned(other, request.note + answer.text, [known], signer.verifier_keys)
    other.close()


def test_a_statement_needs_every_key_of_its_witness(log, make_witness):
    """A witness with two algorithms has cosigned once both say so."""
    witness, known = make_witness("w.test/1", post_quantum=True)
    note = log.grow(3)
    lines = witness.add_checkpoint(encode_request(make_request(log.store, 0))).text
    assert cosign(note, known, lines).size == 3
    for line in lines.splitlines(keepends=True):
        with pytest.raises(AuditVerificationError, match="with the keys in the settings"):
            cosign(note, known, line)


def test_only_the_newest_statement_of_a_witness_is_kept(log, kept):
    """An older one that arrives late replaces nothing; a newer time of one size does."""
    note = log.grow(3)

    def statement(size, time):
        return Cosigned(witness="w", size=size, time=time, note=note)

    assert kept.all() == []
    for size, time, left in (
        (5, 9, (5, 9)),
        (4, 10, (5, 9)),
        (5, 8, (5, 9)),
        (5, 11, (5, 11)),
        (6, 1, (6, 1)),
    ):
        kept.save(statement(size, time))
        assert [(found.size, found.time) for found in kept.all()] == [left]


def test_checkpoint_with_more_witnesses_is_kept_until_as_many_cosign_a_later_one():
    """An older head is kept while no newer one has the same witnesses."""

    def kept_of(*pairs):
        statements = [Cosigned(witness=name, size=size, time=1, note="") for name, size in pairs]
        return [(found.witness, found.size) for found in worth_keeping(statements)]

    assert kept_of(("a", 7), ("b", 7), ("a", 9)) == [("a", 9), ("a", 7), ("b", 7)]
    assert kept_of(("a", 7), ("b", 7), ("a", 9), ("b", 9)) == [("a", 9), ("b", 9)]
    assert kept_of(("a", 7), ("b", 7), ("a", 9), ("b", 12)) == [("b", 12), ("a", 9), ("a", 7), ("b", 7)]
    assert kept_of(("a", 7), ("a", 5), ("a", 9)) == [("a", 9)]


def test_two_histories_of_one_size_are_both_kept(log, signer):
    """Cosignatures of one text are merged; of two texts, both are evidence."""
    note = log.grow(3)
    other = sign_note(encode_body(Checkpoint(origin=signer.name, size=3, root=bytes(32))), [signer])
    statements = [
        Cosigned(witness=name, size=3, time=1, note=text)
        for name, text in zip("abc", (note, note, other), strict=True)
    ]
    assert merge_notes(statements) == [(3, note), (3, other)]


# What auditors see.


async def test_report_names_witnesses_and_sizes(log, make_witness, witnessing, audit):
    """The cosigned head is older than the export's; what came after is counted as not witnessed."""
    pairs = [make_witness("w.test/1"), make_witness("w.test/2", post_quantum=True)]
    log.grow(7)
    await witnessing(pairs)[0].round()
    log.grow(5)
    known = [pair[1] for pair in pairs]
    report = audit(log.store, *known)
    assert (report.exit_code, report.problems) == (ExitCode.VALID, [])
    assert {name: seen.size for name, seen in report.cosigned.items()} == {"w.test/1": 7, "w.test/2": 7}
    assert report.witnessed_size == 7
    text = verify.render(report)
    assert "2 of 2 cosigned, 5 newer entries not (2 needed)" in text
    assert "w.test/1, the first 7 entries at 2027-01-" in text
    content = json.loads(verify.render_json(report))
    assert content["witnesses"]["w.test/2"]["size"] == content["witnessed_size"] == 7


async def test_an_auditor_can_insist_on_witnesses(log, make_witness, witnessing, audit):
    """Fewer than asked for is a verdict of its own; more are no harm."""
    first, second = make_witness("w.test/1"), make_witness("w.test/2")
    log.grow(7)
    assert audit(log.store, first[1]).exit_code == ExitCode.UNWITNESSED
    assert audit(log.store, first[1], needed=0).exit_code == ExitCode.VALID
    await witnessing([first])[0].round()
    assert audit(log.store, first[1], second[1], needed=1).exit_code == ExitCode.VALID
    report = audit(log.store, first[1], second[1])
    assert report.exit_code == ExitCode.UNWITNESSED
    assert "1 of 2 cosigned" in verify.render(report)
    assert report.witnessed_size == 0


async def test_rewritten_log_diverges_from_its_cosigned_checkpoint(
    log, make_witness, witnessing, audit, signer, tmp_path, kept
):
    """Even with the stolen key and the database: the witness's statement is in the way."""
    pair = make_witness("w.test/1")
    log.grow(7)
    await witnessing([pair])[0].round()
    other = SqlAuditStore(f"sqlite:///{tmp_path}/rewritten.db")
    Log(other, signer, "rewritten ").grow(9)
    assert audit(other, pair[1], needed=0).exit_code == ExitCode.VALID
    CosignedCheckpoints(other.database).save(kept.all()[0])
    report = audit(other, pair[1])
    assert report.exit_code == ExitCode.DIVERGED
    assert "a witness cosigned another log" in report.held
    other.close()


async def test_log_shorter_than_its_cosigned_checkpoint_diverges(
    log, make_witness, witnessing, audit, signer, kept, tmp_path
):
    """A restored backup that kept the statements gives itself away."""
    pair = make_witness("w.test/1")
    log.grow(7)
    await witnessing([pair])[0].round()
    other = SqlAuditStore(f"sqlite:///{tmp_path}/restored.db")
    Log(other, signer).grow(5)
    CosignedCheckpoints(other.database).save(kept.all()[0])
    assert audit(other, pair[1]).exit_code == ExitCode.DIVERGED
    other.close()


async def test_every_changed_byte_of_a_cosigned_checkpoint_shows(
    log, make_witness, witnessing, audit, tmp_path
):
    """Invalid, or no longer this witness's; never another statement."""
    pair = make_witness("w.test/1")
    log.grow(2)
    await witnessing([pair])[0].round()
    assert audit(log.store, pair[1]).exit_code == ExitCode.VALID
    directory = tmp_path / "export1"
    (file,) = (directory / "witnessed").iterdir()
    content = file.read_bytes()
    keys = verify.parse_keys((directory / "vkey").read_text())
    # The log's own line in this file means nothing to the verifier: the tree it names is compared.
    own = range(content.index("\u2014".encode()), content.rindex("\u2014".encode()))
    for at in range(len(content)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        report = verify.verify_export(directory, keys, None, named(pair[1]))
        if at not in own:
            assert report.exit_code in {ExitCode.INVALID, ExitCode.UNWITNESSED, ExitCode.DIVERGED}, at


async def test_a_receipt_leads_to_the_cosigned_checkpoint(log, make_witness, witnessing, signer):
    """As soon as a witness has cosigned a head that covers the entry; until then to the newest."""
    pairs = [make_witness("w.test/1"), make_witness("w.test/2")]
    log.grow(7)
    task, courier = witnessing(pairs)
    await task.round()
    log.grow(5)
    courier.witnesses[pairs[1][1].url] = AuditUnavailableError("gone")
    await task.round()
    log.grow(2)
    key, known = verify.parse_key(signer.vkey), [pair[1] for pair in pairs]
    expected = {3: (7, 2), 9: (12, 1), 13: (14, 0)}  # size of the checkpoint, witnesses that cosigned it
    for index, (size, count) in expected.items():
        leaf, text = export_receipt(log.store, index)
        report = verify.verify_receipt(text.encode(), leaf, key, None, named(*known, needed=count))
        assert (report.size, len(report.cosigned), report.exit_code) == (size, count, ExitCode.VALID), index
    assert (
        verify.verify_receipt(text.encode(), leaf, key, None, named(*known)).exit_code == ExitCode.UNWITNESSED
    )


async def test_a_receipt_verifies_with_the_keys_the_log_has_now(log, make_witness, witnessing, signer):
    """What was cosigned before a key was added does not do for auditors who ask for both."""
    pair = make_witness("w.test/1")
    log.grow(7)
    task, _ = witnessing([pair])
    await task.round()
    log.signer = joined(signer, MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32))))
    log.grow(2)
    keys = verify.parse_keys(log.signer.vkey)
    for cosigned in (0, 1):
        leaf, text = export_receipt(log.store, 3)
        report = verify.verify_receipt(text.encode(), leaf, keys, None, named(pair[1], needed=0))
        assert (report.exit_code, len(report.cosigned)) == (ExitCode.VALID, cosigned)
        await task.round()


@pytest.mark.parametrize("size", [5, 6, 9, 12])
def test_a_receipt_is_compared_with_held_heads_it_can_show(log, signer, size):
    """The path shows the tree up to the entry, with the entry, and at the ends of what follows it."""
    held = {0: log.grow(1)} | {number: log.grow(1) for number in range(1, size)}
    key = verify.parse_key(signer.vkey)
    for index in range(size):
        leaf, text = export_receipt(log.store, index)
        for before, note in held.items():
            head = verify.verify_note(note.encode(), key)
            report = verify.verify_receipt(text.encode(), leaf, key, head)
            assert report.exit_code == ExitCode.VALID
            shown = "continues" in report.held
            assert shown or "cannot show" in report.held
            if before + 1 in {index, index + 1, size}:
                assert shown
            other = verify.Head(size=head.size, root=bytes(32))
            code = verify.verify_receipt(text.encode(), leaf, key, other).exit_code
            assert code == (ExitCode.DIVERGED if shown else ExitCode.VALID)


def test_a_post_quantum_log_is_verified_with_both_keys(sql_store, signer, audit, tmp_path):
    """Both signatures are needed once both keys are asked for."""
    both = joined(signer, MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32))))
    log = Log(sql_store, both)
    log.grow(3)
    assert audit(sql_store, keys=both.vkey).exit_code == ExitCode.VALID
    assert audit(sql_store, keys=signer.vkey).exit_code == ExitCode.VALID
    note = (tmp_path / "export1" / "checkpoint").read_text()
    assert len(parse_note(note).signatures) == 2
    Log.sign.__get__(_with_tree(Log(sql_store, signer), log.tree))()
    report = audit(sql_store, keys=both.vkey)
    assert report.exit_code == ExitCode.INVALID
    assert "not signed with this ML-DSA-44 key" in report.problems[0]


def _with_tree(log, tree):
    log.tree = tree
    return log


# Settings and wiring.


def test_witnesses_come_from_the_settings(tmp_path, make_witness):
    """Keys as text or in a file; a name twice, or under another key, is an error."""
    _, first = make_witness("w.test/1")
    _, second = make_witness("w.test/2", post_quantum=True)
    file = tmp_path / "second.keys"
    file.write_text("".join(f"{key.encode()}\n" for key in second.keys))
    entries = (
        WitnessSettings(name=first.name, key=first.keys[0].encode(), url=first.url),
        WitnessSettings(name=second.name, key=str(file)),
    )
    loaded = load_witnesses(AuditSettings(witnesses=entries))
    assert loaded[0] == first
    assert (loaded[1].keys, loaded[1].url) == (second.keys, None)
    with pytest.raises(ConfigurationError, match="twice"):
        load_witnesses(AuditSettings(witnesses=entries[:1] * 2))


def test_the_latest_checkpoint_is_read_as_signed(log):
    """Body and note are one."""
    note = log.grow(3)
    assert latest_checkpoint(log.store) == (parse_body(parse_note(note).text), note)
