"""
What the appliance changes inside a worker: loaded by vLLM itself, in each of its processes.

vLLM finds `register` through the entry point `vllm.general_plugins`; the launcher allows this plugin
and no other.  The only module that imports vllm, and it does so only when called.

It fails by leaving vLLM as it is: whatever a vLLM lacks of what is needed here stays untouched, and
the worker then says that it cannot be controlled.
"""

from typing import Any

from appliance.serving.vllm.deferred_prefill import ARGUMENTS, keep_draft_in_step
from appliance.serving.vllm.repairs import (
    nap_between_looks,
    repair_cpu_sampling,
    sample_steps_without_drafts_plainly,
)
from appliance.serving.vllm.steering import Steering, find_problems
from appliance.serving.worker_protocol import RPC


def register() -> None:
    """Entry point; called once in every process of the worker."""
    from vllm import __version__ as version  # noqa: PLC0415 - never imported outside a worker
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415

    steer(Scheduler, EngineCore, engine=f"vllm {version}")
    if current_platform.is_cpu():
        from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415
        from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415

        repair_cpu_sampling(rejection_sampler, topk_topp_sampler)
        nap_between_looks(shm_broadcast)
        spare_the_draft()


def spare_the_draft() -> None:
    """Run the draft only where it drafts; leave a vLLM that is made differently."""
    import inspect  # noqa: PLC0415 - only in a worker

    import torch  # noqa: PLC0415
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: PLC0415
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    propose = getattr(GPUModelRunner, "propose_draft_token_ids", None)
    sample_steps_without_drafts_plainly(GPUModelRunner)
    if propose is None or tuple(inspect.signature(propose).parameters)[1:] != ARGUMENTS:
        return
    keep_draft_in_step(GPUModelRunner, SpecDecodeBaseProposer, torch)


def steer(scheduler_class: Any, core_class: Any, *, engine: str) -> None:  # noqa: ANN401 - classes of vLLM
    """
    Let every scheduler made from now on be watched and steered, and the engine core pass commands on.

    vLLM loads plugins in `EngineCore.__init__`, before it makes its scheduler.
    """
    if hasattr(core_class, RPC):
        return  # vLLM may load plugins more than once in a process
    original = scheduler_class.__init__

    def initialise(scheduler: Any, *arguments: Any, **named: Any) -> None:  # noqa: ANN401
        original(scheduler, *arguments, **named)
        if not find_problems(scheduler):
            scheduler.appliance_steering = Steering(scheduler)

    post_step = core_class.post_step

    def spare_fetching(core: Any, model_executed: bool) -> None:  # noqa: ANN401, FBT001
        """After a step that drafted nothing, do not ask the workers for drafts: a round trip each step."""
        steering: Steering | None = getattr(core.scheduler, "appliance_steering", None)
        if steering is None or steering.draft_tokens != 0:
            post_step(core, model_executed)

    def command(core: Any, text: str) -> str:  # noqa: ANN401
        steering: Steering | None = getattr(core.scheduler, "appliance_steering", None)
        if steering is None:
            return Steering.cannot(find_problems(core.scheduler), engine)
        return steering.command(text, engine)

    scheduler_class.__init__ = initialise
    core_class.post_step = spare_fetching
    setattr(core_class, RPC, command)
