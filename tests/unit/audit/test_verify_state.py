"""A verification that remembers reports what one full verification reports, and reads only what is new."""

import base64
import contextlib
import hashlib
import io
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.content.payloads import first_id
from appliance.audit.entry import format_time
from appliance.audit.rotation import rotation_message
from appliance.audit.signing_keys import Signer
from appliance.audit.verify import ExitCode
from tests.audit_log import ORIGIN, write_export

SIGNER = Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
NOW_MS = 1_800_000_000_000
OF_THIS_RUN = {"verified_before", "state"}


class Auditor:
    """One who comes again and again: each visit brings an export of the log as it is by then."""

    def __init__(self, directory):
        self.directory = directory
        self.state = directory / "state"
        self.export = directory / "export"
        self.visits = 0

    def visit(self, leaves, *options, payloads=None, signer=SIGNER, key=SIGNER.vkey, state=True, damage=None):
        """Write the export and verify it; return the JSON report, or what went to standard error."""
        self.visits += 1
        self.export = write_export(self.directory / f"export{self.visits}", leaves, signer)
        for name, content in (payloads or {}).items():
            (self.export / "payloads").mkdir(exist_ok=True)
            (self.export / "payloads" / name).write_bytes(content)
        if damage:
            damage(self.export)
        return self.again(*options, key=key, state=state)

    def again(self, *options, key=SIGNER.vkey, state=True):
        """Verify the export of the last visit."""
        if state:
            options = (*options, "--state", self.state)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = verify.main([*map(str, (self.export, "--json", "--key", key, *options))])
        if code == ExitCode.UNUSABLE:
            assert not out.getvalue()
            return err.getvalue()
        report = json.loads(out.getvalue())
        assert report["exit_code"] == code
        return report


@pytest.fixture
def auditor(tmp_path):
    return Auditor(tmp_path)


def request_id(number):
    return first_id(NOW_MS + number * 1000)


def leaf(number, entry_type, **fields):
    """Entry of an own id, one second after the entry before."""
    envelope = {"v": 1, "log": ORIGIN, "id": f"E{number:025}", "type": entry_type}
    return rfc8785.dumps(envelope | {"time": format_time(NOW_MS + number * 1000)} | fields)


def intent(number, request=None, **fields):
    return leaf(
        number, "request.intent", **{"request_id": request or request_id(number), "tenant": "acme"} | fields
    )


def outcome(number, request, **fields):
    return leaf(number, "request.outcome", request_id=request, tenant="acme", **fields)


def kept(content=b"content"):
    """Fields of an entry that names a payload."""
    return {"payload_digest": hashlib.sha256(content).hexdigest(), "payload_commitment": "0" * 64}


def filler(count, start=100):
    return [leaf(start + number, "audit.read", actor="cli:root") for number in range(count)]


def without_this_run(report):
    payloads = {name: value for name, value in report["payloads"].items() if name != "compared_before"}
    return {name: value for name, value in report.items() if name not in OF_THIS_RUN} | {"payloads": payloads}


