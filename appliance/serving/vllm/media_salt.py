"""
Keep tenants apart in vLLM's caches of images, sound and video, as `cache_salt` does in its prefix cache.

vLLM 0.32 finds processed media and encoder outputs by a hash of their content alone (`renderers/base.py`,
`multimodal/processing/inputs.py`), so a tenant could find out by its speed what others have sent.  The hash
covers the options with which media are decoded: the salt is added to them after decoding, when nothing but
the hash reads them.

Fails by leaving vLLM unchanged if it has another structure; a test on its own functions notices.
"""

from collections.abc import Awaitable, Callable
from typing import Any

SALT = "cache_salt"
MODALITIES = ("image", "video", "audio")
"""Those whose options vLLM hashes apart; for any other all options are hashed."""

Prompt = dict[str, Any]


def salt_media(renderer_class: Any) -> None:  # noqa: ANN401 - a class of vLLM
    process = getattr(renderer_class, "_process_tokens", None)
    process_async = getattr(renderer_class, "_process_tokens_async", None)
    if process is None or process_async is None:
        return
    renderer_class._process_tokens = _salting(process)  # noqa: SLF001
    renderer_class._process_tokens_async = _salting_async(process_async)  # noqa: SLF001


def _salting(original: Callable[..., Any]) -> Callable[..., Any]:
    def process(renderer: Any, prompt: Prompt, **named: Any) -> Any:  # noqa: ANN401
        return original(renderer, _salted(prompt), **named)

    return process


def _salting_async(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def process(renderer: Any, prompt: Prompt, **named: Any) -> Any:  # noqa: ANN401
        return await original(renderer, _salted(prompt), **named)

    return process


def _salted(prompt: Prompt) -> Prompt:
    salt = prompt.get(SALT)
    if not salt or not prompt.get("multi_modal_data"):
        return prompt
    options = prompt.get("media_io_kwargs") or {}
    named = {modality: {**(options.get(modality) or {}), SALT: salt} for modality in (*MODALITIES, *options)}
    return {**prompt, "media_io_kwargs": named}
