"""The auditor's verifier accepts what is whole, and has a distinct exit code for every kind of damage."""

import ast
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.entry import Entry, encode, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import Signer
from appliance.audit.verify import ExitCode
from tests.audit_log import write_export
from tests.tree_proofs import make_receipt

TIME = "2026-11-20T12:00:00.000Z"


@pytest.fixture
def write(tmp_path, signer):
    """Write an export of these leaves, signed; by an attacker who has the key, if need be."""

    def write_(leaves, name="export", signed_by=signer):
        return write_export(tmp_path / name, leaves, signed_by)

    return write_


@pytest.fixture
def make(signer, intent, outcome):
    """Make a leaf: `make(type, request)` or `make(type, **fields)`."""
    count = 0

    def make_(entry_type, request=None, **fields):
        nonlocal count
        count += 1
        known = {
            EntryType.REQUEST_INTENT: intent(request),
            EntryType.REQUEST_OUTCOME: outcome(request),
            EntryType.REQUEST_ABORTED: {"request_id": request, "reason": "gateway_stopped"},
            EntryType.AUDIT_READ: {"actor": "cli:root", "operation": "tail"},
            EntryType.AUDIT_GAP: {"reason": "disk full", "entries": 3, "since": TIME, "until": TIME},
            EntryType.ERASURE: {
                "tenant": "acme",
                "payloads": 2,
                "legal_basis": "request",
                "actor": "cli:root",
            },
        }
        return encode(
            Entry(
                log=signer.name,
                id=new_entry_id(count, count.to_bytes(10)),
                type=entry_type,
                time=TIME,
                fields=known.get(entry_type, {}) | fields,
            )
        )

    return make_


@pytest.fixture
def leaves(make):
    """A small log in which every request ended."""
    kinds = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME
    return [make(kind, f"r{number}") for number in range(5) for kind in kinds]


@pytest.fixture
def check(signer):
    """Run the verifier; return the exit code and the report."""

    def check_(directory, held=None):
        key = verify.parse_key(signer.vkey)
        report = verify.verify_export(directory, key, verify.verify_note(held, key) if held else None)
        return report.exit_code, report

    return check_


def test_a_whole_log_is_valid(write, check, leaves, make):
    """The report shows its contents, and that no held checkpoint was compared."""
    leaves += [make(EntryType.REQUEST_INTENT, "x"), make(EntryType.REQUEST_ABORTED, "x")]
    code, report = check(write(leaves))
    assert code == ExitCode.VALID
    assert (report.size, report.checkpoint_verified, report.held) == (12, True, None)
    assert report.entries_by_type == {"request.intent": 6, "request.outcome": 5, "request.aborted": 1}
    assert (report.first_time, report.last_time) == (TIME, TIME)
    assert "signature verified" in verify.render(report)


def test_a_key_that_no_entry_created_is_a_finding_of_its_own(write, check, make):
    """A key put into the database acts: as a tenant, as an admin, in the console."""
    created = {"tenant": "acme", "key_id": "abcd2345", "admin": False, "actor": "cli:root"}
    leaves = [
        make(EntryType.KEY_CREATED, **created),
        make(EntryType.REQUEST_INTENT, "r1"),
        make(EntryType.REQUEST_OUTCOME, "r1"),
        make(EntryType.KEY_ROTATED, tenant="acme", key_id="efgh2345", previous_key_id="abcd2345", actor="x"),
        make(EntryType.REQUEST_INTENT, "r2", key_id="efgh2345"),
        make(EntryType.REQUEST_OUTCOME, "r2", key_id="jwt:0123456789abcdef"),
        make(EntryType.AUDIT_READ, actor="cli:operator", key_id="abcd2345"),
    ]
    code, report = check(write(leaves, "whole"))
    assert (code, report.unknown_keys, report.unrecorded_keys) == (ExitCode.VALID, {}, {})
    leaves += [
        make(EntryType.REQUEST_INTENT, "r3", key_id="zzzz2222"),
        make(EntryType.REQUEST_OUTCOME, "r3", key_id="zzzz2222"),
        make(EntryType.ERASURE, actor="yyyy2222"),
        make(EntryType.ERASURE, actor="console:xxxx2222"),
        make(EntryType.KEY_CREATED, **created | {"key_id": "wwww2222", "actor": "vvvv2222"}),
    ]
    code, report = check(write(leaves))
    assert code == ExitCode.UNKNOWN_KEYS
    assert report.unknown_keys == {"zzzz2222": 7, "yyyy2222": 9, "xxxx2222": 10, "vvvv2222": 11}
    assert "zzzz2222, which no entry created, acts in entry 7" in verify.render(report)
    assert json.loads(verify.render_json(report))["unknown_keys"] == list(report.unknown_keys)


