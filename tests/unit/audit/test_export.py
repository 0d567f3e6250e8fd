"""An export is a C2SP tlog-tiles directory, complete or absent."""

import base64

import pytest

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_checkpoint
from appliance.audit.export import export_log, export_receipt, tile_path
from appliance.audit.merkle import CompactRange, hash_leaf, root_from_leaf_hashes
from appliance.audit.store import Head, Leaf, StoredCheckpoint
from appliance.errors import AuditVerificationError, ConfigurationError
from tests.tree_proofs import verify_inclusion


@pytest.fixture
def filled(memory_store, signer):
    """Fill a store with `size` leaves and a checkpoint over `signed` of them."""

    def filled_(size, signed):
        tree, leaves, root = CompactRange(), [], None
        for index in range(size):
            leaf = f"leaf {index}".encode()
            leaves.append(
                Leaf(index=index, leaf=leaf, leaf_hash=hash_leaf(leaf), type="audit.read", request_id=None)
            )
            tree.append(leaves[-1].leaf_hash)
            if tree.size == signed:
                root = tree.root()
        memory_store.append(leaves, expected=Head.of(CompactRange()), new=Head.of(tree))
        note = sign_note(encode_body(Checkpoint(origin=signer.name, size=signed, root=root)), [signer])
        memory_store.save_checkpoint(StoredCheckpoint(size=signed, note=note, time="t"))
        return memory_store

    return filled_


@pytest.mark.parametrize(
    ("level", "number", "width", "path"),
    [
        ("0", 0, 256, "tile/0/000"),
        ("entries", 7, 3, "tile/entries/007.p/3"),
        ("0", 1_234_067, 256, "tile/0/x001/x234/067"),
        ("1", 1000, 17, "tile/1/x001/000.p/17"),
    ],
)
def test_tile_paths_are_those_of_the_specification(level, number, width, path):
    """Zero-padded groups of three, all but the last with an x."""
    assert tile_path(level, number, width) == path


def test_an_export_covers_exactly_its_checkpoint(filled, export):
    """70,000 entries make the tiles that the specification counts out, and later entries are left out."""
    directory = export(filled(70_003, 70_000))
    tiles = sorted(
        str(path.relative_to(directory)) for path in (directory / "tile").rglob("*") if path.is_file()
    )
    assert len([path for path in tiles if path.startswith("tile/0/") and ".p/" not in path]) == 273
    assert [path for path in tiles if ".p/" in path] == [
        "tile/0/273.p/112",
        "tile/1/001.p/17",
        "tile/2/000.p/1",
        "tile/entries/273.p/112",
    ]
    assert "tile/1/000" in tiles
    assert (directory / "tile/0/000").stat().st_size == 256 * 32
    assert (directory / "checkpoint").read_text().split("\n")[1] == "70000"
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint", "tile", "vkey"]


def test_a_tree_of_one_full_tile(filled, export):
    """256 entries: a full tile at level 0 and a partial one of width 1 above it."""
    directory = export(filled(256, 256))
    root = (directory / "tile/1/000.p/1").read_bytes()
    hashes = (directory / "tile/0/000").read_bytes()
    assert root == root_from_leaf_hashes(hashes[at : at + 32] for at in range(0, len(hashes), 32))
    assert not (directory / "tile/2").exists()


def test_entries_are_length_prefixed(filled, export):
    """Two bytes, big-endian, then the leaf."""
    directory = export(filled(3, 3))
    assert (directory / "tile/entries/000.p/3").read_bytes() == b"\0\x06leaf 0\0\x06leaf 1\0\x06leaf 2"


def test_an_existing_directory_is_never_touched(filled, tmp_path):
    """An earlier export is evidence."""
    (tmp_path / "export").mkdir()
    with pytest.raises(ConfigurationError, match="exists already"):
        export_log(filled(1, 1), tmp_path / "export", vkey="k")


def test_a_failed_export_leaves_nothing_behind(filled, tmp_path):
    """Half an export could be mistaken for a truncated log."""
    store = filled(3, 3)
    store.stored = store.stored[:1]
    with pytest.raises(AuditVerificationError, match="missing"):
        export_log(store, tmp_path / "export", vkey="k")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="cannot write"):
        export_log(store, tmp_path / "missing" / "export", vkey="k")


def test_without_a_checkpoint_there_is_nothing_to_export(memory_store, tmp_path):
    """Unsigned entries prove nothing."""
    with pytest.raises(AuditVerificationError, match="nothing was signed"):
        export_log(memory_store, tmp_path / "export", vkey="k")
    with pytest.raises(AuditVerificationError, match="nothing was signed"):
        export_receipt(memory_store, 0)


def test_a_checkpoint_filed_under_another_size_is_noticed(filled, export):
    """The size in the database's row is not trusted."""
    store = filled(3, 3)
    checkpoint = store.checkpoints.pop(3)
    store.save_checkpoint(StoredCheckpoint(size=4, note=checkpoint.note, time="t"))
    with pytest.raises(AuditVerificationError, match="kept as 4"):
        export(store)


def test_receipts_are_made_for_covered_entries(filled, signer):
    """Leaf and receipt fit together; an uncovered entry has none yet."""
    store = filled(20, 17)
    leaf, text = export_receipt(store, 16)
    assert leaf == b"leaf 16"
    head, _, note = text.partition("\n\n")
    covering = verify_checkpoint(note, signer.verifier_key)
    path = [base64.b64decode(line) for line in head.split("\n")[2:]]
    assert covering.size == 17
    verify_inclusion(leaf_hash=hash_leaf(leaf), index=16, size=17, proof=path, root=covering.root)
    with pytest.raises(AuditVerificationError):
        export_receipt(store, 17)
