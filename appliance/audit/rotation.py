"""
Rotates the signing key of a log, while no gateway runs.

The old key signs an entry that names the new one, so an auditor who trusts the old key can follow; then both
sign one checkpoint that covers the entry.  From there on the new key signs alone.

Gateways on other machines have sealed heads of their own: copy the new key there as `audit.key.new` and run
the same command, which completes the rotation.

Every step does only what is missing: run an interrupted rotation again to complete it.  The file of the new
key is created first, and while it exists no gateway starts (`load_signing_key`), so the old key never signs
alone after the entry that ends it.

To another place, such as into a token, from one or between two, no file is moved: the old key is retired
first, and no gateway of this machine starts with it (`refuse_retired`).
"""

import base64
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance.audit.checkpoint import Checkpoint, VerifierKey, encode_body, sign_note, verify_checkpoint
from appliance.audit.cosignature import MLDSA44
from appliance.audit.entry import decode, encode, format_time, new_entry
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange
from appliance.audit.recovery import recover
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import (
    FRESH,
    MldsaSigner,
    Signer,
    create_mldsa_key,
    create_signing_key,
    is_retired,
    load_keys,
    retire,
)
from appliance.audit.store import AuditStore, Head, Leaf, StoredCheckpoint
from appliance.errors import AuditError, AuditKeyError
from appliance.infra.files import sync_directory
from appliance.infra.key_location import KeyLocation, mldsa_path

PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    signer: Signer
    size: int
    """Entries the checkpoint covers that both keys signed."""
    retired: tuple[KeyLocation, ...]
    """Where the old keys are, to be destroyed."""


def short_form(key: VerifierKey) -> str:
    """Return a key as entries name it: an ML-DSA-44 key would fill the leaf and is named by its hash."""
    if key.kind != MLDSA44:
        return key.encode()
    digest = hashlib.sha256(key.encode().encode()).hexdigest()
    return f"{key.name}+{key.key_id.hex()}+sha256:{digest}"


def rotation_message(origin: str, previous: str, successor: str) -> bytes:
    """Return what the old key signs; no checkpoint reads like this, having a number in its second line."""
    return f"signer.rotated/v1\n{origin}\n{previous}\n{successor}\n".encode()