def test_keys_that_acted_before_any_was_recorded_are_only_counted(write, check, leaves, make):
    """Such a log may not record keys at all."""
    created = make(EntryType.KEY_CREATED, tenant="acme", key_id="efgh2345", admin=False, actor="cli:root")
    code, report = check(write([*leaves, created]))
    assert (code, report.unrecorded_keys) == (ExitCode.VALID, {"abcd2345": 0})
    assert "1 acted before the first one" in verify.render(report)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 511, 513, 1024])
def test_logs_of_every_shape_of_tiles_are_valid(write, check, make, size):
    """Full and partial tiles, one level and two, and the empty log."""
    code, report = check(write([make(EntryType.AUDIT_READ) for _ in range(size)]))
    assert (code, report.problems, report.size) == (ExitCode.VALID, [], size)


def _file(directory, level="entries"):
    return next(path for path in (directory / "tile" / level).rglob("*") if path.is_file())


def _split(content):
    leaves = []
    while content:
        length = int.from_bytes(content[:2])
        leaves.append(content[2 : 2 + length])
        content = content[2 + length :]
    return leaves


def _join(leaves):
    return b"".join(len(leaf).to_bytes(2) + leaf for leaf in leaves)


def _edited(leaves):
    leaves[3] = leaves[3].replace(b"completed", b"timed_out")


def _swapped(leaves):
    leaves[2], leaves[4] = leaves[4], leaves[2]


def _truncated(leaves):
    del leaves[-2:]


def _hollowed(leaves):
    del leaves[4:6]


def _extended(leaves):
    leaves.append(leaves[0])


@pytest.mark.parametrize("attack", [_edited, _swapped, _truncated, _hollowed, _extended])
@pytest.mark.parametrize("thorough", [False, True], ids=["entries", "entries and hashes"])
def test_changed_entries_are_invalid(write, check, leaves, attack, thorough):
    """Edit, swap, cut the end, cut the middle, add: with or without making the hash tiles fit."""
    directory = write(leaves)
    bundle = _file(directory)
    changed = _split(bundle.read_bytes())
    attack(changed)
    bundle.write_bytes(_join(changed))
    if thorough:
        _file(directory, "0").write_bytes(b"".join(hash_leaf(leaf) for leaf in changed))
    code, report = check(directory)
    assert code == ExitCode.INVALID
    assert report.problems


def test_an_edited_entry_is_named(write, check, leaves):
    """The report names the entry, as long as the hash tile is unchanged."""
    directory = write(leaves)
    changed = _split(_file(directory).read_bytes())
    _edited(changed)
    _file(directory).write_bytes(_join(changed))
    assert "entry 3 does not match tile/0/000.p/10" in check(directory)[1].problems


@pytest.mark.parametrize("level", ["entries", "0", "1"])
def test_a_missing_tile_is_invalid(write, check, make, level):
    """What was signed must be there; a hole is not a smaller log."""
    directory = write([make(EntryType.AUDIT_READ) for _ in range(300)])
    _file(directory, level).unlink()
    code, report = check(directory)
    assert code == ExitCode.INVALID
    assert "missing" in report.problems[0]


