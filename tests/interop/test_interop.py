"""Programs of others accept our logs, receipts and cosignatures, and refuse altered ones."""

import asyncio
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from appliance.audit import verify
from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.entry import new_entry_id
from appliance.audit.export import export_log, export_receipt
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.rotation import rotate_keys
from appliance.audit.sealed import SealedHead
from appliance.audit.signing_keys import create_mldsa_key, mldsa_path
from appliance.audit.store import Head, Leaf, SqlAuditStore, StoredCheckpoint
from appliance.audit.witness.home import WitnessHome
from appliance.audit.witness.witness import AddCheckpoint, encode_request
from appliance.audit.witness.witness_client import WitnessClient, open_witnessing
from appliance.audit.witness.witness_server import serving
from appliance.infra.settings import AuditSettings, WitnessSettings
from tests import foreign
from tests.attacks.scene import Scene
from tests.audit_log import ORIGIN, prepare, signer_in
from tests.foreign import RefusedError
from tests.interop.litewitness import NAME, litewitness
from tests.tree_proofs import consistency_proof

pytestmark = pytest.mark.skipif(not foreign.are_installed(), reason=foreign.MISSING)

SIZES = (1, 2, 255, 256, 257, 511, 512, 513, 65535, 65536, 65537)
TIME = "2026-11-20T12:00:00.000Z"


class Log:
    """A log that grows by any number of entries at once, through the store."""

    def __init__(self, directory: Path, history: str = "leaf") -> None:
        directory.mkdir(exist_ok=True)
        if not (directory / "audit.key").exists():
            prepare(directory)
        self.directory, self.signer = directory, signer_in(directory)
        self.store = SqlAuditStore(f"sqlite:///{directory}/audit.db")
        self._tree, self._history = CompactRange(), history

    @property
    def hashes(self) -> list[bytes]:
        return self.store.hashes(0, 0, self._tree.size)

    @property
    def key(self) -> str:
        return self.signer.vkey.split("\n")[0]

    def grow(self, size: int) -> str:
        """Sign a tree of this size; returns its checkpoint."""
        before, leaves = self._tree.copy(), []
        for index in range(before.size, size):
            leaf = f"{self._history} {index}".encode()
            leaves.append(
                Leaf(index=index, leaf=leaf, leaf_hash=hash_leaf(leaf), type="audit.read", request_id=None)
            )
            self._tree.append(leaves[-1].leaf_hash)
        self.store.append(leaves, expected=Head.of(before), new=Head.of(self._tree))
        body = encode_body(Checkpoint(origin=ORIGIN, size=size, root=self._tree.root()))
        note = sign_note(body, self.signer.signers)
        self.store.save_checkpoint(StoredCheckpoint(size=size, note=note, time=TIME))
        return note

    def export(self) -> Path:
        directory = self.directory / f"export-{self._tree.size}"
        export_log(self.store, directory, vkey=self.signer.vkey)
        return directory

    def receipt(self, index: int) -> tuple[Path, Path]:
        leaf, text = export_receipt(self.store, index)
        files = self.directory / f"{index}.tlog-proof", self.directory / f"{index}.leaf"
        files[0].write_text(text)
        files[1].write_bytes(leaf)
        return files


@pytest.fixture
def log(tmp_path):
    made = Log(tmp_path / "log")
    yield made
    made.store.close()


