"""
The bundle's own JSON files: closed models, and one spelling of each.

Canonical JSON here is RFC 8785 for what these files hold: ASCII member names, text, integers, lists
and objects.  A file whose bytes are not those its values encode to is refused, so a byte that was
changed without a change of meaning is noticed as well.
"""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import BundleRefusedError

MAX_RECORD_BYTES = 64 * 2**20
"""Room for 300,000 files; more is refused before it is read into memory."""


class Record(BaseModel):
    """One JSON file, or a part of one; unknown members and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        """Return the one spelling of this record; members that are None are left out."""
        return canonical(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def decode(cls, content: bytes, name: str) -> Self:
        """
        Read a record from the file `name`.

        Raises:
            BundleRefusedError: it does not fit, or is not in its canonical spelling.
        """
        try:
            record = cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(step) for step in first["loc"]) or "its JSON"
            message = f"{name} cannot be used, {place}: {first['msg']}"
            raise BundleRefusedError(message) from error
        if record.encode() != content:
            raise BundleRefusedError(f"{name} is not in its canonical spelling: it was altered")
        return record


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Return canonical JSON: members sorted, no white space, UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode()
