"""Revisions are canonical and round-trip."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.registry.revision import SIGNED, Revision, is_digest
from appliance.drafts.training_record import TrainingRecord
from appliance.errors import BundleRefusedError, DraftRefusedError
from appliance.infra.canonical_json import canonical
from appliance.sovereignty.bundle.signature import BUNDLE
from tests.unit.drafts.registry.site import MAKER_KEY, digest, new_key, trust
from tests.unit.drafts.test_training_record import DIGESTS, JSON, RECORDS

REVISIONS = st.builds(
    Revision,
    digest=DIGESTS.filter(bool),
    target=DIGESTS.filter(bool),
    record=RECORDS,
    parent=DIGESTS,
    dataset=DIGESTS,
    source=st.sampled_from(("imported", "trained")),
    made=st.datetimes().map(lambda at: f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z".zfill(24)),
    origin=st.none() | st.just(MAKER_KEY),
)
SMALL = Revision(
    digest=digest(1),
    target=digest(2),
    record=TrainingRecord(fc_norm=True, recipe={"steps": 10}),
    source="trained",
    made="2026-11-22T09:30:00.000Z",
)


@given(REVISIONS)
def test_revision_round_trips(revision: Revision):
    assert Revision.decode(revision.encode()) == revision
    assert Revision.decode(revision.encode()).encode() == revision.encode()


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_in_one_line(content: bytes):
    with pytest.raises(DraftRefusedError) as caught:
        Revision.decode(content)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(sorted(json.loads(SMALL.encode()))), JSON)
def test_member_of_another_type_is_refused(member: str, value: Any):
    said = json.loads(SMALL.encode()) | {member: value}
    try:
        content = canonical(said)
    except ValueError:  # no JSON has it
        return
    try:
        revision = Revision.decode(content)
    except DraftRefusedError:
        return
    assert revision.encode() == content


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + b"\n",
        lambda text: text.replace(b":", b": ", 1),
        lambda text: text.replace(b"{", b'{"more":1,', 1),
        lambda text: text.replace(b'"format":1', b'"format":true'),
        lambda text: text.replace(b'"fc_norm":true', b'"fc_norm":null'),
        lambda text: text.replace(b'"steps":10', b'"steps":1e1'),
        lambda text: text[:-1],
    ],
)
def test_non_canonical_revision_is_refused(change):
    """Even if the meaning is the same."""
    content = change(SMALL.encode())
    assert content != SMALL.encode()
    with pytest.raises(DraftRefusedError):
        Revision.decode(content)


def test_newer_format_is_named_in_the_error():
    with pytest.raises(DraftRefusedError, match="newer release"):
        Revision.decode(SMALL.encode().replace(b'"format":1', b'"format":2'))


@pytest.mark.parametrize("recipe", [{"rate": float("nan")}, {"rate": float("inf")}, {"name": "\ud800"}])
def test_recipe_without_a_json_form_is_refused(recipe):
    revision = Revision(
        digest=digest(1),
        target=digest(2),
        record=TrainingRecord(recipe=recipe),
        source="trained",
        made=SMALL.made,
    )
    with pytest.raises(DraftRefusedError, match=r"training\.json"):
        revision.encode()


def test_draft_signature_is_not_valid_for_a_bundle(tmp_path):
    """And the other way round: the signature covers the kind."""
    signer = new_key(tmp_path / "a.key", MAKER_KEY)
    content = SMALL.encode()
    assert SIGNED.verify(content, SIGNED.sign(content, signer), trust(signer), 0.0) == MAKER_KEY
    for kind, other in ((SIGNED, BUNDLE), (BUNDLE, SIGNED)):
        with pytest.raises(BundleRefusedError, match="belongs to another"):
            kind.verify(content, other.sign(content, signer), trust(signer), 0.0)


@pytest.mark.parametrize(
    "value", ["sha256:", digest(1)[:-1], digest(1) + "0", digest(1).upper(), 1, None, b""]
)
def test_only_a_whole_digest_is_one(value):
    assert not is_digest(value)
    assert is_digest(digest(1))
