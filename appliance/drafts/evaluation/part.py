"""
The evaluation's own JSON files: an altered report is noticed.
"""

from typing import ClassVar

from appliance.errors import ApplianceError, DraftRefusedError
from appliance.infra.canonical_json import CanonicalModel


class Part(CanonicalModel):
    """One file of an evaluation, or a part of one."""

    refusal: ClassVar[type[ApplianceError]] = DraftRefusedError
    remedy: ClassVar[str] = "evaluate the draft again"
