"""
Secrets are replaced in a running release, as docs/how-to/rotate-keys.md and docs/how-to/tls.md say.
"""

import secrets

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from tests.certificates import Authority
from tests.cluster.connections import soon
from tests.cluster.release import CLIENT, CONTROL_TOKEN, NAME, VALUES
from tests.deploy.chart.site import over

MOUNT_SECONDS = 150
"""Maximum time until the kubelet has put a changed Secret into a pod."""
SEEN = """
import hashlib, ssl, sys
host, port = sys.argv[1:]
pem = ssl.get_server_certificate((host, int(port)))
print(hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest())
"""
"""SHA-256 of a server's certificate: host, port."""
STATUS = """
import sys, urllib.error, urllib.request
url, token = sys.argv[1:]
try:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    print(urllib.request.urlopen(request).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
def with_tls(release, tmp_path):
    """The release with a certificate, whose authority it yields, and a function that issues the next one."""
    authority = Authority("site")

    def issue() -> str:
        """Replace the Secret; SHA-256 of the new certificate."""
        files = authority.issue(tmp_path, "gateway", x509.DNSName(release.host))
        certificate, key = files.certificate.read_text(), files.key.read_text()
        release.namespace.secret("tls", kind="kubernetes.io/tls", **{"tls.crt": certificate, "tls.key": key})
        return x509.load_pem_x509_certificate(certificate.encode()).fingerprint(SHA256()).hex()

    first = issue()
    values = over(VALUES, {"gateway": {"tls": {"existingSecret": "tls"}}})
    release.namespace.install(values, NAME, action="upgrade")
    release.wait_until_served()
    yield authority.pem, first, issue
    release.namespace.helm("rollback", NAME, "--wait")
    release.wait_until_served()


def test_gateway_serves_a_replaced_certificate_without_a_restart(release, with_tls):
    authority, first, issue = with_tls
    key = release.key("pathology")

    def seen() -> str:
        return release.namespace.python(CLIENT, SEEN, release.host, "8080").strip()

    assert release.chat(key, authority)["status"] == 200
    assert seen() == first
    pod = release.pod_of("gateway")
    second = issue()
    assert soon(lambda: seen() == second, MOUNT_SECONDS)
    assert release.chat(key, authority)["status"] == 200
    after = release.pod_of("gateway")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_control_token_is_replaced_and_the_old_one_refused(release):
    """Old and new, new and old, new: gateways restart once, the worker never."""
    old = release.namespace.data_of(CONTROL_TOKEN)["token"].split()[0]
    new = secrets.token_hex(32)
    key = release.key("surgery")
    worker = release.pod_of("worker")
    url = f"http://{worker['status']['podIP']}:8000/v1/models"

    def status(token: str) -> str:
        return release.namespace.python(f"{release.gateway}-0", STATUS, url, token).strip()

    assert (status(old), status(new)) == ("200", "401")
    release.namespace.secret(CONTROL_TOKEN, token=f"{old}\n{new}\n")
    assert soon(lambda: status(new) == "200", MOUNT_SECONDS)
    release.namespace.secret(CONTROL_TOKEN, token=f"{new}\n{old}\n")
    release.namespace.kubectl("rollout", "restart", f"statefulset/{release.gateway}")
    release.wait_until_served()
    assert release.chat(key)["status"] == 200
    release.namespace.secret(CONTROL_TOKEN, token=new)
    assert soon(lambda: status(old) == "401", MOUNT_SECONDS)
    assert release.chat(key)["status"] == 200
    assert release.pod_of("worker")["metadata"]["uid"] == worker["metadata"]["uid"]