def test_a_forged_checkpoint_is_invalid(write, check, leaves):
    """Without the key, a rebuilt log has no valid signature."""
    forger = Signer("appliance.test/audit", Ed25519PrivateKey.generate())
    code, report = check(write(leaves[:4], signed_by=forger))
    assert code == ExitCode.INVALID
    assert report.checkpoint_verified is False


def test_every_changed_byte_of_an_export_is_invalid(write, check, make):
    """No byte of an export is without meaning, but those of the convenience copy of the key."""
    directory = write([make(EntryType.AUDIT_READ), make(EntryType.AUDIT_READ)])
    for file in [path for path in directory.rglob("*") if path.is_file() and path.name != "vkey"]:
        content = file.read_bytes()
        for at in range(len(content)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert check(directory)[0] == ExitCode.INVALID, (file, at)
        file.write_bytes(content)
    assert check(directory)[0] == ExitCode.VALID


def test_a_continuation_of_the_held_checkpoint_is_valid(write, check, leaves):
    """An auditor who kept a head sees that what it covered is still there, unchanged."""
    for size in range(len(leaves) + 1):
        held = (write(leaves[:size], f"held{size}") / "checkpoint").read_bytes()
        code, report = check(write(leaves, f"now{size}"), held)
        assert code == ExitCode.VALID
        assert "continues" in report.held


def test_a_rewritten_log_diverges_from_the_held_checkpoint(write, check, leaves):
    """Even with the stolen key: only a held checkpoint detects a consistent rewrite."""
    held = (write(leaves, "held") / "checkpoint").read_bytes()
    changed = list(leaves)
    _edited(changed)
    forged = write(changed, "forged")
    assert check(forged)[0] == ExitCode.VALID
    code, report = check(forged, held)
    assert code == ExitCode.DIVERGED
    assert "not those of the held checkpoint" in report.held


def test_a_log_shorter_than_the_held_checkpoint_diverges(write, check, leaves):
    """A restored backup, signed again, has lost what the auditor saw."""
    held = (write(leaves, "held") / "checkpoint").read_bytes()
    code, report = check(write(leaves[:4], "restored"), held)
    assert code == ExitCode.DIVERGED
    assert report.held == "10 entries were signed before, 4 are here"


def test_an_open_intent_is_incomplete_and_listed(write, check, leaves, make):
    """Authentic, but something was begun whose end is not recorded."""
    code, report = check(write([*leaves, make(EntryType.REQUEST_INTENT, "unfinished")]))
    assert code == ExitCode.INCOMPLETE
    assert report.open_requests == {"unfinished": 10}
    assert "unfinished, begun by entry 10" in verify.render(report)


def test_an_admitted_gap_is_incomplete(write, check, leaves, make):
    """The log says itself that entries are missing, and how many."""
    code, report = check(write([*leaves, make(EntryType.AUDIT_GAP)]))
    assert code == ExitCode.INCOMPLETE
    assert (report.gaps, report.missing_entries) == (1, 3)
    assert "3 missing entries" in verify.render(report)


def test_erased_payloads_have_a_verdict_of_their_own(write, check, leaves, make):
    """Nothing is wrong, and the report says that payloads are gone."""
    code, report = check(write([*leaves, make(EntryType.ERASURE)]))
    assert code == ExitCode.ERASED
    assert report.erased_payloads == 2
    assert "2 payloads" in verify.render(report)


def test_the_gravest_finding_decides(write, check, leaves, make):
    """Invalid before diverged before incomplete before erased."""
    held = (write([*leaves, leaves[0]], "held") / "checkpoint").read_bytes()
    log = [*leaves, make(EntryType.REQUEST_INTENT, "open"), make(EntryType.ERASURE)]
    assert check(write(log, "a"))[0] == ExitCode.INCOMPLETE
    assert check(write(log, "b"), held)[0] == ExitCode.DIVERGED
    assert check(write([*log, b"{}"], "c"), held)[0] == ExitCode.INVALID


def _accepted(make, *numbers, epochs=None):
    """Entries of the gateway gw with these numbers."""
    return [
        make(EntryType.AUDIT_READ, writer="gw", epoch=epoch, sequence=number)
        for number, epoch in zip(numbers, epochs or [1] * len(numbers), strict=True)
    ]


def test_sequences_of_gateways_without_holes_are_valid(write, check, make, leaves):
    """Mixed with entries without a number, over a restart."""
    accepted = _accepted(make, 1, 2, 3, 4, epochs=[1, 1, 3, 3])
    other = make(EntryType.AUDIT_READ, writer="other", epoch=9, sequence=1)
    code, report = check(write([*accepted[:2], *leaves, other, *accepted[2:]]))
    assert (code, report.problems) == (ExitCode.VALID, [])
    assert report.sequences == {"gw": (3, 4), "other": (9, 1)}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda make: [make(EntryType.REQUEST_OUTCOME, "a")], "which never began"),
        (
            lambda make: [
                make(kind, "a")
                for kind in (
                    EntryType.REQUEST_INTENT,
                    EntryType.REQUEST_OUTCOME,
                    EntryType.REQUEST_OUTCOME,
                )
            ],
            "ends request a a second time",
        ),
        (
            lambda make: [
                make(kind, "a")
                for kind in (
                    EntryType.REQUEST_INTENT,
                    EntryType.REQUEST_OUTCOME,
                    EntryType.REQUEST_ABORTED,
                )
            ],
            "ends request a a second time",
        ),
        (lambda make: [make(EntryType.REQUEST_INTENT, "a")] * 2, "id that was used before"),
        (
            lambda make: [make(EntryType.REQUEST_INTENT, "a"), make(EntryType.REQUEST_INTENT, "a")],
            "begins request a a second time",
        ),
        (
            lambda make: [
                make(kind, "a")
                for kind in (
                    EntryType.REQUEST_INTENT,
                    EntryType.REQUEST_ABORTED,
                    EntryType.REQUEST_INTENT,
                )
            ],
            "begins request a a second time",
        ),
        (lambda make: _accepted(make, 1, 3), "and 1 before it are missing"),
        (lambda make: _accepted(make, 2), "and 1 before it are missing"),
        (lambda make: _accepted(make, 1, 2, 2), "is number 2 of those that gateway gw accepted, after"),
        (lambda make: _accepted(make, 1, 2, 3, epochs=[1, 2, 1]), "of an older start"),
        (lambda make: [make(EntryType.AUDIT_READ).replace(b'"time"', b'"sequence":1,"time"')], "no proper"),
    ],
)
def test_a_signed_log_that_contradicts_itself_is_invalid(write, check, make, build, words):
    """The signature only says who wrote it; requests must begin once and end once."""
    code, report = check(write(build(make)))
    assert code == ExitCode.INVALID
    assert words in " ".join(report.problems)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda leaf: leaf.replace(b'"v":1', b'"v": 1'), "canonical"),
        (lambda leaf: leaf.replace(b'"v":1', b'"v":2'), "format"),
        (lambda leaf: leaf.replace(b'"v":1', b'"v":true'), "format"),
        (lambda leaf: leaf.replace(b'"v":1', b'"v":1.0'), "JSON"),
        (lambda leaf: leaf.replace(b"appliance.test", b"elsewhere.test"), "another log"),
        (lambda leaf: leaf.replace(b"12:00:00.000Z", b"noon"), "time"),
        (lambda leaf: leaf.replace(b'"actor":"cli:root"', b'"actor":null'), "canonical"),
        (lambda leaf: leaf.replace(b'"actor":"cli:root"', b'"actor":{"a":1}'), "canonical"),
        (lambda leaf: leaf.replace(b'"actor":"cli:root"', b'"actor":9007199254740992'), "canonical"),
        (lambda leaf: leaf.replace(b'"actor":"cli:root"', b'"actor":"\\ud800"'), "canonical"),
        (lambda leaf: leaf.replace(b'"actor":"cli:root",', b'"actor":"a","actor":"cli:root",'), "canonical"),
        (lambda leaf: leaf.replace(b'"audit.read"', b"7"), "type"),
        (lambda leaf: leaf.replace(b"cli:root", b"x" * 5000), "bytes long"),
        (lambda _: b"[" * 4000, "JSON"),
        (lambda _: b"\xff", "JSON"),
        (lambda _: b"", "JSON"),
        (lambda _: b"[]", "canonical"),
    ],
)
def test_signed_leaf_that_is_not_an_entry_is_invalid(write, check, make, change, words):
    """Canonical form, envelope and origin are checked although the signature is good."""
    leaf = make(EntryType.AUDIT_READ)
    assert change(leaf) != leaf
    code, report = check(write([make(EntryType.AUDIT_READ), change(leaf)]))
    assert code == ExitCode.INVALID
    assert report.problems[0].startswith("entry 1 ")
    assert words in report.problems[0]


