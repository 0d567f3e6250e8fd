"""The verifier's results on kept content: intact, erased, missing, altered and opened."""

import base64
import json
import random

import pytest

from appliance.audit import verify
from appliance.audit.content.payloads import first_id
from appliance.audit.content.sealing import Part, place, seal, unwrap
from appliance.audit.entry import Entry, encode, format_time
from appliance.audit.entry_types import EntryType
from appliance.audit.verify import ExitCode

RANDOM = random.Random(17)
ORIGIN = "a.example/log"
WRAPPING = RANDOM.randbytes(32)
NOW_MS = 1_800_000_000_000
R1, R2 = first_id(NOW_MS), first_id(NOW_MS + 10_000)


class Export:
    """Entries and payloads, as the verifier gets them."""

    def __init__(self, directory):
        self.directory = directory
        self.report = verify.Report(subject="export", origin=ORIGIN)
        self.check = verify.EntryCheck(self.report)
        self.data_keys = {}
        self.count = 0
        (directory / "payloads").mkdir()

    def add(self, entry_type, **fields):
        """Give the verifier one entry, through its leaf."""
        leaf = encode(
            Entry(
                log=ORIGIN,
                id=first_id(self.count),
                type=entry_type,
                time=format_time(NOW_MS + 60_000),
                fields=fields,
            )
        )
        self.check.see(self.count, [leaf])
        self.count += 1

    def file(self, request, part=Part.REQUEST):
        return self.directory / "payloads" / f"{request}.{part}"

    def keep(self, request, part=Part.REQUEST, content=b"said", tenant="acme"):
        """Write a payload and the entry that names it."""
        sealed, commitment = seal(
            content, place(ORIGIN, request, part), WRAPPING, random_bytes=RANDOM.randbytes
        )
        self.file(request, part).write_bytes(sealed.blob)
        self.data_keys[f"{request}/{part}"] = unwrap(sealed.wrapped_key, WRAPPING)
        named = {
            "request_id": request,
            "payload_commitment": commitment,
            "payload_digest": sealed.digest,
            "payload_key": "acme.x",
        }
        common = {"tenant": tenant, "key_id": "k", "route": "/v1/completions", "model": "m"}
        if part is Part.REQUEST:
            more = {"stream": False, "client": "loopback", "body_bytes": 1, "content_mode": "encrypted"}
            self.add(EntryType.REQUEST_INTENT, **named, **common, **more)
        else:
            more = {"outcome": "completed", "status": 200, "duration_ms": 1}
            self.add(EntryType.REQUEST_OUTCOME, **named, **common, **more)

    def erase(self, tenant="acme", payloads=1, **more):
        self.add(EntryType.ERASURE, tenant=tenant, payloads=payloads, legal_basis="b", actor="a", **more)

    def result(self, data_keys=None):
        """The verifier's report."""
        for request in self.report.open_requests:
            self.report.state.end(request)
        verify.check_payloads(self.report, self.directory, data_keys or {}, again=True)
        return self.report


@pytest.fixture
def export(tmp_path):
    return Export(tmp_path)


def test_payloads_that_are_here_are_compared_and_opened_with_their_keys(export):
    """Both parts; opening also checks what the log commits to."""
    export.keep(R1)
    export.keep(R1, Part.RESPONSE)
    report = export.result(export.data_keys)
    assert report.problems == []
    assert (report.payloads.checked, report.payloads.opened) == (2, 2)
    assert "2 intact, 0 erased, 2 opened" in verify.render(report)


def test_a_missing_payload_is_a_problem(export):
    """Missing content is reported."""
    export.keep(R1)
    export.file(R1).unlink()
    report = export.result()
    assert report.exit_code == ExitCode.INVALID
    assert "missing" in report.problems[0]


@pytest.mark.parametrize(
    "more", [{"requests": (R1,)}, {"before": format_time(NOW_MS + 1)}], ids=["named", "before"]
)
def test_a_missing_payload_that_an_erasure_accounts_for_is_erased(export, more):
    """And only that one."""
    export.keep(R1)
    export.keep(R2)
    export.erase(**more)
    export.file(R1).unlink()
    report = export.result()
    assert report.problems == []
    assert (report.payloads.checked, report.payloads.erased) == (1, 1)
    assert report.exit_code == ExitCode.ERASED


