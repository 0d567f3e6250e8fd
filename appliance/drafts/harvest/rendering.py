"""
From text to the tokens the worker saw, or a reason why not: never tokens that only look like it.

A prompt counts only if the target's own template makes as many tokens of it as the worker counted,
an answer only if its tokens are as many and lead back to the very same text.  Pure, given a
tokenizer; runs where `transformers` may be imported (`harvest.tokenizer_child`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from appliance.drafts.harvest.conversation import EOS
from appliance.drafts.harvest.reasons import Skipped

TAIL = 16
"""Tokens of the prompt that are decoded along with an answer: some tokenizers need what came before."""
OURS = frozenset(
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
"""Arguments of `apply_chat_template` that no request decides."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer of `transformers`."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, Any]], **more: Any) -> Any:  # noqa: ANN401
        """Render and tokenize messages."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Return the text of tokens."""


def render(tokenizer: Tokenizer, job: Mapping[str, Any]) -> dict[str, Any]:
    """
    Tokenize one request.

    Args:
        tokenizer: the target's.
        job: members of `conversation.Asked` and `conversation.Answer`, the answer's text as `answer`,
            and the worker's `prompt_tokens` and `completion_tokens`.

    Returns:
        `prompt` and `answer`, lists of tokens; or `skipped`, a reason.
    """
    found = {tuple(tokens) for tokens in _prompts(tokenizer, job) if len(tokens) == job["prompt_tokens"]}
    if len(found) != 1:
        return {"skipped": Skipped.PROMPT_DIFFERS.value}
    (prompt,) = found
    answer = _answer(tokenizer, prompt, job)
    if not answer:
        return {"skipped": Skipped.ANSWER_DIFFERS.value}
    return {"prompt": list(prompt), "answer": answer}


def _prompts(tokenizer: Tokenizer, job: Mapping[str, Any]) -> list[list[int]]:
    """The ways in which a worker may have tokenized a prompt."""
    if job["tokens"] is not None:
        return [job["tokens"]]
    if job["text"] is not None:
        return [list(tokenizer.encode(job["text"], add_special_tokens=True))]
    more = {name: value for name, value in job["arguments"].items() if name not in OURS}
    rendered = []
    # vLLM looks at a template to see which of the two it expects.
    for form in (_joined, _listed):
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
        except Exception:  # noqa: BLE001, S112 - templates raise what they like at what they do not expect
            continue
        rendered.append(list(tokens))
    return rendered


def _joined(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(content)


def _listed(message: Mapping[str, Any]) -> str | list[dict[str, str]]:
    content = message["content"]
    if message["role"] == "tool":
        return _joined(message)
    texts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": text} for text in texts]


def _answer(tokenizer: Tokenizer, prompt: tuple[int, ...], job: Mapping[str, Any]) -> list[int]:
    """The answer's tokens, its last one included; none if they cannot be told."""
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
        # The last of them may have held more than what stopped it: only those that lie before it are sure.
        whole = before + job["answer"]
        while tokens and not whole.startswith(_decode(tokenizer, (*prompt[-TAIL:], *tokens))):
            tokens.pop()
    return tokens + ended


def _decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