def test_a_type_from_a_newer_appliance_is_counted(write, check, make):
    """Types may be added; the verifier checks what it knows and counts the rest."""
    leaf = make(EntryType.AUDIT_READ).replace(b"audit.read", b"audit.seen")
    code, report = check(write([leaf]))
    assert code == ExitCode.VALID
    assert report.entries_by_type == {"audit.seen": 1}


def test_leaves_are_read_together_if_all_are_right(make):
    """The fast way is taken for entries as gateways write them, and reads the same."""
    leaves = [
        make(EntryType.REQUEST_INTENT, "r"),
        make(EntryType.REQUEST_OUTCOME, "r"),
        make(EntryType.AUDIT_READ, actor='cli:\u00fc"\\\n\U0001f600', purpose=""),
    ]
    origin = json.loads(leaves[0])["log"]
    assert verify.parse_leaves(leaves, origin) == [verify.parse_leaf(leaf, origin) for leaf in leaves]
    for wrong in (b" ", b"{}", b"\xff", leaves[0].replace(b'"v":1', b'"v":2'), leaves[0] + b"\n"):
        assert verify.parse_leaves([*leaves, wrong], origin) is None


@given(st.data())
def test_leaves_are_never_read_together_that_are_wrong_alone(data):
    """However they are cut, joined and damaged: what is read are the leaves as they are."""
    whole = [
        b'{"id":"%d","log":"l","time":"2026-11-20T12:00:00.000Z","type":"t","v":1%s}' % (number, more)
        for number, more in enumerate([b"", b',"x":["{",1]', b',"x":["},{"]', b',"x":[",\\n{"]'])
    ]
    between = data.draw(st.sampled_from([b",", b",\n", b""]))
    text = between.join(data.draw(st.permutations(whole)))
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.sampled_from([b"", b"", b"\n", b",", b"{", b"}", b"["])) + text[at:]
    commas = [at for at, byte in enumerate(text) if byte == ord(",")]
    if data.draw(st.booleans()):
        commas = [at for at in commas if text[at + 1 :].lstrip().startswith(b"{")]
    cuts = sorted(data.draw(st.sets(st.sampled_from(commas), max_size=5)) if commas else [])
    leaves = [
        text[start:end] for start, end in zip([0, *(cut + 1 for cut in cuts)], [*cuts, None], strict=True)
    ]
    assert verify.parse_leaves(leaves, "l") == _alone(leaves)


