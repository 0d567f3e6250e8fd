"""
Images, sound and video in a request: only content that the request itself contains.

A worker fetches any URL it is given, so a request could make it call any machine it can reach.  Follows
`_parse_chat_message_content_mm_part` in `vllm/renderers/chat_utils.py` and the conversions in
`vllm/entrypoints/anthropic/serving.py` (0.32).  Only the places that they read are checked: a URL in a
text, or in the arguments of a tool, is ordinary content.
"""

from appliance.errors import InvalidRequestError

URLS = frozenset({"image_url", "audio_url", "video_url", "file_url"})
TENSORS = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil"})
"""Parts with values for the model itself, which the worker would unpack."""
NAMEABLE = URLS | TENSORS | {"input_audio"}
_CHECKED = NAMEABLE | {"source"}
_NESTED = ("content", "output")
"""Members of a message or part that contain further parts."""


def refuse_media(value: object, param: str, *, remote: bool) -> None:
    """
    Refuse parts that a worker would have to fetch, unpack, or take from another request.

    `param` is the member's name; `remote` permits URLs.
    """
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                refuse_media(item, param, remote=remote)
    elif isinstance(value, dict):
        kind = value.get("type")
        if (isinstance(kind, str) and kind in TENSORS) or not _CHECKED.isdisjoint(value):
            _check_part(value, param, remote=remote)
        for name in _NESTED:
            inner = value.get(name)
            if isinstance(inner, dict | list):
                refuse_media(inner, param, remote=remote)


def _check_part(part: dict[str, object], param: str, *, remote: bool) -> None:
    tensor = next((name for name in TENSORS if name in part or part.get("type") == name), None)
    if tensor is not None:
        message = f"`{tensor}` is not accepted: send the image, sound or text itself."
        raise InvalidRequestError(message, param=param, code="parameter_not_allowed")
    if part.get("uuid") is not None and not NAMEABLE.isdisjoint(part):
        message = "`uuid` of a part is not accepted: it could refer to another request's content. Omit it."
        raise InvalidRequestError(message, param=param, code="parameter_not_allowed")
    if remote:
        return
    for name in URLS:
        given = part.get(name)
        url = given.get("url") if isinstance(given, dict) else given
        if url is not None and not _is_data(url):
            raise _remote(name, param)
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "url" and not _is_data(source.get("url")):
        raise _remote("source.url", param)


def _is_data(url: object) -> bool:
    return isinstance(url, str) and url[:5].lower() == "data:"


def _remote(name: str, param: str) -> InvalidRequestError:
    message = (
        f"`{name}` must be a `data:` URL: the worker fetches nothing from the network. "
        "Send the content itself, in base64."
    )
    return InvalidRequestError(message, param=param, code="media_url_not_allowed")
