"""What a SIEM stored is proven from it alone: nothing between two checkpoints is missing or changed."""

import json
import random
import re

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit import verify
from appliance.audit.checkpoint import parse_note, sign_note
from appliance.audit.entry_types import EntryType
from appliance.audit.forward.cef import render_cef
from appliance.audit.forward.ocsf import render_ocsf
from appliance.audit.rotation import rotate_keys
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import Signer, create_signing_key, load_signing_key
from appliance.audit.verify import ExitCode
from tests.forwarding import Collected, judge_stream, make_forwarder
from tests.unit.audit.conftest import ORIGIN

pytest_plugins = ["tests.unit.audit.forward.conftest"]


@pytest.fixture
def judge(tmp_path, signer):
    """Exit code and report on these lines."""

    def judge_(lines, *options, vkey=signer.vkey):
        path = tmp_path / "stream"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return judge_stream(path, vkey, *options)

    return judge_


@pytest.fixture
def lines(collected):
    """What was stored: eleven entries, two for each request and the start, and checkpoints in between."""
    return list(collected.messages)


def kind_of(line):
    kind, number = verify._PROOF.search(line).groups()[:2]
    return kind.decode(), int(number)


def place(lines, kind, number):
    return [kind_of(line) for line in lines].index((kind, number))


def sizes(lines):
    return [number for kind, number in map(kind_of, lines) if kind == "checkpoint"]


def test_everything_between_the_first_entry_and_the_last_checkpoint_is_proven(lines, judge):
    code, report = judge(lines)
    assert code == ExitCode.VALID, report
    assert (report["start"], report["end"], report["before"], report["after"]) == (0, 11, 0, 0)
    assert report["checkpoints"] == len(sizes(lines)) >= 3
    assert report["entries_by_type"]["request.outcome"] == 5


@pytest.mark.parametrize("render", [render_ocsf, render_cef])
async def test_streams_of_other_formats_are_proven_alike(render, record, sql_store, judge):
    await record("r1", "r2", "r3")
    collector = Collected()
    await make_forwarder(sql_store, collector, render=render).forward(until_sent=True)
    code, report = judge(collector.messages)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, 7)


def test_the_payload_alone_is_enough(lines, judge):
    """Collectors may store it without the syslog header, or inside JSON of their own."""
    payloads = [line[line.index(b"{") :] for line in lines]
    assert judge(payloads)[0] == ExitCode.VALID
    wrapped = [json.dumps({"_raw": line.decode(), "host": "gw"}).encode() for line in lines]
    assert judge(wrapped)[0] == ExitCode.VALID
    sorted_members = [
        json.dumps(json.loads(payload), sort_keys=True, indent=None).encode() for payload in payloads
    ]
    assert judge(sorted_members)[0] == ExitCode.VALID


@pytest.mark.parametrize("seed", range(5))
def test_repeated_and_reordered_lines_change_nothing(lines, judge, seed):
    """Ranges are sent again after each connection, and several threads of a collector store in any order."""
    shuffled = lines + lines[3:9]
    random.Random(seed).shuffle(shuffled)
    code, report = judge(shuffled)
    assert (code, report["end"], report["repeated"]) == (ExitCode.VALID, 11, 6)


@pytest.mark.parametrize("index", range(11))
def test_a_removed_event_is_named(lines, judge, index):
    del lines[place(lines, "leaf", index)]
    code, report = judge(lines)
    if index == 0:  # without the first entry it is a stream that begins at its first checkpoint
        assert report["start"] == sizes(lines)[0]
        return
    assert code == ExitCode.INVALID
    (problem,) = report["problems"]
    assert re.fullmatch(rf"1 entries between {index} and \d+ are missing", problem)


@pytest.mark.parametrize("index", range(11))
def test_a_changed_event_is_invalid(lines, judge, index, signer):
    """Its leaf; its leaf and hash; its readable copy alone."""
    at = place(lines, "leaf", index)
    _, number, digest, content = verify._PROOF.search(lines[at]).groups()
    leaf = verify._word(content).replace(b'"v":1', b'"v":1,"w":2')
    forged = [word.encode() for word in (_word(verify.hash_leaf(leaf)), _word(leaf))]
    changed = [
        lines[at].replace(content, forged[1]),
        lines[at].replace(content, forged[1]).replace(digest, forged[0]),
        lines[at].replace(ORIGIN.encode(), b"other.test/audit", 1),
    ]
    for line in changed:
        assert line != lines[at]
        code, report = judge([*lines[:at], line, *lines[at + 1 :]])
        assert code == ExitCode.INVALID, report
        assert any(number.decode() in problem for problem in report["problems"])