@pytest.mark.parametrize("half", [b',"log"', b',"time"', b',"v"', b',{"]'])
def test_an_entry_in_two_leaves_is_not_made_up_for_by_two_in_one(half):
    """As many entries as leaves, and together they would be canonical JSON; the last half begins with `{`."""
    first, second, third = (
        b'{"id":"%d","log":"l","time":"2026-11-20T12:00:00.000Z","type":"t","v":1,"x":["},{"]}' % at
        for at in range(3)
    )
    at = first.index(half)
    leaves = [first[:at], first[at + 1 :], second + b"," + third]
    assert _alone(leaves) is None
    assert verify.parse_leaves(leaves, "l") is None


def test_leaves_with_members_in_another_order_are_invalid_together_too():
    """RFC 8785 orders names by UTF-16 code units: a name beyond U+FFFF stands before one from U+E000 on."""
    names = ["a", "\U00010000", "\ue000"]
    right = b'{"a":1,"id":"0","log":"l","time":"2026-11-20T12:00:00.000Z","type":"t","v":1,"%b":1,"%b":1}'
    encoded = [name.encode() for name in names]
    leaves = [right % (encoded[1], encoded[2]), right % (encoded[2], encoded[1])]
    assert verify.parse_leaves(leaves[:1], "l") == _alone(leaves[:1]) != [None]
    assert verify.parse_leaves(leaves, "l") is None
    assert _alone(leaves) is None


