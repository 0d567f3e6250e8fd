"""
Under whose name a batch runs, looked up anew before each line, so that revoking a key stops its batches.
"""

from appliance.tenancy import ApiKey, Caller, TenantDirectory
from appliance.tenancy.keys import KEY_ID_FORMAT


def find_owner(directory: TenantDirectory, tenant: str, key_id: str, now: float) -> Caller | None:
    """
    Whom a key of a tenant stands for at `now`, Unix time; None where it opens nothing any more.

    A token or certificate of an identity provider is gone long before its batch has run: there the
    tenant alone decides.
    """
    owner = directory.tenant(tenant)
    if owner is None:
        return None
    key = next((key for key in owner.keys if key.key_id == key_id), None)
    if key is None and KEY_ID_FORMAT.fullmatch(key_id):
        return None
    key = key or ApiKey(key_id=key_id, digest="")
    return Caller(tenant=owner, key=key) if key.opens_at(now) else None
