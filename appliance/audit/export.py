"""
Writes the files for an auditor: a directory in C2SP `tlog-tiles` layout, or one receipt (C2SP `tlog-proof`).

The directory holds `checkpoint`, `vkey`, `tile/<level>/<n>` (hashes), `tile/entries/<n>` (leaves),
`witnessed/<n>-<size>` (older checkpoints that witnesses cosigned) and `timestamps/<n>-<size>.tsr` (time
stamps over checkpoints).  It covers exactly the latest checkpoint, so it is consistent while the log grows.
Of a log with entries that were disposed of it also holds `disposed` (index of the entry that says so) and
`kept/<index>` (of each entry that stays, the path to the root of its tile, eight hashes, and the leaf);
bundles and hashes of level 0 begin behind, and only what can still be compared with the log is exported of
older checkpoints.  Leaves and hashes are copied as stored: a damaged log can be exported, so that
`appliance.audit.verify` can report the damage.

Sources: c2sp.org/tlog-tiles, c2sp.org/tlog-proof@v1.
"""

import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from appliance.audit.checkpoint import parse_body, parse_note
from appliance.audit.cosigned import CosignedCheckpoints, merge_notes
from appliance.audit.merkle import HASH_BYTES, LEVEL_BITS, TILE_WIDTH, Hashes, HashTree
from appliance.audit.store import AuditStore, Disposal, KeptLeaf, Leaf, SqlAuditStore, StoredCheckpoint
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.errors import AuditVerificationError, ConfigurationError

RECEIPT_HEADER = "c2sp.org/tlog-proof@v1"