@pytest.fixture
def other_history(tmp_path, log):
    """Another log of the same name and key."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "audit.key").write_bytes((log.directory / "audit.key").read_bytes())
    (tmp_path / "other" / "audit.key").chmod(0o600)
    made = Log(tmp_path / "other", "another leaf")
    yield made
    made.store.close()


def test_logs_around_the_borders_of_tiles_are_accepted(log):
    """Tiles, entries, root, proofs and signature by two programs; receipts by a third."""
    for size in SIZES:
        log.grow(size)
        export = log.export()
        found = foreign.check_log(export, [log.key])
        assert (found["size"], found["entries"], len(found["signed"])) == (size, size, 1)
        assert found["proofs"] >= 2
        foreign.fsck(export, log.key)
        for index in {0, size // 2, size - 1}:
            assert foreign.check_receipt(*log.receipt(index), [log.key])["size"] == size


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("tile/0/000", 40),
        ("tile/0/002.p/188", 40),
        ("tile/1/000.p/2", 40),
        ("tile/entries/001", 40),
        ("tile/entries/002.p/188", 40),
        ("checkpoint", len(ORIGIN) + 1),  # the size
        ("checkpoint", len(ORIGIN) + 8),  # the root
        ("checkpoint", -20),  # the signature
    ],
)
def test_altered_logs_are_refused(log, file, at):
    """Each program refuses each tile, bundle of entries and checkpoint with one bit changed."""
    log.grow(700)
    export = log.export()
    flip(export / file, at)
    with pytest.raises(RefusedError):
        foreign.check_log(export, [log.key])
    with pytest.raises(RefusedError):
        foreign.fsck(export, log.key)


def test_a_log_of_another_key_is_refused(log, tmp_path):
    log.grow(3)
    export, stranger = log.export(), Log(tmp_path / "stranger").key
    with pytest.raises(RefusedError):
        foreign.check_log(export, [stranger])
    with pytest.raises(RefusedError):
        foreign.fsck(export, stranger)


def test_altered_receipts_are_refused(log):
    """A bit of the path, of the signature or of the entry, and the index of another entry."""
    log.grow(700)
    receipt, leaf = log.receipt(300)
    whole = receipt.read_text()
    lines = whole.splitlines(keepends=True)
    changed = [
        whole.replace("index 300", "index 301"),
        "".join([*lines[:2], lines[3], lines[2], *lines[4:]]),
        "".join([*lines[:2], *lines[3:]]),
        whole[:-20] + ("A" if whole[-20] != "A" else "B") + whole[-19:],
    ]
    for text in changed:
        receipt.write_text(text)
        with pytest.raises(RefusedError):
            foreign.check_receipt(receipt, leaf, [log.key])
    receipt.write_text(whole)
    foreign.check_receipt(receipt, leaf, [log.key])
    flip(leaf, 0)
    with pytest.raises(RefusedError):
        foreign.check_receipt(receipt, leaf, [log.key])


@asynccontextmanager
async def asking(store, *witnesses):
    """The log's task that asks witnesses, each a (name, keys, URL), and the problems it reports."""
    settings = AuditSettings(
        origin=ORIGIN,
        witnesses=tuple(WitnessSettings(name=name, key=key, url=url) for name, key, url in witnesses),
    )
    said = []
    async with open_witnessing(
        store=store, settings=settings, report=lambda *words: said.append(words)
    ) as task:
        yield task, said


async def test_a_witness_of_others_cosigns_a_log_that_grows(log, tmp_path):
    """litewitness checks our consistency proofs; its cosignatures verify with our verifier and in Go."""
    with litewitness(tmp_path, ORIGIN, log.key) as witness:
        async with asking(log.store, (NAME, witness.key, witness.url)) as (task, said):
            for size in (1, 255, 256, 257, 700, 65537):
                log.grow(size)
                await task.round()
                assert (said, task.level.size) == ([], size)
    export = log.export()
    (file,) = (export / "witnessed").iterdir()
    assert foreign.check_log(export, [log.key, witness.key])["cosigned"] == {
        file.name: [foreign.short(witness.key)]
    }
    assert verify.times_signed(*verify.split_note(file.read_bytes()), verify.parse_key(witness.key))
    flip(file, -20)
    with pytest.raises(RefusedError):
        foreign.check_log(export, [log.key, witness.key])


async def test_a_witness_of_others_refuses_another_history(log, other_history, tmp_path):
    """A log that was rolled back or rewritten: our client reports it, and litewitness does not cosign."""
    with litewitness(tmp_path, ORIGIN, log.key) as witness:
        async with asking(log.store, (NAME, witness.key, witness.url)) as (task, said):
            log.grow(300)
            await task.round()
            assert task.level.size == 300
        for size, reported in ((200, "rolled back"), (400, "422")):
            other_history.grow(size)
            async with asking(other_history.store, (NAME, witness.key, witness.url)) as (task, said):
                await task.round()
                ((_, problem),) = said
                assert reported in problem
        note = other_history.grow(500)
        proof = tuple(consistency_proof(other_history.hashes, 300, 500))
        async with WitnessClient.open(timeout_seconds=60) as client:

            async def answer(old: int, proof: tuple[bytes, ...] = ()) -> int:
                request = encode_request(AddCheckpoint(old=old, proof=proof, note=note))
                return (await client.add_checkpoint(witness.url, request)).status

            assert (await answer(300, proof), await answer(300), await answer(0)) == (422, 422, 409)
        async with asking(log.store, (NAME, witness.key, witness.url)) as (task, said):
            log.grow(301)
            await task.round()
            assert (said, task.level.size) == ([], 301)


