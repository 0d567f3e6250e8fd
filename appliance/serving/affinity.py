"""
Prefix affinity: which worker has processed the beginning of a conversation, so that its KV cache is reused.

The beginning is hashed at a few lengths, each twice the one before; the longest that is remembered
estimates how much of the prompt a worker still holds.  The worker may have evicted it; the router weighs
affinity against load, and load wins.

Hashes are per tenant and model, by the interpreter's keyed hash with a new key at each start: no tenant can
learn from the routing or the speed of its requests what another one sent.  No text is kept.
"""

from collections import OrderedDict

from appliance.serving.worker import WorkerId

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Characters; shorter prefixes save nothing, longer ones take too long to hash."""


def prefixes(tenant: str, model: str, text: str) -> tuple[int, ...]:
    """
    Hashes of the beginnings of `text`, shortest first; each covers the one before, so equal means equal text.
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
    def __init__(self, size: int) -> None:
        self._size = size
        """Prefixes remembered; about 180 bytes each."""
        self._seen: OrderedDict[int, WorkerId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def find(self, hashes: tuple[int, ...]) -> dict[WorkerId, int]:
        """The worker with the longest of these prefixes, and its length in characters; empty without one."""
        for each, length in zip(reversed(hashes), reversed(LENGTHS[: len(hashes)]), strict=True):
            worker_id = self._seen.get(each)
            if worker_id is not None:
                return {worker_id: length}
        return {}

    def record(self, hashes: tuple[int, ...], worker_id: WorkerId) -> None:
        """Record that a worker was sent these prefixes; evicts those unused for longest."""
        for each in hashes:
            self._seen[each] = worker_id
            self._seen.move_to_end(each)
        while len(self._seen) > self._size:
            self._seen.popitem(last=False)
