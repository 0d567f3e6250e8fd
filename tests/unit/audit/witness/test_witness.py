"""A witness cosigns one history of each log, and remembers it before it answers."""

import sqlite3
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note, verify_cosignatures
from appliance.audit.cosignature import ED25519_COSIGNATURE
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.signing_keys import MldsaSigner, Signer, mldsa_path
from appliance.audit.witness.home import WitnessHome, load_cosigner_keys, load_verifier_keys
from appliance.audit.witness.witness import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    NOT_FOUND,
    OK,
    SIZE_TYPE,
    UNPROCESSABLE,
    AddCheckpoint,
    Witness,
    encode_request,
    parse_request,
)
from appliance.audit.witness.witness_state import MAX_REFUSED, WitnessState
from appliance.errors import (
    AuditKeyError,
    AuditUnavailableError,
    ConfigurationError,
    MalformedCheckpointError,
)
from tests.tree_proofs import consistency_proof

HASHES = [hash_leaf(f"leaf {number}".encode()) for number in range(40)]
FORKED = [*HASHES[:5], *(hash_leaf(f"other {number}".encode()) for number in range(35))]
NAME = "witness.test/w1"


class History:
    """A log's signed heads, and requests to have them cosigned."""

    def __init__(self, signer, hashes=HASHES):
        self.signer, self.hashes = signer, hashes

    def note(self, size):
        checkpoint = Checkpoint(
            origin=self.signer.name, size=size, root=root_from_leaf_hashes(self.hashes[:size])
        )
        return sign_note(encode_body(checkpoint), [self.signer])

    def ask(self, old, size):
        proof = consistency_proof(self.hashes, old, size) if old else []
        return encode_request(AddCheckpoint(old=old, proof=tuple(proof), note=self.note(size)))


@pytest.fixture
def history(signer):
    return History(signer)


@pytest.fixture
def keys():
    return Signer(NAME, Ed25519PrivateKey.from_private_bytes(b"w" * 32), kind=ED25519_COSIGNATURE)


@pytest.fixture
def state_path(tmp_path):
    return tmp_path / "witness.db"


@pytest.fixture
def witness(state_path, keys, signer, clock):
    return Witness(state=WitnessState(state_path), signer=keys, log_keys=(signer.verifier_key,), clock=clock)


def cosigned(history, size, answer, keys):
    """Whether the answer is this witness's cosignature of the head of this size."""
    assert answer.status == OK, answer
    return bool(verify_cosignatures(history.note(size) + answer.text, [keys.verifier_key]))


def test_a_witness_follows_a_log_as_it_grows(history, witness, keys, clock):
    """From nothing to a first head, on to every later one, and again to the one it has."""
    known = 0
    for size in (0, 1, 1, 5, 8, 8, 13, 40):
        assert cosigned(history, size, witness.add_checkpoint(history.ask(known, size)), keys)
        known = size
    (statement,) = verify_cosignatures(witness.checkpoints()[history.signer.name], [keys.verifier_key])
    assert abs(statement.time - clock.now) < 2


def test_the_kept_checkpoint_bears_the_log_and_the_witness(history, witness, keys):
    """Lines of strangers that came along are not kept."""
    stranger = Signer("stranger.test", Ed25519PrivateKey.generate())
    body = history.note(3).partition("\n\n")[0] + "\n"
    note = sign_note(body, [stranger, history.signer])
    answer = witness.add_checkpoint(encode_request(AddCheckpoint(old=0, proof=(), note=note)))
    assert witness.checkpoints() == {history.signer.name: history.note(3) + answer.text}


def test_another_size_than_the_witness_knows_is_answered_with_that_size(history, witness):
    """409, the size in decimal and a newline, and the type the specification names."""
    answer = witness.add_checkpoint(history.ask(3, 7))
    assert (answer.status, answer.text, answer.content_type) == (CONFLICT, "0\n", SIZE_TYPE)
    witness.add_checkpoint(history.ask(0, 7))
    assert witness.add_checkpoint(history.ask(0, 9)).text == "7\n"


def refused_requests(session, origin):
    """The kept requests that were refused for a log, oldest first."""
    rows = session._connection.execute(
        "SELECT request FROM refused WHERE origin = ? ORDER BY rowid", (origin,)
    )
    return [request for (request,) in rows]


