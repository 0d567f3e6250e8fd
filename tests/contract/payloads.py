"""
Kept content for tests of its stores: sealed parts that no test decrypts.
"""

import random

from appliance.audit.content.payloads import Payload, first_id
from appliance.audit.content.sealing import Part, Sealed

RANDOM = random.Random(19)
START_MS = 1_800_000_000_000


def payload(number, tenant="acme", part=Part.REQUEST, key_id="acme.1"):
    """One part of the request that came `number` seconds after the start."""
    sealed = Sealed(
        nonce=RANDOM.randbytes(12), ciphertext=RANDOM.randbytes(30), wrapped_key=RANDOM.randbytes(40)
    )
    return Payload(
        request_id=first_id(START_MS + 1000 * number),
        part=part,
        tenant=tenant,
        key_id=key_id,
        sealed=sealed,
        time="2027-01-15T08:00:00.000Z",
    )
