"""TLS files: whether they match, the chain is complete, names are covered, and the dates are valid."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from appliance.api.http.server import is_loopback
from appliance.api.http.tls import WARN_SECONDS, open_tls
from appliance.cli.preflight.check import Check, Inquiry, SkippedError, Subject, family
from appliance.errors import ConfigurationError

FILES = Subject("tls.files", "TLS files")
CHAIN = Subject("tls.chain", "Certificate chain")
NAMES = Subject("tls.names", "Certificate names")
EXPIRY = Subject("tls.expiry", "Certificate validity")
ANY_HOST = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCertificate:
    """Content of the certificate file."""

    names: tuple[str, ...]
    """Subject alternative names: DNS names and addresses."""
    issuer: str
    not_before: datetime
    not_after: datetime
    length: int
    """Certificates in the file."""
    broken: int | None
    """Position (from 1) of the first certificate that the next one did not sign."""
    self_signed: bool


@family(FILES, CHAIN, NAMES, EXPIRY)
def check_tls(inquiry: Inquiry) -> Iterable[Check]:
    """Read the files as a start does, then check the certificate."""
    inquiry.require_gateway()
    tls, api = inquiry.settings.tls, inquiry.settings.api
    if tls.certificate_file is None:
        yield judge_plain(api.admin_host if is_loopback(api.host) else api.host)
        raise SkippedError("the gateway speaks plain HTTP")
    silent = structlog.wrap_logger(
        structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    try:
        open_tls(tls, logger=silent, clock=inquiry.clock)
        seen = read_certificate(tls.certificate_file)
    except ConfigurationError as error:
        yield FILES.fail(str(error), "install the certificate, its chain and its own key as PEM")
        raise SkippedError("the TLS files cannot be used") from error
    yield FILES.ok(f"{tls.certificate_file} and its key match")
    yield judge_chain(seen)
    yield judge_names(seen, inquiry.names, host=api.host, machine=socket.getfqdn())
    yield judge_expiry(seen, datetime.fromtimestamp(inquiry.clock(), UTC))


def read_certificate(file: Path) -> SeenCertificate:
    """Raises ConfigurationError if a certificate of the chain cannot be read."""
    try:
        chain = x509.load_pem_x509_certificates(file.read_bytes())
        links = [_signed(below, above) for below, above in pairwise(chain)]
        own, names = chain[0], _names(chain[0])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tls.certificate_file {file} has an unreadable chain: {error}") from error
    return SeenCertificate(
        names=names,
        issuer=own.issuer.rfc4514_string(),
        not_before=own.not_valid_before_utc,
        not_after=own.not_valid_after_utc,
        length=len(chain),
        broken=links.index(False) + 1 if False in links else None,
        self_signed=own.issuer == own.subject,
    )


def judge_plain(host: str) -> Check:
    if is_loopback(host):
        return FILES.ok(f"none; plain HTTP on {host}, for this machine only")
    todo = "set tls.certificate_file and tls.key_file, unless a proxy on this machine encrypts"
    return FILES.warn(f"none, and the gateway listens on {host}: keys and prompts are sent unencrypted", todo)


def judge_chain(seen: SeenCertificate) -> Check:
    if seen.broken is not None:
        order = "put the gateway's own certificate first, then its issuer, and so on"
        return CHAIN.fail(f"certificate {seen.broken} of {seen.length} is not signed by the next one", order)
    if seen.self_signed:
        return CHAIN.warn("it is self-signed", "have your CA sign it, or install it on every client")
    return CHAIN.ok(f"{seen.length} in the file; clients must trust {seen.issuer}")


def judge_names(seen: SeenCertificate, wanted: tuple[str, ...], *, host: str, machine: str) -> Check:
    """`wanted` are the names from `--name`; without any, `api.host` or this machine's name is checked."""
    text = ", ".join(seen.names) or "none"
    if not seen.names:
        todo = "reissue it with its DNS names"
        return NAMES.fail("it has no subject alternative name, and clients read no other", todo)
    missing = [name for name in wanted if not _covers(seen.names, name)]
    if missing:
        return NAMES.fail(f"{text}; not {', '.join(missing)}", "reissue it with these names as well")
    guess = machine if host in ANY_HOST or is_loopback(host) else host
    if not wanted and not _covers(seen.names, guess):
        return NAMES.warn(f"{text}; not {guess}", "pass the names that clients use with --name to check them")
    return NAMES.ok(text)


def judge_expiry(seen: SeenCertificate, now: datetime) -> Check:
    todo = "replace certificate and key; a running gateway reloads them"
    text = f"{seen.not_before:%Y-%m-%d} to {seen.not_after:%Y-%m-%d}"
    if now < seen.not_before:
        return EXPIRY.fail(f"{text}: not yet", "check the clock, and the certificate")
    left = seen.not_after - now
    if left.total_seconds() <= 0:
        return EXPIRY.fail(f"{text}: expired", todo)
    if left.total_seconds() < WARN_SECONDS:
        return EXPIRY.warn(f"{text}: {left.days} days left", todo)
    return EXPIRY.ok(f"{text}: {left.days} days left")


def _signed(below: x509.Certificate, above: x509.Certificate) -> bool:
    try:
        below.verify_directly_issued_by(above)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *found.get_values_for_type(x509.DNSName),
        *(str(address) for address in found.get_values_for_type(x509.IPAddress)),
    )


def _covers(names: tuple[str, ...], wanted: str) -> bool:
    """Whether a name matches; a star stands for one label (RFC 6125)."""
    wanted = wanted.lower().rstrip(".")
    rest = wanted.partition(".")[2]
    return any(name.lower() in {wanted, f"*.{rest}" if rest else wanted} for name in names)
