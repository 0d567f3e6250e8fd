"""
The attacks of the catalogue, each a function of the same name.

Each gets the history (see `tests.attacks.scene`) and changes the log like an attacker.
"""

import json
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit.checkpoint import parse_note, sign_note
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import TILE_WIDTH, CompactRange, hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import Signer
from appliance.tenancy import ApiKey
from appliance.tenancy.edits import add_key
from tests.attacks.scene import Past
from tests.audit_log import ORIGIN

VICTIM = 3
"""Index of the entry that is edited, moved or deleted."""


def edit_a_leaf(past: Past) -> None:
    past.scene.run("UPDATE audit_leaves SET leaf = :leaf WHERE idx = :idx", idx=VICTIM, leaf=_edited(past))


def edit_a_leaf_and_its_hash(past: Past) -> None:
    leaf = _edited(past)
    statement = "UPDATE audit_leaves SET leaf = :leaf, leaf_hash = :leaf_hash WHERE idx = :idx"
    past.scene.run(statement, idx=VICTIM, leaf=leaf, leaf_hash=hash_leaf(leaf))


def edit_a_leaf_and_its_hashes(past: Past) -> None:
    edit_a_leaf_and_its_hash(past)
    rows = past.scene.rows("SELECT leaf_hash FROM audit_leaves ORDER BY idx LIMIT :width", width=TILE_WIDTH)
    alter_a_tile_hash(past, root_from_leaf_hashes(row["leaf_hash"] for row in rows))


def alter_a_tile_hash(past: Past, forged: bytes = bytes(32)) -> None:
    past.scene.run("UPDATE audit_tile_hashes SET hash = :hash WHERE level = 1 AND number = 0", hash=forged)


def remove_a_tile_hash(past: Past) -> None:
    past.scene.run("DELETE FROM audit_tile_hashes WHERE level = 1 AND number = 0")


def swap_two_leaves(past: Past) -> None:
    past.scene.run(
        "UPDATE audit_leaves SET idx = -1 WHERE idx = :one",
        "UPDATE audit_leaves SET idx = :one WHERE idx = :other",
        "UPDATE audit_leaves SET idx = :other WHERE idx = -1",
        one=VICTIM,
        other=VICTIM + 1,
    )


def delete_from_the_middle(past: Past) -> None:
    # In two steps, so that no index is taken twice on the way.
    past.scene.run(
        "DELETE FROM audit_leaves WHERE idx = :idx",
        "UPDATE audit_leaves SET idx = -idx WHERE idx > :idx",
        "UPDATE audit_leaves SET idx = -idx - 1 WHERE idx < 0",
        idx=VICTIM,
    )


def delete_the_tail(past: Past) -> None:
    past.scene.run("DELETE FROM audit_leaves WHERE idx >= :size", size=past.monday.size)


def delete_the_tail_and_move_the_head_back(past: Past) -> None:
    (head,) = past.monday.tables["audit_head"]
    past.scene.run(
        "DELETE FROM audit_leaves WHERE idx >= :size",
        "DELETE FROM audit_checkpoints WHERE size > :size",
        "DELETE FROM audit_timestamps WHERE size > :size",
        "UPDATE audit_head SET size = :size, root = :root, frontier = :frontier",
        size=head["size"],
        root=head["root"],
        frontier=head["frontier"],
    )


def drop_the_triggers(past: Past) -> None:
    past.scene.drop_triggers()


def move_the_head(past: Past) -> None:
    past.scene.run("UPDATE audit_head SET size = size - 1")


def append_an_entry(past: Past) -> None:
    tree = CompactRange()
    for row in past.scene.rows("SELECT leaf_hash FROM audit_leaves ORDER BY idx"):
        tree.append(row["leaf_hash"])
    invented = {
        "actor": "cli:root",
        "id": "0" * 26,
        "log": ORIGIN,
        "operation": "tail",
        "time": "2026-11-21T00:00:00.000Z",
        "type": "audit.read",
        "v": 1,
    }
    leaf = json.dumps(invented, separators=(",", ":")).encode()
    index = tree.size
    tree.append(hash_leaf(leaf))
    past.scene.run(
        "INSERT INTO audit_leaves (idx, leaf, leaf_hash, type) VALUES (:idx, :leaf, :leaf_hash, :type)",
        "UPDATE audit_head SET size = :size, root = :root, frontier = :frontier",
        idx=index,
        leaf=leaf,
        leaf_hash=hash_leaf(leaf),
        type=invented["type"],
        size=tree.size,
        root=tree.root(),
        frontier=b"".join(tree.subtrees),
    )