R = request_id(1)
CREATED = leaf(0, "key.created", tenant="acme", key_id="abcd2345", actor="cli:root")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([leaf(0, "audit.read")], [leaf(0, "audit.seen")], "has an id that was used before"),
        ([intent(1, R)], [intent(2, R)], f"begins request {R} a second time"),
        ([intent(1, R), outcome(2, R)], [intent(3, R)], f"begins request {R} a second time"),
        ([intent(1, R), outcome(2, R)], [outcome(3, R)], f"ends request {R} a second time"),
        ([intent(1, R)], [outcome(2, R), outcome(3, R)], f"ends request {R} a second time"),
        ([leaf(0, "audit.read")], [outcome(1, R)], f"ends request {R}, which never began"),
        (
            [leaf(0, "hold.placed", tenant="acme")],
            [leaf(1, "erasure", tenant="acme", payloads=0)],
            "under a legal hold",
        ),
        ([intent(1, R)], [outcome(2, R, **kept())], "whose intent names none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("between", [0, 300])
def test_an_attack_that_begins_before_the_remembered_size_is_found(auditor, before, after, words, between):
    """The evidence is on both sides of the size; the report is that of a full verification."""
    before = [*before, *filler(between)]
    assert auditor.visit(before)["problems"] == []
    report = auditor.visit([*before, *after])
    assert report["verdict"] == "invalid"
    assert words in report["problems"][0]
    assert without_this_run(auditor.again(state=False)) == without_this_run(report)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([intent(1, R)], [], "incomplete"),
        ([intent(1, R)], [outcome(2, R)], "valid"),
        ([leaf(1, "audit.gap", entries=2)], [], "incomplete"),
        ([CREATED], [intent(1, R, key_id="abcd2345"), outcome(2, R)], "valid"),
        ([CREATED], [intent(1, R, key_id="efgh2345"), outcome(2, R)], "unknown_keys"),
        ([CREATED, intent(1, R, key_id="efgh2345"), outcome(2, R)], [], "unknown_keys"),
        ([intent(1, R, key_id="efgh2345"), outcome(2, R)], [CREATED], "valid"),
        ([leaf(1, "erasure", tenant="acme", payloads=3)], [], "erased"),
        (
            [leaf(1, "hold.placed", tenant="acme"), leaf(2, "hold.released", tenant="acme")],
            [leaf(3, "erasure", tenant="acme", payloads=3)],
            "erased",
        ),
        ([intent(1, R, **kept())], [outcome(2, R, **kept())], "valid"),
    ],
)  # fmt: skip
def test_what_was_found_before_the_remembered_size_still_counts(auditor, before, after, verdict):
    """Open requests, gaps, keys, holds and erasures are remembered with the entries."""
    payloads = {f"{R}.request": b"content", f"{R}.response": b"content"}
    auditor.visit(before, payloads=payloads)
    after = [*after, *filler(3)]
    report = auditor.visit([*before, *after], payloads=payloads)
    assert (report["verdict"], report["verified_before"]) == (verdict, len(before))
    assert without_this_run(auditor.again(state=False)) == without_this_run(report)


# Content that an earlier run compared.

KEPT = [intent(1, R, **kept()), outcome(2, R)]
NAME = f"{R}.request"


@pytest.mark.parametrize(
    "more",
    [
        {"requests": [R]},
        {"before": format_time(NOW_MS + 1500)},
        {"before": format_time(NOW_MS + 1500), "before_index": 1},
        {"before": format_time(1), "everything": True},
    ],
)
def test_an_erasure_is_checked_against_payloads_that_were_compared_before(auditor, more):
    """Those that it covers must be gone, though nothing else about them is new."""
    auditor.visit(KEPT, payloads={NAME: b"content"})
    erased = [*KEPT, leaf(3, "erasure", tenant="acme", payloads=1, **more)]
    report = auditor.visit(erased, payloads={NAME: b"content"})
    assert report["problems"] == ["entry 2 says that the payload of entry 0 was erased"]
    report = auditor.visit(erased)
    assert report["verdict"] == "erased"
    assert report["payloads"] | {"intact": 0, "erased": 1, "compared_before": 0} == report["payloads"]
    assert auditor.visit(erased)["payloads"]["compared_before"] == 1


@pytest.mark.parametrize("change", [{}, {NAME: b"altered"}], ids=["lost", "altered"])
def test_payloads_that_were_compared_before_are_counted_and_compared_again_on_request(auditor, change):
    """The report says how many were not compared; `--all-payloads` compares them."""
    auditor.visit(KEPT, payloads={NAME: b"content"})
    report = auditor.visit([*KEPT, *filler(1)], payloads=change)
    assert report["problems"] == []
    assert (report["payloads"]["intact"], report["payloads"]["compared_before"]) == (1, 1)
    report = auditor.again("--all-payloads")
    assert len(report["problems"]) == 1
    assert report["payloads"]["compared_before"] == 0


def test_content_that_was_put_back_is_found_when_all_payloads_are_compared(auditor):
    erased = [*KEPT, leaf(3, "erasure", tenant="acme", payloads=1, requests=[R])]
    auditor.visit(erased)
    assert auditor.visit(erased, payloads={NAME: b"content"})["problems"] == []
    assert len(auditor.again("--all-payloads")["problems"]) == 1


def test_payloads_that_no_run_compared_are_compared_by_the_next(auditor):
    """`--no-payloads` postpones the comparison; it does not replace it."""
    assert auditor.visit(KEPT, "--no-payloads")["problems"] == []
    assert auditor.visit([*KEPT, *filler(1)])["problems"] == ["the payload that entry 0 names is missing"]


def test_a_payload_whose_key_is_given_is_opened_whenever_it_was_compared(auditor, tmp_path):
    auditor.visit(KEPT, payloads={NAME: b"content"})
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({f"{R}/request": base64.b64encode(bytes(32)).decode()}))
    report = auditor.visit(KEPT, "--payload-keys", keys, payloads={NAME: b"content"})
    assert report["problems"] == ["the payload that entry 0 names does not open with this key"]