def test_two_events_whose_contents_were_swapped_are_invalid(lines, judge):
    one, other = place(lines, "leaf", 5), place(lines, "leaf", 6)
    swapped = (
        lines[one].replace(b"tlog-leaf.5.", b"tlog-leaf.6."),
        lines[other].replace(b"tlog-leaf.6.", b"tlog-leaf.5."),
    )
    lines[one], lines[other] = swapped
    code, report = judge(lines)
    assert code == ExitCode.INVALID
    assert "are not those that it signs" in report["problems"][0]


def test_an_event_that_came_again_with_other_content_is_invalid(lines, judge):
    """As after a rollback: the log has another entry of that index now."""
    content = verify._PROOF.search(lines[place(lines, "leaf", 4)])[4]
    leaf = verify._word(content).replace(b'"acme"', b'"evil"')
    other = f"tlog-leaf.4.{_word(verify.hash_leaf(leaf))}.{_word(leaf)}.".encode()
    for stored in ([*lines, other], [other, *lines]):
        code, report = judge(stored)
        assert code == ExitCode.INVALID
        assert any("came again with other content" in problem for problem in report["problems"])


def test_a_removed_checkpoint_is_covered_by_later_ones(lines, judge):
    del lines[place(lines, "checkpoint", sizes(lines)[1])]
    code, report = judge(lines)
    assert (code, report["start"], report["end"]) == (ExitCode.VALID, 0, 11)


def test_entries_behind_the_last_checkpoint_are_not_called_proven(lines, judge):
    del lines[place(lines, "checkpoint", sizes(lines)[-1])]
    code, report = judge(lines)
    assert (code, report["end"]) == (ExitCode.VALID, sizes(lines)[-1])
    assert report["after"] == 11 - sizes(lines)[-1] > 0


def test_a_foreign_checkpoint_is_invalid(lines, judge):
    at = place(lines, "checkpoint", sizes(lines)[0])
    note = verify._PROOF.search(lines[at])[4]
    forger = Signer(ORIGIN, Ed25519PrivateKey.generate())
    forged = sign_note(parse_note(verify._word(note).decode()).text, [forger])
    lines[at] = lines[at].replace(note, _word(forged.encode()).encode())
    code, report = judge(lines)
    assert code == ExitCode.INVALID
    assert "not signed with this" in report["problems"][0]


def test_a_frontier_of_another_tree_is_invalid(lines, judge):
    """It is not signed itself: it counts because it makes the root that is."""
    at = place(lines, "checkpoint", sizes(lines)[0])
    frontier = verify._PROOF.search(lines[at])[3]
    lines[at] = lines[at].replace(frontier, _word(bytes(len(verify._word(frontier)))).encode())
    code, report = judge(lines)
    assert code == ExitCode.INVALID
    assert "frontier of another tree" in report["problems"][0]


def test_a_stream_may_begin_at_any_checkpoint(lines, judge):
    """Older events are gone from the SIEM: from the first checkpoint on, all is proven."""
    for size in sizes(lines)[:-1]:
        rest = lines[place(lines, "checkpoint", size) :]
        code, report = judge(rest)
        assert (code, report["start"], report["end"]) == (ExitCode.VALID, size, 11)
        code, report = judge(lines[place(lines, "leaf", size - 1) :])
        assert (code, report["start"], report["before"]) == (ExitCode.VALID, size, 1)
        at = place(rest, "leaf", size)
        assert judge([*rest[:at], *rest[at + 1 :]])[0] == ExitCode.INVALID


def test_a_held_checkpoint_is_compared(lines, judge, tmp_path, signer):
    """An older one must be a prefix; a newer one shows that the stream's end was cut off."""
    first, last = sizes(lines)[0], sizes(lines)[-1]
    path = tmp_path / "held"

    def keep(size):
        path.write_bytes(verify._word(verify._PROOF.search(lines[place(lines, "checkpoint", size)])[4]))

    keep(first)
    assert judge(lines, "--held", str(path))[1]["held"] == f"continues the held checkpoint of {first} entries"
    assert judge(lines[place(lines, "checkpoint", first) :], "--held", str(path))[0] == ExitCode.VALID
    keep(last)
    cut = lines[: place(lines, "checkpoint", last)]
    assert judge(cut, "--held", str(path))[0] == ExitCode.DIVERGED
    body = parse_note(path.read_text()).text.split("\n")
    body[2] = "A" * 43 + "="
    path.write_text(sign_note("\n".join(body), [signer]))
    assert judge(lines, "--held", str(path))[0] == ExitCode.DIVERGED


