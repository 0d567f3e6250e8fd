"""
Authenticates a request by its API key, its token, or its connection's client certificate.

A key or token takes precedence; the certificate alone counts without either.  With
`tls.require_client_certificate` both are needed and must belong to one tenant.  It fails closed: credentials
that are not understood are refused.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from appliance.errors import InvalidApiKeyError
from appliance.infra.settings import TlsSettings
from appliance.tenancy import ApiKey, Caller, TenantDirectory
from appliance.tenancy.directory import EndedMakerError
from appliance.tenancy.identity.certificates import ClientCertificate, find_tenant
from appliance.tenancy.identity.credentials import is_token, presented
from appliance.tenancy.identity.provider import IdentityProvider
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError
from appliance.tenancy.identity.tokens import subject_id

MAY_BE_NEW = {
    RefusalReason.API_KEY,
    RefusalReason.API_KEY_MAKER,
    RefusalReason.TOKEN_TENANT,
    RefusalReason.CERTIFICATE_TENANT,
}


class Authenticator:
    def __init__(
        self,
        directory: TenantDirectory,
        *,
        provider: IdentityProvider | None = None,
        tls: TlsSettings | None = None,
        refuse: Callable[[], None] = lambda: None,
        poll: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """
        `refuse` raises TenantsUnavailableError while no credential can be checked.

        `poll` brings the directory up to date, and says whether it has changed.
        """
        self._refuse, self._poll = refuse, poll
        self._directory, self._provider, self._tls = directory, provider, tls or TlsSettings()

    async def find(
        self, headers: Sequence[tuple[bytes, bytes]], certificate: ClientCertificate | None = None
    ) -> Caller:
        """As `identify`, but who would be refused is looked for in the newest tenants and keys first."""
        try:
            return self.identify(headers, certificate)
        except RefusedCallerError as error:
            if self._poll is None or error.reason not in MAY_BE_NEW or not await self._poll():
                raise
        return self.identify(headers, certificate)

    def identify(
        self, headers: Iterable[tuple[bytes, bytes]], certificate: ClientCertificate | None = None
    ) -> Caller:
        """
        The caller of a request with these headers (names in lower case) and this connection's certificate.

        Raises RefusedCallerError, with the same message always, and the reason for operators;
        TenantsUnavailableError, whatever the credential, while none can be checked.
        """
        self._refuse()
        credential = presented(headers)
        if credential is None:
            if certificate is None:
                raise RefusedCallerError(RefusalReason.NO_CREDENTIAL)
            return self._by_certificate(certificate)
        caller = self._by_token(credential) if is_token(credential) else self._by_key(credential)
        if self._tls.require_client_certificate:
            self._check_certificate(caller, certificate)
        return caller

    def _by_key(self, key: str) -> Caller:
        try:
            return self._directory.authenticate(key)
        except EndedMakerError as error:
            raise RefusedCallerError(RefusalReason.API_KEY_MAKER) from error
        except InvalidApiKeyError as error:
            raise RefusedCallerError(RefusalReason.API_KEY) from error

    def _by_token(self, token: str) -> Caller:
        if self._provider is None:
            raise RefusedCallerError(RefusalReason.TOKENS_NOT_ACCEPTED)
        bearer = self._provider.read(token)
        tenant = self._directory.tenant(bearer.tenant)
        if tenant is None:
            raise RefusedCallerError(RefusalReason.TOKEN_TENANT)
        key = ApiKey(
            key_id=bearer.key_id,
            digest="",
            admin=bearer.is_admin,
            scopes=bearer.scopes,
            manage_keys=bearer.manages_keys,
        )
        return Caller(tenant=tenant, key=key)

    def _by_certificate(self, certificate: ClientCertificate) -> Caller:
        name, known_by = find_tenant(certificate, self._tls.client_tenants)
        tenant = self._directory.tenant(name)
        if tenant is None:
            raise RefusedCallerError(RefusalReason.CERTIFICATE_TENANT)
        return Caller(tenant=tenant, key=ApiKey(key_id=subject_id("cert", known_by), digest=""))

    def _check_certificate(self, caller: Caller, certificate: ClientCertificate | None) -> None:
        if certificate is None:
            raise RefusedCallerError(RefusalReason.CERTIFICATE_MISSING)
        name, _ = find_tenant(certificate, self._tls.client_tenants)
        if name != caller.tenant.name:
            raise RefusedCallerError(RefusalReason.CERTIFICATE_OF_ANOTHER)
