"""
The appliance's changes to a worker, loaded by vLLM in each of its processes.

vLLM finds `register` through the entry point `vllm.general_plugins`; the launcher allows this plugin and no
other.  The only module that imports vllm, and only when called.

Fails by leaving vLLM unchanged: if a vLLM lacks a part that is needed here, that part stays as it is, and
the worker reports that it cannot be controlled.
"""

from typing import Any

from appliance.serving.vllm.deferred_prefill import ARGUMENTS, defer_draft_prefill
from appliance.serving.vllm.media_salt import salt_media
from appliance.serving.vllm.redaction import redact_before, replace_failure_dump
from appliance.serving.vllm.repairs import (
    bypass_rejection_without_drafts,
    follow_table_in_suffix_decoding,
    repair_cpu_sampling,
    sleep_while_waiting,
)
from appliance.serving.vllm.scheduler_control import SchedulerControl, find_problems
from appliance.serving.vllm.token_counts import count_sequences
from appliance.serving.worker_protocol import RPC


def register() -> None:
    """Entry point; called once in every process of the worker."""
    from vllm import __version__ as version  # noqa: PLC0415 - never imported outside a worker
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.renderers.base import BaseRenderer  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine import core  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    # In the API server the middleware does it.
    redact_before(core.EngineCore, "preprocess_add_request")
    redact_before(WorkerWrapperBase, "execute_model")
    replace_failure_dump(core)
    salt_media(BaseRenderer)
    install_control(Scheduler, core.EngineCore, engine=f"vllm {version}")
    count_sequences(OutputProcessor)
    follow_table_in_suffix_decoding(SuffixDecodingProposer)
    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415
        from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415

        repair_cpu_sampling(rejection_sampler, topk_topp_sampler)
        sleep_while_waiting(shm_broadcast)
        install_deferred_prefill()


def install_deferred_prefill() -> None:
    """Run the draft only where it drafts; a vLLM of another structure stays unchanged."""
    import inspect  # noqa: PLC0415 - only in a worker

    import torch  # noqa: PLC0415
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: PLC0415
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    propose = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    bypass_rejection_without_drafts(GPUModelRunner)
    if propose is None or tuple(inspect.signature(propose).parameters)[1:] != ARGUMENTS:
        return
    defer_draft_prefill(GPUModelRunner, SpecDecodeBaseProposer, torch)


def install_control(scheduler_class: Any, core_class: Any, *, engine: str) -> None:  # noqa: ANN401 - classes of vLLM
    """Control every scheduler created later: `EngineCore.__init__` loads plugins before it makes its own."""
    if hasattr(core_class, RPC):
        return  # vLLM may load plugins more than once in a process
    original = scheduler_class.__init__

    def initialise(scheduler: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        original(scheduler, *arguments, **named)
        if not find_problems(scheduler):
            scheduler.appliance_control = SchedulerControl(scheduler)

    post_step = core_class.post_step

    def post_step_with_drafts(core: Any, model_executed: bool) -> None:  # noqa: ANN401, FBT001
        """After a step that drafted nothing, do not ask the workers for drafts: a round trip each step."""
        control: SchedulerControl | None = getattr(core.scheduler, "appliance_control", None)
        if control is None or control.draft_tokens != 0:
            post_step(core, model_executed)

    def command(core: Any, text: str) -> str:  # noqa: ANN401
        control: SchedulerControl | None = getattr(core.scheduler, "appliance_control", None)
        if control is None:
            return SchedulerControl.cannot(find_problems(core.scheduler), engine)
        return control.command(text, engine)

    scheduler_class.__init__ = initialise
    core_class.post_step = post_step_with_drafts
    setattr(core_class, RPC, command)