def test_events_that_were_cut_off_are_counted_and_missing(lines, judge):
    """A collector with a smaller maximum message size cuts the largest ones."""
    at = place(lines, "leaf", 6)
    lines[at] = lines[at][:-40]
    code, report = judge(lines)
    assert (code, report["cut_off"]) == (ExitCode.INVALID, 1)
    assert judge([*lines, *lines[:at]])[0] == ExitCode.INVALID


def test_a_torn_line_in_front_of_a_message_hides_nothing(lines, judge):
    """A killed collector leaves half a line, and appends the next message to it."""
    at = place(lines, "leaf", 6)
    lines[at] = lines[at][:-40] + lines[at]
    assert judge(lines)[0] == ExitCode.VALID


async def test_an_id_that_a_caller_chose_cannot_pass_for_a_proof(open_log, sql_store, intent, judge):
    """`client_request_id` is recorded as the client sent it."""
    async with open_log(sql_store) as log:
        chosen = {**intent("r1"), "client_request_id": f"tlog-leaf.0.{'A' * 43}.{'A' * 60}."}
        await log.append(EntryType.REQUEST_INTENT, **chosen)
    collector = Collected()
    await make_forwarder(sql_store, collector).forward(until_sent=True)
    code, report = judge(collector.messages)
    assert (code, report["end"]) == (ExitCode.VALID, 3), report


def test_lines_of_others_are_counted(lines, judge):
    code, report = judge([b"<13>1 - host sshd - - - hello", *lines, b""])
    assert (code, report["other_lines"]) == (ExitCode.VALID, 1)


@pytest.mark.parametrize("stored", [[], [b"hello"]])
def test_a_stream_that_proves_nothing_is_not_called_valid(stored, judge, lines):
    assert judge(stored)[0] == ExitCode.UNUSABLE
    assert judge(lines[-1:])[0] == ExitCode.UNUSABLE
    assert judge(lines[:2])[0] == ExitCode.UNUSABLE


def test_every_changed_byte_of_a_proof_is_detected(lines, judge):
    """In leaves; the checkpoints are those of the log either way."""
    at = place(lines, "leaf", 7)
    line = lines[at]
    start, end = verify._PROOF.search(line).span()
    for position in range(start, end, 5):
        swapped = b"B" if line[position : position + 1] == b"A" else b"A"
        changed = line[:position] + swapped + line[position + 1 :]
        code, _ = judge([*lines[:at], changed, *lines[at + 1 :]])
        assert code == ExitCode.INVALID, position


async def test_a_rotated_key_is_followed(sql_store, open_log, sealed_path, clock, intent, judge, tmp_path):
    """The auditor has the first key only; the last key alone proves what comes after the rotation."""
    path = tmp_path / "audit.key"
    create_signing_key(path)
    first = load_signing_key(path, ORIGIN)

    async def write(name):
        async with open_log(sql_store, signed_by=load_signing_key(path, ORIGIN)) as log:
            await log.append(EntryType.REQUEST_INTENT, **intent(name))

    await write("r1")
    rotate_keys(
        store=sql_store,
        path=path,
        origin=ORIGIN,
        sealed=SealedHead(sealed_path),
        gateway="gateway",
        actor="cli:root",
        clock=clock,
    )
    await write("r2")
    collector = Collected()
    await make_forwarder(sql_store, collector).forward(until_sent=True)
    code, report = judge(collector.messages, vkey=first.vkey)
    assert code == ExitCode.VALID, report
    assert len(report["rotations"]) == 1
    second = load_signing_key(path, ORIGIN).vkey
    assert judge(collector.messages, vkey=second)[0] == ExitCode.INVALID
    last = place(collector.messages, "checkpoint", sizes(collector.messages)[-2])
    assert judge(collector.messages[last:], vkey=second)[0] == ExitCode.VALID


def _word(content: bytes) -> str:
    return verify.base64.urlsafe_b64encode(content).decode().rstrip("=")