def test_the_second_of_two_split_views_is_refused(history, witness, signer, keys):
    """One log, one key, two histories: the witness cosigns the first it saw, and keeps the other as proof."""
    other = History(signer, FORKED)
    assert cosigned(history, 7, witness.add_checkpoint(history.ask(0, 7)), keys)
    for request in (other.ask(7, 7), other.ask(7, 12)):
        assert witness.add_checkpoint(request).status == UNPROCESSABLE
    assert cosigned(history, 12, witness.add_checkpoint(history.ask(7, 12)), keys)
    with witness._state.exclusive() as session:
        assert refused_requests(session, signer.name) == [other.ask(7, 7), other.ask(7, 12)]


def test_refused_checkpoints_do_not_fill_the_disk(history, witness, signer):
    """The first hundred prove as much as all of them."""
    witness.add_checkpoint(history.ask(0, 7))
    with witness._state.exclusive() as session:
        for _ in range(MAX_REFUSED + 5):
            session.refuse(signer.name, 0, "again", "x")
        assert len(refused_requests(session, signer.name)) == MAX_REFUSED


def test_rolled_back_log_gets_no_cosignature(history, witness, keys):
    """What it has now is smaller than what was cosigned: no honest request can say so."""
    witness.add_checkpoint(history.ask(0, 20))
    assert witness.add_checkpoint(history.ask(0, 9)).text == "20\n"
    smaller = encode_request(AddCheckpoint(old=20, proof=(), note=history.note(9)))
    assert witness.add_checkpoint(smaller).status == BAD_REQUEST


def test_restored_witness_forgets_later_checkpoints(history, witness, state_path, signer, keys):
    """Documented, not prevented: a restored witness can cosign a second history."""
    witness.add_checkpoint(history.ask(0, 5))
    copy = state_path.read_bytes()
    assert cosigned(history, 20, witness.add_checkpoint(history.ask(5, 20)), keys)
    state_path.write_bytes(copy)
    other = History(signer, FORKED)
    assert cosigned(other, 20, witness.add_checkpoint(other.ask(5, 20)), keys)


def test_an_unknown_log_is_not_found(witness):
    """Only logs whose keys were entered by hand are witnessed."""
    other = History(Signer("other.test/audit", Ed25519PrivateKey.generate()))
    assert witness.add_checkpoint(other.ask(0, 3)).status == NOT_FOUND


def test_checkpoint_of_an_unknown_key_is_forbidden(history, witness, signer):
    """An impostor under the log's name, and a wrong signature under its key."""
    impostor = History(Signer(signer.name, Ed25519PrivateKey.generate()))
    assert witness.add_checkpoint(impostor.ask(0, 3)).status == FORBIDDEN
    lines = history.note(3).splitlines(keepends=True)
    swapped = "".join([*lines[:-1], history.note(4).splitlines(keepends=True)[-1]])
    request = encode_request(AddCheckpoint(old=0, proof=(), note=swapped))
    assert witness.add_checkpoint(request).status == FORBIDDEN
    assert witness.checkpoints() == {}


def test_one_of_a_logs_keys_is_enough(history, state_path, keys, signer, clock):
    """While a log's key is rotated a witness knows both; a post-quantum key counts as well."""
    fresh = Signer(signer.name, Ed25519PrivateKey.generate())
    post_quantum = MldsaSigner(signer.name, MLDSA44PrivateKey.from_seed_bytes(bytes(32)))
    log_keys = tuple(other.verifier_key for other in (signer, fresh, post_quantum))
    witness = Witness(state=WitnessState(state_path), signer=keys, log_keys=log_keys, clock=clock)
    known = 0
    for size, signers in enumerate(([signer], [fresh], [post_quantum], [signer, post_quantum]), start=2):
        body = history.note(size).partition("\n\n")[0] + "\n"
        proof = consistency_proof(HASHES, known, size) if known else []
        note = sign_note(body, signers)
        request = encode_request(AddCheckpoint(old=known, proof=tuple(proof), note=note))
        assert witness.add_checkpoint(request).status == OK
        known = size


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text.replace("old 3", "old 03"),
        lambda text: text.replace("old 3", "old -3"),
        lambda text: text.replace("old 3", "old 3 "),
        lambda text: text.replace("old 3\n", "old 3\nAAAA\n"),
        lambda text: text.replace("old 3\n", "old 3\n" + "A" * 43 + "=\n" * 70),
        lambda text: text.replace("old 3\n", "old 3\n" + ("A" * 43 + "=\n") * 64),
        lambda text: text.replace("\n\n", "\n", 1),
        lambda text: text.replace("\n7\n", "\n7\nextension\n"),
        lambda text: text.replace("\u2014", "-"),
    ],
)
def test_malformed_request_is_bad(history, witness, change):
    """Loose numbers, loose base64, too many hashes, extension lines: 400, and nothing is remembered."""
    witness.add_checkpoint(history.ask(0, 3))
    assert witness.add_checkpoint(change(history.ask(3, 7))).status == BAD_REQUEST
    assert "\n3\n" in witness.checkpoints()[history.signer.name]


