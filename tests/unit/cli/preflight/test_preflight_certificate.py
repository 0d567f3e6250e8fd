"""The checks of TLS files, on real certificates."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from appliance.cli.preflight.certificate import (
    check_tls,
    judge_chain,
    judge_expiry,
    judge_names,
    judge_plain,
    read_certificate,
)
from appliance.cli.preflight.check import CheckResult, Inquiry
from appliance.infra.settings import load_settings
from tests.certificates import LOOPBACK, Authority

AUTHORITY, OTHER = Authority("servers"), Authority("others")
GATEWAY = (x509.DNSName("gateway.bank.internal"), x509.DNSName("*.llm.bank.internal"))


def asked(certificate, key, *, names=(), host="127.0.0.1"):
    overrides = {
        "tls": {"certificate_file": str(certificate), "key_file": str(key)},
        "api": {"host": host},
    }
    inquiry = Inquiry(
        settings=load_settings(environment={}, overrides=overrides),
        settings_file=None,
        clock=time.time,  # noqa: TID251 - certificates are made by it
        names=names,
    )
    checks = {check.id: check for check in check_tls(inquiry)}
    assert list(checks) == [subject.id for subject in check_tls.subjects]
    return checks


def test_a_certificate_with_its_chain(tmp_path):
    """Files, chain, names and validity pass."""
    files = AUTHORITY.issue(tmp_path, "gateway", *GATEWAY, lasts=timedelta(days=90))
    files.certificate.write_text(files.certificate.read_text() + AUTHORITY.pem)
    checks = asked(files.certificate, files.key, names=("gateway.bank.internal", "eu.llm.bank.internal"))
    assert {check.result for check in checks.values()} == {CheckResult.OK}
    assert "89 days left" in checks["tls.expiry"].seen


def test_the_key_of_another_certificate_is_a_failure(tmp_path):
    """The line names the file."""
    files, other = (AUTHORITY.issue(tmp_path, name, *GATEWAY) for name in ("gateway", "other"))
    checks = asked(files.certificate, other.key)
    assert checks["tls.files"].result is CheckResult.FAIL
    assert str(other.key) in checks["tls.files"].seen
    assert checks["tls.expiry"].result is CheckResult.SKIPPED


def test_missing_or_malformed_file_is_a_failure(tmp_path):
    files = AUTHORITY.issue(tmp_path, "gateway", *GATEWAY)
    assert asked(tmp_path / "none.pem", files.key)["tls.files"].result is CheckResult.FAIL
    files.certificate.write_text("none")
    assert asked(files.certificate, files.key)["tls.files"].result is CheckResult.FAIL


def test_an_expired_certificate_is_a_failure(tmp_path):
    """A gateway would start with it, and every client would refuse it."""
    files = AUTHORITY.issue(tmp_path, "gateway", *GATEWAY, lasts=timedelta(seconds=-1))
    assert asked(files.certificate, files.key)["tls.expiry"].result is CheckResult.FAIL


@pytest.mark.parametrize(
    ("days", "result"),
    [(-40, CheckResult.FAIL), (5, CheckResult.OK), (20, CheckResult.WARN), (31, CheckResult.FAIL)],
)
def test_a_certificate_lasts_a_while(tmp_path, days, result):
    """It warns two weeks before the end; before the beginning the clock may be wrong."""
    files = AUTHORITY.issue(tmp_path, "gateway", *GATEWAY, lasts=timedelta(days=30))
    seen = read_certificate(files.certificate)
    now = datetime.now(UTC) + timedelta(days=days)
    assert judge_expiry(seen, now).result is result


def test_a_chain_in_the_wrong_order_is_a_failure(tmp_path):
    """Each certificate must be signed by the next one."""
    files = AUTHORITY.issue(tmp_path, "gateway", *GATEWAY)
    files.certificate.write_text(files.certificate.read_text() + OTHER.pem + AUTHORITY.pem)
    check = judge_chain(read_certificate(files.certificate))
    assert check.result is CheckResult.FAIL
    assert check.seen == "certificate 1 of 3 is not signed by the next one"


def test_self_signed_certificate_is_a_warning(tmp_path):
    """Only clients that have it installed trust it."""
    (tmp_path / "own.pem").write_text(AUTHORITY.pem)
    assert judge_chain(read_certificate(tmp_path / "own.pem")).result is CheckResult.WARN


@pytest.mark.parametrize(
    ("alternatives", "wanted", "host", "result"),
    [
        (GATEWAY, (), "0.0.0.0", CheckResult.OK),
        (GATEWAY, ("gateway.bank.internal",), "0.0.0.0", CheckResult.OK),
        (GATEWAY, ("GATEWAY.bank.internal.",), "0.0.0.0", CheckResult.OK),
        (GATEWAY, ("a.b.llm.bank.internal",), "0.0.0.0", CheckResult.FAIL),
        (GATEWAY, ("other.bank.internal",), "0.0.0.0", CheckResult.FAIL),
        (GATEWAY, (), "10.0.0.5", CheckResult.WARN),
        (LOOPBACK, ("127.0.0.1",), "127.0.0.1", CheckResult.OK),
        ((), (), "0.0.0.0", CheckResult.FAIL),
    ],
)
def test_the_certificate_has_the_names_clients_use(tmp_path, alternatives, wanted, host, result):
    """A star stands for one label; a missing `--name` is a failure, a missing guess a warning."""
    files = AUTHORITY.issue(tmp_path, "gateway", *alternatives)
    seen = read_certificate(files.certificate)
    assert judge_names(seen, wanted, host=host, machine="gateway.bank.internal").result is result


def test_plain_http_is_for_this_machine():
    """On a network, keys and prompts would be readable."""
    assert judge_plain("127.0.0.1").result is CheckResult.OK
    assert judge_plain("0.0.0.0").result is CheckResult.WARN
