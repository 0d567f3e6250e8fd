"""
One request as it is trained on: the tokens of prompt and answer, and which of them are the answer's.

Written as canonical JSON, which is only ever stored sealed.  Its digest stands in manifests and
training records, which outlive it; the salt inside keeps anybody from guessing the text by it.
Pure.
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from appliance.errors import DraftRefusedError

FORMAT = 1
SALT_BYTES = 16
LARGEST_TOKEN = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request and its answer."""

    request_id: str
    tenant: str
    template: str
    """Label of the prompt template, as the request's outcome has it."""
    context: str
    """Range of prompt lengths, as the request's outcome has it."""
    token_ids: tuple[int, ...]
    """Prompt and answer, as the target's own tokenizer has them."""
    loss_mask: tuple[bool, ...]
    """True where the token is the answer's; as long as `token_ids`."""
    tokenizer: str = ""
    """Digest of the files that made the tokens."""
    salt: str = ""
    """Random hex digits."""

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, in hex."""
        return hashlib.sha256(encode_sample(self)).hexdigest()

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the answer."""
        return self.token_ids[: self.loss_mask.index(True)] if True in self.loss_mask else self.token_ids


def encode_sample(sample: Sample) -> bytes:
    """Return the canonical form; `decode_sample` reads it back."""
    content = {
        "v": FORMAT,
        "request_id": sample.request_id,
        "tenant": sample.tenant,
        "template": sample.template,
        "context": sample.context,
        "token_ids": sample.token_ids,
        # Lengths of runs, the first of them of tokens that are not the answer's.
        "runs": _runs(sample.loss_mask),
        "tokenizer": sample.tokenizer,
        "salt": sample.salt,
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def decode_sample(content: bytes) -> Sample:
    """
    Read a canonical form.

    Raises:
        DraftRefusedError: it is none.  Nothing of the content is in the message.
    """
    try:
        fields = json.loads(content)
        sample = Sample(
            token_ids=tuple(fields.pop("token_ids")),
            loss_mask=_mask(fields.pop("runs")),
            **{name: value for name, value in fields.items() if name != "v"},
        )
        known = fields["v"] == FORMAT and _is_sound(sample) and encode_sample(sample) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftRefusedError("a stored sample cannot be read: harvest again") from error
    if not known:
        raise DraftRefusedError("a stored sample is not of a form that is known here: harvest again")
    return sample


def _is_sound(sample: Sample) -> bool:
    tokens = sample.token_ids
    return len(tokens) == len(sample.loss_mask) and all(
        type(token) is int and 0 <= token < LARGEST_TOKEN for token in tokens
    )


def _runs(mask: tuple[bool, ...]) -> list[int]:
    runs = [] if not mask or not mask[0] else [0]
    return runs + [len(list(run)) for _, run in groupby(mask)]


def _mask(runs: Any) -> tuple[bool, ...]:  # noqa: ANN401 - decoded JSON
    return tuple(bool(place % 2) for place, length in enumerate(runs) for _ in range(length))