def dispose_without_an_entry(past: Past) -> None:
    past.scene.run(
        "INSERT INTO audit_disposal (id, below, idx) VALUES (1, :below, :idx)",
        "DELETE FROM audit_leaves WHERE idx < :below",
        below=TILE_WIDTH,
        idx=TILE_WIDTH + VICTIM,
    )


def dispose_of_young_entries(past: Past) -> None:
    rows = past.scene.rows("SELECT leaf_hash FROM audit_leaves ORDER BY idx LIMIT :width", width=TILE_WIDTH)
    lie = {
        "below": TILE_WIDTH,
        "previous": 0,
        "root": b64encode(root_from_leaf_hashes(row["leaf_hash"] for row in rows)).decode(),
        "newest": "2001-01-01T00:00:00.000Z",
        "exported": TILE_WIDTH,
        "legal_basis": "none",
        "actor": "cli:root",
    }
    past.scene.append(EntryType.AUDIT_DISPOSED, lie)
    (size,) = past.scene.rows("SELECT size FROM audit_head")
    past.scene.run(
        "INSERT INTO audit_disposal (id, below, idx) VALUES (1, :below, :idx)",
        "DELETE FROM audit_leaves WHERE idx < :below",
        below=TILE_WIDTH,
        idx=size["size"] - 1,
    )


def refill_a_disposed_range(past: Past) -> None:
    (like,) = past.scene.rows("SELECT leaf FROM audit_leaves WHERE idx = :idx", idx=2 * TILE_WIDTH)
    entry = json.loads(like["leaf"])
    forged = []
    for index in range(TILE_WIDTH, 2 * TILE_WIDTH):
        leaf = json.dumps({**entry, "operation": "export", "id": f"{index:026}"}, separators=(",", ":"))
        forged.append((index, leaf.encode()))
    past.scene.run(
        "DELETE FROM audit_leaves WHERE idx >= :low AND idx < :high", low=TILE_WIDTH, high=2 * TILE_WIDTH
    )
    for index, leaf in forged:
        past.scene.run(
            "INSERT INTO audit_leaves (idx, leaf, leaf_hash, type) VALUES (:idx, :leaf, :hash, 'audit.read')",
            idx=index,
            leaf=leaf,
            hash=hash_leaf(leaf),
        )


def put_a_key_among_the_kept_entries(past: Past) -> None:
    (kept,) = past.scene.rows("SELECT leaf FROM audit_leaves WHERE idx = 0")
    leaf = json.dumps({**json.loads(kept["leaf"]), "key_id": "zyxw7654"}, separators=(",", ":")).encode()
    past.scene.run(
        "INSERT INTO audit_leaves (idx, leaf, leaf_hash, type) VALUES (:idx, :leaf, :hash, 'key.created')",
        "INSERT INTO audit_kept (idx, path) SELECT :idx, path FROM audit_kept WHERE idx = 0",
        idx=2 * VICTIM,
        leaf=leaf,
        hash=hash_leaf(leaf),
    )


def forge_a_checkpoint(past: Past) -> None:
    forger = Signer(ORIGIN, Ed25519PrivateKey.generate())
    note = sign_note(parse_note(past.scene.checkpoint()).text, [forger])
    past.scene.run(
        "UPDATE audit_checkpoints SET note = :note WHERE size = :size", note=note, size=past.tuesday.size
    )


def swap_two_time_stamps(past: Past) -> None:
    one, other = past.scene.rows("SELECT size FROM audit_timestamps ORDER BY size")
    past.scene.run(
        "UPDATE audit_timestamps SET size = -1 WHERE size = :one",
        "UPDATE audit_timestamps SET size = :one WHERE size = :other",
        "UPDATE audit_timestamps SET size = :other WHERE size = -1",
        one=one["size"],
        other=other["size"],
    )


def edit_a_ciphertext(past: Past) -> None:
    where, request_id = "WHERE request_id = :request_id", past.archived[0]
    (row,) = past.scene.rows(f"SELECT ciphertext FROM audit_payloads {where}", request_id=request_id)
    edited = bytes([row["ciphertext"][0] ^ 1]) + row["ciphertext"][1:]
    past.scene.run(
        f"UPDATE audit_payloads SET ciphertext = :edited {where}", edited=edited, request_id=request_id
    )


def delete_a_payload(past: Past) -> None:
    past.scene.run("DELETE FROM audit_payloads WHERE request_id = :one", one=past.archived[0])