def test_an_old_size_beyond_the_checkpoint_is_bad(history, witness):
    """The specification asks for 400 before anything is compared."""
    request = encode_request(AddCheckpoint(old=9, proof=(), note=history.note(7)))
    assert witness.add_checkpoint(request).status == BAD_REQUEST


def test_a_size_no_database_can_hold_is_bad(witness, signer):
    """A number of nineteen digits may be larger than SQLite's integers."""
    huge = sign_note(encode_body(Checkpoint(origin=signer.name, size=2**63, root=bytes(32))), [signer])
    assert (
        witness.add_checkpoint(encode_request(AddCheckpoint(old=0, proof=(), note=huge))).status
        == BAD_REQUEST
    )


def test_a_proof_from_nothing_must_be_empty_and_an_empty_tree_has_one_root(history, witness, signer):
    """Both are 422 by the specification."""
    padded = encode_request(AddCheckpoint(old=0, proof=(bytes(32),), note=history.note(3)))
    assert witness.add_checkpoint(padded).status == UNPROCESSABLE
    hollow = sign_note(encode_body(Checkpoint(origin=signer.name, size=0, root=bytes(32))), [signer])
    empty = encode_request(AddCheckpoint(old=0, proof=(), note=hollow))
    assert witness.add_checkpoint(empty).status == UNPROCESSABLE
    assert witness.checkpoints() == {}


def test_every_changed_hash_of_a_proof_is_refused(history, witness):
    """A proof shows one thing; with a bit or a hash less, more or swapped it shows nothing."""
    witness.add_checkpoint(history.ask(0, 7))
    request = parse_request(history.ask(7, 29))
    nodes = list(request.proof)
    wrong = [
        [*nodes[:at], bytes([nodes[at][0] ^ 1]) + nodes[at][1:], *nodes[at + 1 :]] for at in range(len(nodes))
    ]
    for proof in ([], nodes[:-1], nodes[1:], [*nodes, nodes[0]], nodes[::-1], *wrong):
        text = encode_request(AddCheckpoint(old=7, proof=tuple(proof), note=request.note))
        assert witness.add_checkpoint(text).status == UNPROCESSABLE
    assert witness.add_checkpoint(encode_request(request)).status == OK


def test_every_changed_character_of_a_request_is_refused(history, witness):
    """Whatever is changed, nothing but the one history is cosigned."""
    witness.add_checkpoint(history.ask(0, 7))
    request = history.ask(7, 8)
    for at in range(len(request)):
        changed = request[:at] + ("A" if request[at] != "A" else "B") + request[at + 1 :]
        assert witness.add_checkpoint(changed).status != OK, at
    assert witness.add_checkpoint(request).status == OK


@given(st.integers(0, 2**62), st.lists(st.binary(min_size=32, max_size=32), max_size=63))
def test_requests_round_trip(old, proof):
    """What is written is read back."""
    request = AddCheckpoint(old=old, proof=tuple(proof), note="log.test/a\n1\n\n\u2014 x AAAA\n")
    assert parse_request(encode_request(request)) == request


@given(st.text(max_size=200))
def test_parsing_any_request_raises_only_our_error(text):
    """Requests come from anybody."""
    for candidate in (text, f"old 1\n{text}\n\n{text}"):
        try:
            assert encode_request(parse_request(candidate)) == candidate
        except MalformedCheckpointError:
            continue


# Durability and races.


class Crash(BaseException):
    """The process is gone."""


def test_a_crash_after_persisting_loses_no_cosignature(history, witness, keys, monkeypatch):
    """The client asks again: told where the witness stands, it gets the cosignature of the same head."""
    witness.add_checkpoint(history.ask(0, 5))
    real = WitnessState.exclusive

    def crash_when_durable(self):
        session = real(self)

        class Around:
            def __enter__(self):
                return session.__enter__()

            def __exit__(self, *problem):
                session.__exit__(*problem)
                raise Crash

        return Around()

    with monkeypatch.context() as patch:
        patch.setattr(WitnessState, "exclusive", crash_when_durable)
        with pytest.raises(Crash):
            witness.add_checkpoint(history.ask(5, 11))
    retried = witness.add_checkpoint(history.ask(5, 11))
    assert (retried.status, retried.text) == (CONFLICT, "11\n")
    assert cosigned(history, 11, witness.add_checkpoint(history.ask(11, 11)), keys)


