"""
Canonical JSON files: closed models in which every altered byte is detected.

RFC 8785 for what these files hold: ASCII member names, text, integers, lists and objects.  A file whose bytes
are not the encoding of its values is refused, even if the meaning is the same.
"""

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import ApplianceError


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


class CanonicalModel(BaseModel):
    """One JSON file, or a part of one; unknown members and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    refusal: ClassVar[type[ApplianceError]]
    """What `decode` raises."""
    remedy: ClassVar[str] = ""
    """What to do about it, after `; `."""

    def encode(self) -> bytes:
        """Return the canonical bytes; members that are None are omitted."""
        return canonical(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def decode(cls, content: bytes, name: str) -> Self:
        """Read the file `name`; raises `refusal` if it does not fit, or is not canonical."""
        try:
            found = cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(step) for step in first["loc"]) or "its JSON"
            raise cls.refusal(cls._advise(f"{name} cannot be used, {place}: {first['msg']}")) from error
        if found.encode() != content:
            raise cls.refusal(cls._advise(f"{name} is not canonical JSON: it was altered"))
        return found

    @classmethod
    def _advise(cls, problem: str) -> str:
        return f"{problem}; {cls.remedy}" if cls.remedy else problem
