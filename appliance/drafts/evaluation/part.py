"""
The evaluation's own JSON files: closed models, and one spelling of each.

As for bundles (`appliance.bundle.record`): a file whose bytes are not those its values encode to is
refused, so an altered report is noticed.
"""

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.bundle.record import canonical
from appliance.errors import DraftRefusedError


class Part(BaseModel):
    """One JSON file, or a part of one; unknown members and other types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        """Return the one spelling of this part; members that are None are left out."""
        return canonical(self.model_dump(mode="json", exclude_none=True))

    @classmethod
    def decode(cls, content: bytes, name: str) -> Self:
        """
        Read a part from the file `name`.

        Raises:
            DraftRefusedError: it does not fit, or is not in its canonical spelling.
        """
        try:
            part = cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(step) for step in first["loc"]) or "its JSON"
            message = f"{name} cannot be used, {place}: {first['msg']}; evaluate the draft again"
            raise DraftRefusedError(message) from error
        if part.encode() != content:
            message = f"{name} is not in its canonical spelling: it was altered; evaluate the draft again"
            raise DraftRefusedError(message)
        return part