# The log that it continues.


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 600, 1023])
def test_only_entries_that_are_newer_are_read(auditor, size):
    """Full bundles and tiles of before may even be missing; the root shows that the log continues."""
    log = filler(1100)
    auditor.visit(log[:size])

    def remove_old_bundles(export):
        for number in range(size // 256):
            (export / f"tile/entries/{number:03}").unlink()

    report = auditor.visit(log, damage=remove_old_bundles)
    assert (report["verdict"], report["verified_before"], report["size"]) == ("valid", size, 1100)
    assert report["state"] == f"the first {size} entries, not read again: the log continues them"


def test_a_log_that_did_not_grow_is_verified_again_at_once(auditor):
    log = filler(300)
    first = auditor.visit(log)
    assert without_this_run(auditor.again()) == without_this_run(first)


@pytest.mark.parametrize("changed", [0, 280, 299])
@pytest.mark.parametrize("newer", [0, 1, 400])
def test_a_history_that_was_rewritten_and_signed_diverges(auditor, changed, newer):
    """With the log's key, so that the log by itself is valid; the state is left as it was."""
    log = filler(300)
    auditor.visit(log)
    state = auditor.state.read_bytes()
    forged = [*log, *filler(newer, start=1000)]
    forged[changed] = leaf(9999, "audit.read", actor="cli:mallory")
    report = auditor.visit(forged)
    assert report["verdict"] == "diverged"
    assert report["state"] == "the first 300 entries are not those that were verified before"
    assert auditor.state.read_bytes() == state
    assert auditor.again(state=False)["verdict"] == "valid"


def test_a_rewritten_history_behind_the_tiles_of_the_true_one_is_invalid(auditor):
    """The tiles agree with the state, but new entries do not lead from them to the root."""
    log = filler(600)
    auditor.visit(log[:300])
    forged = [leaf(9999, "audit.read"), *log[1:]]

    def keep_true_tiles(export):
        true = write_export(auditor.directory / "true", log, SIGNER)
        shutil.copytree(true / "tile", export / "tile", dirs_exist_ok=True)

    assert auditor.visit(forged, damage=keep_true_tiles)["problems"] == [
        "the entries are not the ones that were signed: the root differs"
    ]


def test_a_log_that_was_cut_back_diverges(auditor):
    auditor.visit(filler(300))
    report = auditor.visit(filler(299))
    assert report["verdict"] == "diverged"
    assert report["state"] == "300 entries were verified before, 299 are here"


def test_an_entry_of_before_in_a_partial_bundle_that_was_altered_is_named(auditor):
    """The bundle is read again for its newer entries, so a change in it is seen."""
    log = filler(300)
    auditor.visit(log[:290])

    def alter(export):
        path = next((export / "tile/entries").rglob("44"))
        path.write_bytes(path.read_bytes().replace(b"cli:root", b"cli:r00t", 1))

    assert "entry 256 does not match tile/0/001.p/44" in auditor.visit(log, damage=alter)["problems"]


@pytest.mark.parametrize("held", [0, 1, 255, 256, 300, 511, 512, 700, 900])
def test_a_held_checkpoint_older_than_the_remembered_size_is_compared(auditor, tmp_path, held):
    """By the hash tiles, each shown to belong to the tree."""
    log = filler(900)
    auditor.visit(log[:700])
    for name, history, verdict in ("true", log, "valid"), ("other", filler(900, start=5000), "diverged"):
        kept = write_export(tmp_path / name, history[:held], SIGNER) / "checkpoint"
        report = auditor.visit(log, "--held", kept)
        assert report["verdict"] == ("valid" if held == 0 else verdict)
        auditor.state.unlink()
        auditor.visit(log[:700])


def test_a_tile_of_before_that_was_altered_proves_no_held_checkpoint(auditor, tmp_path):
    log = filler(900)
    auditor.visit(log[:700])
    kept = write_export(tmp_path / "kept", log[:100], SIGNER) / "checkpoint"

    def alter(export):
        (export / "tile/0/000").write_bytes(bytes(8192))

    assert auditor.visit(log, "--held", kept, damage=alter)["problems"] == [
        "tile/0/000 does not match the tree"
    ]


@pytest.mark.parametrize("rotated_at", [0, 1], ids=["rotation before", "rotation after"])
@pytest.mark.parametrize("trusted", ["old", "new"])
def test_rotations_are_followed_on_both_sides_of_the_remembered_size(auditor, rotated_at, trusted):
    """Whichever key the auditor trusts; a key that took over without consent is not followed."""
    new = Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"n" * 32))
    message = rotation_message(ORIGIN, SIGNER.vkey, new.vkey)
    signed = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).sign(message)
    rotation = leaf(
        50, "signer.rotated", previous_key=SIGNER.vkey, key=new.vkey, actor="cli:root",
        signature=base64.b64encode(signed).decode(),
    )  # fmt: skip
    log = [*filler(3), *([rotation] if rotated_at == 0 else [])]
    signer = new if rotated_at == 0 else SIGNER
    assert auditor.visit(log, signer=signer, key=signer.vkey)["verdict"] == "valid"
    log += [*filler(3, start=60), *([rotation] if rotated_at else [])]
    key = SIGNER.vkey if trusted == "old" else new.vkey
    report = auditor.visit(log, signer=new, key=key)
    assert report["verdict"] == "valid"
    assert len(report["rotations"]) == (trusted == "old")
    assert without_this_run(auditor.again(key=key, state=False)) == without_this_run(report)