def export_log(
    store: AuditStore,
    directory: Path,
    *,
    vkey: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """
    Write the log, up to its latest checkpoint, into the new directory; return how many entries.

    The directory appears only once it is complete.  `vkey` has one verifier key a line: an auditor compares
    them with those held before.  `progress` is called with the entries written and their total.

    Raises AuditUnavailableError, AuditVerificationError if there is no checkpoint yet or leaves it covers are
    missing, or ConfigurationError if the directory exists or cannot be written.
    """
    if directory.exists():
        raise ConfigurationError(f"{directory} exists already; export into a new directory")
    # First: the log read later is never older than what was cosigned and time-stamped.
    cosigned, stamped_size = _cosigned(store), _stamped_size(store)
    checkpoint = _latest(store)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
            fresh = Path(temporary) / "log"
            disposal = _write_tiles(store, fresh, checkpoint.size, progress)
            (fresh / "checkpoint").write_text(checkpoint.note, encoding="utf-8")
            (fresh / "vkey").write_text(f"{vkey}\n", encoding="utf-8")
            for number, (size, note) in enumerate(cosigned, start=1):
                if _is_comparable(size, disposal):
                    _write(fresh / "witnessed" / f"{number}-{size}", note.encode())
            for number, stamp in enumerate(_timestamps(store, stamped_size), start=1):
                if _is_comparable(stamp.size, disposal):
                    _write(fresh / "timestamps" / f"{number}-{stamp.size}.tsr", stamp.token)
            fresh.rename(directory)
    except OSError as error:
        raise ConfigurationError(f"cannot write the export {directory}: {error.strerror}") from error
    return checkpoint.size


def export_receipt(store: AuditStore, index: int) -> tuple[bytes, str]:
    """
    Return the leaf at `index` and its receipt (the text of a `.tlog-proof` file).

    It leads to the checkpoint that most witnesses cosigned, once one of them covers the entry and is
    signed with the log's present keys, and to the latest until then.

    Raises AuditUnavailableError, or AuditVerificationError if no checkpoint covers the entry yet.
    """
    disposal = store.disposal()
    if index < disposal.below:
        raise AuditVerificationError(
            f"entry {index} was disposed of, as entry {disposal.index} says: older receipts still verify"
        )
    latest = _latest(store).note
    note = _best_cosigned(store, index, latest) or latest
    receipt = make_receipt(hashes=store.hashes, index=index, checkpoint=note)
    leaves = store.leaves(index, index + 1)
    if not leaves:
        raise AuditVerificationError(f"entry {index} is missing: it was signed and is gone")
    return leaves[0].leaf, receipt


def make_receipt(*, hashes: Hashes, index: int, checkpoint: str) -> str:
    """Return the receipt of an entry; raises AuditVerificationError if the signed checkpoint lacks it."""
    path = HashTree(parse_body(parse_note(checkpoint).text).size, hashes).inclusion_proof(index)
    lines = [RECEIPT_HEADER, f"index {index}", *(b64encode(node).decode("ascii") for node in path)]
    return "\n".join(lines) + f"\n\n{checkpoint}"


def tile_path(level: str, number: int, width: int) -> str:
    """Return the path of a tile of `width` hashes or entries, such as `tile/0/x001/234.p/7`."""
    parts = [f"{number % 1000:03d}"]
    while number := number // 1000:
        parts.insert(0, f"x{number % 1000:03d}")
    partial = "" if width == TILE_WIDTH else f".p/{width}"
    return f"tile/{level}/{'/'.join(parts)}{partial}"


def _latest(store: AuditStore) -> StoredCheckpoint:
    checkpoint = store.latest_checkpoint()
    if checkpoint is None:
        raise AuditVerificationError("nothing was signed yet; wait for the first checkpoint")
    size = parse_body(parse_note(checkpoint.note).text).size
    if size != checkpoint.size:
        raise AuditVerificationError(
            f"the latest checkpoint covers {size} entries, but is kept as {checkpoint.size}"
        )
    return checkpoint


def _cosigned(store: AuditStore) -> list[tuple[int, str]]:
    return merge_notes(CosignedCheckpoints(store.database).all()) if isinstance(store, SqlAuditStore) else []


def _stamped_size(store: AuditStore) -> int:
    newest = Timestamps(store.database).newest() if isinstance(store, SqlAuditStore) else None
    return newest.size if newest else 0


def _timestamps(store: AuditStore, size: int) -> Iterator[Timestamp]:
    if isinstance(store, SqlAuditStore):
        yield from takewhile(lambda stamp: stamp.size <= size, Timestamps(store.database).all())


def _best_cosigned(store: AuditStore, index: int, latest: str) -> str | None:
    """Return the checkpoint most witnesses cosigned, of those that verify with the keys of the latest."""
    needed = _log_signers(latest)
    covering = [
        (len(parse_note(note).signatures), size, note)
        for size, note in _cosigned(store)
        if size > index and needed <= _log_signers(note)
    ]
    return max(covering, default=(0, 0, None))[2]


def _log_signers(note: str) -> set[bytes]:
    """Return the ids of the log's own keys that signed; they change when a key is rotated or added."""
    parsed = parse_note(note)
    origin = parsed.text.partition("\n")[0]
    return {line.key_id for line in parsed.signatures if line.name == origin}


def _is_comparable(size: int, disposal: Disposal) -> bool:
    """Whether the tree of this size can still be computed."""
    return size >= disposal.below or size % TILE_WIDTH == 0


def _write_tiles(store: AuditStore, root: Path, size: int, progress: Callable[[int, int], None]) -> Disposal:
    """Write leaves and hashes; return how far entries were disposed of."""
    disposal = store.disposal()
    for number, start in enumerate(range(0, size, TILE_WIDTH)):
        progress(start, size)
        end = min(start + TILE_WIDTH, size)
        leaves = store.leaves(start, end)
        if [leaf.index for leaf in leaves] != list(range(start, end)):
            if start >= disposal.below:
                disposal = store.disposal()  # it may have begun since
            if start >= disposal.below:
                raise AuditVerificationError(
                    f"leaves are missing between {start} and {end}: they were signed and are gone"
                )
            _write_kept(root, store.kept(start, end))
            continue
        if start < disposal.below:
            # Their removal has not ended: what will stay is known, and the rest goes along.
            _write_kept(root, [kept for kept in store.kept(start, end) if kept.path])
        entries = b"".join(map(_framed, leaves))
        _write(root / tile_path("entries", number, len(leaves)), entries)
        _write(root / tile_path("0", number, len(leaves)), b"".join(leaf.leaf_hash for leaf in leaves))
    if disposal.below and disposal.index >= size:
        raise AuditVerificationError("entries were disposed of meanwhile: export the log again")
    if disposal.below:
        _write(root / "disposed", f"{disposal.index}\n".encode())
    _write_upper_tiles(store, root, size)
    return disposal


def _write_kept(root: Path, leaves: Sequence[KeptLeaf]) -> None:
    for kept in leaves:
        # Without a path it should be gone: whatever is written in its place, the verifier reports it.
        path = b"".join(kept.path) or bytes(HASH_BYTES * LEVEL_BITS)
        _write(root / "kept" / str(kept.leaf.index), path + kept.leaf.leaf)


def _write_upper_tiles(store: AuditStore, root: Path, size: int) -> None:
    level, count = 1, size >> LEVEL_BITS
    while count:
        for start in range(0, count, TILE_WIDTH):
            end = min(start + TILE_WIDTH, count)
            tile = store.hashes(level, start, end)
            if len(tile) != end - start:
                raise AuditVerificationError(
                    f"hashes of level {level} are missing between {start} and {end}: "
                    "they were signed and are gone"
                )
            _write(root / tile_path(str(level), start // TILE_WIDTH, len(tile)), b"".join(tile))
        level, count = level + 1, count >> LEVEL_BITS


def _framed(leaf: Leaf) -> bytes:
    """A leaf behind its length, which has two bytes."""
    try:
        return len(leaf.leaf).to_bytes(2) + leaf.leaf
    except OverflowError as error:
        raise AuditVerificationError(
            f"entry {leaf.index} has {len(leaf.leaf)} bytes, longer than any that was written: it was altered"
        ) from error


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
