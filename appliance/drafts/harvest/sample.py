"""
A training sample: the tokens of prompt and answer, and which of them are the answer's.

Encoded as canonical JSON, which is stored sealed only.  Manifests and training records keep its digest after
erasure; the salt prevents guessing the text from it.  Pure.
"""

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from appliance.errors import DraftRefusedError

FORMAT = 1
SALT_BYTES = 16
TOKEN_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    request_id: str
    tenant: str
    template: str
    context: str
    """Context bucket, from the request's outcome, like `template`."""
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True for tokens of the answer; as long as `token_ids`."""
    tokenizer: str = ""
    """Digest of the tokenizer's files."""
    salt: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(encode_sample(self)).hexdigest()

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.token_ids[: self.loss_mask.index(True)] if True in self.loss_mask else self.token_ids


def encode_sample(sample: TrainingSample) -> bytes:
    content = {
        "v": FORMAT,
        "request_id": sample.request_id,
        "tenant": sample.tenant,
        "template": sample.template,
        "context": sample.context,
        "token_ids": sample.token_ids,
        # Run lengths, beginning with tokens outside the answer.
        "runs": _runs(sample.loss_mask),
        "tokenizer": sample.tokenizer,
        "salt": sample.salt,
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def decode_sample(content: bytes) -> TrainingSample:
    """Decode the canonical form; raises DraftRefusedError, whose message holds none of the content."""
    try:
        fields = json.loads(content)
        sample = TrainingSample(
            token_ids=tuple(fields.pop("token_ids")),
            loss_mask=_mask(fields.pop("runs")),
            **{name: value for name, value in fields.items() if name != "v"},
        )
        valid = fields["v"] == FORMAT and _is_sound(sample) and encode_sample(sample) == content
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftRefusedError("a stored sample cannot be read: harvest again") from error
    if not valid:
        raise DraftRefusedError("a stored sample has an unknown format: harvest again")
    return sample


def _is_sound(sample: TrainingSample) -> bool:
    tokens = sample.token_ids
    return len(tokens) == len(sample.loss_mask) and all(
        type(token) is int and 0 <= token < TOKEN_LIMIT for token in tokens
    )


def _runs(mask: tuple[bool, ...]) -> list[int]:
    runs = [] if not mask or not mask[0] else [0]
    return runs + [len(list(run)) for _, run in groupby(mask)]


def _mask(runs: Any) -> tuple[bool, ...]:  # noqa: ANN401 - decoded JSON
    return tuple(bool(place % 2) for place, length in enumerate(runs) for _ in range(length))
