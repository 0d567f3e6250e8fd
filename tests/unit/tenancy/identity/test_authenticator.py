"""Who is calling, by key, token or certificate."""

import random
from dataclasses import replace

import pytest

from appliance.errors import ConfigurationError
from appliance.infra.logs import configure_logs
from appliance.infra.settings import LogSettings, OidcSettings, TlsSettings
from appliance.tenancy import Tenant, TenantDirectory, make_key
from appliance.tenancy.directory import REFUSAL
from appliance.tenancy.identity.authenticator import Authenticator
from appliance.tenancy.identity.certificates import ClientCertificate
from appliance.tenancy.identity.provider import IdentityProvider, open_provider
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError
from appliance.tenancy.identity.tokens import subject_id
from appliance.tenancy.keys import MAKER_FORMAT
from tests.clock import Clock
from tests.identity_provider import AUDIENCE, ISSUER, Provider, publish

RANDOM = random.Random(8)
KEY, STORED = make_key(RANDOM.randbytes(37))
ADMIN_KEY, STORED_ADMIN = make_key(RANDOM.randbytes(37), admin=True)
DIRECTORY = TenantDirectory(
    (
        Tenant(name="acme", keys=(STORED,)),
        Tenant(name="billing"),
        Tenant(name="gone", disabled=True),
        Tenant(name="operator", models=(), keys=(STORED_ADMIN,)),
    )
)
PROVIDER = Provider()
TLS = TlsSettings(
    certificate_file="c.pem",
    key_file="c.key",
    client_ca_file="ca.pem",
    client_tenants={"cn:acme": "acme", "cn:billing": "billing", "cn:gone": "gone", "cn:never": "never"},
)
STRICT = TLS.model_copy(update={"require_client_certificate": True})
ACME, BILLING = ClientCertificate(("cn:acme",)), ClientCertificate(("cn:billing",))


@pytest.fixture
def settings(tmp_path) -> OidcSettings:
    file = publish(tmp_path / "keys.json", PROVIDER)
    return OidcSettings(
        jwks_file=file,
        issuer=ISSUER,
        audience=AUDIENCE,
        admin_claim="roles",
        admin_values=("admin", "auditor"),
        admin_scopes={"auditor": ("read",)},
        manage_claim="roles",
        manage_values=("keys",),
    )


@pytest.fixture
def provider(settings) -> IdentityProvider:
    found = open_provider(settings, logger=configure_logs(LogSettings(), terminal=False), clock=Clock(1e6))
    assert found is not None
    return found


