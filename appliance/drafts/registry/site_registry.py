"""Opens the registry at the configured place, and the site's signing key."""

import os
from contextlib import suppress

from appliance.audit.signing_keys import Signer, create_signing_key, load_keys, mldsa_path
from appliance.drafts.registry.registry import Clock, DraftRegistry
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import Installation, locate
from appliance.infra.files import sync_directory
from appliance.infra.settings import Settings
from appliance.sovereignty.bundle.signature import TrustedKey, load_trusted_keys


def open_registry(settings: Settings, clock: Clock) -> DraftRegistry:
    """Trusts the site's own key, which is not made here, and those in `drafts.trusted_keys_file`."""
    installation, file = locate(settings), settings.drafts.trusted_keys_file
    others = () if file is None else load_trusted_keys(file)
    mine = (_load(settings, installation),) if installation.drafts_key.exists() else ()
    own = tuple(TrustedKey(verifier_key=signer.verifier_key) for signer in mine)
    return DraftRegistry(installation.drafts, trusted=(*own, *others), clock=clock)


def site_signer(settings: Settings) -> Signer:
    """Makes the site's key on first use; one at a configured path is the operator's and never made."""
    installation = locate(settings)
    if settings.drafts.signing_key_file is None and not installation.drafts_key.exists():
        _create(installation)
    return _load(settings, installation)


def _load(settings: Settings, installation: Installation) -> Signer:
    path = installation.drafts_key
    return load_keys(path, mldsa_path(path), f"{settings.audit.origin}/drafts")


def _create(installation: Installation) -> None:
    """Create the key under another name first: a concurrent reader finds a whole key or none."""
    path = installation.drafts_key
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        installation.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        create_signing_key(fresh)
        with suppress(FileExistsError):  # another process was faster: its key is the site's
            os.link(fresh, path)
        fresh.unlink()
        sync_directory(path.parent)
    except OSError as error:
        raise ConfigurationError(f"cannot write the drafts key {path}: {error.strerror}") from error
