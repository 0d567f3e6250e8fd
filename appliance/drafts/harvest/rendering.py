"""
Reproduces the tokens the worker processed, or gives a reason.

A prompt counts only if the target's own template gives as many tokens as the worker counted; an answer only
if its tokens are as many and decode to the same text.  Pure, given a tokenizer; runs where `transformers`
may be imported (`harvest.tokenizer_process`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from appliance.drafts.harvest.conversation import EOS, Skipped

TAIL = 16
"""Prompt tokens decoded with an answer: some tokenizers need context."""
FIXED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
    }
)
"""Arguments of `apply_chat_template` that a request cannot set."""


class TransformersTokenizer(Protocol):
    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **more: Any) -> Any:  # noqa: ANN401
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


def render(tokenizer: TransformersTokenizer, job: Mapping[str, Any]) -> dict[str, Any]:
    """
    Tokenize one request; returns `prompt` and `answer`, lists of tokens, or `skipped`, a reason.

    `job` has the members of `PromptSource` and `SampledAnswer` (its text as `answer`), and the worker's
    `prompt_tokens` and `completion_tokens`.
    """
    found = {tuple(tokens) for tokens in _prompts(tokenizer, job) if len(tokens) == job["prompt_tokens"]}
    if len(found) != 1:
        return {"skipped": Skipped.PROMPT_DIFFERS.value}
    (prompt,) = found
    answer = _answer(tokenizer, prompt, job)
    if not answer:
        return {"skipped": Skipped.ANSWER_DIFFERS.value}
    return {"prompt": list(prompt), "answer": answer}


def _prompts(tokenizer: TransformersTokenizer, job: Mapping[str, Any]) -> list[list[int]]:
    """Every tokenization of the prompt that the worker may have used."""
    if job["tokens"] is not None:
        return [job["tokens"]]
    if job["text"] is not None:
        return [list(tokenizer.encode(job["text"], add_special_tokens=True))]
    more = {name: value for name, value in job["arguments"].items() if name not in FIXED_ARGUMENTS}
    rendered = []
    # vLLM inspects the template to choose between the two.
    for form in (_as_text, _as_parts):
        messages = [{**message, "content": form(message)} for message in job["messages"]]
        try:
            tokens = tokenizer.apply_chat_template(
                messages,
                **more,
                add_generation_prompt=True,
                tools=job["tools"] or None,
                tokenize=True,
                return_dict=False,
            )
        except Exception:  # noqa: BLE001, S112 - templates raise anything
            continue
        rendered.append(list(tokens))
    return rendered


def _as_text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(content)


def _as_parts(message: Mapping[str, Any]) -> str | list[dict[str, str]]:
    content = message["content"]
    if message["role"] == "tool":
        return _as_text(message)
    texts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": text} for text in texts]


def _answer(tokenizer: TransformersTokenizer, prompt: tuple[int, ...], job: Mapping[str, Any]) -> list[int]:
    """The answer's tokens with the last one; empty if they cannot be determined."""
    text = job["answer"] + job["stop"]
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    end = tokenizer.eos_token_id if job["end"] == EOS else job["end"]
    if job["end"] is not None and end is None:
        return []
    ended = [] if end is None else [end]
    if len(tokens) + len(ended) != job["completion_tokens"]:
        return []
    before = _decode(tokenizer, prompt[-TAIL:])
    if _decode(tokenizer, (*prompt[-TAIL:], *tokens)) != before + text:
        return []
    if job["stop"]:
        # The last token may extend beyond the stop text: only those before it are certain.
        whole = before + job["answer"]
        while tokens and not whole.startswith(_decode(tokenizer, (*prompt[-TAIL:], *tokens))):
            tokens.pop()
    return tokens + ended


def _decode(tokenizer: TransformersTokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
