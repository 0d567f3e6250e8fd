"""
A witness killed at any call that changes its state never cosigns two histories of one log.
"""

import re
import shutil
import time
from collections import Counter

import pytest

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.merkle import hash_leaf, root_from_leaf_hashes
from appliance.audit.witness.home import WitnessHome
from appliance.audit.witness.witness import OK, AddCheckpoint, encode_request
from tests.audit_log import prepare, signer_in
from tests.faults.injection import CALLS, FAULTS
from tests.tree_proofs import consistency_proof

COSIGNED, SIZE = 3, 8
"""Entries of the head that was cosigned before, and of the one that two histories have."""
STATE_FILES = ("", "witness.db", "witness.db-journal")


@pytest.fixture
def log_signer(tmp_path):
    prepare(tmp_path / "log")
    return signer_in(tmp_path / "log")


@pytest.fixture
def ask(log_signer):
    """The request to cosign one of the two histories, from the size that the witness stands at."""

    def ask_(history, old, size=SIZE):
        shared = [hash_leaf(b"%d" % number) for number in range(COSIGNED)]
        hashes = [*shared, *(hash_leaf(b"%s %d" % (history, number)) for number in range(SIZE))][:size]
        head = Checkpoint(origin=log_signer.name, size=size, root=root_from_leaf_hashes(hashes))
        proof = consistency_proof(hashes, old, size) if old else []
        note = sign_note(encode_body(head), [log_signer])
        return encode_request(AddCheckpoint(old=old, proof=tuple(proof), note=note))

    return ask_


@pytest.fixture
def home(tmp_path, log_signer, ask):
    """A witness that is asked for the first history."""
    directory = tmp_path.resolve() / "witness"
    home = WitnessHome(directory=directory)
    home.create("w.test/1", log_signer.verifier_keys, post_quantum=False)
    assert cosign(directory, ask(b"", 0, COSIGNED)) == OK
    (directory / "request").write_text(ask(b"first", COSIGNED))
    return directory


def cosign(directory, request):
    """Start the witness again and ask it."""
    return WitnessHome(directory=directory).open(time.time).add_checkpoint(request).status  # noqa: TID251 - a root


def test_a_witness_killed_at_any_call_cosigns_one_history(home, ask, servers, tmp_path):
    """Offered the second history after the kill, it cosigns either the first or the second from then on."""

    def killed(directory, call, number):
        shutil.copytree(home, directory)
        # Of `write`, the call that answers.
        paths = [f"--trace-path={directory / name}" for name in STATE_FILES if call != "write"]
        fault = FAULTS["killed"].format(n=number)
        return server.run("cosign", directory, [f"--trace={call}", *paths, f"--inject={call}:{fault}"])

    server = servers.get()
    outcomes = Counter()
    try:
        unharmed = tmp_path.resolve() / "unharmed"
        shutil.copytree(home, unharmed)
        run = server.run("cosign", unharmed, [f"--trace={','.join(f'?{call}' for call in CALLS)}"])
        assert run.reports("cosigned") == [OK]
        made = re.compile(
            rf'^\d+ +(\w+)\(.*{re.escape(str(unharmed))}(?:/witness\.db(?:-journal)?)?[">]', re.MULTILINE
        )
        calls = Counter(made.findall(run.trace))
        assert {"openat", "pwrite64", "fdatasync", "unlink"} <= set(calls), run.trace
        for call, count in {**calls, "write": 1}.items():
            for number in range(1, count + 1):
                directory = tmp_path.resolve() / f"{call}-{number}"
                run = killed(directory, call, number)
                assert (run.outcome, run.reports("cosigned")) == ("killed", []), run.trace
                second = cosign(directory, ask(b"second", COSIGNED))
                # Asked again from where it stands now: the history it keeps to, and the other one.
                again = [cosign(directory, ask(history, SIZE)) for history in (b"first", b"second")]
                assert again.count(OK) == 1, (call, number)
                assert (again[1] == OK) == (second == OK), (call, number)
                outcomes[second == OK] += 1
    finally:
        servers.put(server)
    assert set(outcomes) == {True, False}, "some kills come before the commit and some after it"


def test_a_witness_that_answered_keeps_to_its_answer(home, ask):
    """Whenever it is started again."""
    assert cosign(home, ask(b"first", COSIGNED)) == OK
    assert cosign(home, ask(b"second", COSIGNED)) != OK
    assert cosign(home, ask(b"second", SIZE)) != OK
    assert cosign(home, ask(b"first", SIZE)) == OK
