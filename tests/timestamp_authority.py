"""A time-stamp authority for tests: OpenSSL's `ts`, with certificates of its own, also as an HTTP server."""

import shutil
import subprocess
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

POLICY, OTHER_POLICY = "1.2.3.4.1", "1.2.3.4.2"
QUERY, REPLY = "application/timestamp-query", "application/timestamp-reply"

_CONFIGURATION = """
[tsa]
default_tsa = unit
[unit]
dir = {directory}
serial = {directory}/serial
crypto_device = builtin
signer_cert = {directory}/{signer}.pem
signer_key = {directory}/{signer}.key
signer_digest = sha256
default_policy = 1.2.3.4.1
other_policies = 1.2.3.4.2
digests = sha256, sha384, sha512
accuracy = secs:1, millisecs:500
ess_cert_id_alg = {ess}
ess_cert_id_chain = no
"""


class TimestampAuthority:
    """An authority and its units in a directory; `signer` names the unit that stamps."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("TIME STAMPS ARE NOT TESTED: install the Debian package `openssl`")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Time authority")
        usage = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key.public_key())
        self._write("authority", builder.add_extension(usage, critical=True), self._key)
        self.issue("unit")

    def issue(self, name, *, key=None, usages=(ExtendedKeyUsageOID.TIME_STAMPING,), critical=True, lasts=30):
        """Make a unit; `lasts` in days, negative for one that has expired."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key.public_key(), timedelta(days=lasts))
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=critical)
        self._write(name, builder, key)
        return self.directory / f"{name}.pem"

    @property
    def certificate(self) -> Path:
        """The unit's."""
        return self.directory / "unit.pem"

    @property
    def issuer(self) -> Path:
        return self.directory / "authority.pem"

    def reply(self, query: bytes, *, signer="unit", ess="sha256") -> bytes:
        """Answer a TimeStampReq with a TimeStampResp, by OpenSSL."""
        configuration = self.directory / f"{signer}-{ess}.cnf"
        configuration.write_text(_CONFIGURATION.format(directory=self.directory, signer=signer, ess=ess))
        asked = self.directory / "asked.tsq"
        asked.write_bytes(query)
        arguments = ["-reply", "-config", configuration, "-section", "unit", "-queryfile", asked]
        return _openssl("ts", *arguments)

    def query(self, content: bytes, *, policy=None, nonce=False) -> bytes:
        """A TimeStampReq by OpenSSL."""
        data = self.directory / "content"
        data.write_bytes(content)
        options = [*(["-tspolicy", policy] if policy else []), *([] if nonce else ["-no_nonce"])]
        return _openssl("ts", "-query", "-data", data, "-sha256", "-cert", *options)

    def stamp(self, content: bytes, *, policy=None, **options) -> bytes:
        return self.reply(self.query(content, policy=policy), **options)

    def _write(self, name, builder, key) -> None:
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.directory / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (self.directory / f"{name}.key").write_bytes(secret)


def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@contextmanager
def answering(answer, *, context=None):
    """Serve on loopback; `answer(query)` returns a reply, or (status, type, body); gives URL and queries."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            query = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.headers["Content-Type"], query))
            given = answer(query)
            status, kind, body = given if isinstance(given, tuple) else (200, REPLY, given)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """A client that gave up."""

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}/tsr", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _openssl(*arguments) -> bytes:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject, issuer, public_key, lasts=timedelta(days=30)) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + lasts
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(end, datetime.now(UTC)) - timedelta(days=1))
        .not_valid_after(end)
    )