def put_erased_content_back(past: Past) -> None:
    columns = ", ".join(past.erased)
    values = ", ".join(f":{name}" for name in past.erased)
    past.scene.run(f"INSERT INTO audit_payloads ({columns}) VALUES ({values})", **past.erased)


def swap_two_wrapped_keys(past: Past) -> None:
    one, other = past.archived
    query = "SELECT wrapped_key FROM audit_payloads WHERE request_id = :name"
    keys = [past.scene.rows(query, name=name)[0]["wrapped_key"] for name in (one, other)]
    for name, key in ((one, keys[1]), (other, keys[0])):
        past.scene.run(
            "UPDATE audit_payloads SET wrapped_key = :key WHERE request_id = :name", key=key, name=name
        )


_LAST = "SELECT max(seq) FROM audit_pending"


def delete_an_accepted_entry(past: Past) -> None:
    past.scene.run(f"DELETE FROM audit_pending WHERE seq = ({_LAST}) - 1")


def edit_an_accepted_entry(past: Past) -> None:
    (row,) = past.scene.rows(f"SELECT seq, leaf FROM audit_pending WHERE seq = ({_LAST}) - 1")
    leaf = row["leaf"].replace(b"cli:root", b"cli:evil")
    past.scene.run(
        "UPDATE audit_pending SET leaf = :leaf, leaf_hash = :hash WHERE seq = :seq",
        leaf=leaf,
        hash=hash_leaf(leaf),
        seq=row["seq"],
    )


def delete_an_accepted_entry_and_renumber(past: Past) -> None:
    (row,) = past.scene.rows(f"SELECT seq, previous_hash FROM audit_pending WHERE seq = ({_LAST}) - 1")
    past.scene.run(
        "DELETE FROM audit_pending WHERE seq = :seq",
        "UPDATE audit_pending SET seq = :seq, previous_hash = :hash WHERE seq = :seq + 1",
        seq=row["seq"],
        hash=row["previous_hash"],
    )


def delete_the_first_accepted_entry_behind_a_disposal(past: Past) -> None:
    (row,) = past.scene.rows("SELECT seq, previous_hash FROM audit_pending ORDER BY seq LIMIT 1")
    past.scene.run(
        "DELETE FROM audit_pending WHERE seq = :seq",
        "UPDATE audit_pending SET previous_hash = :hash WHERE seq = :seq + 1",
        # In two steps, so that no number is taken twice on the way.
        "UPDATE audit_pending SET seq = -seq",
        "UPDATE audit_pending SET seq = -seq - 1",
        seq=row["seq"],
        hash=row["previous_hash"],
    )


def delete_the_newest_accepted_entries(past: Past) -> None:
    past.scene.run(f"DELETE FROM audit_pending WHERE seq >= ({_LAST}) - 1")


INTRUDER = "aaaabbbb"


def insert_an_admin_key(past: Past) -> None:
    past.scene.run(
        "INSERT INTO api_keys (key_id, tenant, digest, admin) VALUES (:key_id, 'acme', :digest, :admin)",
        "UPDATE tenancy_generation SET generation = generation + 1",
        key_id=INTRUDER,
        digest="ab" * 32,
        admin=True,
    )


def unrevoke_a_key(past: Past) -> None:
    past.scene.run(
        "UPDATE api_keys SET revoked_at = NULL",
        "UPDATE tenancy_generation SET generation = generation + 1",
    )


def replay_old_tenants(past: Past) -> None:
    past.scene.restore_tenants(past.monday)


def remove_the_mac(past: Past) -> None:
    insert_an_admin_key(past)
    past.scene.run("UPDATE tenancy_generation SET mac = NULL")


def act_with_a_key_of_a_forged_mac(past: Past) -> None:
    """Not in the catalogue: it takes the MAC key, and shows once the next checkpoint covers it."""
    stolen = ApiKey(key_id=INTRUDER, digest="ab" * 32, admin=True)
    with past.scene.tenant_store() as store:
        before = store.read()
        store.write(before, add_key(before.tenants, "acme", stolen))
    fields = {"tenant": "acme", "reason": "the case is closed", "actor": INTRUDER}
    past.scene.append(EntryType.HOLD_RELEASED, fields)


def restore_an_old_backup(past: Past) -> None:
    past.scene.drop_triggers()  # a restored file or dump does not have them
    past.scene.restore(past.monday)


def restore_database_and_sealed_head(past: Past) -> None:
    restore_an_old_backup(past)
    past.scene.seal(past.monday)


