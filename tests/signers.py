"""Signing keys for tests."""

from appliance.audit.checkpoint import NoteSigner
from appliance.audit.signing_keys import Signer


def joined(signer: Signer, *others: NoteSigner) -> Signer:
    """This signer with further keys that sign with it."""
    everyone = (*signer.signers[1:], *others)
    return Signer(signer.name, signer._private_key, everyone, kind=signer.verifier_key.kind)
