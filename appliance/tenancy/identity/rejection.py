"""
Why a caller was refused: one answer for clients, a reason for operators.

All refusals are the same for clients, so that they do not reveal which part was right.  The reason is from a
closed list, for the log and the metrics; it never holds anything the caller sent.
"""

from enum import StrEnum

from appliance.errors import InvalidApiKeyError
from appliance.tenancy.directory import REFUSAL


class RefusalReason(StrEnum):
    NO_CREDENTIAL = "no_credential"
    CREDENTIALS_DISAGREE = "credentials_disagree"
    API_KEY = "api_key"
    """Unknown, malformed, revoked or expired."""
    API_KEY_MAKER = "api_key_maker"
    """The key that made it is revoked or expired."""
    TOKENS_NOT_ACCEPTED = "tokens_not_accepted"
    TOKEN_MALFORMED = "token_malformed"  # noqa: S105 - a word for the log
    TOKEN_ALGORITHM = "token_algorithm"  # noqa: S105 - as above
    TOKEN_KEY_UNKNOWN = "token_key_unknown"  # noqa: S105 - as above
    TOKEN_SIGNATURE = "token_signature"  # noqa: S105 - as above
    TOKEN_EXPIRED = "token_expired"  # noqa: S105 - as above
    TOKEN_NOT_YET_VALID = "token_not_yet_valid"  # noqa: S105 - as above
    TOKEN_ISSUER = "token_issuer"  # noqa: S105 - as above
    TOKEN_AUDIENCE = "token_audience"  # noqa: S105 - as above
    TOKEN_CLAIM_MISSING = "token_claim_missing"  # noqa: S105 - as above
    TOKEN_TYPE = "token_type"  # noqa: S105 - as above
    """An ID token, or another kind that is not an access token."""
    TOKEN_LIFETIME = "token_lifetime"  # noqa: S105 - as above
    """Valid for longer than `oidc.max_lifetime_seconds`."""
    TOKEN_TENANT = "token_tenant"  # noqa: S105 - as above
    """Its claim maps to no tenant, to an unknown one, or to several."""
    CERTIFICATE_MISSING = "certificate_missing"
    CERTIFICATE_TENANT = "certificate_tenant"
    """Its names map to no tenant, to an unknown one, or to several."""
    CERTIFICATE_OF_ANOTHER = "certificate_of_another"
    """The key or token belongs to another tenant than the certificate."""
    ROLE = "role"
    """A valid credential of a tenant for the admin API or the console, or of an admin for models."""


class RefusedCallerError(InvalidApiKeyError):
    """A refused caller; the message is always the same, `reason` is for operators."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(REFUSAL)
        self.reason = reason
