"""The edits of a body, applied to its text."""

from collections.abc import Mapping

from appliance.infra.json_members import Member
from appliance.serving.dialects.dialect import Edits, splices_of


def edit_members(text: str, members: Mapping[str, Member], edits: Edits) -> str:
    for start, end, value in reversed(splices_of(text, members, edits)):
        text = text[:start] + value + text[end:]
    return text
