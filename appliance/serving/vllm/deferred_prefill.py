"""
Spare the draft every forward while it is not asked to draft, and let it catch up when it is.

The draft attends over its own KV cache, which holds an entry for each token the target computed.  At
zero draft tokens vLLM 0.32 therefore still runs the draft once a step, over prompts too
(`v1/spec_decode/llm_base_proposer.py`, `propose`: "to keep the drafter KV cache in sync"), and a site
that has stopped speculating goes on paying for it.  Here such a step only puts by what the draft
would have read, the target's hidden states, at the places of the KV cache it would have filled.  They
are *owed* from then on.  Before drafting starts again, the draft is run over what is owed of the
requests in the batch, and its cache holds what it would have held.

Places, not requests, because blocks outlive requests: whoever finds a block in the prefix cache finds
what is owed of it as well.  What is owed of a block that nobody drafts on is never paid: the next
owner of the block writes over it.

What is generated never depends on this: the target does not read the draft's cache.

Only for vLLM's first runner on a CPU, where it was checked; others are left alone.  The hidden states
take memory as they come, at most their size times the tokens the KV cache has room for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring tokens of one request that are owed."""

    row: int
    """Of the batch."""
    first: int
    """Position in the request."""
    end: int

    @property
    def length(self) -> int:
        """How many they are."""
        return self.end - self.first


class OwedDraft:
    """What one runner's draft has not yet been run over."""

    def __init__(self, runner: Any, propose: Any, torch: Any) -> None:  # noqa: ANN401 - objects of vLLM
        self._runner = runner
        self._propose = propose
        self._torch = torch
        self._hidden: Any = None
        """Of each place, what the draft reads there; None until something is owed for the first time."""
        self._is_owed: Any = None
        self._paid: set[str] = set()
        """Requests of which nothing is owed, as of the last step that ran the draft."""

    def put_by(self, named: dict[str, Any]) -> Any:  # noqa: ANN401
        """
        Put by a step in place of running the draft; None if the draft has to run.

        Args:
            named: the arguments of vLLM's `propose_draft_token_ids`.
        """
        if not self._can_wait(named):
            return None
        count = named["scheduler_output"].total_num_scheduled_tokens
        slots = named["common_attn_metadata"].slot_mapping[:count]
        states = self._torch.cat([hidden[:count] for hidden in named["aux_hidden_states"]], dim=-1)
        if self._hidden is None:
            self._make_room(states)
        self._hidden[slots] = states
        self._is_owed[slots] = True
        self._paid.clear()
        return self._torch.empty((len(self._runner.input_batch.req_ids), 0), dtype=self._torch.int64)

    def catch_up(self, named: dict[str, Any]) -> None:
        """
        Run the draft over what is owed of the requests in a batch.

        Args:
            named: the arguments of vLLM's `drafter.propose` for the step that comes next, at least its
                positions, sampling and attention metadata.
        """
        if self._hidden is None:
            return
        batch, requests = named["common_attn_metadata"], self._runner.input_batch.req_ids
        if not self._paid.issuperset(requests):
            spans = list(self._owed(batch, named["target_positions"]))
            for part in self._parts(spans):
                self._pay(part, batch, named["sampling_metadata"])
        # The step itself is about to be run.
        self._is_owed[batch.slot_mapping[: batch.num_actual_tokens]] = False
        # Who sits out a step may come back elsewhere, with blocks of others.
        self._paid = set(requests)

    def _make_room(self, states: Any) -> None:  # noqa: ANN401 - a tensor of torch
        places = self._runner.kv_cache_config.num_blocks * self._block_size
        # Memory that is not written to is not taken.
        self._hidden = self._torch.empty((places, states.shape[1]), dtype=states.dtype)
        self._is_owed = self._torch.zeros(places, dtype=self._torch.bool)

    @property
    def _block_size(self) -> int:
        return int(self._runner.input_batch.block_table[0].block_size)

    def _slots(self, batch: Any, row: int, first: int, end: int) -> Any:  # noqa: ANN401
        positions = self._torch.arange(first, end)
        size = self._block_size
        return batch.block_table_tensor[row][positions // size].long() * size + positions % size

    def _owed(self, batch: Any, positions: Any) -> Iterator[Span]:  # noqa: ANN401
        """Everything owed of a batch's requests before the step that comes next; it is taken as paid."""
        begins = positions[batch.query_start_loc[:-1].long()].tolist()
        for row, (request, begin) in enumerate(zip(self._runner.input_batch.req_ids, begins, strict=True)):
            if request in self._paid or not begin:
                continue
            slots = self._slots(batch, row, 0, begin)
            owed = self._is_owed[slots]
            if not owed.any():
                continue
            # At once, for the next request may share the block.
            self._is_owed[slots] = False
            edges = self._torch.nonzero(self._torch.diff(owed.int(), prepend=owed.new_zeros(1).int()))
            marks = [*edges.flatten().tolist(), begin]
            for first, end in zip(marks[::2], marks[1::2], strict=False):
                yield Span(row=row, first=first, end=end)

    def _parts(self, spans: list[Span]) -> Iterator[list[Span]]:
        """What is owed, in pieces that the draft's buffers have room for, earlier tokens first."""
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

    def _pay(self, part: list[Span], batch: Any, sampling_metadata: Any) -> None:  # noqa: ANN401
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


def keep_draft_in_step(runner_class: Any, proposer_class: Any, torch: Any) -> None:  # noqa: ANN401
    """Let every runner made from now on run its draft only when it drafts."""
    original, propose = runner_class.propose_draft_token_ids, proposer_class.propose

    def propose_draft_token_ids(runner: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        named |= dict(zip(ARGUMENTS, arguments, strict=False))
        owed = getattr(runner, "appliance_owed", None)
        if owed is None and _is_known(runner):
            drafter = runner.drafter
            owed = OwedDraft(runner, lambda **given: propose(drafter, **given), torch)
            runner.appliance_owed = drafter.appliance_owed = owed
        answer = owed.put_by(named) if owed is not None else None
        return original(runner, **named) if answer is None else answer

    def propose_after_catching_up(drafter: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        owed: OwedDraft | None = getattr(drafter, "appliance_owed", None)
        if owed is not None and not arguments:
            owed.catch_up(named)
        return propose(drafter, *arguments, **named)

    runner_class.propose_draft_token_ids = propose_draft_token_ids
    proposer_class.propose = propose_after_catching_up


def _is_known(runner: Any) -> bool:  # noqa: ANN401 - a runner of vLLM
    """Whether its draft reads the target's layers, its tokens are on the CPU and all share one KV cache."""
    return (
        hasattr(runner.drafter, "needs_extra_input_slots")
        and runner.use_aux_hidden_state_outputs
        and not runner.use_async_scheduling
        and not runner.supports_mm_inputs
        and len(runner.kv_cache_config.kv_cache_groups) == 1
    )


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
"""Of vLLM's `GPUModelRunner.propose_draft_token_ids`, in order."""
