"""
Every attack on the log, in plain words, and the observers that must detect it.

Tests run the attacks and compare what they find with what stands here; the page for auditors,
docs/explanation/audit-attacks.md, is written from it.  So neither can promise what was not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Observer(StrEnum):
    """Observers, in the order in which they would detect an attack."""

    DATABASE = "The database"
    RUNNING = "The gateway, at its next entry"
    SELF_CHECK = "The gateway's scheduled check"
    START = "The gateway, at its next start"
    AUDITOR = "An auditor who has only the key"
    OPENER = "An auditor who opens the archived content"
    HELD = "An auditor who kept a checkpoint"
    SIEM = "The copy in a SIEM"
    WITNESS = "A witness"


class Loot(StrEnum):
    """What the attacker holds."""

    DATABASE = "database"
    SEALED_HEAD = "sealed head"
    SIGNING_KEY = "signing key"
    EXPORT = "what the auditor is shown"
    STREAM = "the copy in a SIEM"


REFUSED = "refuses the statement"
FORK = "AuditForkError"
ROLLBACK = "AuditRollbackError"
DAMAGED = "AuditVerificationError"
DAMAGE = "reports damage"
TENANTS = "TenantsAlteredError"
NO_EXPORT = "no export can be made"
INVALID = "invalid"
DIVERGED = "diverged"
NOT_COSIGNED = "does not cosign"
NOT_FORWARDED = "is not continued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack."""

    name: str
    """The function in `tests.attacks.attackers` that carries it out."""
    title: str
    what: str
    """Action and purpose, for an auditor."""
    loot: tuple[Loot, ...]
    noticed: Mapping[Observer, str] = field(default_factory=dict)
    """Report of each observer; those not listed detect nothing."""
    remark: str = ""
    """The reason, if it is not obvious."""
    is_accepted: bool = False
    """Whether it concerns entries that a gateway has accepted and none has integrated; on PostgreSQL."""
    has_disposed: bool = False
    """Whether the log has disposed of entries before the attack."""


DATABASE_ONLY = (Loot.DATABASE,)
STREAM_ONLY = (Loot.STREAM,)
ALTERED = {Observer.AUDITOR: INVALID, Observer.OPENER: INVALID, Observer.HELD: INVALID}
GONE = {Observer.AUDITOR: NO_EXPORT, Observer.OPENER: NO_EXPORT, Observer.HELD: NO_EXPORT}
EVERYTHING = (Loot.DATABASE, Loot.SEALED_HEAD, Loot.SIGNING_KEY)
IN_FORCE = {Observer.RUNNING: TENANTS, Observer.START: TENANTS}
OUTSIDERS = {Observer.HELD: DIVERGED, Observer.WITNESS: NOT_COSIGNED}

PATH = (
    "A start reads the newest hashes of each level, at most 256. The scheduled check finds an older one "
    "within a day."
)