async def test_a_log_with_everything_is_accepted(tmp_path):
    """Post-quantum signatures, rotated keys, erased content, and cosignatures of two witnesses."""
    prepare(tmp_path)
    create_mldsa_key(mldsa_path(tmp_path / "audit.key"))
    erased, kept = (new_entry_id(number, bytes(10)) for number in range(2))
    with closing(Scene(tmp_path)) as scene, closing(SqlAuditStore(scene.installation.database_url)) as store:
        await asyncio.to_thread(scene.serve, "r1", archived=[kept, erased], erased=[erased])
        scene.run("DELETE FROM audit_payloads WHERE request_id = :one", one=erased)
        rotate_keys(
            store=store,
            path=tmp_path / "audit.key",
            origin=ORIGIN,
            sealed=SealedHead(scene.installation.sealed_head),
            gateway="gateway",
            actor="cli:root",
            clock=time.time,  # noqa: TID251 - a root: the clock enters here
        )
        await asyncio.to_thread(scene.serve, "r2")
        ed25519, mldsa = scene.vkey.split()
        home = WitnessHome(tmp_path / "witness")
        own = home.create("own.test/witness", signer_in(tmp_path).verifier_keys, post_quantum=True)
        witness = home.open(clock=time.time)  # noqa: TID251 - a root: the clock enters here
        (tmp_path / "own.keys").write_text(own.vkey)
        with litewitness(tmp_path, ORIGIN, ed25519) as lite:
            async with serving(witness, "127.0.0.1", 0) as url:
                known = (NAME, lite.key, lite.url), (own.name, str(tmp_path / "own.keys"), url)
                async with asking(store, *known) as (task, said):
                    await task.round()
                    assert (said, task.level.cosigned) == ([], 2)
        export = scene.export("export")
        keys = [ed25519, mldsa, lite.key, *own.vkey.split()]
        found = foreign.check_log(export, keys)
        signers = sorted(map(foreign.short, keys))
        assert sorted([*found["signed"], *found["cosigned"].popitem()[1]]) == signers
        foreign.fsck(export, ed25519)
        options = [f"--key={key}" for key in keys[:2]] + [f"--witness={key}" for key in keys[2:]]
        assert verify.main([str(export), *options]) == verify.ExitCode.ERASED
        leaf, receipt = export_receipt(store, 3)
        files = tmp_path / "receipt", tmp_path / "leaf"
        files[0].write_text(receipt)
        files[1].write_bytes(leaf)
        assert foreign.check_receipt(*files, keys)["signed"] == signers


def test_every_log_that_our_verifier_accepts_in_a_test_is_checked_by_the_others(log):
    """A verifier of ours that accepts a damaged log, or an altered receipt, fails the test."""
    assert verify.verify_export.__wrapped__
    assert verify.verify_receipt.__wrapped__
    log.grow(700)
    export, (receipt, leaf) = log.export(), log.receipt(300)
    key = verify.parse_key(log.key)
    blind = verify.Report(subject="anything", origin=ORIGIN, size=700)
    accept = foreign.checks_export(lambda *_: blind)
    accept_receipt = foreign.checks_receipt(lambda *_: blind)
    accept(export, key, None)
    accept_receipt(receipt.read_bytes(), leaf.read_bytes(), key, None)
    flip(export / "tile/0/001", 40)
    with pytest.raises(RefusedError):
        accept(export, key, None)
    with pytest.raises(RefusedError):
        accept_receipt(receipt.read_bytes(), leaf.read_bytes() + b" ", key, None)