@pytest.mark.parametrize(
    "more",
    [
        {"requests": (R2,)},
        {"requests": (R1,), "tenant": "other"},
        {"before": format_time(NOW_MS)},
        {"before": format_time(NOW_MS + 1), "tenant": "other"},
        {},
    ],
)
def test_an_erasure_of_something_else_accounts_for_nothing(export, more):
    """Another request, another tenant, an earlier time, or no member that names anything."""
    export.keep(R1)
    export.erase(**more)
    export.file(R1).unlink()
    assert "missing" in export.result().problems[0]


def test_an_erasure_of_the_future_accounts_only_for_the_past(export):
    """An erasure entry does not cover later losses."""
    later = first_id(NOW_MS + 60_002)
    export.keep(R1)
    export.erase(before="2999-01-01T00:00:00.000Z")
    export.keep(later)
    for request in (R1, later):
        export.file(request).unlink()
    report = export.result()
    assert report.payloads.erased == 1
    assert [problem for problem in report.problems if "missing" in problem] == [
        "the payload that entry 2 names is missing"
    ]


def test_a_payload_that_was_to_be_erased_and_is_still_here_is_a_problem(export):
    """An entry must not call erased what is not."""
    export.keep(R1)
    export.erase(requests=(R1,))
    assert "says that the payload of entry 0 was erased" in export.result().problems[0]


@pytest.mark.parametrize(
    "more",
    [
        {"before": format_time(NOW_MS + 1)},
        {"before": format_time(NOW_MS + 1), "before_index": 1},
        {"before": format_time(1), "everything": True},
    ],
    ids=["as version 0.1.0 writes it", "before a time", "everything"],
)
@pytest.mark.parametrize("part", [Part.REQUEST, Part.RESPONSE])
def test_a_payload_that_an_erasure_by_time_covers_and_is_still_here_is_a_problem(export, more, part):
    """The tenant's own, recorded before the entry; another tenant's is no problem."""
    export.keep(R1)
    if part is Part.RESPONSE:
        export.keep(R1, Part.RESPONSE)
        export.file(R1).unlink()
    export.keep(R2, tenant="other")
    export.erase(**more)
    named = export.count - 3
    erasure = export.count - 1
    assert export.result().problems == [f"entry {erasure} says that the payload of entry {named} was erased"]


@pytest.mark.parametrize("more", [{"before_index": 99}, {"everything": True}, {}])
def test_content_kept_after_an_erasure_is_no_problem(export, more):
    """A later request with an earlier id, and the answer to a request whose body was erased."""
    export.keep(R1)
    export.erase(before=format_time(NOW_MS + 20_000), **more)
    export.file(R1).unlink()
    export.keep(R1, Part.RESPONSE)
    export.keep(R2)
    report = export.result()
    assert report.problems == []
    assert (report.payloads.checked, report.payloads.erased) == (2, 1)


def test_answer_kept_after_the_erasure_of_its_request_by_name_is_no_problem(export):
    export.keep(R1)
    export.erase(requests=(R1,))
    export.file(R1).unlink()
    export.keep(R1, Part.RESPONSE)
    assert export.result().problems == []


@pytest.mark.parametrize("more", [{"before_index": 1}, {"everything": True}])
def test_an_erasure_explains_no_later_loss(export, more):
    """Whatever the ids of the requests say."""
    export.keep(R1)
    export.erase(before=format_time(NOW_MS + 20_000), **more)
    export.keep(R2)
    for request in (R1, R2):
        export.file(request).unlink()
    assert export.result().problems == ["the payload that entry 2 names is missing"]


def test_erasure_of_everything_explains_content_of_a_clock_that_was_ahead(export):
    """No time in an id limits it."""
    ahead = first_id(NOW_MS + 10**10)
    export.keep(ahead)
    export.erase(before=format_time(NOW_MS + 60_000), everything=True)
    export.file(ahead).unlink()
    assert export.result().problems == []


