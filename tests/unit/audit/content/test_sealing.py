"""
What was sealed opens as itself, in its place, or not at all.
"""

import hashlib
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.audit import verify
from appliance.audit.content.sealing import (
    KEY_BYTES,
    Part,
    Sealed,
    commit,
    open_sealed,
    place,
    rewrap,
    seal,
    unwrap,
)
from appliance.errors import AuditVerificationError

RANDOM = random.Random(7)
WRAPPING, OTHER_WRAPPING = RANDOM.randbytes(32), RANDOM.randbytes(32)
HERE = place("a.example/log", "0" * 26, Part.REQUEST)
THERE = place("a.example/log", "0" * 26, Part.RESPONSE)
PLACES = st.builds(
    place, st.text(min_size=1), st.text("0123456789AB", min_size=26, max_size=26), st.sampled_from(Part)
)


def sealed_and_more(content: bytes, where: bytes = HERE):
    """Seal, and return also what is needed to open."""
    sealed, commitment = seal(content, where, WRAPPING, random_bytes=RANDOM.randbytes)
    return sealed, commitment, unwrap(sealed.wrapped_key, WRAPPING)


@given(st.binary(max_size=5000), PLACES)
def test_sealed_content_decrypts(content: bytes, where: bytes):
    """`open_sealed` undoes `seal`; so does the auditor's own code, which shares nothing with it."""
    sealed, commitment, key = sealed_and_more(content, where)
    assert open_sealed(sealed.blob, where, key, digest=sealed.digest, commitment=commitment) == content
    assert verify.open_payload(sealed.blob, where, key, commitment) == content
    assert sealed.digest == hashlib.sha256(sealed.blob).hexdigest()


@given(st.binary(max_size=300), st.data())
def test_a_changed_byte_is_refused(content: bytes, data: st.DataObject):
    """In nonce, ciphertext or tag, also when the digest is changed along with it."""
    sealed, commitment, key = sealed_and_more(content)
    at = data.draw(st.integers(0, len(sealed.blob) - 1))
    blob = bytearray(sealed.blob)
    blob[at] ^= data.draw(st.integers(1, 255))
    digest = data.draw(st.sampled_from([sealed.digest, hashlib.sha256(blob).hexdigest()]))
    with pytest.raises(AuditVerificationError):
        open_sealed(bytes(blob), HERE, key, digest=digest, commitment=commitment)
    with pytest.raises(verify.InvalidError):
        verify.open_payload(bytes(blob), HERE, key, commitment)


def test_content_that_was_moved_is_refused():
    """The answer cannot stand in for the request, nor one request for another."""
    sealed, commitment, key = sealed_and_more(b"yes")
    with pytest.raises(AuditVerificationError, match="moved"):
        open_sealed(sealed.blob, THERE, key, digest=sealed.digest, commitment=commitment)


def test_swapped_data_keys_are_refused():
    """A wrapped key unwraps wherever it lies, and then opens nothing but its own."""
    one, commitment, _ = sealed_and_more(b"one")
    two, _, _ = sealed_and_more(b"two")
    swapped = replace(one, wrapped_key=two.wrapped_key)
    with pytest.raises(AuditVerificationError):
        open_sealed(
            swapped.blob,
            HERE,
            unwrap(swapped.wrapped_key, WRAPPING),
            digest=one.digest,
            commitment=commitment,
        )


@given(st.binary(min_size=1, max_size=64))
def test_a_data_key_unwraps_with_its_own_key_only_and_unaltered_only(noise: bytes):
    """Key wrap is authenticated."""
    sealed, _, _ = sealed_and_more(b"x")
    with pytest.raises(AuditVerificationError):
        unwrap(sealed.wrapped_key, OTHER_WRAPPING)
    with pytest.raises(AuditVerificationError):
        unwrap(noise, WRAPPING)


def test_rewrapping_changes_the_wrap_and_not_the_content():
    """After it the new key opens, and the old one does not."""
    sealed, commitment, key = sealed_and_more(b"kept")
    again = Sealed(
        nonce=sealed.nonce,
        ciphertext=sealed.ciphertext,
        wrapped_key=rewrap(sealed.wrapped_key, WRAPPING, OTHER_WRAPPING),
    )
    assert unwrap(again.wrapped_key, OTHER_WRAPPING) == key
    assert again.digest == sealed.digest
    assert open_sealed(again.blob, HERE, key, digest=again.digest, commitment=commitment) == b"kept"
    with pytest.raises(AuditVerificationError):
        unwrap(again.wrapped_key, WRAPPING)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_commitment_binds_key_place_and_content(one: bytes, two: bytes):
    """Change any of them and it is another."""
    key = RANDOM.randbytes(KEY_BYTES)
    said = commit(key, HERE, one)
    assert (commit(key, HERE, two) == said) == (one == two)
    assert commit(key, THERE, one) != said
    assert commit(RANDOM.randbytes(KEY_BYTES), HERE, one) != said
    assert hashlib.sha256(one).hexdigest() != said


def test_an_opening_that_the_log_does_not_commit_to_is_refused():
    """The data key's owner cannot show another content for the same entry."""
    sealed, _, key = sealed_and_more(b"an answer")
    _, commitment, _ = sealed_and_more(b"what was not")
    with pytest.raises(AuditVerificationError, match="commits"):
        open_sealed(sealed.blob, HERE, key, digest=sealed.digest, commitment=commitment)
    with pytest.raises(verify.InvalidError, match="commit"):
        verify.open_payload(sealed.blob, HERE, key, commitment)


def test_no_two_sealings_are_alike():
    """Equal contents cannot be told to be equal."""
    one, one_commitment, _ = sealed_and_more(b"same")
    two, two_commitment, _ = sealed_and_more(b"same")
    assert one.ciphertext != two.ciphertext
    assert one_commitment != two_commitment