# The file.


def test_a_log_with_a_problem_is_not_remembered(auditor):
    """What is wrong is reported by every run, not only by the first."""
    log = [intent(1, R), intent(2, R)]
    for size in (2, 2):
        report = auditor.visit(log[:size])
        assert (report["verdict"], report["verified_before"]) == ("invalid", 0)
    auditor.visit(log[:1])
    for _ in range(2):
        report = auditor.visit([*log, *filler(5)])
        assert (report["verdict"], report["verified_before"]) == ("invalid", 1)


def test_the_state_of_another_log_is_refused(auditor):
    """By its origin; of the same origin, it diverges."""
    other = Signer("other.test/audit", Ed25519PrivateKey.generate())
    auditor.visit([], signer=other, key=other.vkey)
    state = auditor.state.read_bytes()
    assert "is the state of another log, other.test/audit" in auditor.visit(filler(3))
    assert auditor.state.read_bytes() == state


def _another_version(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")


def _another_program(path):
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (a)")


def _no_findings(path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE log SET tiles = '{'")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_another_version, "another version"),
        (_another_program, "another program's file"),
        (_no_findings, "damaged"),
        (lambda path: path.write_bytes(b"not a database at all" * 99), "not a database"),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "malformed"),
        (lambda path: path.unlink() or path.mkdir(), "unable to open"),
    ],
)
def test_a_file_that_is_no_state_is_refused_in_one_line_and_kept(auditor, damage, words):
    log = [intent(number) for number in range(900)]
    auditor.visit(log[:800])
    damage(auditor.state)
    before = auditor.state.read_bytes() if auditor.state.is_file() else None
    said = auditor.visit(log)
    assert words in said
    assert re.fullmatch(r"verify: .*\n", said)
    assert before is None or auditor.state.read_bytes() == before


