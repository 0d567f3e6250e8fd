"""
The bundle's own JSON files.
"""

from typing import ClassVar

from appliance.errors import ApplianceError, BundleRefusedError
from appliance.infra.canonical_json import CanonicalModel

MAX_RECORD_BYTES = 64 * 2**20
"""Room for 300,000 files; more is refused before it is read into memory."""


class Record(CanonicalModel):
    """One file of a bundle, or a part of one."""

    refusal: ClassVar[type[ApplianceError]] = BundleRefusedError
