"""A spool gives back what it acknowledged, in order, whatever a crash or a bad disk left behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit.durability.spool import FRAME_BYTES, SUFFIX, Spool, SpoolStart
from appliance.audit.entry_types import EntryType
from appliance.errors import AuditUnavailableError, ConfigurationError

START = SpoolStart(spool="one", log="appliance.test/audit", size=7, since="then", reason="the disk is full")
INTENT, OUTCOME = EntryType.REQUEST_INTENT, EntryType.REQUEST_OUTCOME


def leaf(number, kind="audit.read"):
    """Some leaf; a spool reads of it what it needs and leaves the rest alone."""
    return f'{{"number":{number},"request_id":"r{number}","type":"{kind}"}}'.encode()


@pytest.fixture
def reopen(tmp_path):
    """Open the spool of this test as a new process would."""
    spools = []

    def open_(max_bytes=2**20):
        for spool in spools:
            spool.close()
        spools[:] = [Spool.open(tmp_path / "spool", max_bytes=max_bytes)]
        return spools[0]

    yield open_
    for spool in spools:
        spool.close()


def test_next_process_reads_appended_entries_in_order(reopen):
    """Over as many segments as it took."""
    spool = reopen(max_bytes=4000)
    leaves = [leaf(number) for number in range(30)]
    for at in range(0, 30, 3):
        spool.append(leaves[at : at + 3], START)
    again = reopen()
    assert len(list(again._directory.glob(f"*{SUFFIX}"))) > 2
    assert (again.entries, again.start, again.torn_bytes) == (30, START, 0)
    read = []
    while found := again.read(7):
        read += found
        again.advance(found)
    assert read == leaves
    again.clear()
    assert (again.entries, again.start, again.size_bytes) == (0, None, 0)
    assert reopen().start is None


def test_entries_can_be_added_while_others_are_taken_out(reopen):
    """Draining does not wait for the last entry."""
    spool = reopen(max_bytes=3000)
    read = []
    for number in range(40):
        spool.append([leaf(2 * number), leaf(2 * number + 1)], START)
        found = spool.read(1 if number % 3 else 3)
        spool.advance(found)
        read += found
    while found := spool.read(5):
        spool.advance(found)
        read += found
    assert read == [leaf(number) for number in range(80)]
    assert len(list(spool._directory.glob(f"*{SUFFIX}"))) == 1


@given(cut=st.integers(0, 400), garbage=st.binary(max_size=80))
def test_a_write_that_was_cut_off_costs_only_itself(tmp_path_factory, cut, garbage):
    """What lies before it is there; it is not taken for an entry."""
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool.open(directory, max_bytes=2**20)
    leaves = [leaf(number) for number in range(5)]
    ends = []
    for each in leaves:
        spool.append([each], START)
        ends.append(spool.size_bytes)
    spool.close()
    (path,) = directory.glob(f"*{SUFFIX}")
    content = path.read_bytes()
    cut = min(cut, len(content))
    path.write_bytes(content[: len(content) - cut] + garbage)
    whole = sum(end <= len(content) - cut for end in ends)
    again = Spool.open(directory, max_bytes=2**20)
    found = again.read(10)
    assert found[:whole] == leaves[:whole]
    assert set(found) <= set(leaves)
    if found or again.start:
        again.append([leaf(9)], START)
        assert again.read(10) == [*found, leaf(9)]
    again.close()


def test_an_altered_byte_is_noticed(reopen):
    """Frames carry the hash of their leaf."""
    spool = reopen()
    spool.append([leaf(1), leaf(2)], START)
    (path,) = spool._directory.glob(f"*{SUFFIX}")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    again = reopen()
    assert (again.read(5), again.torn_bytes) == ([leaf(1)], FRAME_BYTES + len(leaf(2)))


def test_room_is_left_for_the_ends_of_requests(reopen):
    """Intents stop earlier than ends."""
    spool = reopen(max_bytes=8000)
    assert spool.room(OUTCOME) == 8000
    assert spool.room(INTENT) == 7000
    spool.append([leaf(1)], START)
    assert spool.room(OUTCOME) == 8000 - spool.size_bytes


def test_it_knows_which_requests_began_and_ended_in_it(reopen):
    """The log must not end those, and must end the others."""
    spool = reopen()
    spool.append([leaf(1, "request.intent"), leaf(2, "request.intent"), leaf(1, "request.outcome")], START)
    spool.append([leaf(3, "request.aborted")], START)
    again = reopen()
    assert (list(again.begun), again.ended) == (["r2"], {"r1", "r3"})


def test_a_failed_write_acknowledges_nothing_and_harms_nothing(reopen, monkeypatch):
    """The next one goes to another file."""
    spool = reopen()
    spool.append([leaf(1)], START)
    with monkeypatch.context() as patch:

        def fail(_file, _data):
            raise OSError(28, "No space left on device")

        patch.setattr("appliance.audit.durability.spool._write", fail)
        for _ in range(2):
            with pytest.raises(AuditUnavailableError, match="No space left"):
                spool.append([leaf(2)], START)
    spool.append([leaf(3)], START)
    assert spool.read(9) == [leaf(1), leaf(3)]
    assert reopen().read(9) == [leaf(1), leaf(3)]


def test_a_directory_that_cannot_be_used_keeps_the_gateway_from_starting(tmp_path):
    """Better than to find out in an outage."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"audit\.spool_directory"):
        Spool.open(tmp_path / "file" / "spool", max_bytes=1)