ATTACKS = (
    Attack(
        name="edit_a_leaf",
        title="Edit an entry",
        what="Another tenant's name is written into one entry.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            **ALTERED,
            Observer.SIEM: NOT_FORWARDED,
        },
        remark="The gateway checks the hashes of the entries, not their text; the verifier checks both.",
    ),
    Attack(
        name="edit_a_leaf_and_its_hash",
        title="Edit an entry and its hash",
        what="As before, and the entry's stored hash is made to fit.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            **ALTERED,
            Observer.SIEM: NOT_FORWARDED,
        },
        remark="A start reads only the newest entries: one of the newest, at most 256 and those without a "
        "signature, keeps the gateway from starting.",
    ),
    Attack(
        name="edit_a_leaf_and_its_hashes",
        title="Edit an entry and all hashes above it",
        what="As before, and the hash of the tile above the entry is made to fit as well.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **ALTERED,
            Observer.SIEM: NOT_FORWARDED,
        },
        remark=PATH,
    ),
    Attack(
        name="alter_a_tile_hash",
        title="Alter a hash above entries",
        what="The stored hash of 256 entries is replaced; the entries stay.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **ALTERED,
        },
        remark=PATH,
    ),
    Attack(
        name="remove_a_tile_hash",
        title="Remove a hash above entries",
        what="The stored hash of 256 entries is removed; the entries stay.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **GONE,
        },
        remark="The newest hash of a level is computed again from the entries. " + PATH,
    ),
    Attack(
        name="swap_two_leaves",
        title="Swap two entries",
        what="Two entries change places, so that something seems to have happened earlier.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            **ALTERED,
            Observer.SIEM: NOT_FORWARDED,
        },
    ),
    Attack(
        name="delete_from_the_middle",
        title="Delete an entry",
        what="One entry is removed, and the later ones are moved up.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **GONE,
            Observer.SIEM: NOT_FORWARDED,
        },
    ),
    Attack(
        name="delete_the_tail",
        title="Delete the newest entries",
        what="The last entries are removed.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **GONE,
            Observer.SIEM: NOT_FORWARDED,
        },
    ),
    Attack(
        name="delete_the_tail_and_move_the_head_back",
        title="Delete the newest entries and cover the traces",
        what="The last entries are removed; the stored head and checkpoints are put back to what they were.",
        loot=DATABASE_ONLY,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.RUNNING: FORK,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **OUTSIDERS,
        },
        remark="What is left is a genuine older log. Only who knows of a newer head can tell.",
    ),
    Attack(
        name="drop_the_triggers",
        title="Drop the triggers",
        what="The database's own protection is removed; nothing is altered yet.",
        loot=DATABASE_ONLY,
        remark="The triggers stop mistakes. Nothing that is proved here rests on them.",
    ),
    Attack(
        name="move_the_head",
        title="Edit the stored head",
        what="The size and root that the gateway continues from are overwritten.",
        loot=DATABASE_ONLY,
        noticed={Observer.RUNNING: FORK, Observer.START: DAMAGED},
        remark="The entries and the signed checkpoint are untouched, so an export is still right.",
    ),
    Attack(
        name="dispose_without_an_entry",
        title="Dispose of entries without saying so",
        what="The oldest 256 entries are deleted, and the database says that they were disposed of.",
        loot=DATABASE_ONLY,
        noticed={Observer.SELF_CHECK: DAMAGE, Observer.START: DAMAGED, **ALTERED},
        remark="The trigger lets go what the database says was disposed of. On PostgreSQL, gateways have no "
        "right to say so.",
    ),
    Attack(
        name="dispose_of_young_entries",
        title="Dispose of young entries",
        what="As before, with an `audit.disposed` entry that calls them older than they are.",
        loot=DATABASE_ONLY,
        noticed=GONE,
        remark="Until a gateway has signed the entry, no export can be made. Then the verifier reports that "
        "the first entry that stays is too young; with a state of before, also that the entry lies.",
    ),
    Attack(
        name="refill_a_disposed_range",
        title="Write other entries in the place of disposed ones",
        what="A tile of disposed entries is filled with others, to show a past that never was.",
        loot=DATABASE_ONLY,
        noticed={Observer.SELF_CHECK: DAMAGE, **ALTERED},
        has_disposed=True,
    ),
    Attack(
        name="put_a_key_among_the_kept_entries",
        title="Add the creation of an API key to the disposed entries that stay",
        what="So that a key that was put into the database has an entry that created it.",
        loot=DATABASE_ONLY,
        noticed={Observer.SELF_CHECK: DAMAGE, **ALTERED},
        remark="An entry that stays has to lead to the hash of its tile.",
        has_disposed=True,
    ),
    Attack(
        name="append_an_entry",
        title="Add an entry",
        what="An invented entry is appended, with hash and head computed as the gateway would.",
        loot=DATABASE_ONLY,
        remark="Several gateways may write one log, so an addition that is made as they make theirs looks "
        "like one of them. The log proves what was recorded, not that it was true.",
    ),
    Attack(
        name="forge_a_checkpoint",
        title="Forge a checkpoint",
        what="The newest checkpoint is replaced by one that another key signed.",
        loot=DATABASE_ONLY,
        noticed={Observer.START: DAMAGED, **ALTERED, Observer.WITNESS: NOT_COSIGNED, Observer.SIEM: INVALID},
    ),
    Attack(
        name="swap_two_time_stamps",
        title="Swap two time stamps",
        what="The time stamps of an older and a newer checkpoint change places, so that newer entries seem "
        "to have existed earlier.",
        loot=DATABASE_ONLY,
        noticed={Observer.DATABASE: REFUSED, **ALTERED},
        remark="A time stamp names the checkpoint it is over. One that is removed is not missed, except by "
        "an auditor who asks for time stamps (`--timestamp-cert`).",
    ),
    Attack(
        name="edit_a_ciphertext",
        title="Edit archived content",
        what="One byte of an encrypted prompt is changed.",
        loot=DATABASE_ONLY,
        noticed=ALTERED,
        remark="The entry names the digest of what was encrypted.",
    ),
    Attack(
        name="delete_a_payload",
        title="Delete archived content",
        what="An encrypted prompt is removed without an `erasure` entry that accounts for it.",
        loot=DATABASE_ONLY,
        noticed=ALTERED,
    ),
    Attack(
        name="put_erased_content_back",
        title="Keep content that the log calls erased",
        what="The log says that all prompts from before a time were erased; one of them is still there, "
        "or was put back from a copy of the database.",
        loot=DATABASE_ONLY,
        noticed=ALTERED,
        remark="Each payload is named by an entry, so it is decidable which an erasure covers: those that "
        "its bounds include and that earlier entries name.",
    ),
    Attack(
        name="swap_two_wrapped_keys",
        title="Swap the keys of two archived prompts",
        what="Each prompt gets the other's data key, so that neither can be opened, or seems to be another.",
        loot=DATABASE_ONLY,
        noticed={Observer.OPENER: INVALID},
        remark="Data keys are not in the log, so that they can be destroyed. A prompt opens with its own key "
        "in its own place, or not at all.",
    ),
    Attack(
        name="insert_an_admin_key",
        title="Insert an admin key",
        what="A row in the table of API keys makes the attacker an administrator.",
        loot=DATABASE_ONLY,
        noticed=IN_FORCE,
        remark="A running gateway keeps the tenants and keys that it read last, and the key opens nothing. "
        "The same holds for every other change of tenants and keys: the MAC covers all of them.",
    ),
    Attack(
        name="unrevoke_a_key",
        title="Make a revoked key valid again",
        what="The time of its revocation is removed.",
        loot=DATABASE_ONLY,
        noticed=IN_FORCE,
    ),
    Attack(
        name="replay_old_tenants",
        title="Put old tenants and keys back",
        what="All rows of tenants and keys, with their MAC, are put back to before a revocation.",
        loot=DATABASE_ONLY,
        noticed=IN_FORCE,
        remark="The MAC is genuine. The gateway knows better from a file that is not in the database. A "
        "gateway with a new data directory does not have that file, but the log announces every state.",
    ),
    Attack(
        name="remove_the_mac",
        title="Remove the MAC",
        what="An admin key is inserted, and the MAC removed as if the site had just been upgraded.",
        loot=DATABASE_ONLY,
        noticed=IN_FORCE,
        remark="The log says that there was a MAC.",
    ),
    Attack(
        name="restore_an_old_backup",
        title="Restore an old backup",
        what="The whole database is put back to last week's state.",
        loot=DATABASE_ONLY,
        noticed={Observer.RUNNING: FORK, Observer.SELF_CHECK: DAMAGE, Observer.START: ROLLBACK, **OUTSIDERS},
        remark="It may be an accident. The gateway knows better from its sealed head, which is not in "
        "the database.",
    ),
    Attack(
        name="restore_database_and_sealed_head",
        title="Restore an old backup of the whole machine",
        what="Database and sealed head are put back together.",
        loot=(Loot.DATABASE, Loot.SEALED_HEAD),
        noticed={Observer.RUNNING: FORK, Observer.SELF_CHECK: DAMAGE, **OUTSIDERS},
        remark="Nothing on the machine remembers better. Keep the sealed head on another disk, and a "
        "witness in another house.",
    ),
    Attack(
        name="delete_the_sealed_head",
        title="Delete the sealed head",
        what="The file that remembers the last signed head is removed, perhaps to restore a backup next.",
        loot=(Loot.SEALED_HEAD,),
        noticed={Observer.START: ROLLBACK},
    ),
    Attack(
        name="replay_an_old_checkpoint",
        title="Show an old checkpoint",
        what="The auditor is given the log as it was before the entries that matter.",
        loot=(Loot.EXPORT,),
        noticed=OUTSIDERS,
        remark="It is a genuine older log, as above.",
    ),
    Attack(
        name="rebuild_with_the_stolen_key",
        title="Write a new history with the stolen key",
        what="All entries are replaced by invented ones, and signed with the true key.",
        loot=(Loot.DATABASE, Loot.SIGNING_KEY),
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.RUNNING: FORK,
            Observer.SELF_CHECK: DAMAGE,
            Observer.START: ROLLBACK,
            **OUTSIDERS,
            Observer.SIEM: INVALID,
        },
    ),
    Attack(
        name="rebuild_everything",
        title="Write a new history with the stolen key and seal it",
        what="As before, and the sealed head is replaced too: the attacker is, in effect, the operator.",
        loot=EVERYTHING,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.RUNNING: FORK,
            Observer.SELF_CHECK: DAMAGE,
            **OUTSIDERS,
            Observer.SIEM: INVALID,
        },
        remark="**Once the gateway was stopped, only a checkpoint held by another party, a witness, or the "
        "copy in a SIEM shows it.** The forged log is valid by itself.",
    ),
    Attack(
        name="show_two_histories",
        title="Show two histories",
        what="From one moment on there are two logs, both signed: each is shown to another auditor.",
        loot=EVERYTHING,
        noticed={
            Observer.DATABASE: REFUSED,
            Observer.RUNNING: FORK,
            Observer.SELF_CHECK: DAMAGE,
            **OUTSIDERS,
            Observer.SIEM: INVALID,
        },
        remark="Each auditor is shown a log that continues what that auditor saw before. They notice when "
        "they compare checkpoints, which is what a witness does for them.",
    ),
    Attack(
        name="rewrite_unheld_entries",
        title="Rewrite what is newer than any checkpoint held elsewhere",
        what="What came after the last checkpoint that left the machine is replaced and signed again.",
        loot=EVERYTHING,
        noticed={Observer.DATABASE: REFUSED, Observer.RUNNING: FORK, Observer.SELF_CHECK: DAMAGE},
        remark="**Once the gateway was stopped, no one can detect it.** The attacker can rewrite what was "
        "recorded since the last checkpoint that another party holds: have heads witnessed often.",
    ),
    Attack(
        name="remove_a_forwarded_event",
        title="Remove an event from the SIEM",
        what="One entry is deleted from what the SIEM stored.",
        loot=STREAM_ONLY,
        noticed={Observer.SIEM: INVALID},
        remark="The entries from one checkpoint to the next must make the root that the next one signs.",
    ),
    Attack(
        name="edit_a_forwarded_event",
        title="Edit an event in the SIEM",
        what="Another tenant's name is written into one event, and its leaf and hash are made to fit.",
        loot=STREAM_ONLY,
        noticed={Observer.SIEM: INVALID},
    ),
    Attack(
        name="edit_what_people_read_of_a_forwarded_event",
        title="Edit what people read of an event in the SIEM",
        what="As before, and the proof in the event is left as it was.",
        loot=STREAM_ONLY,
        noticed={Observer.SIEM: INVALID},
        remark="In the formats JSON and OCSF, the copy of the entry is compared with the leaf. In CEF, and "
        "in OCSF's own attributes, only the leaf is proven.",
    ),
    Attack(
        name="swap_two_forwarded_events",
        title="Swap two events in the SIEM",
        what="Two events get each other's index.",
        loot=STREAM_ONLY,
        noticed={Observer.SIEM: INVALID},
    ),
    Attack(
        name="forge_a_forwarded_checkpoint",
        title="Forge a checkpoint in the SIEM",
        what="One checkpoint is replaced by one that another key signed.",
        loot=STREAM_ONLY,
        noticed={Observer.SIEM: INVALID},
    ),
    Attack(
        name="remove_a_forwarded_checkpoint",
        title="Remove a checkpoint from the SIEM",
        what="One of the checkpoints is deleted from what the SIEM stored.",
        loot=STREAM_ONLY,
        remark="Nothing is lost: the next checkpoint covers the same entries.",
    ),
    Attack(
        name="delete_an_accepted_entry",
        title="Delete an accepted entry",
        what="Where gateways share a log, one of the entries that wait to be integrated is removed.",
        loot=DATABASE_ONLY,
        noticed={Observer.RUNNING: FORK, Observer.START: ROLLBACK},
        remark="A running gateway knows what it accepted. At a start, the rows after it do not follow; once "
        "another gateway has integrated them, the verifier reports the hole.",
        is_accepted=True,
    ),
    Attack(
        name="edit_an_accepted_entry",
        title="Edit an accepted entry",
        what="An entry that waits to be integrated is changed, and its hash made to fit.",
        loot=DATABASE_ONLY,
        noticed={Observer.DATABASE: REFUSED, Observer.RUNNING: FORK, Observer.START: ROLLBACK},
        remark="The row after it has the hash of the entry as it was.",
        is_accepted=True,
    ),
    Attack(
        name="delete_an_accepted_entry_and_renumber",
        title="Delete an accepted entry and renumber the rest",
        what="An entry that waits to be integrated is removed; the rows after it are made to follow.",
        loot=DATABASE_ONLY,
        noticed={Observer.DATABASE: REFUSED, Observer.RUNNING: FORK, **ALTERED},
        remark="While its gateway is dead, another integrates the rest. The number is also in the entry "
        "itself, so the verifier finds the hole.",
        is_accepted=True,
    ),
    Attack(
        name="delete_the_first_accepted_entry_behind_a_disposal",
        title="Delete the first accepted entry behind a disposal",
        what="All earlier entries of its gateway were disposed of. It is removed before it is integrated, "
        "and the rows after it are made to follow.",
        loot=DATABASE_ONLY,
        noticed={Observer.DATABASE: REFUSED, Observer.RUNNING: FORK, **ALTERED},
        remark="The newest entry of every gateway outlives a disposal, so its number is known.",
        is_accepted=True,
        has_disposed=True,
    ),
    Attack(
        name="delete_the_newest_accepted_entries",
        title="Delete the newest accepted entries",
        what="The last entries that wait to be integrated are removed.",
        loot=DATABASE_ONLY,
        noticed={Observer.RUNNING: FORK},
        remark="**While the gateway that accepted them is dead, no one detects it**, as with entries that "
        "no checkpoint covers: entries wait for a fraction of a second, after the integrating gateway was "
        "killed for some seconds.",
        is_accepted=True,
    ),
)
