"""
Changes to a body on its way to a worker: a few members set or cut, the rest as it came, to the byte.
"""

from collections.abc import Mapping

from appliance.infra.json_members import Member, cut_member

Edits = Mapping[str, str | None]
"""New JSON text by key; None cuts the member out."""


def edit_members(text: str, members: dict[str, Member], edits: Edits) -> str:
    """
    Return `text` with several members changed at once; what is missing is added in front.

    Args:
        text: a JSON object.
        members: all members of `text`; one of them at least is not cut.
        edits: the changes; no key needs an escape.
    """
    # From the end: whatever is still to be changed stays where it was found.
    for key in sorted(edits.keys() & members.keys(), key=lambda key: members[key].start, reverse=True):
        value, member = edits[key], members[key]
        if value is None:
            text = cut_member(text, members, key)
        else:
            text = text[: member.value_start] + value + text[member.end :]
    added = [f'"{key}":{value},' for key, value in edits.items() if value is not None and key not in members]
    if not added:
        return text
    opening = text.index("{") + 1
    return text[:opening] + "".join(added) + text[opening:]
