"""The verifier's reading of time stamps (RFC 3161), with OpenSSL as the authority and as another opinion."""

import json
import shutil
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from appliance.audit import verify
from appliance.audit.checkpoint import parse_note
from appliance.audit.export import export_log
from appliance.audit.timestamps.store import Timestamp, Timestamps
from appliance.audit.verify import ExitCode
from tests.growing_log import Log
from tests.timestamp_authority import OTHER_POLICY, POLICY, TimestampAuthority, rsa_key

CONTENT = b"log.test/a\n3\nAAAA\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return TimestampAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return TimestampAuthority(tmp_path_factory.mktemp("stranger"))


def load(*paths):
    return [each for path in paths for each in x509.load_pem_x509_certificates(path.read_bytes())]


def opened(response, content=CONTENT):
    stamp = verify.open_timestamp(response)
    stamp.check(content)
    return stamp


def test_time_stamps_of_openssl_verify(authority):
    """RSA and ECDSA, the signer named by SHA-1 or SHA-256; trusted by its certificate or by its issuer's."""
    authority.issue("rsa", key=rsa_key())
    for signer in ("unit", "rsa"):
        for ess in ("sha1", "sha256"):
            stamp = opened(authority.stamp(CONTENT, signer=signer, ess=ess))
            assert stamp.policy == POLICY
            assert stamp.is_of(load(authority.directory / f"{signer}.pem"))
            assert stamp.is_of(load(authority.issuer))
    assert not stamp.is_of(load(authority.certificate)), "the certificate of another unit"
    assert opened(authority.stamp(CONTENT, policy=OTHER_POLICY)).policy == OTHER_POLICY


def test_openssl_agrees_about_what_is_verified(authority, tmp_path):
    response, content = tmp_path / "stamp.tsr", tmp_path / "content"
    response.write_bytes(authority.stamp(CONTENT))
    for text, expected in ((CONTENT, True), (CONTENT + b"\n", False)):
        content.write_bytes(text)
        done = subprocess.run(
            ["openssl", "ts", "-verify", "-data", content, "-in", response, "-CAfile", authority.issuer],
            capture_output=True,
            check=False,
        )
        assert (done.returncode == 0) is expected
        try:
            opened(response.read_bytes(), text)
        except verify.InvalidError:
            assert not expected
        else:
            assert expected


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_changed_byte_of_a_time_stamp_is_refused_or_changes_nothing(authority, mask):
    """What is not signed, such as the list of hashes, states nothing."""
    response = authority.reply(authority.query(CONTENT, nonce=True))
    known = opened(response)
    unchanged = 0
    for at in range(len(response)):
        changed = response[:at] + bytes([response[at] ^ mask]) + response[at + 1 :]
        try:
            stamp = verify.open_timestamp(changed)
        except verify.InvalidError:
            continue
        assert stamp == known, at
        assert at < len(response) - 64, "the signature comes last"
        unchanged += 1
    assert unchanged < len(response) / 4


def test_a_time_stamp_cut_short_or_with_something_added_is_refused(authority):
    response = authority.stamp(CONTENT)
    for length in range(len(response)):
        with pytest.raises(verify.InvalidError):
            verify.open_timestamp(response[:length])
    for added in (b"\0", b"\x05\0", bytes(verify.MAX_TIMESTAMP_BYTES)):
        with pytest.raises(verify.InvalidError):
            verify.open_timestamp(response + added)


def _der(tag, *parts):
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + content


@pytest.fixture
def forge(authority, tmp_path):
    """Sign a TSTInfo with any certificate and options of `openssl cms`, which asks no questions."""

    def forge_(signer, *options, kind="1.2.840.113549.1.9.16.1.4", info=None, status=b"\0"):
        path = tmp_path / "info.der"
        path.write_bytes(info or statement())
        unit = authority.directory / signer
        arguments = ["-econtent_type", kind, "-in", path, "-signer", f"{unit}.pem", "-inkey", f"{unit}.key"]
        form = ["-sign", "-binary", "-nodetach", "-nosmimecap", "-outform", "DER"]
        options = options or ("-cades", "-md", "sha256")
        command = ["openssl", "cms", *form, *arguments, *options]
        made = subprocess.run(command, capture_output=True, check=True)
        return _der(0x30, _der(0x30, _der(2, status)), made.stdout)

    def statement():
        token = authority.directory / "genuine.tsr"
        token.write_bytes(authority.stamp(CONTENT))
        parsed = verify._Der(token.read_bytes()).only(0x30)
        parsed.value(0x30)
        token = parsed.inside(0x30)
        token.oid()
        signed = token.inside(0xA0).only(0x30)
        signed.integer()
        signed.value(0x31)
        signed = signed.inside(0x30)
        signed.oid()
        return signed.inside(0xA0).only(4).rest()

    forge_.statement = statement
    return forge_