def bearer(credential: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {credential}".encode())]


def refused(authenticator: Authenticator, *given) -> RefusalReason:
    with pytest.raises(RefusedCallerError) as refusal:
        authenticator.identify(*given)
    assert str(refusal.value) == REFUSAL
    return refusal.value.reason


def test_key_token_and_certificate_authenticate_their_tenants(provider):
    """Each with an id for the audit log that says which kind it was."""
    who = Authenticator(DIRECTORY, provider=provider, tls=TLS)
    by_key = who.identify(bearer(KEY))
    by_token = who.identify(bearer(PROVIDER.token()))
    by_certificate = who.identify([], BILLING)
    assert [(caller.tenant.name, caller.key.admin) for caller in (by_key, by_token, by_certificate)] == [
        ("acme", False), ("acme", False), ("billing", False),
    ]  # fmt: skip
    assert by_key.key.key_id == STORED.key_id
    assert by_token.key.key_id == subject_id("jwt", ISSUER, "ada")
    assert by_certificate.key.key_id == subject_id("cert", "cn:billing")


def test_a_token_with_the_admins_claim_is_an_admin(provider):
    """As an admin key is, with the scopes of the claim."""
    who = Authenticator(DIRECTORY, provider=provider)
    caller = who.identify(bearer(PROVIDER.token(roles=["admin"])))
    assert (caller.tenant.name, caller.key.admin, caller.key.scopes) == ("operator", True, None)
    assert who.identify(bearer(PROVIDER.token(roles=["auditor"]))).key.scopes == {"read"}


def test_a_token_with_the_claim_may_make_keys_of_its_tenant(provider):
    """An admin's never, and no certificate."""
    who = Authenticator(DIRECTORY, provider=provider, tls=TLS)
    made = {
        tuple(roles): who.identify(bearer(PROVIDER.token(roles=roles))).key
        for roles in (["keys"], [], ["admin", "keys"])
    }
    assert {roles: key.manage_keys for roles, key in made.items()} == {
        ("keys",): True, (): False, ("admin", "keys"): False,
    }  # fmt: skip
    assert MAKER_FORMAT.fullmatch(made["keys",].key_id)
    assert not who.identify([], ACME).key.manage_keys


def test_a_key_whose_maker_ended_is_refused_with_a_reason_of_its_own():
    minted = replace(STORED, made_by="mmmmmmmm")
    who = Authenticator(TenantDirectory((Tenant(name="acme", keys=(minted,)),)))
    assert refused(who, bearer(KEY)) is RefusalReason.API_KEY_MAKER
    assert refused(who, bearer(KEY[:-1] + "!")) is RefusalReason.API_KEY


def test_every_refusal_has_the_same_message_and_its_reason(provider):
    who = Authenticator(DIRECTORY, provider=provider, tls=TLS)
    assert refused(who, []) is RefusalReason.NO_CREDENTIAL
    assert refused(who, bearer("sk-no")) is RefusalReason.API_KEY
    assert refused(who, bearer(KEY[:-1] + "!")) is RefusalReason.API_KEY
    assert refused(who, bearer(PROVIDER.token(tenant="unknown"))) is RefusalReason.TOKEN_TENANT
    assert refused(who, bearer(PROVIDER.token(tenant="gone"))) is RefusalReason.TOKEN_TENANT
    assert refused(who, bearer(Provider().token())) is RefusalReason.TOKEN_SIGNATURE
    assert refused(who, [], ClientCertificate(("cn:other",))) is RefusalReason.CERTIFICATE_TENANT
    assert refused(who, [], ClientCertificate(("cn:gone",))) is RefusalReason.CERTIFICATE_TENANT
    assert refused(Authenticator(DIRECTORY), bearer(PROVIDER.token())) is RefusalReason.TOKENS_NOT_ACCEPTED


def test_key_takes_precedence_over_the_certificate():
    assert Authenticator(DIRECTORY, tls=TLS).identify(bearer(KEY), BILLING).tenant.name == "acme"


def test_certificate_does_not_replace_a_wrong_key():
    """A revoked key stays revoked on a connection with a certificate."""
    assert refused(Authenticator(DIRECTORY, tls=TLS), bearer("sk-no"), ACME) is RefusalReason.API_KEY


def test_required_certificate_must_match_the_keys_tenant(provider):
    """A key that was stolen is of no use elsewhere; a certificate alone is enough to call."""
    who = Authenticator(DIRECTORY, provider=provider, tls=STRICT)
    assert who.identify(bearer(KEY), ACME).key == STORED
    assert who.identify([], ACME).tenant.name == "acme"
    assert who.identify(bearer(PROVIDER.token()), ACME).tenant.name == "acme"
    assert refused(who, bearer(KEY)) is RefusalReason.CERTIFICATE_MISSING
    assert refused(who, bearer(KEY), BILLING) is RefusalReason.CERTIFICATE_OF_ANOTHER
    assert refused(who, bearer(PROVIDER.token()), BILLING) is RefusalReason.CERTIFICATE_OF_ANOTHER
    assert refused(who, bearer(ADMIN_KEY), ACME) is RefusalReason.CERTIFICATE_OF_ANOTHER
    assert refused(who, bearer(KEY), ClientCertificate(())) is RefusalReason.CERTIFICATE_TENANT
    assert refused(who, []) is RefusalReason.NO_CREDENTIAL


def test_changed_key_file_is_loaded_and_old_tokens_refused(provider, settings):
    """A key the provider has withdrawn verifies nothing any more, also not what was verified before."""
    who, successor = Authenticator(DIRECTORY, provider=provider), Provider("k2")
    old = PROVIDER.token()
    assert who.identify(bearer(old))
    publish(settings.jwks_file, successor)
    assert who.identify(bearer(old))
    provider.renew()
    assert refused(who, bearer(old)) is RefusalReason.TOKEN_KEY_UNKNOWN
    assert who.identify(bearer(successor.token()))


@pytest.mark.parametrize("broken", ["", '{"keys": [', '{"keys": []}', None])
def test_broken_key_file_keeps_the_previous_keys(settings, broken, capsys):
    provider = open_provider(settings, logger=configure_logs(LogSettings(), terminal=False), clock=Clock(1e6))
    if broken is None:
        settings.jwks_file.unlink()
    else:
        settings.jwks_file.write_text(broken)
    provider.renew()
    provider.renew()
    assert provider.read(PROVIDER.token()).tenant == "acme"
    assert capsys.readouterr().err.count("jwks_reload_failed") == 1
    publish(settings.jwks_file, Provider("k2"))
    provider.renew()
    with pytest.raises(RefusedCallerError):
        provider.read(PROVIDER.token())


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("x", "not a JSON Web Key Set")])
def test_a_start_without_keys_is_refused_in_one_line(settings, content, words):
    """A gateway that would refuse all users does not start."""
    settings.jwks_file.unlink()
    if content is not None:
        settings.jwks_file.write_text(content)
    with pytest.raises(ConfigurationError, match=words) as error:
        open_provider(settings, logger=configure_logs(LogSettings(), terminal=False), clock=Clock(1e6))
    assert "oidc.jwks_file" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_key_file_there_is_no_provider():
    """Tokens are accepted only if their issuer is configured."""
    assert (
        open_provider(OidcSettings(), logger=configure_logs(LogSettings(), terminal=False), clock=Clock(1e6))
        is None
    )


async def test_caller_who_would_be_refused_is_looked_for_in_the_newest_tenants():
    """A key that was made a moment ago on another gateway, or by a command, works."""
    directory = TenantDirectory()
    polls = []

    async def poll() -> bool:
        polls.append(directory.tenants)
        directory.replace(DIRECTORY.tenants)
        return len(polls) == 1

    who = Authenticator(directory, poll=poll)
    assert (await who.find(bearer(KEY))).tenant.name == "acme"
    assert (await who.find(bearer(KEY))).tenant.name == "acme"
    assert len(polls) == 1
    with pytest.raises(RefusedCallerError):
        await who.find(bearer(KEY + "x"))
    with pytest.raises(RefusedCallerError):
        await who.find([])
    assert len(polls) == 2