def _alone(leaves):
    try:
        return [verify.parse_leaf(leaf, "l") for leaf in leaves]
    except verify.InvalidError:
        return None


JSON_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUE = st.one_of(
    JSON_TEXT, st.booleans(), st.integers(-(2**53) + 1, 2**53 - 1), st.lists(JSON_TEXT, max_size=3)
)


@given(st.dictionaries(JSON_TEXT, JSON_VALUE, max_size=6))
def test_canonical_form_equals_an_independent_implementation(entry):
    """The verifier's few lines of RFC 8785 agree with a library that does all of it."""
    assert verify.canonical(entry) == rfc8785.dumps(entry)


def test_receipts_verify_against_the_writer_for_all_sizes(signer, make):
    """Two implementations of the path agree for every entry of every tree to 40."""
    leaves = [make(EntryType.AUDIT_READ) for _ in range(40)]
    hashes = [hash_leaf(leaf) for leaf in leaves]
    key = verify.parse_key(signer.vkey)
    for size in range(1, 41):
        body = Checkpoint(origin=signer.name, size=size, root=root_from_leaf_hashes(hashes[:size]))
        note = sign_note(encode_body(body), [signer])
        for index in range(size):
            text = make_receipt(leaf_hashes=hashes, index=index, checkpoint=note).encode()
            assert verify.verify_receipt(text, leaves[index], key, None).exit_code == ExitCode.VALID
            assert verify.verify_receipt(text, leaves[index - 1], key, None).exit_code == ExitCode.INVALID


@pytest.fixture
def receipt(signer, leaves):
    hashes = [hash_leaf(leaf) for leaf in leaves]
    body = Checkpoint(origin=signer.name, size=len(leaves), root=root_from_leaf_hashes(hashes))
    note = sign_note(encode_body(body), [signer])
    return make_receipt(leaf_hashes=hashes, index=6, checkpoint=note).encode()


def test_every_changed_byte_of_a_receipt_is_invalid(signer, receipt, leaves):
    """No byte of a receipt or its leaf is without meaning."""
    key = verify.parse_key(signer.vkey)
    assert verify.verify_receipt(receipt, leaves[6], key, None).exit_code == ExitCode.VALID
    for at in range(len(receipt)):
        changed = receipt[:at] + bytes([receipt[at] ^ 1]) + receipt[at + 1 :]
        assert verify.verify_receipt(changed, leaves[6], key, None).exit_code == ExitCode.INVALID, at
    for at in range(len(leaves[6])):
        changed = leaves[6][:at] + bytes([leaves[6][at] ^ 1]) + leaves[6][at + 1 :]
        assert verify.verify_receipt(receipt, changed, key, None).exit_code == ExitCode.INVALID, at


def test_a_path_of_another_length_is_invalid(signer, receipt, leaves):
    """A receipt has exactly the hashes it needs: there is one receipt per entry and checkpoint."""
    key = verify.parse_key(signer.vkey)
    lines = receipt.split(b"\n")
    for changed in ([*lines[:3], *lines[2:]], [*lines[:2], *lines[3:]], [*lines[:5], lines[2], *lines[5:]]):
        report = verify.verify_receipt(b"\n".join(changed), leaves[6], key, None)
        assert report.exit_code == ExitCode.INVALID
    end = lines.index(b"")
    longer = b"\n".join([*lines[:end], lines[2], *lines[end:]])
    assert "too long" in verify.verify_receipt(longer, leaves[6], key, None).problems[0]


