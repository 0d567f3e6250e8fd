"""
Stand-in for the part of Arctic Inference that vLLM 0.32 calls, for workers in tests.

The package is published as source only, and its build downloads PyTorch.  Same interface, naive search: the
continuation after the latest earlier occurrence of the longest suffix.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SuffixDecodingDraft:
    token_ids: list[int]


class SuffixDecodingCache:
    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        if max_cached_requests:
            raise ValueError("answers to other requests must not be kept")
        self._depth = max_tree_depth
        self._tokens: dict[str, list[int]] = {}
        self.cached_requests: set[str] = set()

    @property
    def active_requests(self):
        return self._tokens.keys()

    def start_request(self, request: str, prompt: Sequence[int]) -> None:
        if request in self._tokens:
            raise ValueError(f"request {request} is active")
        self._tokens[request] = list(prompt)

    def add_active_response(self, request: str, tokens: Sequence[int]) -> None:
        self._tokens[request] += tokens

    def stop_request(self, request: str) -> None:
        del self._tokens[request]

    def speculate(
        self,
        request: str,
        context: Sequence[int],
        *,
        max_spec_tokens: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> SuffixDecodingDraft:
        """A maximum of 0 means the depth of the tree, as in the package's documentation."""
        known, recent = self._tokens[request], list(context)[-self._depth :]
        for length in range(len(recent) - 1, 0, -1):
            suffix = recent[-length:]
            for start in range(len(known) - length - 1, -1, -1):
                if known[start : start + length] == suffix:
                    most = min(max_spec_tokens or self._depth, int(max_spec_factor * length))
                    follows = start + length
                    return SuffixDecodingDraft([int(token) for token in known[follows : follows + most]])
        return SuffixDecodingDraft([])
