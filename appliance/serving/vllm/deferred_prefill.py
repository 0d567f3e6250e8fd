"""
Defer the draft's prefill while speculation is off, and replay it before drafting resumes.

The draft attends over its own KV cache, which holds an entry for each token that the target computed.  At
zero draft tokens vLLM 0.32 therefore still runs the draft at every step, over prompts too
(`v1/spec_decode/llm_base_proposer.py`, `propose`: "to keep the drafter KV cache in sync"), so a site that
has stopped speculating keeps paying for it.  Here such a step only stores what the draft would have read,
the target's hidden states, for the KV cache slots that it would have filled: these slots are *deferred*.
Before drafting resumes, the draft is run over the deferred slots of the requests in the batch, and its
cache holds what it would have held.

Slots, not requests, because blocks outlive requests: a request that finds a block in the prefix cache also
finds its deferred slots.  If no request drafts on a block, its slots are never replayed: the next owner of
the block overwrites them.

The generated text never depends on this: the target does not read the draft's cache.

Only for vLLM's first runner on a CPU, where it was checked; other runners stay unchanged.  Memory for the
hidden states is used as slots are written, at most their size times the tokens in the KV cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    row: int
    first: int
    """Position in the request."""
    end: int

    @property
    def length(self) -> int:
        return self.end - self.first


class DeferredPrefill:
    def __init__(self, runner: Any, propose: Any, torch: Any) -> None:  # noqa: ANN401 - objects of vLLM
        self._runner = runner
        self._propose = propose
        self._torch = torch
        self._hidden: Any = None
        """By slot, what the draft reads there; None until a step is deferred for the first time."""
        self._is_deferred: Any = None
        self._caught_up: set[str] = set()
        """Requests without deferred slots, as of the last step that ran the draft."""

    def defer(self, named: dict[str, Any]) -> Any:  # noqa: ANN401
        """Defer the draft's part of a step; None if the draft must run."""
        if not self._can_wait(named):
            return None
        count = named["scheduler_output"].total_num_scheduled_tokens
        slots = named["common_attn_metadata"].slot_mapping[:count]
        states = self._torch.cat([hidden[:count] for hidden in named["aux_hidden_states"]], dim=-1)
        if self._hidden is None:
            self._allocate(states)
        self._hidden[slots] = states
        self._is_deferred[slots] = True
        self._caught_up.clear()
        return self._torch.empty((len(self._runner.input_batch.req_ids), 0), dtype=self._torch.int64)

    def catch_up(self, named: dict[str, Any]) -> None:
        """Run the draft over the deferred slots of the requests in a batch."""
        if self._hidden is None:
            return
        batch, requests = named["common_attn_metadata"], self._runner.input_batch.req_ids
        if not self._caught_up.issuperset(requests):
            spans = list(self._deferred_spans(batch, named["target_positions"]))
            for part in self._chunks(spans):
                self._replay(part, batch, named["sampling_metadata"])
        # The draft is about to be run over this step itself.
        self._is_deferred[batch.slot_mapping[: batch.num_actual_tokens]] = False
        # A request that is not in this step may return in another row, with other blocks.
        self._caught_up = set(requests)

    def _allocate(self, states: Any) -> None:  # noqa: ANN401 - a tensor of torch
        slots = self._runner.kv_cache_config.num_blocks * self._block_size
        # The kernel assigns memory only to pages that are written.
        self._hidden = self._torch.empty((slots, states.shape[1]), dtype=states.dtype)
        self._is_deferred = self._torch.zeros(slots, dtype=self._torch.bool)

    @property
    def _block_size(self) -> int:
        return int(self._runner.input_batch.block_table[0].block_size)

    def _slots(self, batch: Any, row: int, first: int, end: int) -> Any:  # noqa: ANN401
        positions = self._torch.arange(first, end)
        size = self._block_size
        return batch.block_table_tensor[row][positions // size].long() * size + positions % size

    def _deferred_spans(self, batch: Any, positions: Any) -> Iterator[Span]:  # noqa: ANN401
        """Deferred spans of the batch's requests before the next step; clears their marks."""
        begins = positions[batch.query_start_loc[:-1].long()].tolist()
        for row, (request, begin) in enumerate(zip(self._runner.input_batch.req_ids, begins, strict=True)):
            if request in self._caught_up or not begin:
                continue
            slots = self._slots(batch, row, 0, begin)
            deferred = self._is_deferred[slots]
            if not deferred.any():
                continue
            # Immediately, because the next request may share the block.
            self._is_deferred[slots] = False
            edges = self._torch.nonzero(self._torch.diff(deferred.int(), prepend=deferred.new_zeros(1).int()))
            marks = [*edges.flatten().tolist(), begin]
            for first, end in zip(marks[::2], marks[1::2], strict=False):
                yield Span(row=row, first=first, end=end)

    def _chunks(self, spans: list[Span]) -> Iterator[list[Span]]:
        """The spans in chunks that fit the draft's buffers, earlier tokens first."""
        most, rows = self._runner.max_num_tokens, self._runner.max_num_reqs
        part: list[Span] = []
        room = most
        for span in spans:
            first = span.first
            while first < span.end:
                end = min(span.end, first + room)
                part.append(replace(span, first=first, end=end))
                room -= end - first
                first = end
                if not room or len(part) == rows:
                    yield part
                    part, room = [], most
        if part:
            yield part

    def _replay(self, part: list[Span], batch: Any, sampling_metadata: Any) -> None:  # noqa: ANN401
        torch, known = self._torch, self._runner.input_batch.token_ids_cpu
        slots = torch.cat([self._slots(batch, span.row, span.first, span.end) for span in part])
        lengths = [span.length for span in part]
        integers = batch.query_start_loc.dtype
        ends = torch.tensor([0, *lengths], dtype=integers).cumsum(0).to(integers)
        seen = torch.tensor([span.end for span in part], dtype=batch.seq_lens.dtype)
        tokens = [torch.as_tensor(known[span.row, span.first : span.end]) for span in part]
        self._propose(
            num_speculative_tokens=0,
            target_token_ids=torch.cat(tokens).to(torch.int32),
            target_positions=torch.cat([torch.arange(span.first, span.end) for span in part]),
            target_hidden_states=self._hidden[slots],
            next_token_ids=torch.tensor([int(known[span.row, span.end]) for span in part], dtype=torch.int32),
            token_indices_to_sample=None,
            common_attn_metadata=replace(
                batch,
                query_start_loc=ends,
                query_start_loc_cpu=ends,
                seq_lens=seen,
                seq_lens_cpu_upper_bound=seen,
                num_reqs=len(part),
                num_actual_tokens=sum(lengths),
                max_query_len=max(lengths),
                max_seq_len=int(seen.max()),
                block_table_tensor=batch.block_table_tensor[torch.tensor([span.row for span in part])],
                slot_mapping=slots,
                is_prefilling=None,
                positions=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            ),
            sampling_metadata=sampling_metadata,
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=None,
        )

    def _can_wait(self, named: dict[str, Any]) -> bool:
        scheduled = named["scheduler_output"]
        return (
            scheduled.num_spec_tokens_to_schedule == 0
            and not scheduled.scheduled_spec_decode_tokens
            and named["aux_hidden_states"] is not None
        )


def defer_draft_prefill(runner_class: Any, proposer_class: Any, torch: Any) -> None:  # noqa: ANN401
    """Make every runner created from now on run its draft only when it drafts."""
    original, propose = runner_class.propose_draft_token_ids, proposer_class.propose

    def propose_draft_token_ids(runner: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        named |= dict(zip(ARGUMENTS, arguments, strict=False))
        deferred = getattr(runner, "appliance_deferred", None)
        if deferred is None and not find_runner_problem(runner):
            drafter = runner.drafter
            deferred = DeferredPrefill(runner, lambda **given: propose(drafter, **given), torch)
            runner.appliance_deferred = drafter.appliance_deferred = deferred
        answer = deferred.defer(named) if deferred is not None else None
        return original(runner, **named) if answer is None else answer

    def propose_after_catching_up(drafter: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        deferred: DeferredPrefill | None = getattr(drafter, "appliance_deferred", None)
        if deferred is not None and not arguments:
            deferred.catch_up(named)
        return propose(drafter, *arguments, **named)

    runner_class.propose_draft_token_ids = propose_draft_token_ids
    proposer_class.propose = propose_after_catching_up


def find_runner_problem(runner: Any) -> str:  # noqa: ANN401 - a runner of vLLM
    """
    Why its draft cannot wait; empty if it can.

    Its draft must read the target's layers, its tokens must be on the CPU, and all must share one KV cache.
    A draft that drafts in parallel writes slots behind its input: its replay would overwrite later ones.
    """
    if getattr(getattr(runner, "drafter", None), "needs_extra_input_slots", True) is not False:
        return "the runner has no draft model that the plugin knows"
    if not runner.use_aux_hidden_state_outputs:
        return "the draft does not read the target's layers"
    if runner.use_async_scheduling:
        return "the engine schedules asynchronously"
    if runner.supports_mm_inputs:
        return "the target reads images, sound or video"
    return "" if len(runner.kv_cache_config.kv_cache_groups) == 1 else "there are several KV caches"


ARGUMENTS = (
    "scheduler_output",
    "sampled_token_ids",
    "sampling_metadata",
    "hidden_states",
    "sample_hidden_states",
    "aux_hidden_states",
    "spec_decode_metadata",
    "common_attn_metadata",
    "slot_mappings",
)
"""Parameters of vLLM's `GPUModelRunner.propose_draft_token_ids`, in order."""
