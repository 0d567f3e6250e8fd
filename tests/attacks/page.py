"""
The page for auditors, docs/explanation/audit-attacks.md, written from the catalogue.
"""

from tests.attacks.catalogue import (
    ATTACKS,
    DAMAGE,
    DAMAGED,
    DIVERGED,
    FORK,
    INVALID,
    NO_EXPORT,
    NOT_COSIGNED,
    NOT_FORWARDED,
    REFUSED,
    ROLLBACK,
    TENANTS,
    Attack,
    Observer,
)

NOTE = "<!-- Written by `python -m docs.generate` from tests/attacks/catalogue.py; edit that instead. -->"
COLUMNS = {
    Observer.DATABASE: "Database",
    Observer.RUNNING: "Gateway, next entry",
    Observer.SELF_CHECK: "Gateway, scheduled check",
    Observer.START: "Gateway, next start",
    Observer.AUDITOR: "Auditor with the key",
    Observer.OPENER: "Auditor who opens content",
    Observer.HELD: "Auditor with an older checkpoint",
    Observer.SIEM: "Copy in a SIEM",
    Observer.WITNESS: "Witness",
}

SAID = {
    REFUSED: "refuses the statement",
    FORK: "stops: `AuditForkError`",
    ROLLBACK: "does not start: `AuditRollbackError`",
    DAMAGE: "reports damage",
    DAMAGED: "does not start: `AuditVerificationError`",
    NO_EXPORT: "gets no export",
    INVALID: "invalid",
    DIVERGED: "diverged",
    NOT_COSIGNED: "does not cosign",
    NOT_FORWARDED: "gateway stops forwarding",
    TENANTS: "refuses tenants and keys: `TenantsAlteredError`",
}

INTRODUCTION = """\
*For auditors. What an attacker with the database, the machine or the signing key can do to the log, who
detects it, and what no one can detect. Every line of the table is a test that carries the attack out on a
real log, on SQLite and on PostgreSQL (accepted entries: PostgreSQL only), and asks the real gateway, the
real verifier and the real witness: `python -m pytest tests/attacks`. How to verify a log is in [Verify the
audit log](../how-to/verify-the-audit-log.md); every store and key, and what a thief of it could do, is in
[Whom the audit log does not trust](audit-trust-model.md); what a crash or a failing disk does is in [Crashes
and the audit log](audit-crashes.md).*

## Who holds what

```mermaid
flowchart LR
  subgraph operator["The operator's machine"]
    database[("database:<br/>entries, head, checkpoints")]
    sealed["sealed head:<br/>the last signed head, in a file apart"]
    key["signing key"]
    gateway["gateway"]
    gateway --- database
    gateway --- sealed
    gateway --- key
  end
  subgraph outside["Other parties"]
    witness["witness:<br/>the newest head it cosigned"]
    auditor["auditor:<br/>public key, and a checkpoint from the last visit"]
  end
  gateway -- "new head" --> witness
  witness -- "cosignature" --> gateway
  gateway -- "export" --> auditor
```

* The **database** holds every entry, the hash of each, the head (how many entries, and the root of the tree
  over them) and the signed **checkpoints** (heads with a signature).
* The **sealed head** is a file with the newest signed head. With it, a gateway detects a restored database.
* **Tenants and API keys** are in the same database, with a MAC over all of them. Its key, and the newest
  state that the gateway has read, are files apart.
* The **signing key** signs checkpoints. Its holder can sign any history.
* An **auditor** has the public key, and should keep the `checkpoint` file of every visit.
* A **SIEM**, if the log is forwarded, has a copy of the entries with every checkpoint. Its column says what
  `verify --stream` reports of the copy, and whether the gateway continues it.
* A **witness** is a small program of another party. It signs a head only if it continues the last head it
  signed.

The last three decide. The owner of the whole machine can make it report anything, but cannot change what
other parties already hold.

## What was tried

A cell shows what the observer in that column reports. A dash: nothing is detected. `refuses the statement`:
triggers in the database stop the change until its owner drops them, which the attack then does; the other
columns show the result after that. The columns of a running gateway hold while it runs; the owner of the
machine stops it first.
"""

AFTERWORD = """\
## What the log does not prove

* **That an entry is true.** It proves that this was recorded, in this order, and not altered since. A
  gateway that lies is recorded faithfully, and so is an entry added by an account that may write to the
  database.
* **That everything was recorded.** A request that never reached the gateway is not in the log. What the
  gateway accepted is: its intent is on the disk before the first byte of the answer leaves.
* **When something happened**, better than the operator's clock. The order is the index, not the time. A [time
  stamp](../how-to/time-stamp-the-log.md) shows by when entries existed, not since when.
* **That tenants have the models and limits that the operator gave them.** Entries name what changed, not the
  values. A key that acts although no entry created it is reported by the verifier.
* **Anything about the time since the newest checkpoint that another party holds.** Up to there, history is
  fixed; after it, the owner of machine and key can still rewrite it. Short intervals between cosignatures
  make that short.
* **That no one read it.** Reading with `appliance audit` is recorded; reading the database file is not.

## What to do about it

1. Keep the `checkpoint` file of every export, and give it to the verifier with `--held` next time.
2. Ask for a witness that the operator does not run, and for the witness's public key.
3. Put the sealed head and the signing key on another disk than the database, with another backup.
4. [Forward the log](../how-to/forward-the-log.md) to a system that others run, and verify the copy there.
5. Compare checkpoints with other auditors of the same log.
"""


def page() -> str:
    """Return the page."""
    lines = ["# Attacks on the audit log, and who detects them", "", NOTE, "", INTRODUCTION]
    lines += [
        f"| Attack | Needs | {' | '.join(COLUMNS.values())} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
        *(_row(attack) for attack in ATTACKS),
        "",
        "## The attacks",
    ]
    for attack in ATTACKS:
        lines += ["", f"### {attack.title}", "", f"{attack.what} {_noticed(attack)}"]
        if attack.remark:
            lines += ["", attack.remark]
    return "\n".join([*lines, "", AFTERWORD])


def _row(attack: Attack) -> str:
    cells = [SAID.get(attack.noticed.get(observer, ""), "-") for observer in COLUMNS]
    return f"| {attack.title} | {', '.join(attack.loot)} | {' | '.join(cells)} |"


def _noticed(attack: Attack) -> str:
    after = [
        observer for observer in COLUMNS if observer in attack.noticed and observer is not Observer.DATABASE
    ]
    if not after:
        return "No one detects it."
    names = [f"{observer[0].lower()}{observer[1:]}" for observer in after]
    return f"Detected by {'; '.join(names)}."
