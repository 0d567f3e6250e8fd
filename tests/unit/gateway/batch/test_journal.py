"""Results are kept once, whatever a crash leaves of the file they are kept in."""

import os

import pytest

from appliance.errors import StorageUnavailableError
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.pieces import PlainPieces, SealedPieces
from appliance.gateway.batch.results import LineResult

KEY = bytes(range(32))


def result(number, *, succeeded=True, line=None):
    return LineResult(number=number, succeeded=succeeded, line=line or f'{{"custom_id": "ä{number}"}}')


@pytest.fixture(params=["plain", "sealed"])
def pieces(request):
    return PlainPieces() if request.param == "plain" else SealedPieces(KEY, "a batch", os.urandom)


def test_what_was_added_is_there_again(tmp_path, pieces):
    """Numbers, how it ended, and the lines, in the order they came."""
    wanted = [result(3), result(1, succeeded=False), result(2)]
    journal = ResultJournal.open(tmp_path / "j", pieces)
    journal.add(wanted[:2])
    journal.add(wanted[2:])
    assert list(journal.results()) == wanted
    journal.add([result(9)])
    journal.close()
    again = ResultJournal.open(tmp_path / "j", pieces)
    assert again.done == {3: True, 1: False, 2: True, 9: True}
    assert list(again.results()) == [*wanted, result(9)]
    again.close()


def test_wherever_a_write_was_torn_whole_results_stay_and_the_rest_is_done_again(tmp_path, pieces):
    """Every cut of the last record: what was before is kept, what comes after is readable."""
    path = tmp_path / "j"
    journal = ResultJournal.open(path, pieces)
    journal.add([result(1), result(2)])
    whole = path.stat().st_size
    journal.add([result(3)])
    journal.close()
    written = path.read_bytes()
    for cut in range(whole, len(written)):
        path.write_bytes(written[:cut])
        journal = ResultJournal.open(path, pieces)
        assert journal.done == {1: True, 2: True}
        journal.add([result(3, line="again")])
        assert [each.line for each in journal.results()][2:] == ["again"]
        journal.close()


def test_noise_where_a_write_was_torn_is_no_result(tmp_path, pieces):
    """After a power cut the length of a file may be right and its end not written."""
    path = tmp_path / "j"
    journal = ResultJournal.open(path, pieces)
    journal.add([result(1), result(2)])
    journal.close()
    written = path.read_bytes()
    path.write_bytes(written[:-5] + bytes(5))
    journal = ResultJournal.open(path, pieces)
    assert journal.done == {1: True}
    journal.close()


def test_only_its_owner_reads_it_and_a_sealed_one_not_even_they(tmp_path):
    """Mode 0600; with a key, nothing of the content is in the file."""
    journal = ResultJournal.open(tmp_path / "j", SealedPieces(KEY, "a batch", os.urandom))
    journal.add([result(1, line="an unmistakable secret")])
    journal.close()
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
    assert b"unmistakable" not in (tmp_path / "j").read_bytes()
    with pytest.raises(StorageUnavailableError, match="damaged"):
        ResultJournal.open(tmp_path / "j", SealedPieces(bytes(32), "a batch", os.urandom))


def test_a_disk_that_fails_is_said_to(tmp_path):
    """Not a result less, silently."""
    with pytest.raises(StorageUnavailableError):
        ResultJournal.open(tmp_path / "missing" / "j", PlainPieces())
