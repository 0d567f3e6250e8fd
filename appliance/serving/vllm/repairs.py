"""
Repairs of vLLM 0.32, each for one defect or inefficiency; all but that of suffix decoding are for a CPU.

Each checks that what it replaces exists, and leaves a vLLM of another structure unchanged.
"""

import inspect
import time
from typing import Any

NAP_SECONDS = 20e-6
"""Linux adds its timer slack of 50 microseconds; a step on a CPU takes milliseconds."""


def repair_cpu_sampling(rejection_sampler: Any, topk_topp_sampler: Any) -> None:  # noqa: ANN401
    expand_sampling_parameters(rejection_sampler)
    accept_empty_top_k(topk_topp_sampler)


def expand_sampling_parameters(sampler: Any) -> None:  # noqa: ANN401 - a module of vLLM
    """
    Give each draft token the temperature, top-k and top-p of its request.

    `utils/cpu_triton_utils.py`, `_expand_kernel_impl`: the kernel writes into an int64 copy, which is
    dropped.  The result stays uninitialised memory, so text is sampled from the wrong distribution, and a
    top-k of such a value crashes the engine.
    """
    if not hasattr(sampler, "expand_batch_to_tokens"):
        return

    def expand_batch_to_tokens(
        x: Any,  # noqa: ANN401 - tensors of torch
        cu_num_tokens: Any,  # noqa: ANN401
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Any:  # noqa: ANN401
        """[batch_size] values and running token counts to [num_tokens] values."""
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = x.masked_fill(x == replace_from, replace_to)
        return values.repeat_interleave(counts, output_size=num_tokens)

    sampler.expand_batch_to_tokens = expand_batch_to_tokens


def accept_empty_top_k(sampler: Any) -> None:  # noqa: ANN401 - a module of vLLM
    """
    Let a step without draft tokens pass through the top-k filter.

    The first step of a request has no draft tokens to verify, and `apply_top_k_only` takes the maximum of an
    empty tensor.  That crashes the engine: any client that sends `top_k` without `top_p` would end the
    worker.
    """
    original = getattr(sampler, "apply_top_k_only", None)
    if original is None:
        return

    def apply_top_k_only(logits: Any, k: Any) -> Any:  # noqa: ANN401 - tensors of torch
        return logits if k.numel() == 0 else original(logits, k)

    sampler.apply_top_k_only = apply_top_k_only


def sleep_while_waiting(shared_memory: Any) -> None:  # noqa: ANN401 - a module of vLLM
    """
    Let a process that waits for another one sleep briefly instead of spinning.

    `distributed/device_communicators/shm_broadcast.py`: while requests run, engine core and worker each wait
    in a loop around `sched_yield`, which occupies a whole core.  On a machine with few cores the gateway and
    the API server need it.  Linux 6.18 then lets the loop run for seconds while no process sends the answer.
    """
    if not hasattr(shared_memory, "sched_yield"):
        return

    def sched_yield() -> None:
        time.sleep(NAP_SECONDS)

    shared_memory.sched_yield = sched_yield


def follow_table_in_suffix_decoding(proposer_class: Any) -> None:  # noqa: ANN401 - a class of vLLM
    """
    Let suffix decoding draft as many tokens as the step's entry in the draft-token table.

    `v1/spec_decode/suffix_decoding.py`, `propose`: asserts that it is asked for the maximum, so the first
    step with another number ends the engine.
    """
    original = getattr(proposer_class, "propose", None)
    if original is None or "num_speculative_tokens" not in inspect.signature(original).parameters:
        return

    def propose(proposer: Any, num_speculative_tokens: int, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        proposer.num_speculative_tokens = num_speculative_tokens
        drafts = original(proposer, num_speculative_tokens, *arguments, **named)
        # Its cache may take a maximum of 0 for none.
        return [draft[:num_speculative_tokens] for draft in drafts]

    proposer_class.propose = propose


def bypass_rejection_without_drafts(runner_class: Any) -> None:  # noqa: ANN401 - a class of vLLM
    """
    Sample a step without draft tokens as a worker without a draft does.

    `v1/worker/gpu_model_runner.py`, `_sample`: once a draft is loaded, every step goes through the rejection
    sampler, so a site that has stopped speculating pays for it.
    """
    original = getattr(runner_class, "_sample", None)
    if original is None:
        return

    def _sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:  # noqa: ANN401
        if getattr(spec_decode_metadata, "max_spec_len", None) == 0:
            spec_decode_metadata = None
        return original(runner, logits, spec_decode_metadata)

    runner_class._sample = _sample  # noqa: SLF001