def rotate_keys(
    *,
    store: AuditStore,
    path: Path,
    origin: str,
    sealed: SealedHead,
    gateway: str,
    actor: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> Rotated:
    """
    Hand the log over to new keys of the kinds it has now; no other process may be writing to it.

    The post-quantum key next to `path` is rotated, too.

    Raises AuditKeyError if a key cannot be read or made, AuditRollbackError, AuditVerificationError if the
    log is damaged, and AuditUnavailableError if it cannot be written: run the rotation again.
    """
    fresh, fresh_mldsa = (file.with_name(file.name + FRESH) for file in (path, mldsa_path(path)))
    is_resumed = fresh.exists()
    # The post-quantum key first, both ways: where the fresh signing key is, the other was made.
    if mldsa_path(path).exists() and not is_resumed and not fresh_mldsa.exists():
        create_mldsa_key(fresh_mldsa)
    if not is_resumed:
        create_signing_key(fresh)
    new = load_keys(fresh, fresh_mldsa if fresh_mldsa.exists() else mldsa_path(path), origin)
    old = load_keys(path, mldsa_path(path), origin)
    size = _hand_over(store, sealed, gateway, old, new, is_resumed, actor, clock, random_bytes)
    retired = [
        _replace(file) for file in (mldsa_path(path), path) if file.with_name(file.name + FRESH).exists()
    ]
    return Rotated(signer=load_keys(path, mldsa_path(path), origin), size=size, retired=tuple(retired))


def rotate_to(
    *,
    store: AuditStore,
    place: KeyLocation,
    to: KeyLocation,
    origin: str,
    retired: Path,
    sealed: SealedHead,
    gateway: str,
    actor: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> Rotated:
    """
    Hand the log over to the keys at `to`; no other process may be writing to it.

    A key in a file is created if it is missing, one in a token never.  `retired` keeps the old keys from
    signing on this machine.  Raises as `rotate_keys`.
    """
    old = load_keys(place, mldsa_path(place), origin)
    if isinstance(to, Path) and not to.exists():
        create_signing_key(to)
    if len(old.signers) > 1 and not mldsa_path(to).exists():
        create_mldsa_key(mldsa_path(to))
    new = load_keys(to, mldsa_path(to), origin)
    if len(new.signers) != len(old.signers):
        raise AuditKeyError(f"the log has no post-quantum key: move {mldsa_path(to)} away")
    if is_retired(new, retired):
        raise AuditKeyError(f"the key at {to} has signed this log before: generate another")
    latest = store.latest_checkpoint()
    is_resumed = is_retired(old, retired) or (latest is not None and _signed(latest.note, new))
    # Before the entry: a crash after this line leaves a log that no gateway of this machine opens.
    retire(old, retired)
    size = _hand_over(store, sealed, gateway, old, new, is_resumed, actor, clock, random_bytes)
    others = (mldsa_path(place),) if len(old.signers) > 1 else ()
    return Rotated(signer=new, size=size, retired=(place, *others))


def _is_handed_over(store: AuditStore, sealed: SealedHead, old: Signer, new: Signer) -> bool:
    note, latest = sealed.read(), store.latest_checkpoint()
    return bool(note and latest and _signed(note, old, new) and _signed(latest.note, new))


def _hand_over(
    store: AuditStore,
    sealed: SealedHead,
    gateway: str,
    old: Signer,
    new: Signer,
    is_resumed: bool,  # noqa: FBT001 - private
    actor: str,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> int:
    """Return the size of the log; after a crash that left only files to be moved, nothing is written."""
    if _is_handed_over(store, sealed, old, new):
        return store.head().size
    named = _successors(store) if is_resumed else set()
    tree = _checked_tree(store, sealed.read(), gateway, old, new)
    for before, after in zip(old.signers, new.signers, strict=True):
        previous, successor = short_form(before.verifier_key), short_form(after.verifier_key)
        if previous == successor:
            raise AuditKeyError(
                f"the new key {successor} is the old one: put every new key next to the old one as `{FRESH}`"
            )
        if successor in named:
            continue
        fields = {
            "previous_key": previous,
            "key": successor,
            "signature": _signature(before, rotation_message(old.name, previous, successor)),
            "actor": actor,
        }
        tree = _append(store, tree, old.name, fields, clock, random_bytes)
    now = clock()
    body = encode_body(Checkpoint(origin=old.name, size=tree.size, root=tree.root()))
    note = sign_note(body, (*old.signers, *new.signers), time=int(now))
    # As every checkpoint: sealed first, so that no reader holds a head that could be forgotten here.
    sealed.write(note)
    store.save_checkpoint(StoredCheckpoint(size=tree.size, note=note, time=format_time(int(now * 1000))))
    return tree.size


def _checked_tree(
    store: AuditStore, sealed_note: str | None, gateway: str, old: Signer, new: Signer
) -> CompactRange:
    """Check the log as a gateway does at its start; where another has rotated, new checkpoints are known."""
    if sealed_note is not None:
        # In memory only: a head the old key signed, signed by the new key as well.
        sealed_note = sign_note(encode_body(verify_checkpoint(sealed_note, old.verifier_key)), (old, new))
    latest = store.latest_checkpoint()
    is_newer = latest is not None and _signed(latest.note, new)
    return recover(store, sealed_note, (new if is_newer else old).verifier_key, gateway).tree


def _append(
    store: AuditStore,
    tree: CompactRange,
    origin: str,
    fields: dict[str, str],
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> CompactRange:
    """Add one `signer.rotated` entry and return the tree with it."""
    entry = new_entry(origin, EntryType.SIGNER_ROTATED, fields, clock=clock, random_bytes=random_bytes)
    added, grown = Leaf.of(tree.size, encode(entry), entry.type), tree.copy()
    grown.append(added.leaf_hash)
    store.append([added], expected=Head.of(tree), new=Head.of(grown))
    return grown


def _signature(signer: object, message: bytes) -> str:
    assert isinstance(signer, Signer | MldsaSigner)  # noqa: S101 - a log has no other keys
    return base64.b64encode(signer.sign(message)).decode("ascii")


def _signed(note: str, *signers: Signer) -> bool:
    try:
        verify_checkpoint(note, *(signer.verifier_key for signer in signers))
    except AuditError:
        return False
    return True


def _successors(store: AuditStore) -> set[str]:
    named: set[str] = set()
    size = store.head().size
    for start in range(0, size, PAGE):
        for leaf in store.leaves(start, min(start + PAGE, size)):
            if leaf.type == EntryType.SIGNER_ROTATED:
                named.add(str(decode(leaf.leaf).fields["key"]))
    return named


def _replace(path: Path) -> Path:
    """Put the fresh key in place; the old one stays next to it until the operator destroys it."""
    key_id = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    retired = path.with_name(f"{path.name}.retired-{key_id}")
    try:
        retired.unlink(missing_ok=True)
        retired.hardlink_to(path)
        path.with_name(path.name + FRESH).replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise AuditKeyError(
            f"cannot put the new key at {path} ({error.strerror}): run the rotation again"
        ) from error
    return retired