@pytest.mark.parametrize("known", [0, 2000])
def test_a_run_that_is_killed_leaves_the_state_as_it_was(auditor, known):
    """Even when it had already written to the file: the next run resumes from the remembered size."""
    log = [intent(number) for number in range(4000)]
    if known:
        auditor.visit(log[:known])
    size = auditor.state.stat().st_size if known else 0
    auditor.visit(log, state=False)
    program = (
        "import os, sys\n"
        "from appliance.audit import verify\n"
        "verify.CACHE_KIB = 16\n"
        "verify.State.save = lambda state, report: os._exit(9)\n"
        "verify.main(sys.argv[1:])"
    )
    arguments = [auditor.export, "--key", SIGNER.vkey, "--state", auditor.state]
    assert subprocess.run([sys.executable, "-c", program, *arguments], check=False).returncode == 9
    assert auditor.state.stat().st_size > size  # it did write
    with contextlib.closing(sqlite3.connect(auditor.state)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        ids = database.execute("SELECT count(*) FROM ids").fetchone() if "ids" in tables else (0,)
    assert ids == (known,)
    report = auditor.again()
    assert report["verified_before"] == known
    assert without_this_run(report) == without_this_run(auditor.again(state=False))


def test_a_receipt_has_no_state(auditor, tmp_path):
    (tmp_path / "a.tlog-proof").write_text("")
    auditor.export = tmp_path / "a.tlog-proof"
    assert "a receipt has no state" in auditor.again()


def test_the_report_says_what_was_not_read_again(auditor, capsys):
    auditor.visit(filler(5))
    auditor.visit(filler(7))
    assert verify.main([str(auditor.export), "--key", SIGNER.vkey, "--state", str(auditor.state)]) == 0
    assert "the first 7 entries, not read again" in capsys.readouterr().out


# Any log, verified in any number of runs.

NUMBERS = st.integers(0, 5)
EVENTS = st.one_of(
    st.tuples(st.just("intent"), NUMBERS, st.booleans(), NUMBERS),
    st.tuples(st.just("outcome"), NUMBERS, st.booleans(), NUMBERS),
    st.tuples(st.sampled_from(["key", "hold", "release", "erase", "erase all", "gap", "same id"]), NUMBERS),
)


def _leaves(events, start):  # noqa: C901, PLR0912 - one case for each kind of event
    """Leaves, the first of them entry `start`, and the payloads that exist after each number of them."""
    payloads, states, leaves = {}, [{}], []
    for at, (kind, number, *more) in enumerate(events):
        request, tenant = request_id(number), f"t{number % 2}"
        content = {}
        if more and more[0]:
            content = kept() | ({"content_mode": "encrypted"} if kind == "intent" else {})
        match kind:
            case "intent":
                fields = {"tenant": tenant, "key_id": f"abcd234{more[1] + 2}"} | content
                leaves.append(intent(at, request, **fields))
                if content:
                    payloads[f"{request}.request"] = b"content"
            case "outcome":
                leaves.append(outcome(at, request, **content))
                if content:
                    payloads[f"{request}.response"] = b"content"
            case "key":
                leaves.append(
                    leaf(at, "key.created", tenant=tenant, key_id=f"abcd234{number + 2}", actor="a")
                )
            case "hold" | "release":
                leaves.append(leaf(at, "hold.placed" if kind == "hold" else "hold.released", tenant=tenant))
            case "erase":
                leaves.append(leaf(at, "erasure", tenant=tenant, payloads=1, requests=[request]))
                if number % 2 == int(tenant[1:]):
                    payloads = {name: each for name, each in payloads.items() if not name.startswith(request)}
            case "erase all":
                before = format_time(NOW_MS + number * 1000)
                fields = {"before": before, "before_index": start + at}
                leaves.append(leaf(at, "erasure", tenant=tenant, payloads=1, **fields))
                gone = {request_id(each) for each in range(number) if each % 2 == number % 2}
                payloads = {name: each for name, each in payloads.items() if name[:26] not in gone}
            case "gap":
                leaves.append(leaf(at, "audit.gap", entries=number))
            case "same id":
                leaves.append(leaf(max(0, at - number), "audit.read", actor=f"abcd234{number + 2}"))
        states.append(dict(payloads))
    return leaves, states


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=20), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 260))
def test_any_log_verified_in_several_runs_has_the_report_of_one_run(events, splits, between):
    """Requests, keys, content, holds, erasures and contradictions; split anywhere."""
    leaves, states = _leaves(events, between)
    padding = filler(between, start=1000)
    with tempfile.TemporaryDirectory() as directory:
        auditor = Auditor(Path(directory))
        for size in sorted({min(size, len(leaves)) for size in splits} | {len(leaves)}):
            # Padding moves the entries across the borders of bundles and tiles.
            split = auditor.visit([*padding, *leaves[:size]], payloads=states[size])
            whole = auditor.again("--all-payloads", state=False)
            assert without_this_run(split) == without_this_run(whole)


PEAK = """
import sys
from pathlib import Path
from appliance.audit import verify
verify.CACHE_KIB = 512
assert verify.main(sys.argv[1:]) == 0
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
"""


def test_memory_does_not_grow_with_the_log(tmp_path):
    """Eight times as many entries need as much memory: what grows with the log is in a file."""
    pair = [intent(0, "R" * 26), outcome(1, "R" * 26)]

    def log(size):
        for number in range(size):
            request = b"%026d" % (number // 2)
            entry = pair[number % 2].replace(b"R" * 26, request)
            yield re.sub(rb'"E\d{25}"', b'"E%025d"' % number, entry)

    def peak(size, *options):
        export = tmp_path / str(size)
        if not export.exists():
            write_export(export, list(log(size)), SIGNER)
        arguments = [export, "--key", SIGNER.vkey, *options]
        done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, check=True)
        return int(done.stdout.split()[-1]) / 1024

    few, many = 8_192, 8 * 8_192
    assert peak(many) - peak(few) < 4
    assert peak(few, "--state", tmp_path / "state") > 0
    assert peak(many, "--state", tmp_path / "state") - peak(few) < 4
