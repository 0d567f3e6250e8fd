"""The caller that a batch's lines run as."""

from dataclasses import replace

from appliance.gateway.batch.answerer import find_owner
from appliance.tenancy import Tenant, TenantDirectory, make_key

_, KEY = make_key(bytes(range(37)))
ACME = Tenant(name="acme", keys=(KEY,))


def find(tenant, key_id=KEY.key_id, name="acme"):
    return find_owner(TenantDirectory((tenant,)), name, key_id, 100.0)


def test_valid_key_authenticates_its_tenant():
    """With its current models and modes."""
    assert find(ACME).tenant is ACME
    assert find(ACME).key is KEY


def test_revoked_or_expired_key_stops_its_batches():
    assert find(replace(ACME, keys=())) is None
    assert find(replace(ACME, keys=(replace(KEY, expires_at=99),))) is None
    assert find(replace(ACME, keys=(replace(KEY, expires_at=101),))) is not None


def test_a_tenant_that_is_gone_or_disabled_stops_its_batches():
    """Whatever its keys are."""
    assert find(replace(ACME, disabled=True)) is None
    assert find(ACME, name="other") is None


def test_batch_of_an_oidc_caller_runs_while_its_tenant_exists():
    """The token expires long before the batch runs: the tenant decides."""
    owner = find(ACME, key_id="oidc:1234")
    assert (owner.tenant, owner.key.key_id) == (ACME, "oidc:1234")
    assert find(replace(ACME, disabled=True), key_id="oidc:1234") is None
