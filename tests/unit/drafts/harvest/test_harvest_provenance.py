"""The samples of a draft are checked against its data set and the erasures."""

import hashlib

import pytest

from appliance.audit.content.payloads import first_id
from appliance.audit.entry import format_time
from appliance.drafts.harvest.dataset_manifest import DatasetManifest, ManifestEntry
from appliance.drafts.harvest.provenance import ErasedSample, first_training, parse_used, trace
from appliance.errors import DraftRefusedError

DAY_MS = 1_800_000_000_000


def request(number):
    return first_id(DAY_MS + 1000 * number)


def manifest_of(count=4):
    return DatasetManifest(
        target="t",
        tokenizer="k",
        policy="p",
        made="m",
        samples=tuple(
            ManifestEntry(
                request_id=request(number),
                tenant="acme" if number % 2 else "clinic",
                template="x",
                context="c",
                tokens=3,
                digest=f"{number:064x}",
                held_out=False,
            )
            for number in range(count)
        ),
    )


USED = {entry.request_id: entry.digest for entry in manifest_of().samples}


def test_used_requests_are_counted_per_tenant():
    used = {request(number): f"{number:064x}" for number in (0, 1, 3)}
    found = trace(used, manifest_of(), [], trained=7)
    assert (found.used, found.tenants, found.is_sound) == (3, {"acme": 2, "clinic": 1}, True)
    assert (found.erased_before, found.erased_since, found.unknown) == ((), (), ())
    assert found.dataset == manifest_of().digest


def test_request_erased_before_the_training_is_not_sound():
    """By request or by time, for its own tenant only."""
    by_name = {"tenant": "acme", "requests": [request(1)]}
    others = {"tenant": "clinic", "requests": [request(3)]}
    by_time = {"tenant": "clinic", "before": format_time(DAY_MS + 1)}
    found = trace(USED, manifest_of(), [(3, by_name), (4, others), (5, by_time)], trained=7)
    assert found.erased_before == (
        ErasedSample(request_id=request(0), tenant="clinic", index=5),
        ErasedSample(request_id=request(1), tenant="acme", index=3),
    )
    assert not found.is_sound


def test_request_erased_after_the_training_is_reported():
    everything = {"tenant": "acme", "before": format_time(DAY_MS + 10**9)}
    found = trace(USED, manifest_of(), [(9, everything), (11, everything)], trained=7)
    assert [each.request_id for each in found.erased_since] == [request(1), request(3)]
    assert {each.index for each in found.erased_since} == {9}
    assert found.is_sound


def test_without_a_training_entry_every_erasure_counts_as_earlier():
    found = trace(USED, manifest_of(), [(3, {"tenant": "acme", "requests": [request(1)]})], trained=None)
    assert len(found.erased_before) == 1
    assert not found.is_sound


def test_used_request_missing_in_the_data_set_is_unknown():
    used = {**USED, "elsewhere": "0" * 64, request(2): "f" * 64}
    found = trace(used, manifest_of(), [], trained=7)
    assert found.unknown == tuple(sorted(("elsewhere", request(2))))
    assert not found.is_sound


def test_first_training_entry_counts():
    entries = [(2, {"draft": "b"}), (4, {"draft": "a"}), (6, {"draft": "a"})]
    assert first_training("a", entries) == 4
    assert first_training("c", entries) is None


def test_used_list_must_match_the_training_record():
    content = b"r1 aa\nr2 bb\n"
    digest = hashlib.sha256(content).hexdigest()
    assert parse_used(content, digest) == {"r1": "aa", "r2": "bb"}
    assert parse_used(b"", hashlib.sha256(b"").hexdigest()) == {}
    for wrong in (content + b"r3 cc\n", content[:-1]):
        with pytest.raises(DraftRefusedError, match="record"):
            parse_used(wrong, digest)


@pytest.mark.parametrize("content", [b"r1\n", b"r1 aa bb\n", b"r1 aa\nr1 bb\n", b"\n", b"\xff\n"])
def test_malformed_used_list_is_refused(content):
    with pytest.raises(DraftRefusedError, match="line"):
        parse_used(content, hashlib.sha256(content).hexdigest())