def test_a_receipt_and_a_held_checkpoint_of_its_size_must_agree(signer, receipt, leaves, write):
    """Two heads of one size are proof of a second history."""
    key = verify.parse_key(signer.vkey)
    same = verify.verify_note((write(leaves, "same") / "checkpoint").read_bytes(), key)
    other = verify.verify_note((write(leaves[::-1], "other") / "checkpoint").read_bytes(), key)
    longer = verify.verify_note((write([*leaves, leaves[0]], "longer") / "checkpoint").read_bytes(), key)
    assert verify.verify_receipt(receipt, leaves[6], key, same).exit_code == ExitCode.VALID
    assert verify.verify_receipt(receipt, leaves[6], key, other).exit_code == ExitCode.DIVERGED
    assert "cannot show" in verify.verify_receipt(receipt, leaves[6], key, longer).held


@given(st.binary(max_size=200))
def test_no_note_can_break_the_verifier(content):
    """Hostile evidence is invalid; it never ends in a traceback."""
    key = verify.parse_key(Signer("log.test/a", Ed25519PrivateKey.from_private_bytes(bytes(32))).vkey)
    for note in (content, b"a\n\n\xe2\x80\x94 " + content + b"\n"):
        with pytest.raises(verify.InvalidError):
            verify.verify_note(note, key)
    receipt = b"c2sp.org/tlog-proof@v1\nindex 0\n\n" + content
    assert verify.verify_receipt(receipt, b"", key, None).exit_code == ExitCode.INVALID
    assert verify.verify_receipt(content, content, key, None).exit_code == ExitCode.INVALID


def test_other_signatures_are_ignored(write, check, leaves, signer):
    """A witness's line is ignored; a wrong line of the log's own key is not."""
    directory = write(leaves)
    note = (directory / "checkpoint").read_text()
    witness = base64.b64encode(bytes(68)).decode()
    (directory / "checkpoint").write_text(f"{note}\u2014 witness.test {witness}\n")
    assert check(directory)[0] == ExitCode.VALID
    own = base64.b64encode(signer.verifier_key.key_id + bytes(64)).decode()
    (directory / "checkpoint").write_text(f"{note}\u2014 {signer.name} {own}\n")
    assert check(directory)[0] == ExitCode.INVALID


def test_evidence_cannot_steer_the_terminal(write, check, make):
    """What an attacker wrote into a leaf is shown escaped."""
    text = verify.render(check(write([make(EntryType.REQUEST_INTENT, "\x1b[2Jgone\n")]))[1])
    assert "\x1b" not in text
    assert "\\u001b[2Jgone\\n" in text


# The command line.


@pytest.fixture
def run(signer, capsys):
    """Run the command line; return exit code, standard output and standard error."""

    def run_(*arguments, key=signer.vkey):
        try:
            code = verify.main([*map(str, arguments), "--key", key])
        except SystemExit as error:
            code = error.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_


def test_the_command_reports_for_people_and_programs(write, run, leaves, tmp_path):
    """Same verdict in both; the key may be text or a file."""
    directory = write(leaves)
    code, text, _ = run(directory)
    assert code == 0
    assert text.endswith("valid and complete (exit code 0)\n")
    code, text, _ = run(directory, "--json", key=str(directory / "vkey"))
    report = json.loads(text)
    assert (code, report["verdict"], report["size"]) == (0, "valid", 10)
    held = (write(leaves[:3], "held") / "checkpoint").rename(tmp_path / "held.txt")
    assert "continues the held checkpoint of 3 entries" in run(directory, "--held", held)[1]


