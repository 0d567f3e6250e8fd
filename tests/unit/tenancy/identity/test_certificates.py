"""The names in a client certificate, and whose they are."""

import pytest

from appliance.tenancy.identity.certificates import ClientCertificate, find_tenant, read_certificate
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

PEER = {
    "subject": ((("countryName", "DE"),), (("commonName", "billing"),)),
    "subjectAltName": (("DNS", "Host.Bank"), ("URI", "spiffe://bank/Billing"), ("IP Address", "10.0.0.1")),
}
TENANTS = {"uri:spiffe://bank/Billing": "billing", "cn:billing": "billing", "dns:lab.bank": "research"}


def test_certificate_names_have_the_form_of_the_settings():
    """Host names know no case, all others do; addresses and the rest of the subject are no names."""
    assert read_certificate(PEER).names == ("dns:host.bank", "uri:spiffe://bank/Billing", "cn:billing")
    assert read_certificate({"subject": ((("countryName", "DE"),),)}).names == ()


def test_certificate_name_maps_to_its_tenant():
    assert find_tenant(read_certificate(PEER), TENANTS)[0] == "billing"
    assert find_tenant(ClientCertificate(("dns:lab.bank",)), TENANTS) == ("research", "dns:lab.bank")


@pytest.mark.parametrize(
    "names", [(), ("cn:unknown",), ("uri:spiffe://bank/billing",), ("cn:billing", "dns:lab.bank")]
)
def test_certificate_of_no_tenant_or_of_two_is_refused(names):
    with pytest.raises(RefusedCallerError) as refusal:
        find_tenant(ClientCertificate(names), TENANTS)
    assert refusal.value.reason is RefusalReason.CERTIFICATE_TENANT
