"""
What a time-stamp authority is asked, and when its answer is accepted.

The stamped content is the text of a checkpoint: origin, size and root, without signatures.  Answers are
judged by the auditor's own verifier, so what is kept is what an auditor will accept.  Pure but for
`load_authority`.

Source: RFC 3161.
"""

import hashlib
import re
from dataclasses import dataclass

from cryptography import x509

from appliance.audit.verify import InvalidError, Stamp, open_timestamp
from appliance.errors import AuditVerificationError, ConfigurationError
from appliance.infra.settings import AuditSettings

_SHA256 = bytes.fromhex("300d06096086480165030402010500")
_INTEGER, _OCTETS, _OID, _SEQUENCE = 0x02, 0x04, 0x06, 0x30
_CERTIFICATE_REQUESTED = b"\x01\x01\xff"
_POLICY = re.compile(r"[0-2](\.(0|[1-9]\d{0,17}))+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    certificates: tuple[x509.Certificate, ...]
    """Its own, or of the authorities that issue them."""
    policy: str | None = None
    """The one its time stamps must have; None for any."""

    def judge(self, response: bytes, text: str | None = None, *, nonce: int | None = None) -> Stamp:
        """
        Return what a response states; `text` and `nonce` are those it must be for, if they are known.

        Raises AuditVerificationError if it is no time stamp of this authority and policy, or another's.
        """
        try:
            stamp = open_timestamp(response)
            if text is not None:
                stamp.check(text.encode())
        except InvalidError as error:
            raise AuditVerificationError(f"the time stamp {error}") from error
        if not stamp.is_of(self.certificates):
            signer = stamp.signer.subject.rfc4514_string()
            message = (
                f"the time stamp is of {signer}, whose certificate audit.timestamp_certificate_file lacks"
            )
            raise AuditVerificationError(message)
        if self.policy not in {None, stamp.policy}:
            message = f"the time stamp has policy {stamp.policy}, not {self.policy} of audit.timestamp_policy"
            raise AuditVerificationError(message)
        if nonce is not None and stamp.nonce != nonce:
            raise AuditVerificationError("the time stamp has another nonce than its request")
        return stamp


def load_authority(settings: AuditSettings) -> Authority | None:
    """Return the authority of the settings, if any; raises ConfigurationError."""
    path = settings.timestamp_certificate_file
    if path is None:
        return None
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"audit.timestamp_certificate_file {path} cannot be used: {error}"
        ) from error
    policy = settings.timestamp_policy
    if policy is not None and not _POLICY.fullmatch(policy):
        raise ConfigurationError(
            f"audit.timestamp_policy {policy} is no object identifier, such as 1.2.3.4.1"
        )
    return Authority(certificates=tuple(certificates), policy=policy)


def make_query(text: str, *, policy: str | None, nonce: int | None = None) -> bytes:
    """Return a TimeStampReq for a text; `nonce` has at most 63 bits."""
    imprint = _der(_SEQUENCE, _SHA256, _der(_OCTETS, hashlib.sha256(text.encode()).digest()))
    return _der(
        _SEQUENCE,
        _der(_INTEGER, b"\x01"),
        imprint,
        *([] if policy is None else [_der(_OID, _encode_oid(policy))]),
        *([] if nonce is None else [_der(_INTEGER, nonce.to_bytes(nonce.bit_length() // 8 + 1))]),
        _CERTIFICATE_REQUESTED,
    )


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    # A request is shorter than 128 bytes, unless its policy is absurdly long.
    length = len(content).to_bytes() if len(content) < 0x80 else b"\x81" + len(content).to_bytes()  # noqa: PLR2004
    return tag.to_bytes() + length + content


def _encode_oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    return b"".join(map(_base128, (40 * first + second, *rest)))


def _base128(number: int) -> bytes:
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.insert(0, number & 0x7F | 0x80)
    return bytes(digits)
