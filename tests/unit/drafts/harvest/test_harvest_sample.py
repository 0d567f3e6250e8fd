"""Samples and manifests are canonical, and their digests reveal nothing."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.harvest.dataset_manifest import (
    DatasetManifest,
    ManifestEntry,
    decode_manifest,
    encode_manifest,
    is_held_out,
)
from appliance.drafts.harvest.sample import TrainingSample, decode_sample, encode_sample
from appliance.errors import DraftRefusedError
from tests.unit.drafts.harvest.harvest_site import sample_of

TEXT = st.text(max_size=20)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def samples(draw):
    mask = draw(st.lists(st.booleans(), max_size=30))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    return TrainingSample(
        request_id=draw(TEXT),
        tenant=draw(TEXT),
        template=draw(TEXT),
        context=draw(TEXT),
        token_ids=tuple(tokens),
        loss_mask=tuple(mask),
        tokenizer=draw(TEXT),
        salt=draw(TEXT),
    )


@given(samples())
def test_sample_round_trips(sample):
    assert decode_sample(encode_sample(sample)) == sample


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"runs": [4]},
        {"runs": [2, 1]},
        {"runs": "22"},
        {"token_ids": [3, 77, -1, 1]},
        {"token_ids": [3, 77, 88.0, 1]},
        {"token_ids": [3, 77, True, 1]},
        {"extra": 1},
    ],
)
def test_malformed_sample_is_refused_without_quoting_it(change):
    content = json.loads(encode_sample(sample_of("r"))) | change
    spelt = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    if change == {"runs": [4]}:
        assert not any(decode_sample(spelt).loss_mask)  # a sample too: one without an answer
        return
    with pytest.raises(DraftRefusedError) as caught:
        decode_sample(spelt)
    assert "77" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 5000, b"null", b'{"v":1}', b"\xff"])
def test_arbitrary_json_is_refused(content):
    with pytest.raises(DraftRefusedError):
        decode_sample(content)


def test_non_canonical_sample_is_refused():
    content = encode_sample(sample_of("r"))
    with pytest.raises(DraftRefusedError):
        decode_sample(json.dumps(json.loads(content)).encode())


def test_digest_depends_on_the_salt():
    sample = sample_of("r", salt="00")
    assert sample.digest != replace(sample, salt="01").digest
    assert len(sample.digest) == 64


def test_prompt_ends_where_the_answer_begins():
    assert sample_of("r").prompt == (3, 77)
    assert sample_of("r", loss_mask=(False,) * 4).prompt == (3, 77, 88, 1)


ENTRIES = st.builds(
    ManifestEntry,
    request_id=TEXT,
    tenant=TEXT,
    template=TEXT,
    context=TEXT,
    tokens=st.integers(0, 10**6),
    digest=HEX,
    held_out=st.booleans(),
)
MANIFESTS = st.builds(
    DatasetManifest,
    target=TEXT,
    tokenizer=TEXT,
    policy=TEXT,
    made=TEXT,
    samples=st.lists(ENTRIES, max_size=5, unique_by=lambda entry: entry.request_id).map(
        lambda entries: tuple(sorted(entries, key=lambda entry: entry.request_id))
    ),
)


@given(MANIFESTS)
def test_manifest_round_trips(manifest):
    assert decode_manifest(encode_manifest(manifest), manifest.digest) == manifest


@given(MANIFESTS, st.data())
def test_manifest_with_one_changed_byte_is_refused(manifest, data):
    content = bytearray(encode_manifest(manifest))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1
    with pytest.raises(DraftRefusedError, match="altered"):
        decode_manifest(bytes(content), manifest.digest)


def entry(request_id, **more):
    given_ = {"tenant": "t", "template": "x", "context": "c", "tokens": 4, "digest": "0" * 64}
    return ManifestEntry(request_id=request_id, **{**given_, "held_out": False, **more})


def manifest_of(*entries):
    return DatasetManifest(target="t", tokenizer="k", policy="p", made="m", samples=entries)


@pytest.mark.parametrize(
    "manifest",
    [
        manifest_of(entry("b"), entry("a")),
        manifest_of(entry("a"), entry("a")),
        manifest_of(entry("a", digest="x")),
        manifest_of(entry("a", tokens="4")),
        manifest_of(entry("a", held_out=0)),
        manifest_of(entry("a", tenant=None)),
    ],
)
def test_malformed_manifest_with_a_valid_digest_is_refused(manifest):
    with pytest.raises(DraftRefusedError):
        decode_manifest(encode_manifest(manifest), manifest.digest)


def test_tenth_is_held_out_and_always_the_same_tenth():
    ids = [f"{number:026d}" for number in range(5000)]
    held = [each for each in ids if is_held_out(each)]
    assert 400 < len(held) < 600
    assert held == [each for each in ids if is_held_out(each)]
