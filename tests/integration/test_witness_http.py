"""The witness's server and the log's client over a real loopback socket."""

import asyncio
import hashlib
import io
import time

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_cosignatures
from appliance.audit.cosignature import ED25519_COSIGNATURE
from appliance.audit.merkle import CompactRange, hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import Signer
from appliance.audit.store import Head, Leaf, SqlAuditStore, StoredCheckpoint
from appliance.audit.witness.witness import (
    BAD_REQUEST,
    CONFLICT,
    NOT_FOUND,
    OK,
    SIZE_TYPE,
    AddCheckpoint,
    Answer,
    Witness,
    encode_request,
)
from appliance.audit.witness.witness_client import WitnessClient, open_witnessing
from appliance.audit.witness.witness_server import serving
from appliance.audit.witness.witness_state import WitnessState
from appliance.errors import AuditUnavailableError, ConfigurationError
from appliance.infra.settings import AuditSettings, WitnessSettings
from tests.tree_proofs import consistency_proof

ORIGIN = "appliance.test/audit"
LEAVES = [f"leaf {number}".encode() for number in range(330)]
HASHES = [hash_leaf(leaf) for leaf in LEAVES]
SIGNER = Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(b"l" * 32))
KEYS = Signer("w.test/1", Ed25519PrivateKey.from_private_bytes(b"w" * 32), kind=ED25519_COSIGNATURE)
ELSEWHERE = hashlib.sha256(b"another log").hexdigest()


def note_of(size):
    """A signed head."""
    root = root_from_leaf_hashes(HASHES[:size])
    return sign_note(encode_body(Checkpoint(origin=ORIGIN, size=size, root=root)), [SIGNER])


def ask(old, size):
    """The request to cosign it."""
    proof = consistency_proof(HASHES, old, size) if old else []
    return encode_request(AddCheckpoint(old=old, proof=tuple(proof), note=note_of(size))).encode()


@pytest.fixture
def state_path(tmp_path):
    return tmp_path / "witness.db"


@pytest.fixture
def witness(state_path):
    return Witness(
        state=WitnessState(state_path),
        signer=KEYS,
        log_keys=SIGNER.verifier_keys,
        clock=time.time,  # noqa: TID251 - a root: the clock enters here
    )


async def test_the_server_speaks_the_protocol(witness, state_path):
    """Statuses, types and texts as specified; the newest checkpoint is served by the hash of its origin."""
    async with serving(witness, "127.0.0.1", 0) as url, aiohttp.ClientSession() as session:

        async def post(content):
            async with session.post(f"{url}/add-checkpoint", data=content) as response:
                return response.status, response.headers["Content-Type"], await response.text()

        async def get(path):
            async with session.get(f"{url}/{path}") as response:
                return response.status, await response.text()

        mine = hashlib.sha256(ORIGIN.encode()).hexdigest()
        assert (await get(f"{mine}/checkpoint"))[0] == NOT_FOUND
        status, _, lines = await post(ask(0, 3))
        assert status == OK
        assert verify_cosignatures(note_of(3) + lines, [KEYS.verifier_key])
        assert await get(f"{mine}/checkpoint") == (OK, note_of(3) + lines)
        assert (await get(f"{ELSEWHERE}/checkpoint"))[0] == NOT_FOUND
        assert await post(ask(0, 9)) == (CONFLICT, SIZE_TYPE, "3\n")
        assert (await post(b"\xff"))[0] == BAD_REQUEST
        assert (await post(io.BytesIO(b"x" * 2**21)))[0] == 413
        answers = await asyncio.gather(*(post(ask(3, size)) for size in (7, 8, 9)))
        assert sorted(status for status, _, _ in answers) == [OK, CONFLICT, CONFLICT]
        state_path.write_bytes(b"not a database" * 1000)
        assert (await post(ask(0, 3)))[0] == 503
        assert (await get(f"{mine}/checkpoint"))[0] == 503


async def test_port_in_use_is_reported(witness):
    """One line that says what to do."""
    async with serving(witness, "127.0.0.1", 0) as url:
        with pytest.raises(ConfigurationError, match="--port"):
            async with serving(witness, "127.0.0.1", int(url.rpartition(":")[2])):
                raise AssertionError


async def test_a_witness_is_asked_over_http(witness, tmp_path):
    """The real server, the real client, a real log, round after round."""
    store, tree = SqlAuditStore(f"sqlite:///{tmp_path}/audit.db"), CompactRange()

    def grow(size):
        before, start = tree.copy(), tree.size
        for leaf_hash in HASHES[start:size]:
            tree.append(leaf_hash)
        leaves = [
            Leaf(index=at, leaf=LEAVES[at], leaf_hash=HASHES[at], type="audit.read", request_id=None)
            for at in range(start, size)
        ]
        store.append(leaves, expected=Head.of(before), new=Head.of(tree))
        stamp = "2026-11-20T12:00:00.000Z"
        store.save_checkpoint(StoredCheckpoint(size=size, note=note_of(size), time=stamp))

    async with serving(witness, "127.0.0.1", 0) as url:
        entry = WitnessSettings(name=KEYS.name, key=KEYS.vkey, url=url)
        settings = AuditSettings(witnesses=(entry,))
        async with open_witnessing(store=store, settings=settings, report=lambda *_: None) as task:
            for size in (300, 330):
                grow(size)
                await task.round()
                assert (task.level.cosigned, task.level.size) == (1, size)
    store.close()


async def test_unreachable_witness_is_one_error_line():
    """A refused connection is our error."""
    async with WitnessClient.open(timeout_seconds=5) as client:
        with pytest.raises(AuditUnavailableError, match="cannot be reached"):
            await client.add_checkpoint("http://127.0.0.1:9", "")


async def test_an_answer_of_any_length_is_not_read():
    """A hostile witness cannot fill the gateway's memory."""

    class Endless:
        def add_checkpoint(self, _text):
            return Answer(status=200, text="x" * 2**17)

    async with serving(Endless(), "127.0.0.1", 0) as url, WitnessClient.open(timeout_seconds=5) as client:
        with pytest.raises(AuditUnavailableError, match="more than any"):
            await client.add_checkpoint(url, "")