def test_request_that_the_log_recorded_too_late_is_not_covered_by_a_time(export):
    """Its clock was behind: by its id alone it would have been erased early."""
    export.keep(R2)
    export.keep(R1)
    export.erase(before=format_time(NOW_MS + 1), before_index=1)
    assert export.result().problems == []
    export.file(R1).unlink()
    assert export.result().problems == ["the payload that entry 1 names is missing"]


def test_a_wider_erasure_does_not_hide_what_a_narrower_one_says(export):
    """Of several, each is followed: one of everything, then one by time."""
    export.keep(R1)
    export.keep(R2)
    export.erase(before=format_time(1), everything=True)
    export.erase(before=format_time(NOW_MS + 1), before_index=1)
    export.file(R1).unlink()
    assert export.result().problems == ["entry 2 says that the payload of entry 1 was erased"]


def test_content_with_ids_after_the_newest_entry_is_reported(export):
    """An erasure by time would leave it for too long."""
    export.keep(R1)
    assert "WARNING" not in verify.render(export.result())
    export.keep(first_id(NOW_MS + 10**7))
    report = export.result()
    assert "1 have ids of a time after the newest entry" in verify.render(report)
    assert json.loads(verify.render_json(report))["payloads"]["ahead"] == 1
    assert report.problems == []


def test_an_altered_payload_is_a_problem(export):
    """At any byte."""
    export.keep(R1)
    content = bytearray(export.file(R1).read_bytes())
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        export.file(R1).write_bytes(changed)
        export.report.problems.clear()
        assert "altered" in export.result().problems[0]


def test_a_key_that_opens_something_else_is_a_problem(export):
    """A wrong key, and the key of another payload."""
    export.keep(R1)
    export.keep(R2)
    report = export.result({f"{R1}/request": export.data_keys[f"{R2}/request"]})
    assert "does not open" in report.problems[0]


def test_an_erasure_under_a_hold_is_a_problem(export):
    """Until the hold is released."""
    export.add(EntryType.HOLD_PLACED, tenant="acme", reason="case 7", actor="a")
    export.erase(tenant="other", before=format_time(1))
    assert export.report.problems == []
    export.erase(before=format_time(1))
    assert "legal hold" in export.report.problems.pop()
    export.add(EntryType.HOLD_RELEASED, tenant="acme", reason="closed", actor="a")
    export.erase(before=format_time(1))
    assert export.report.problems == []


def test_an_intent_that_keeps_content_and_names_none_is_a_problem(export):
    """The mode promises that content is kept."""
    export.add(
        EntryType.REQUEST_INTENT,
        request_id=R1, tenant="acme", key_id="k", route="r", model="m", stream=False, client="loopback",
        body_bytes=1, content_mode="encrypted",
    )  # fmt: skip
    assert "names none" in export.report.problems[0]


def test_payloads_are_never_read_from_outside_the_export(export):
    """What names it must be a request id, even in a signed log."""
    export.add(
        EntryType.REQUEST_INTENT,
        request_id="../../etc/passwd", tenant="acme", key_id="k", route="r", model="m", stream=False,
        client="loopback", body_bytes=1, content_mode="encrypted", payload_commitment="0" * 64,
        payload_digest="0" * 64, payload_key="k",
    )  # fmt: skip
    assert "no request id" in export.report.problems[0]
    assert export.report.payloads.named == 0


def test_data_keys_are_read_from_a_file(tmp_path, export):
    """As `appliance audit open --keys` writes it; anything else cannot be used."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({f"{R1}/request": base64.b64encode(b"k" * 32).decode()}))
    assert verify.read_data_keys(path) == {f"{R1}/request": b"k" * 32}
    for wrong in ("", "[]", '{"a": 1}', '{"a": "!"}', "\xff"):
        path.write_text(wrong, encoding="latin-1")
        with pytest.raises(verify.UnusableError):
            verify.read_data_keys(path)
