"""A log with disposed entries works on and verifies, and nothing else passes for one."""

import base64
import contextlib
import io
import json
import sqlite3

import pytest

from appliance.audit import verify
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.durability.selfcheck import DamagedError, SelfCheck
from appliance.audit.entry_types import EntryType
from appliance.audit.export import export_receipt
from appliance.audit.merkle import HashTree
from appliance.audit.recovery import recover
from appliance.audit.store import SqlAuditStore
from appliance.audit.stored import place_of
from appliance.audit.verify import ExitCode
from appliance.errors import (
    AuditRollbackError,
    AuditVerificationError,
    ControlRefusedError,
)
from tests.disposed_log import DAY_MS, AgedLog, aged, dispose, plan_of, record


@pytest.fixture
def log(sql_store, signer):
    return aged(sql_store, signer)


@pytest.fixture
def database(tmp_path):
    """Statements of an attacker who owns the database."""

    def execute(*statements):
        with contextlib.closing(sqlite3.connect(tmp_path / "audit.db")) as connection, connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
            for (name,) in names:
                connection.execute(f"DROP TRIGGER {name}")
            for statement in statements:
                connection.execute(*statement)

    return execute


@pytest.fixture
def open_second(tmp_path):
    """The store of another log."""
    with contextlib.closing(SqlAuditStore(f"sqlite:///{tmp_path}/other.db")) as store:
        yield store


def verified(export, signer, *options):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = verify.main([*map(str, (export, "--json", "--key", signer.vkey, *options))])
    assert code != ExitCode.UNUSABLE, err.getvalue()
    return json.loads(out.getvalue())


