"""Results are kept once, whatever a crash leaves of the journal's file."""

import os

import pytest

from appliance.errors import StorageUnavailableError
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.pieces import PlainPieces, SealedPieces
from appliance.gateway.batch.results import LineResult

KEY = bytes(range(32))


def result(number, *, succeeded=True, line=None):
    return LineResult(number=number, succeeded=succeeded, line=line or f'{{"custom_id": "ä{number}"}}')


def open_journal(path, pieces, check_room=lambda _size: None):
    return ResultJournal.open(path, pieces, check_room)


@pytest.fixture(params=["plain", "sealed"])
def pieces(request):
    return PlainPieces() if request.param == "plain" else SealedPieces(KEY, "a batch", os.urandom)


def test_journal_reads_back_added_results(tmp_path, pieces):
    """Numbers, success and lines, in the order they were added."""
    wanted = [result(3), result(1, succeeded=False), result(2)]
    journal = open_journal(tmp_path / "j", pieces)
    journal.add(wanted[:2])
    journal.add(wanted[2:])
    assert list(journal.results()) == wanted
    journal.add([result(9)])
    journal.close()
    again = open_journal(tmp_path / "j", pieces)
    assert again.done == {3: True, 1: False, 2: True, 9: True}
    assert list(again.results()) == [*wanted, result(9)]
    again.close()


def test_torn_write_keeps_whole_results_only(tmp_path, pieces):
    """At every cut of the last record: earlier results are kept, later ones are readable."""
    path = tmp_path / "j"
    journal = open_journal(path, pieces)
    journal.add([result(1), result(2)])
    whole = path.stat().st_size
    journal.add([result(3)])
    journal.close()
    written = path.read_bytes()
    for cut in range(whole, len(written)):
        path.write_bytes(written[:cut])
        journal = open_journal(path, pieces)
        assert journal.done == {1: True, 2: True}
        journal.add([result(3, line="again")])
        assert [each.line for each in journal.results()][2:] == ["again"]
        journal.close()


def test_noise_after_a_torn_write_is_not_a_result(tmp_path, pieces):
    """After a power cut a file may have its full length, but not its last bytes."""
    path = tmp_path / "j"
    journal = open_journal(path, pieces)
    journal.add([result(1), result(2)])
    journal.close()
    written = path.read_bytes()
    path.write_bytes(written[:-5] + bytes(5))
    journal = open_journal(path, pieces)
    assert journal.done == {1: True}
    journal.close()


def test_journal_has_mode_0600_and_may_be_sealed(tmp_path):
    """With a key, no content is readable in the file."""
    journal = open_journal(tmp_path / "j", SealedPieces(KEY, "a batch", os.urandom))
    journal.add([result(1, line="an unmistakable secret")])
    journal.close()
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
    assert b"unmistakable" not in (tmp_path / "j").read_bytes()
    with pytest.raises(StorageUnavailableError, match="damaged"):
        open_journal(tmp_path / "j", SealedPieces(bytes(32), "a batch", os.urandom))


def test_disk_error_raises_storage_unavailable(tmp_path):
    with pytest.raises(StorageUnavailableError):
        open_journal(tmp_path / "missing" / "j", PlainPieces())


def test_result_without_room_on_the_disk_is_not_kept(tmp_path, pieces):
    """The journal's file is as before, and its results are read again."""
    room = [0]

    def check_room(size):
        if size > room[0]:
            raise StorageUnavailableError("nearly full")

    room[0] = 1000
    journal = open_journal(tmp_path / "j", pieces, check_room)
    journal.add([result(1)])
    size = journal.size
    assert size == (tmp_path / "j").stat().st_size
    with pytest.raises(StorageUnavailableError):
        journal.add([result(2, line="x" * 1000)])
    journal.close()
    assert (tmp_path / "j").stat().st_size == size
    again = open_journal(tmp_path / "j", pieces)
    assert again.done == {1: True}
    again.close()