def test_only_certificates_for_time_stamps_may_stamp(authority, forge):
    """Valid at the time, and made for this alone: a server's certificate of the same authority is not."""
    assert opened(forge("unit")).policy == POLICY
    stamping = ExtendedKeyUsageOID.TIME_STAMPING
    for name, options, words in (
        ("none", {"usages": ()}, "not for time stamps"),
        ("server", {"usages": [ExtendedKeyUsageOID.SERVER_AUTH]}, "not for time stamps"),
        ("both", {"usages": [stamping, ExtendedKeyUsageOID.SERVER_AUTH]}, "not for time stamps"),
        ("uncritical", {"critical": False}, "not for time stamps"),
        ("expired", {"lasts": -2}, "not valid at its time"),
        ("weak", {"key": rsa.generate_private_key(65537, 1024)}, "kind or size"),
    ):
        authority.issue(name, **options)
        with pytest.raises(verify.InvalidError, match=words):
            verify.open_timestamp(forge(name))


def test_only_complete_time_stamps_are_accepted(authority, forge):
    """Signed attributes that name content and signer, hashes that hold, a time and nothing else."""
    authority.issue("rsa", key=rsa_key())
    pss = ("-cades", "-md", "sha384", "-keyopt", "rsa_padding_mode:pss")
    assert opened(forge("rsa", *pss)).policy == POLICY
    assert opened(forge("unit", "-cades", "-md", "sha512")).policy == POLICY
    info = forge.statement()

    def extended(critical):
        extension = _der(0x30, _der(6, b"\x2a\x03"), *([_der(1, b"\xff")] if critical else []), _der(4, b""))
        return _der(0x30, verify._Der(info).only(0x30).rest(), _der(0xA1, extension))

    assert opened(forge("unit", info=extended(critical=False))).policy == POLICY
    for made, words in (
        (lambda: forge("unit", "-md", "sha256"), "does not name its signer"),
        (lambda: forge("unit", "-noattr", "-md", "sha256"), "not well formed"),
        (lambda: forge("unit", "-cades", "-md", "sha1"), "not known here"),
        (lambda: forge("unit", "-cades", "-md", "sha256", "-nocerts"), "not carry its signer"),
        (lambda: forge("unit", kind="1.2.840.113549.1.7.1"), "other than a time"),
        (lambda: forge("unit", info=info.replace(b"\x02\x01\x01", b"\x02\x01\x02", 1)), "version"),
        (lambda: forge("unit", info=info + b"\0"), "left over"),
        (lambda: forge("unit", info=extended(critical=True)), "critical extension"),
        (lambda: forge("unit", status=b"\x02"), "refusal"),
    ):
        with pytest.raises(verify.InvalidError, match=words):
            verify.open_timestamp(made())


def test_numbers_and_lengths_have_one_form():
    for content in (
        b"\x02\x02\x00\x01",
        b"\x02\x00",
        b"\x02\x81\x01\x01",
        b"\x02\x80\x01\x00\x00",
        b"\x02\x05\x01",
    ):
        with pytest.raises(verify.InvalidError):
            verify._Der(content).integer()
    for content in (b"\x06\x00", b"\x06\x01\x80", b"\x06\x02\x80\x01", b"\x06\x01\x81"):
        with pytest.raises(verify.InvalidError):
            verify._Der(content).oid()
    assert verify._Der(b"\x06\x03\x88\x37\x01").oid() == "2.999.1"


@pytest.fixture
def log(sql_store, signer):
    log = Log(sql_store, signer)
    log.time = "2020-01-01T00:00:00.000Z"
    log.grow(3)
    return log


@pytest.fixture
def keep(log):
    """Have the log's newest checkpoint stamped; returns its size."""

    def keep_(authority, **options):
        text = parse_note(log.sign()).text
        token = authority.stamp(text.encode(), **options)
        time = verify.open_timestamp(token).time
        Timestamps(log.store.database).save(Timestamp(size=log.tree.size, token=token, time=time))
        return log.tree.size

    return keep_


@pytest.fixture
def run(log, tmp_path, capsys):
    """Export the log, let an attacker at the export, and verify it."""

    def run_(*arguments, attack=lambda _directory: None):
        directory = tmp_path / "export"
        shutil.rmtree(directory, ignore_errors=True)
        export_log(log.store, directory, vkey=log.signer.vkey)
        attack(directory)
        arguments = [str(each) for each in (directory, "--key", log.signer.vkey, *arguments)]
        try:
            code = verify.main([*arguments, "--json"])
        except SystemExit as error:
            code = error.code
        output = capsys.readouterr()
        if not output.out:
            return code, output.err
        verify.main(arguments)
        report = json.loads(output.out)
        report["text"] = capsys.readouterr().out
        return code, report

    return run_


