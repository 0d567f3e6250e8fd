"""
The reference page of the audit format, made from the registry and the verifier's exit codes.

`docs/reference/audit-format.md` is this module's output; a test compares the two.  Write it with
`python -m appliance.audit.reference > docs/reference/audit-format.md`.
"""

import sys

from appliance.audit.entry import ENVELOPE, FORMAT_VERSION, MAX_LEAF_BYTES
from appliance.audit.registry import REGISTRY, EntryType, Field, Schema
from appliance.audit.verify import MEANINGS

_HEAD = f"""\
# Audit format

<!-- Made by `python -m appliance.audit.reference`; change the code, not this page. -->

What the audit log writes, byte for byte, so that anyone can read and verify it without our software.
The formats are RFC 6962 (tree), RFC 8785 (leaves) and C2SP (`signed-note`, `tlog-checkpoint`,
`tlog-cosignature`, `tlog-tiles`, `tlog-proof`).

## Leaf

A leaf is one entry as canonical JSON (RFC 8785), at most {MAX_LEAF_BYTES} bytes: one flat object of strings,
integers (below 2^53), booleans and lists of strings.  There are no floats and no nulls; fractions are strings
with three decimal places.  Prompts and completions are never in it.

| Field | Kind | Meaning |
|---|---|---|
"""

_ENVELOPE = {
    "v": ("integer", f"version of this format: {FORMAT_VERSION}"),
    "log": ("string", "origin of the log; the same as in every checkpoint"),
    "id": ("string", "ULID of the entry: 26 characters, never reused"),
    "type": ("string", "one of the types below"),
    "time": (
        "string",
        "RFC 3339, UTC, milliseconds: `2026-11-20T23:59:59.999Z`; order is the index, not the time",
    ),
}

_TYPES = """
## Entry types

Every type is closed: an entry with a field that is not listed is refused.  Optional fields are left out when
there is nothing to say.  [`audit-format.schema.json`](audit-format.schema.json) says the same as JSON Schema
(draft 2020-12); it knows every rule of a leaf but its canonical spelling and its size.

Request ids are never reused.  A `request.intent` is followed by exactly one `request.outcome` or
`request.aborted` of the same request; it is durable before any byte of the answer leaves.
"""

_TAIL = """
## Tree and checkpoint

The hash of a leaf is SHA-256(0x00 ‖ leaf), of a node SHA-256(0x01 ‖ left ‖ right); the tree is that of
RFC 6962.

A checkpoint is a signed note: origin, number of entries and base64 root, one per line, an empty line, and
signature lines `— name base64(key id ‖ signature)`.  The key id is the first four bytes of
SHA-256(name ‖ 0x0A ‖ type ‖ public key).  Lines signed by keys the reader does not know are ignored.

| Type | Key | Signs |
|---|---|---|
| 0x01 | Ed25519, of the log | the note's text |
| 0x04 | Ed25519, of a witness | the time and the note's text; the time stands before the signature |
| 0x06 | ML-DSA-44, of log or witness | the structure of `tlog-cosignature`; likewise |

The log's keys have its origin for a name, a witness's keys have the witness's. Keys are handed to auditors
as `name+hash+base64(type ‖ public key)`, the hash being the key id in hex; a log with two keys has two
lines.

A rotation of the log's key is a `signer.rotated` entry.  Its signature is the old key's over four lines:
`signer.rotated/v1`, origin, `previous_key`, `key`.  The old and the new key both sign the checkpoint that
covers it; from there on the new one signs alone.

## Receipt

A `.tlog-proof` file: `c2sp.org/tlog-proof@v1`, `index N`, the inclusion path with the leaf's sibling first,
one base64 hash per line, an empty line, and the checkpoint.  The leaf travels beside it.

## Export

A directory in `tlog-tiles` layout that covers exactly its checkpoint:

| Path | Content |
|---|---|
| `checkpoint` | the signed tree head |
| `vkey` | the verifier keys, for convenience; an auditor uses those received by another way |
| `tile/entries/<N>` | 256 leaves, each after its length as two bytes, big-endian |
| `tile/0/<N>` | the 256 leaf hashes of that bundle |
| `tile/<L>/<N>` | 256 roots of full tiles of the level below |
| `witnessed/<N>-<size>` | the newest checkpoints that witnesses cosigned |
| `payloads/<request id>.<part>` | kept content: 12 bytes of nonce, AES-256-GCM ciphertext |

`<N>` is written in groups of three digits, all but the last with an `x`: tile 1234067 is `x001/x234/067`.
The last tile of a level may hold fewer; its path then ends in `.p/<how many>`.

## Kept content

A part is `request` or `response`, and its place is `<origin>/<request id>/<part>`. From its data key,
HKDF-SHA256 without salt derives two keys of 32 bytes, by the info `appliance payload encryption v1` and
`appliance payload commitment v1`. The first encrypts with the place as associated data; the second makes
the commitment, HMAC-SHA256(place ‖ 0x00 ‖ content). The digest is SHA-256(nonce ‖ ciphertext). With
`content_mode` `digest`, the commitment is made with a key of the tenant.

## Verifying

    python -m appliance.audit.verify EXPORT --key KEY [--held CHECKPOINT] [--witness KEY] [--json]
    python -m appliance.audit.verify RECEIPT.tlog-proof --leaf LEAF --key KEY

`appliance/audit/verify.py` needs only Python and `cryptography`; it may be copied and run alone. Every key
that is given must have signed. `--held` names a checkpoint kept from earlier, `--witness` whose cosignature
is asked for. Without a checkpoint held by somebody else, a valid log only shows that its operator is
consistent. An export made while requests are running has open requests, and is reported as incomplete.
`--payload-keys` opens kept content, `--no-payloads` says that it was left out.

| Exit code | Meaning |
|---|---|
"""


def reference() -> str:
    """Return the page, in Markdown."""
    envelope = "".join(f"| `{name}` | {_ENVELOPE[name][0]} | {_ENVELOPE[name][1]} |\n" for name in ENVELOPE)
    types = "".join(_section(entry_type, REGISTRY[entry_type]) for entry_type in EntryType)
    codes = "".join(f"| {code.value} | {meaning} |\n" for code, meaning in sorted(MEANINGS.items()))
    return f"{_HEAD}{envelope}{_TYPES}{types}{_TAIL}{codes}"


def _section(entry_type: EntryType, schema: Schema) -> str:
    reason = " ".join(schema.reason.split())
    rows = "".join(_row(field) for field in schema.fields.values())
    return f"\n### `{entry_type}`\n\n{reason}\n\n| Field | Kind | | Meaning |\n|---|---|---|---|\n{rows}"


def _row(field: Field) -> str:
    values = f" ({', '.join(f'`{value}`' for value in field.values)})" if field.values else ""
    needed = "required" if field.required else "optional"
    return f"| `{field.name}` | {field.kind}{values} | {needed} | {field.meaning} |\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