def test_a_page_to_file_says_the_verdict_and_what_made_it(write, run, make, leaves, tmp_path):
    """What an attacker wrote into a leaf is text in it."""
    page = tmp_path / "verdict.html"
    assert run(write(leaves), "--html", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert '<h1 class="good">valid and complete (exit code 0)</h1>' in text
    assert hashlib.sha256(Path(verify.__file__).read_bytes()).hexdigest() in text
    bad = write([make(EntryType.REQUEST_OUTCOME, "<script>")], "bad")
    assert run(bad, "--html", page)[0] == 2
    text = page.read_text(encoding="utf-8")
    assert '<h1 class="bad">invalid' in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert run(bad, "--html", tmp_path / "nowhere" / "verdict.html")[0] == 1


def test_the_command_verifies_a_receipt(run, receipt, leaves, tmp_path):
    """One file and its leaf are enough, offline."""
    (tmp_path / "a.tlog-proof").write_bytes(receipt)
    (tmp_path / "a.json").write_bytes(leaves[6])
    code, text, _ = run(tmp_path / "a.tlog-proof", "--leaf", tmp_path / "a.json")
    assert code == 0
    assert "request.intent" in text


def test_many_problems_are_counted_not_listed(write, run, make):
    """A log full of problems gives a readable report."""
    code, text, _ = run(write([make(EntryType.REQUEST_OUTCOME, f"r{number}") for number in range(50)]))
    assert code == 2
    assert "and 30 more" in text
    assert text.count("PROBLEM") == 21


def test_unusable_input_is_exit_code_1_and_one_line(write, run, leaves, tmp_path, signer):
    """Nothing verified is not the same as invalid."""
    directory = write(leaves)
    other = Signer(signer.name, Ed25519PrivateKey.generate())
    (tmp_path / "junk").write_bytes(b"\xff\xfe")
    forged = write(leaves, "forged", signed_by=other) / "checkpoint"
    for code, out, err in (
        run(tmp_path / "nowhere"),
        run(tmp_path / "nowhere", "--leaf", tmp_path / "junk"),
        run(tmp_path),
        run(directory, key="nonsense"),
        run(directory, key="a+b+c"),
        run(directory, key=signer.vkey[:-4] + "AAA="),
        run(directory, key=str(tmp_path / "junk")),
        run(directory, "--held", tmp_path / "junk"),
        run(directory, "--held", forged),
        run(directory, "--unknown"),
    ):
        assert (code, out) == (1, "")
        assert err.startswith(("verify: ", "usage: "))
        assert "Traceback" not in err


def test_the_verifier_imports_nothing_of_ours():
    """Standard library and `cryptography` only, at any depth of the file."""
    tree = ast.parse(Path(verify.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign == {"cryptography"}


def test_the_verifier_runs_as_a_copied_file(write, leaves, tmp_path, signer):
    """An auditor copies one file; it runs without our package."""
    copy = tmp_path / "elsewhere" / "verify.py"
    copy.parent.mkdir()
    shutil.copy(verify.__file__, copy)
    done = subprocess.run(
        [sys.executable, "-I", copy, write(leaves), "--key", signer.vkey, "--json"],
        capture_output=True,
        cwd=copy.parent,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["verdict"] == "valid"


# The tutorial.


TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial"
DIGEST = TUTORIAL.parent / "reference" / "verify.py.sha256"


def test_the_tutorials_commands_give_the_verdicts_it_shows(tmp_path):
    """In order, as a reader types them; what it shows of each report is in the report."""
    page = (TUTORIAL / "verify-a-sample-log.md").read_text(encoding="utf-8")
    for file in (TUTORIAL / "sample-log.tar.gz", Path(verify.__file__), DIGEST):
        shutil.copy(file, tmp_path)
    directory, shown = tmp_path, 0
    for language, text in re.findall(r"^   ```(sh)?\n(.*?)^   ```", page, re.MULTILINE | re.DOTALL):
        lines = [line.strip() for line in text.splitlines()]
        if language:
            command = "\n".join(lines).replace("python ", f"{sys.executable} -I ")
            done = subprocess.run(
                ["sh", "-c", command], cwd=directory, capture_output=True, text=True, check=False
            )
            directory = tmp_path / "sample-log"
        else:
            shown += 1
            assert set(lines) - {"\u2026"} <= set(done.stdout.splitlines()), done.stderr
            assert f"(exit code {done.returncode})" in lines[-1]
    assert shown == 4
    assert "valid and complete" in (directory / "verdict.html").read_text(encoding="utf-8")