def delete_the_sealed_head(past: Past) -> None:
    past.scene.installation.sealed_head.unlink()


def replay_an_old_checkpoint(past: Past) -> None:
    past.scene.drop_triggers()  # what is shown to the auditor is the attacker's own copy
    past.scene.run(
        "DELETE FROM audit_checkpoints WHERE size > :size",
        "DELETE FROM audit_timestamps WHERE size > :size",
        size=past.monday.size,
    )


def rebuild_with_the_stolen_key(past: Past) -> None:
    past.scene.restore(past.scene.elsewhere(None, *_INVENTED))


def rebuild_everything(past: Past) -> None:
    invented = past.scene.elsewhere(None, *_INVENTED)
    past.scene.restore(invented)
    past.scene.seal(invented)


def show_two_histories(past: Past) -> None:
    other = past.scene.elsewhere(past.monday, *_INVENTED)
    past.scene.restore(other)
    past.scene.seal(other)


def rewrite_unheld_entries(past: Past) -> None:
    # Since Monday, no party but the operator has a checkpoint.
    past.held, past.witness = past.held_on_monday, past.witness_of_monday
    past.stream = past.stream_of_monday
    show_two_histories(past)


def remove_a_forwarded_event(past: Past) -> None:
    _change_stream(past, lambda lines, at: lines[:at] + lines[at + 1 :])


def edit_a_forwarded_event(past: Past) -> None:
    """What people read, and the proof with it."""

    def edit(lines: list[bytes], at: int) -> list[bytes]:
        leaf = _edited(past)
        word = urlsafe_b64encode(leaf).rstrip(b"=")
        digest = urlsafe_b64encode(hash_leaf(leaf)).rstrip(b"=")
        line = lines[at].replace(b'"acme"', b'"evil"')
        head, _, _ = line.partition(b"tlog-leaf.")
        forged = b'%stlog-leaf.%d.%s.%s."}' % (head, VICTIM, digest, word)
        return [*lines[:at], forged, *lines[at + 1 :]]

    _change_stream(past, edit)


def edit_what_people_read_of_a_forwarded_event(past: Past) -> None:
    _change_stream(
        past, lambda lines, at: [*lines[:at], lines[at].replace(b'"acme"', b'"evil"'), *lines[at + 1 :]]
    )


def swap_two_forwarded_events(past: Past) -> None:
    one, other = b"tlog-leaf.%d." % VICTIM, b"tlog-leaf.%d." % (VICTIM + 1)
    _change_stream(
        past,
        lambda lines, _at: [
            line.replace(one, b"?").replace(other, one).replace(b"?", other)
            if one in line or other in line
            else line
            for line in lines
        ],
    )


def remove_a_forwarded_checkpoint(past: Past) -> None:
    _change_stream(past, lambda lines, _at: [line for line in lines if b"tlog-checkpoint.4." not in line])


def forge_a_forwarded_checkpoint(past: Past) -> None:
    def forge(lines: list[bytes], _at: int) -> list[bytes]:
        at = next(at for at, line in enumerate(lines) if b"tlog-checkpoint.4." in line)
        head, frontier, note, end = lines[at].rsplit(b".", 3)
        text = parse_note(urlsafe_b64decode(note + b"=" * (-len(note) % 4)).decode()).text
        forged = sign_note(text, [Signer(ORIGIN, Ed25519PrivateKey.generate())])
        word = urlsafe_b64encode(forged.encode()).rstrip(b"=")
        return [*lines[:at], b".".join((head, frontier, word, end)), *lines[at + 1 :]]

    _change_stream(past, forge)


def _change_stream(past: Past, change: Callable[[list[bytes], int], list[bytes]]) -> None:
    """Write back the lines that `change` makes of all lines and the place of the victim."""
    lines = past.stream.read_bytes().splitlines()
    at = next(at for at, line in enumerate(lines) if b"tlog-leaf.%d." % VICTIM in line)
    changed = change(lines, at)
    assert changed != lines
    past.stream.write_bytes(b"".join(line + b"\n" for line in changed))


_INVENTED = tuple(f"invented-{number}" for number in range(1, 9))
"""More than was recorded, so that the size alone reveals nothing."""


def _edited(past: Past) -> bytes:
    row = next(row for row in past.tuesday.tables["audit_leaves"] if row["idx"] == VICTIM)
    assert b'"acme"' in row["leaf"]
    return row["leaf"].replace(b'"acme"', b'"evil"')
