"""
Keep the draft in step with the target while it is not asked to draft, without a forward for each step.

The draft attends over its own KV cache, which holds an entry for each token the target computed.  At
zero draft tokens vLLM 0.32 therefore still runs the draft once a step (`v1/spec_decode/
llm_base_proposer.py`, `propose`: "to keep the drafter KV cache in sync"), and a site that has stopped
speculating goes on paying for it.  Here such steps are only noted, up to `LONGEST` of them, and the
draft is run once over all their tokens: when the notes are full, before a prompt is processed, and
before drafting starts again.  Afterwards its cache holds what it would have held.

What is lost: a request that ends leaves its last noted tokens out of the draft's cache, so one that
continues it from the prefix cache drafts a little worse there.  Never what is generated: the target
does not read the draft's cache.

Only for vLLM's first runner on a CPU, where it was checked; others are left alone.
"""

from dataclasses import dataclass, replace
from typing import Any

LONGEST = 32
"""Steps noted until the draft catches up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One decode step of a batch, one token of each request; rows in the batch's order."""

    requests: list[str]
    token_ids: Any
    positions: Any
    hidden_states: Any
    slots: Any


class DraftBacklog:
    """The steps one runner has not yet run its draft over."""

    def __init__(self, runner: Any, propose: Any, torch: Any) -> None:  # noqa: ANN401 - objects of vLLM
        self._runner = runner
        self._propose = propose
        self._torch = torch
        self._notes: list[Note] = []

    def take(self, named: dict[str, Any]) -> Any:  # noqa: ANN401
        """
        Note a step in place of running the draft; None if the draft has to run.

        Args:
            named: the arguments of vLLM's `propose_draft_token_ids`.
        """
        if not self._can_wait(named):
            return None
        runner, batch = self._runner, named["common_attn_metadata"]
        count = len(runner.input_batch.req_ids)
        token_ids = runner.input_ids.gpu[:count]
        positions = runner._get_positions(count)  # noqa: SLF001
        if positions.dim() != 1:
            return None  # of a target that takes pictures, where this was not checked
        if len(self._notes) >= LONGEST or (len(self._notes) + 1) * count > runner.max_num_tokens:
            self.catch_up({**named, "target_token_ids": token_ids, "target_positions": positions})
        self._notes.append(
            Note(
                requests=list(runner.input_batch.req_ids),
                token_ids=token_ids.clone(),
                positions=positions.clone(),
                hidden_states=self._torch.cat(
                    [hidden[:count] for hidden in named["aux_hidden_states"]], dim=-1
                ),
                slots=batch.slot_mapping[:count].clone(),
            )
        )
        return self._torch.empty((count, 0), dtype=self._torch.int64)

    def catch_up(self, named: dict[str, Any]) -> None:
        """
        Run the draft over the noted steps of the requests in a batch, and forget the notes.

        Args:
            named: the arguments of vLLM's `drafter.propose` for the step that comes next, at least its
                token ids, positions, sampling and attention metadata.
        """
        notes, self._notes = self._notes, []
        if not notes:
            return
        torch, batch = self._torch, named["common_attn_metadata"]
        starts = batch.query_start_loc_cpu.tolist()
        row_of = {request: row for row, request in enumerate(self._runner.input_batch.req_ids)}
        following = named["target_positions"][batch.query_start_loc[:-1].long()].tolist()
        chosen: dict[int, list[int]] = {}
        base = 0
        positions = torch.cat([note.positions for note in notes])
        for note in notes:
            for at, request in enumerate(note.requests):
                row = row_of.get(request)
                if row is not None:
                    chosen.setdefault(row, []).append(base + at)
            base += len(note.requests)
        where = positions.tolist()
        # A request that was preempted is computed anew, elsewhere: what was noted before, that is what
        # does not lead up to its next token, is of blocks it lost.
        for row, noted in chosen.items():
            kept = 0
            while kept < len(noted) and where[noted[-1 - kept]] == following[row] - 1 - kept:
                kept += 1
            del noted[: len(noted) - kept]
        rows = [row for row in sorted(chosen) if chosen[row]]
        if not rows:
            return
        order = torch.tensor([index for row in rows for index in chosen[row]])
        lengths = [len(chosen[row]) for row in rows]
        ends = torch.tensor([0, *lengths], dtype=batch.query_start_loc.dtype).cumsum(0)
        ends = ends.to(batch.query_start_loc.dtype)
        picked = torch.tensor(rows)
        seen = torch.tensor([following[row] for row in rows], dtype=batch.seq_lens.dtype)
        self._propose(
            num_speculative_tokens=0,
            target_token_ids=torch.cat([note.token_ids for note in notes])[order],
            target_positions=positions[order],
            target_hidden_states=torch.cat([note.hidden_states for note in notes])[order],
            next_token_ids=named["target_token_ids"][torch.tensor([starts[row] for row in rows])],
            token_indices_to_sample=None,
            common_attn_metadata=replace(
                batch,
                query_start_loc=ends,
                query_start_loc_cpu=ends,
                seq_lens=seen,
                seq_lens_cpu_upper_bound=seen,
                num_reqs=len(rows),
                num_actual_tokens=len(order),
                max_query_len=max(lengths),
                max_seq_len=int(seen.max()),
                block_table_tensor=batch.block_table_tensor[picked],
                slot_mapping=torch.cat([note.slots for note in notes])[order],
                is_prefilling=None,
                positions=None,
                _num_computed_tokens_cache=None,
                _token_to_req_indices_cache=None,
            ),
            sampling_metadata=named["sampling_metadata"],
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=None,
        )

    def _can_wait(self, named: dict[str, Any]) -> bool:
        batch = named["common_attn_metadata"]
        return (
            named["scheduler_output"].num_spec_tokens_to_schedule == 0
            and not named["scheduler_output"].scheduled_spec_decode_tokens
            and named["aux_hidden_states"] is not None
            and batch.max_query_len == 1
        )


def keep_draft_in_step(runner_class: Any, proposer_class: Any, torch: Any) -> None:  # noqa: ANN401
    """Let every runner made from now on run its draft only as often as it must."""
    original, propose = runner_class.propose_draft_token_ids, proposer_class.propose

    def propose_draft_token_ids(runner: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        named |= dict(zip(ARGUMENTS, arguments, strict=False))
        backlog = getattr(runner, "appliance_backlog", None)
        if backlog is None and hasattr(runner.drafter, "needs_extra_input_slots"):
            drafter = runner.drafter
            backlog = DraftBacklog(runner, lambda **given: propose(drafter, **given), torch)
            runner.appliance_backlog = drafter.appliance_backlog = backlog
        taken = backlog.take(named) if backlog is not None and runner.use_aux_hidden_state_outputs else None
        return original(runner, **named) if taken is None else taken

    def propose_after_catching_up(drafter: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        backlog: DraftBacklog | None = getattr(drafter, "appliance_backlog", None)
        if backlog is not None and not arguments:
            backlog.catch_up(named)
        return propose(drafter, *arguments, **named)

    runner_class.propose_draft_token_ids = propose_draft_token_ids
    proposer_class.propose = propose_after_catching_up


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