def test_a_crash_before_persisting_cosigned_nothing(history, witness, keys, signer, monkeypatch):
    """What was signed in memory never left it, so another history may still be the first."""
    witness.add_checkpoint(history.ask(0, 5))

    def crash(*_):
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("appliance.audit.witness.witness_state.Session.save", crash)
        with pytest.raises(Crash):
            witness.add_checkpoint(history.ask(5, 11))
    assert cosigned(history, 9, witness.add_checkpoint(history.ask(5, 9)), keys)


def test_a_state_that_cannot_be_written_cosigns_nothing(history, witness, state_path):
    """No durable memory, no cosignature."""
    witness.add_checkpoint(history.ask(0, 5))
    with sqlite3.connect(state_path) as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON heads BEGIN SELECT RAISE(ABORT, 'full'); END"
        )
    with pytest.raises(AuditUnavailableError, match="full"):
        witness.add_checkpoint(history.ask(5, 11))
    assert "\n5\n" in witness.checkpoints()[history.signer.name]


def test_a_damaged_state_is_an_error_not_a_new_beginning(history, witness, state_path):
    """A witness that lost its memory must not act as if it had none."""
    witness.add_checkpoint(history.ask(0, 5))
    state_path.write_bytes(b"not a database" * 1000)
    with pytest.raises(AuditUnavailableError):
        witness.add_checkpoint(history.ask(0, 5))


def test_the_race_of_the_specification_rolls_nothing_back(history, state_path, keys, signer, clock):
    """Two requests from one size at the same time: one is cosigned, the other is told the new size."""
    for _ in range(20):
        state_path.unlink(missing_ok=True)
        witnesses = [
            Witness(state=WitnessState(state_path), signer=keys, log_keys=(signer.verifier_key,), clock=clock)
            for _ in range(2)
        ]
        witnesses[0].add_checkpoint(history.ask(0, 4))
        barrier, answers = threading.Barrier(2), {}

        def ask(witness, size, barrier=barrier, answers=answers):
            barrier.wait()
            answers[size] = witness.add_checkpoint(history.ask(4, size))

        threads = [
            threading.Thread(target=ask, args=(witness, size))
            for witness, size in zip(witnesses, (9, 15), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = next(size for size in (9, 15) if answers[size].status == OK)
        lost = answers[24 - won]
        assert (lost.status, lost.text) == (CONFLICT, f"{won}\n")
        assert f"\n{won}\n" in witnesses[0].checkpoints()[signer.name]


# Its directory.


@pytest.mark.parametrize("post_quantum", [False, True])
def test_a_witness_is_made_once_and_opened_again(tmp_path, history, signer, clock, post_quantum):
    """Its keys are its own, private, and the same at every start."""
    home = WitnessHome(directory=tmp_path / "w")
    made = home.create(NAME, [signer.verifier_key], post_quantum=post_quantum)
    assert home.signer().vkey == made.vkey
    assert len(made.verifier_keys) == 1 + post_quantum
    assert home.key.stat().st_mode & 0o777 == 0o600
    assert load_cosigner_keys(NAME, made.vkey) == made.verifier_keys
    answer = home.open(clock).add_checkpoint(history.ask(0, 3))
    statements = verify_cosignatures(history.note(3) + answer.text, made.verifier_keys)
    assert len(statements) == 1 + post_quantum
    with pytest.raises(AuditKeyError, match="never replaced"):
        home.create(NAME, [signer.verifier_key], post_quantum=post_quantum)


def test_directory_without_a_witness_is_reported(tmp_path, signer):
    """A missing directory, a damaged list of logs, a key of another kind."""
    with pytest.raises(ConfigurationError, match="witness init"):
        WitnessHome(directory=tmp_path / "none").signer()
    home = WitnessHome(directory=tmp_path / "w")
    home.create(NAME, [signer.verifier_key], post_quantum=False)
    home.logs.write_text("nonsense\n")
    with pytest.raises(AuditKeyError):
        home.open(lambda: 0.0)
    with pytest.raises(AuditKeyError, match="04 or 06"):
        load_cosigner_keys(signer.name, signer.vkey)
    with pytest.raises(AuditKeyError, match="bear that name"):
        load_cosigner_keys("other.test", home.signer().vkey)
    (tmp_path / "key").write_text(f"# ours\n{signer.vkey}\n")
    assert load_verifier_keys(str(tmp_path / "key")) == (signer.verifier_key,)
    mldsa_path(home.key).write_bytes(home.key.read_bytes())
    mldsa_path(home.key).chmod(0o600)
    with pytest.raises(AuditKeyError, match="ML-DSA-44"):
        home.signer()