def test_the_report_says_how_far_the_log_is_timed(authority, log, keep, run):
    """Untimed, timed, timed by a named policy; up to which size and when."""
    log.grow(1)
    code, report = run()
    assert (code, report["timestamps"]["level"]) == (ExitCode.VALID, "untimed")
    code, report = run("--timestamp-cert", authority.certificate)
    assert (code, report["verdict"]) == (ExitCode.UNTIMED, "untimed")
    keep(authority)
    log.grow(2)
    newest = keep(authority, policy=OTHER_POLICY)
    log.grow(1)
    code, report = run("--timestamp-cert", authority.issuer)
    found = report["timestamps"]
    assert (code, found["level"], found["size"], found["policy"]) == (0, "timed", newest, OTHER_POLICY)
    assert (found["trusted"], found["unknown"]) == (2, 0)
    assert f"the first {newest} entries at {found['time']}, 1 newer entries not" in report["text"]
    code, report = run("--timestamp-cert", authority.issuer, "--timestamp-policy", POLICY)
    found = report["timestamps"]
    assert (code, found["level"], found["size"]) == (0, "timed by a named policy", 4)
    code, report = run("--timestamp-cert", authority.issuer, "--timestamp-policy", "1.2.3.4.9")
    assert (code, report["timestamps"]["level"]) == (ExitCode.UNTIMED, "timed")
    assert run("--timestamp-cert", authority.issuer, "--timestamps-needed", 3)[0] == ExitCode.UNTIMED
    needless = ("--timestamp-policy", "1.2.3.4.9", "--timestamps-needed", 0)
    assert run("--timestamp-cert", authority.issuer, *needless)[0] == ExitCode.VALID


def test_an_unknown_authority_is_not_trusted(authority, stranger, keep, run):
    keep(stranger)
    code, report = run("--timestamp-cert", authority.issuer)
    found = report["timestamps"]
    assert (code, found["level"], found["unknown"]) == (ExitCode.UNTIMED, "untimed", 1)
    assert "1 not trusted: the authority's certificate was not given" in report["text"]
    code, report = run()
    assert (code, report["timestamps"]["unknown"]) == (ExitCode.VALID, 1)


def test_a_time_stamp_of_something_else_makes_the_log_invalid(authority, log, keep, run):
    """Swapped, of a longer log, altered or misnamed: whether or not the authority is trusted."""

    def swap(directory):
        one, other = sorted((directory / "timestamps").iterdir())
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)

    def rename(name):
        return lambda directory: (directory / "timestamps/1-3.tsr").rename(directory / "timestamps" / name)

    def flip(directory):
        path = directory / "timestamps/1-3.tsr"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    keep(authority)
    log.grow(2)
    keep(authority)
    for attack, words in (
        (swap, "1-3.tsr is of something other"),
        (rename("1-4.tsr"), "1-4.tsr is of something other"),
        (rename("1-9.tsr"), "of 9 entries, and 5 are here"),
        (rename("readme"), "no time stamp's name"),
        (flip, "wrong signature"),
    ):
        for options in ((), ("--timestamp-cert", authority.issuer)):
            code, report = run(*options, attack=attack)
            assert code == ExitCode.INVALID
            assert any(words in problem for problem in report["problems"]), report["problems"]
    assert run()[0] == ExitCode.VALID


def test_entries_with_a_time_after_their_time_stamp_are_reported(authority, log, keep, run):
    """A gateway's clock was ahead when it recorded them; no refusal, as the order is still right."""
    keep(authority)
    log.time = "2999-01-01T00:00:00.000Z"
    log.grow(1)
    keep(authority)
    code, report = run("--timestamp-cert", authority.issuer)
    assert (code, report["timestamps"]["clock_ahead"]) == (ExitCode.VALID, [4])
    assert "the first 4 entries have a time after their time stamp: a clock was ahead" in report["text"]


def test_options_that_trust_nothing_are_refused(authority, run, tmp_path):
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    for arguments, words in (
        (("--timestamps-needed", 1), "give --timestamp-cert"),
        (("--timestamp-policy", POLICY), "give --timestamp-cert"),
        (("--timestamp-cert", empty), "no PEM certificate"),
        (("--timestamp-cert", tmp_path / "none"), "cannot read"),
        (("--timestamp-cert", authority.issuer, "--timestamps-needed", -1), "0 or more"),
    ):
        code, error = run(*arguments)
        assert code == ExitCode.UNUSABLE
        assert words in error
