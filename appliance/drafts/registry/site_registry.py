"""Opens the registry at the configured place, and the site's signing key."""

from pathlib import Path

from appliance.audit.checkpoint import VerifierKey
from appliance.audit.signing_keys import (
    Signer,
    create_signing_key,
    keep_public_keys,
    load_kept,
    load_keys,
)
from appliance.drafts.registry.registry import Clock, DraftRegistry
from appliance.errors import AuditKeyError, ConfigurationError
from appliance.infra.data_directory import Installation, locate
from appliance.infra.key_location import KeyLocation, TokenKey, mldsa_path
from appliance.infra.settings import Settings
from appliance.sovereignty.bundle.signature import TrustedKey, load_trusted_keys


def open_registry(settings: Settings, clock: Clock) -> DraftRegistry:
    """Trusts the site's own key, which is not made here, and those in `drafts.trusted_keys_file`."""
    installation, file = locate(settings), settings.drafts.trusted_keys_file
    others = () if file is None else load_trusted_keys(file)
    own = tuple(TrustedKey(verifier_key=key) for key in _own_keys(settings, installation))
    return DraftRegistry(installation.drafts, trusted=(*own, *others), clock=clock)


def site_signer(settings: Settings) -> Signer:
    """Makes the site's key on first use; one at a configured path is the operator's and never made."""
    installation = locate(settings)
    key = installation.drafts_key
    if settings.drafts.signing_key_file is None and isinstance(key, Path) and not key.exists():
        _create(installation, key)
    signer = _load(settings, key)
    keep_public_keys(key, signer, installation.drafts_public_key)
    return signer


def _own_keys(settings: Settings, installation: Installation) -> tuple[VerifierKey, ...]:
    """The public half of the site's key; none before its first use."""
    key = installation.drafts_key
    if isinstance(key, TokenKey):
        return load_kept(key, installation.drafts_public_key)[:1]
    return (_load(settings, key).verifier_key,) if key.exists() else ()


def _load(settings: Settings, key: KeyLocation) -> Signer:
    return load_keys(key, mldsa_path(key), f"{settings.audit.origin}/drafts")


def _create(installation: Installation, path: Path) -> None:
    try:
        installation.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make {installation.directory}: {error.strerror}") from error
    try:
        create_signing_key(path)
    except AuditKeyError:
        if not path.exists():  # otherwise another process was faster: its key is the site's
            raise