def test_the_export_of_a_log_with_disposed_entries_verifies(log, export, signer):
    """The verifier says disposed: not missing, and not invalid."""
    assert verified(export(log.store, "before"), signer)["verdict"] == "valid"
    assert dispose(log).below == 1024
    report = verified(export(log.store, "after"), signer)
    assert report["problems"] == []
    assert report["verdict"] == "erased"
    assert report["disposed"]["gone_below"] == report["disposed"]["below"] == 1024
    assert report["disposed"]["kept"] == 2  # the key, and the intent of the request that ended later
    assert report["unknown_keys"] == report["open_requests"] == []
    assert [leaf.type for leaf in log.store.leaves(0, 1024)] == ["key.created", "request.intent"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        verify.main([str(log_export := export(log.store, "again")), "--key", signer.vkey])
    assert "disposed             the first 1024 entries" in text.getvalue()
    assert not (log_export / "tile/entries/000").exists()
    assert not (log_export / "tile/0/000").exists()


def test_proofs_of_what_was_kept_still_verify(log, tmp_path, signer):
    """Receipts of before, and new ones; a disposed entry has no new one."""
    old = export_receipt(log.store, 5)
    dispose(log)
    new = export_receipt(log.store, 1024)
    for name, (leaf, receipt) in {"old": old, "new": new}.items():
        (tmp_path / f"{name}.leaf").write_bytes(leaf)
        (tmp_path / f"{name}.tlog-proof").write_text(receipt)
        report = verified(tmp_path / f"{name}.tlog-proof", signer, "--leaf", tmp_path / f"{name}.leaf")
        assert report["verdict"] == "valid"
    with pytest.raises(AuditVerificationError, match="was disposed of, as entry"):
        export_receipt(log.store, 5)


def test_a_second_disposal_drops_the_intents_that_were_kept_for_a_later_end(log, export, signer):
    dispose(log)
    log.fill(60 * 24)
    log.read(1, "export")
    log.sign()
    assert dispose(log).below > 2000
    report = verified(export(log.store), signer)
    assert (report["problems"], report["open_requests"]) == ([], [])
    assert {leaf.type for leaf in log.store.leaves(0, 1024)} == {"key.created"}


def test_an_interrupted_disposal_is_completed_by_the_same_command(log, export, signer, monkeypatch):
    """Between any two transactions; what is left of it verifies meanwhile."""
    monkeypatch.setattr("appliance.audit.disposal.store.TILES", 1)
    disposing, disposal = Disposing(store=log.store), record(log, plan_of(log))
    assert disposing.recorded() == disposal
    left = []
    for number in range(10):
        steps = disposing.carry_out(disposal)
        for _ in range(number + 1 if number < 5 else 1):
            next(steps, None)
        steps.close()
        report = verified(export(log.store, f"export{number}"), signer)
        assert report["problems"] == []
        left.append(report["disposed"]["left"])
        check = SelfCheck(log.store, None, verify_seconds=1.0, clock=log.clock, rest=lambda _seconds: None)
        check.round(log.tree.size, report["root"])
    assert left == [0, 0, 0, 0, 768, 512, 256, 0, 0, 0]
    assert disposing.recorded() is None
    assert log.store.disposal() == disposal


def test_a_disposal_waits_for_the_checkpoint_and_the_witnesses(log):
    disposing = Disposing(store=log.store, witnesses=["w"])
    assert plan_of(log, DAY_MS).entries == 0
    plan = plan_of(log)
    Disposing(store=log.store).record(
        plan, "retention", actor="cli:root", origin=log.signer.name, clock=log.clock
    )
    recorded = disposing.recorded()
    assert "no checkpoint covers" in disposing.unseen(recorded)
    with pytest.raises(ControlRefusedError, match="no checkpoint"):
        list(disposing.carry_out(recorded))
    log.sign()
    with pytest.raises(ControlRefusedError, match="not cosigned yet by w"):
        list(disposing.carry_out(recorded))
    assert log.store.disposal().below == 0


def test_a_hold_that_comes_after_the_entry_stops_the_removal(log):
    disposal = record(log, plan_of(log))
    hold = {"tenant": "acme", "reason": "lawsuit", "actor": "cli:root"}
    log.append((EntryType.HOLD_PLACED, hold))
    with pytest.raises(ControlRefusedError, match="acme came under a legal hold"):
        list(Disposing(store=log.store).carry_out(disposal))
    log.append((EntryType.HOLD_RELEASED, hold))
    list(Disposing(store=log.store).carry_out(disposal))


def test_a_held_tenants_entries_stay(log):
    log.append((EntryType.HOLD_PLACED, {"tenant": "acme", "reason": "lawsuit", "actor": "cli:root"}))
    assert plan_of(log).entries == 0


def test_entries_that_no_export_covers_stay(sql_store, signer):
    log = aged(sql_store, signer)
    log.fill(30 * 24)
    log.sign()
    plan = plan_of(log)
    assert plan.below <= plan.facts.exported < log.tree.size


def test_holds_keys_and_gaps_outlive_disposal(sql_store, signer, export):
    """What later entries, and the gateway, are judged by."""
    log = aged(sql_store, signer)
    hold = {"tenant": "other", "reason": "lawsuit", "actor": "cli:root"}
    log.append((EntryType.HOLD_PLACED, hold))
    log.create_key("zyxw7654")
    gap = {"reason": "disk", "entries": 3, "since": log.now, "until": log.now}
    log.append((EntryType.AUDIT_GAP, gap))
    log.fill(300 * 24)
    log.append((EntryType.HOLD_RELEASED, hold))
    log.begin(9, key_id="zyxw7654")
    log.read(1, "export")
    log.sign()
    log.append((EntryType.HOLD_PLACED, hold))
    assert plan_of(log).below < 5500
    log.append((EntryType.HOLD_RELEASED, hold))
    log.sign()
    assert dispose(log).below > 5500
    assert SqlPayloadStore(sql_store.database).holds() == {}
    report = verified(export(sql_store), signer)
    assert (report["problems"], report["unknown_keys"], report["gaps"]) == ([], [], 1)


# Sequences of gateways that share the log.


def _accepted(store, signer, *, behind, early=lambda _log: None):
    """A log that will lose its first 512 entries; behind them are further numbers of one gateway."""
    log = AgedLog(store, signer, DAY_MS)
    log.create_key()
    log.accept("g1", 1)
    log.accept("g2", 1)
    log.fill(300)
    log.accept("g1", 2)
    log.sign()
    early(log)
    log.fill(300)
    for number in behind:
        log.accept("g1", number)
    log.fill(140)
    log.read(1, "export")
    log.sign()
    return log


def _places(store, below):
    return [place for leaf in store.leaves(0, below) if (place := place_of(leaf))]


def test_the_sequence_of_a_gateway_continues_over_a_disposal(sql_store, signer, export):
    """The newest entry of each gateway stays, and proves which number the next one has."""
    log = _accepted(sql_store, signer, behind=[3, 4])
    assert dispose(log).below == 512
    assert _places(sql_store, 512) == [("g2", 1), ("g1", 2)]
    log.accept("g2", 2, epoch=2)
    log.sign()
    assert verified(export(sql_store), signer)["problems"] == []


@pytest.mark.parametrize(("behind", "words"), [([4], "1 before it are missing"), ([2], "after number 2")])
def test_a_hole_that_begins_in_what_was_disposed_of_is_found(sql_store, signer, export, behind, words):
    """Rows of a gateway that were removed, or put in again, just behind the newest one that is gone."""
    log = _accepted(sql_store, signer, behind=behind)
    assert dispose(log).below == 512
    [problem] = verified(export(sql_store), signer)["problems"]
    assert f"number {behind[0]} of those that gateway g1 accepted" in problem
    assert words in problem


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_verification_that_remembers_finds_holes_over_a_disposal(sql_store, signer, export, tmp_path, when):
    """Whether it has read less than what is disposed of since, or more."""

    def verify_now(name):
        return verified(export(sql_store, name), signer, "--state", tmp_path / "state")["problems"]

    early = (lambda _log: verify_now("first")) if when == "early" else (lambda _log: None)
    log = _accepted(sql_store, signer, behind=[3], early=early)
    if when == "late":
        assert verify_now("first") == []
    dispose(log)
    log.accept("g2", 2)
    log.sign()
    assert verify_now("second") == []
    log.accept("g1", 5)
    log.sign()
    [problem] = verify_now("third")
    assert "1 before it are missing" in problem


def test_a_sequence_whose_newest_disposed_entry_was_not_kept_has_a_hole(sql_store, signer, export):
    log = _accepted(sql_store, signer, behind=[3])
    dispose(log)
    directory = export(sql_store)
    (directory / "kept" / "303").unlink()
    [problem] = verified(directory, signer)["problems"]
    assert "2 before it are missing" in problem


def test_a_later_disposal_drops_entries_that_newer_ones_of_their_gateway_follow(sql_store, signer, export):
    log = _accepted(sql_store, signer, behind=[3, 4])
    dispose(log)
    log.fill(240)
    log.read(1, "export")
    log.sign()
    assert dispose(log).below == 768
    assert _places(sql_store, 768) == [("g2", 1), ("g1", 4)]
    log.accept("g1", 5)
    log.sign()
    assert verified(export(sql_store), signer)["problems"] == []
    assert plan_of(log).facts.sequences == {"g1": 4, "g2": 1}


# Verifications that remember.


def test_a_state_from_behind_the_disposal_continues(log, export, signer, tmp_path):
    state = tmp_path / "state"
    verified(export(log.store, "before"), signer, "--state", state)
    dispose(log)
    report = verified(export(log.store, "after"), signer, "--state", state)
    assert report["problems"] == []
    assert report["verified_before"] > 1024
    assert "the log continues them" in report["state"]


def test_a_state_from_within_what_was_disposed_of_says_what_cannot_be_compared(
    sql_store, signer, export, tmp_path
):
    log, state = aged(sql_store, signer), tmp_path / "state"
    first = verified(export(log.store, "first"), signer, "--state", state)["size"]
    log.fill(200 * 24)
    log.read(1, "export")
    log.sign()
    assert dispose(log).below > first
    report = verified(export(log.store, "second"), signer, "--state", state)
    assert report["problems"] == []
    assert "entries were disposed of before they could be verified" in report["state"]
    log.fill(3)
    log.sign()
    report = verified(export(log.store, "third"), signer, "--state", state)
    assert (report["problems"], report["verdict"]) == ([], "erased")
    assert "the log continues them" in report["state"]


def test_another_log_that_disposed_of_what_a_state_remembers_has_diverged(
    sql_store, signer, export, tmp_path, open_second
):
    log, state = aged(sql_store, signer), tmp_path / "state"
    verified(export(log.store, "first"), signer, "--state", state)
    other = aged(open_second, signer, old=1200)
    other.fill(250 * 24)
    other.read(1, "export")
    other.sign()
    dispose(other)
    assert verified(export(other.store, "other"), signer, "--state", state)["verdict"] == "diverged"


def test_entries_called_older_than_they_were_are_found_by_who_verified_them(log, export, signer, tmp_path):
    """The operator disposes of young entries, and their entry lies; others see the next entry."""
    state = tmp_path / "state"
    verified(export(log.store, "before"), signer, "--state", state)
    log.fill(700)
    log.read(1, "export")
    log.sign()
    plan = plan_of(log)
    below = log.tree.size // 256 * 256
    lie = {
        "below": below,
        "previous": 0,
        "root": _root(log, below),
        "newest": plan.newest,
        "exported": log.tree.size,
        "legal_basis": "none",
        "actor": "cli:root",
    }
    log.append((EntryType.AUDIT_DISPOSED, lie))
    log.sign()
    _remove(log)
    after = export(log.store, "after")
    [first] = verified(after, signer)["problems"]
    assert f"entry {below}, the first that stays, was younger than 183 days" in first
    [_, second] = verified(after, signer, "--state", state)["problems"]
    assert "the entry that disposes of them calls them older" in second


def test_a_held_checkpoint_of_disposed_entries_is_said_not_to_be_comparable(log, export, signer, tmp_path):
    held = tmp_path / "held"
    log.fill(1)
    held.write_text(log.sign())
    log.fill(200 * 24)
    log.read(1, "export")
    log.sign()
    dispose(log)
    report = verified(export(log.store), signer, "--held", held)
    assert report["problems"] == []
    assert "not comparable" in report["held"]


# The gateway.


def test_a_start_checks_a_log_with_disposed_entries(log, signer):
    sealed = log.sign()
    dispose(log)
    found = recover(log.store, sealed, signer.verifier_key, "gateway")
    assert found.tree.size == log.tree.size


def test_a_gateway_that_cannot_check_the_log_any_more_does_not_start(sql_store, signer):
    """It did not run for so long that all it signed last was disposed of."""
    log = aged(sql_store, signer)
    sealed = log.sign()
    log.fill(250 * 24)
    log.read(1, "export")
    log.sign()
    dispose(log)
    with pytest.raises(AuditRollbackError, match="new data directory"):
        recover(sql_store, sealed, signer.verifier_key, "gateway")


def test_a_start_refuses_a_disposal_that_no_entry_records(log, signer, database):
    sealed = log.sign()
    database(("INSERT INTO audit_disposal VALUES (1, 512, 5)",))
    with pytest.raises(AuditVerificationError, match="no entry disposes of"):
        recover(log.store, sealed, signer.verifier_key, "gateway")
    check = SelfCheck(log.store, None, verify_seconds=1.0, clock=log.clock, rest=lambda _seconds: None)
    with pytest.raises(DamagedError, match="no entry disposes of"):
        check.round(log.tree.size, base64.b64encode(log.tree.root()).decode())


# Attacks.


def test_leaves_that_no_entry_disposes_of_cannot_be_deleted(log, tmp_path):
    """By an honest tool: a trigger refuses it; those that were disposed of can be."""
    dispose(log)
    with (
        contextlib.closing(sqlite3.connect(tmp_path / "audit.db")) as connection,
        pytest.raises(sqlite3.IntegrityError, match="write-once"),
    ):
        connection.execute("DELETE FROM audit_leaves WHERE idx = 1024")


def test_removed_without_an_entry_is_missing_not_disposed(log, export, database):
    database(("DELETE FROM audit_leaves WHERE idx < 256",))
    with pytest.raises(AuditVerificationError, match="leaves are missing between 0 and 256"):
        export(log.store)


@pytest.mark.parametrize("how", ["one", "tile", "kept altered", "kept without path"])
def test_a_disposed_range_that_was_filled_with_other_leaves_is_found(log, export, signer, database, how):
    """By the self-check of the gateway and by the verifier."""
    dispose(log)
    leaf = json.loads(log.store.leaves(1024, 1025)[0].leaf)

    def forged(index):
        content = verify.canonical({**leaf, "purpose": f"forged {index}"})
        return index, content, verify.hash_leaf(content)

    insert = "INSERT INTO audit_leaves VALUES (?, ?, ?, 'audit.read', NULL)"
    if how == "one":
        database((insert, forged(300)))
    elif how == "tile":
        database(*((insert, forged(index)) for index in range(768, 1024)))
    elif how == "kept altered":
        database(("UPDATE audit_leaves SET leaf = ?2, leaf_hash = ?3 WHERE idx = ?1", forged(0)))
    else:
        database(("DELETE FROM audit_kept",))
    report = verified(export(log.store), signer)
    assert report["verdict"] == "invalid"
    assert "in their place" in str(report["problems"]) or "in its place" in str(report["problems"])
    check = SelfCheck(log.store, None, verify_seconds=1.0, clock=log.clock, rest=lambda _seconds: None)
    with pytest.raises(DamagedError):
        check.round(log.tree.size, report["root"])


def test_a_refilled_range_is_not_deleted_as_if_it_had_been_left_over(log, database):
    """It is evidence."""
    disposal = dispose(log)
    leaf = log.store.leaves(1024, 1025)[0]
    database(("INSERT INTO audit_leaves VALUES (300, ?, ?, 'audit.read', NULL)", (leaf.leaf, leaf.leaf_hash)))
    disposing = Disposing(store=log.store)
    assert disposing.recorded() == disposal
    with pytest.raises(AuditVerificationError, match="nothing of them is disposed of"):
        list(disposing.carry_out(disposal))
    assert log.store.leaves(300, 301)


def test_a_damaged_tile_is_not_disposed_of(log, database):
    database(("UPDATE audit_leaves SET leaf = x'7b7d', type = '' WHERE idx = 700",))
    plan = plan_of(log)
    assert plan.below == 512  # it cannot be read
    database(("UPDATE audit_leaves SET leaf = ? WHERE idx = 700", (log.store.leaves(699, 700)[0].leaf,)))
    disposal = record(log, plan_of(log))
    with pytest.raises(AuditVerificationError, match="nothing of them is disposed of"):
        list(Disposing(store=log.store).carry_out(disposal))
    assert len(log.store.leaves(512, 768)) == 256


def test_without_the_entry_of_a_key_its_use_is_a_finding(log, export, signer, database):
    """Keeping fewer entries than there should be never makes a log look better."""
    log.begin(7)
    log.sign()
    dispose(log)
    database(("DELETE FROM audit_leaves WHERE idx = 0",), ("DELETE FROM audit_kept WHERE idx = 0",))
    log.create_key("zyxw7654")
    log.begin(8)
    log.sign()
    report = verified(export(log.store), signer)
    assert report["unknown_keys"] or report["unrecorded_keys"]


def test_a_kept_entry_that_never_was_in_the_log_is_found(log, export, signer):
    """An API key too many."""
    dispose(log)
    directory = export(log.store)
    kept = (directory / "kept" / "0").read_bytes()
    created = json.loads(kept[256:]) | {"key_id": "zyxw7654", "id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}
    (directory / "kept" / "1").write_bytes(kept[:256] + verify.canonical(created))
    report = verified(directory, signer)
    assert "entry 1 was disposed of, and another is in its place" in report["problems"]


def test_a_disposal_of_young_entries_is_found(log, export, signer):
    below = log.tree.size // 256 * 256
    young = {
        "below": below,
        "previous": 0,
        "root": _root(log, below),
        "newest": log.now,
        "exported": log.tree.size,
        "legal_basis": "none",
        "actor": "cli:root",
    }
    log.append((EntryType.AUDIT_DISPOSED, young))
    log.sign()
    _remove(log)
    report = verified(export(log.store), signer)
    [entry, first] = report["problems"]
    assert f"entry {log.tree.size - 1} disposes of entries of" in entry
    assert f"entry {below}, the first that stays" in first


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("3\n", "disposes of nothing"),
        ("900000\n", "are signed"),
        ("first\n", "names no entry"),
    ],
)
def test_an_export_that_names_no_disposal_is_invalid(log, export, signer, content, words):
    directory = export(log.store)
    (directory / "disposed").write_text(content)
    report = verified(directory, signer)
    assert report["verdict"] == "invalid"
    assert words in report["problems"][0]


def test_bundles_missing_without_a_disposal_are_missing(log, export, signer):
    """Although an entry disposes of them: the export does not name it."""
    dispose(log)
    directory = export(log.store)
    (directory / "disposed").unlink()
    report = verified(directory, signer)
    assert report["verdict"] == "invalid"
    assert "missing" in report["problems"][0]


def test_an_upper_tile_that_was_altered_is_found(log, export, signer):
    dispose(log)
    directory = export(log.store)
    tile = next((directory / "tile/1/000.p").iterdir())
    content = bytearray(tile.read_bytes())
    content[5] ^= 1
    tile.write_bytes(content)
    assert verified(directory, signer)["verdict"] == "invalid"


def _root(log, below):
    return base64.b64encode(HashTree(below, log.store.hashes).root()).decode()


def _remove(log):
    """Remove what the newest entry disposes of, whatever the rules are."""
    disposing = Disposing(store=log.store)
    list(disposing.carry_out(disposing.recorded()))
