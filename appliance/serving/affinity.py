"""
Which worker has seen the beginning of a conversation, so that its KV cache can be used again.

The beginning is hashed at a few lengths, each twice the one before; the longest that is remembered
says how much of the prompt a worker has probably kept.  A guess: the worker may have evicted it.  The
router weighs it against load, and load wins.

Hashes are taken for each tenant and model apart, with the interpreter's own keyed hash, which is new at
each start: no tenant can learn from where its requests go, or how fast they are answered here, what
another one sent.  Nothing of the text is kept.
"""

from collections import OrderedDict

from appliance.serving.worker import WorkerId

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Characters; below the first nothing is worth remembering, beyond the last a hash takes too long."""


def prefixes(tenant: str, model: str, text: str) -> tuple[int, ...]:
    """
    Hashes of the beginnings of `text`, shortest first; empty for a short one.

    Each covers what came before it, so equal hashes at some length mean equal beginnings up to it,
    but for accidents, which cost a less fitting worker and nothing else.
    """
    found: list[int] = []
    before, start = hash((tenant, model)), 0
    for end in LENGTHS:
        if len(text) < end:
            break
        before = hash((before, text[start:end]))
        found.append(before)
        start = end
    return tuple(found)


class Affinity:
    """Remembers for a bounded number of beginnings who served them last."""

    def __init__(self, size: int) -> None:
        self._size = size
        """Beginnings remembered; about 180 bytes each."""
        self._seen: OrderedDict[int, WorkerId] = OrderedDict()

    def __len__(self) -> int:
        """How many beginnings are remembered."""
        return len(self._seen)

    def find(self, hashes: tuple[int, ...]) -> dict[WorkerId, int]:
        """Who has seen the longest of these beginnings, and its length in characters; empty if nobody has."""
        for each, length in zip(reversed(hashes), reversed(LENGTHS[: len(hashes)]), strict=True):
            worker_id = self._seen.get(each)
            if worker_id is not None:
                return {worker_id: length}
        return {}

    def saw(self, hashes: tuple[int, ...], worker_id: WorkerId) -> None:
        """Remember that a worker was sent these beginnings; forgets those not seen for longest."""
        for each in hashes:
            self._seen[each] = worker_id
            self._seen.move_to_end(each)
        while len(self._seen) > self._size:
            self._seen.popitem(last=False)
